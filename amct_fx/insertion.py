"""Swapping layers and inserting input quantizers, in traced parts and in islands."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from amct_fx.graph import (
    FixedMinRule,
    Region,
    install_graph,
    is_nonnegative_input,
    layer_calls,
    layer_input,
    tensor_version,
)
from amct_fx.nn.become import become
from amct_fx.nn.geometry import constructor_arguments
from amct_fx.nn.qat import QATLayer, qat_class_of
from amct_fx.observers import ULQFakeQuantize

if TYPE_CHECKING:
    from torch import fx, nn
    from torch.ao.quantization import FakeQuantizeBase, QConfig

__all__ = ["quantize_island_layer", "quantize_region"]


def quantize_region(
    region: Region, qconfigs: Mapping[str, QConfig], fixed_min_rule: FixedMinRule
) -> None:
    """Swap the layers of a traced part and insert one quantizer for each quantized tensor.

    Consumers share a quantizer when they read the same values with equal settings; the first of
    them in ``named_modules()`` order owns it. Source: spec/config.md section 7.

    Args:
        region: A traced part; its modules and its graph are changed.
        qconfigs: The QConfig of every layer to quantize, by name in the model.
        fixed_min_rule: Decides an automatic ``fixed_min``.
    """
    names = {module: region.full_name(name) for name, module in region.module.named_modules()}
    calls = layer_calls(region.graph, region.module)
    layers = [module for module in region.module.modules() if names[module] in qconfigs]
    groups: dict[Any, list[tuple[QATLayer, fx.Node]]] = {}
    for module in layers:
        (call,) = calls.get(module, [None])
        if call is None:
            continue
        qconfig = _decided(qconfigs[names[module]], call, region.module, fixed_min_rule)
        layer = _swap(module, qconfig)
        tensor = layer_input(call)
        if tensor is not None:
            version = tensor_version(tensor, call, region.module)
            key = (tensor, version, _settings(qconfig.activation))
            groups.setdefault(key, []).append((layer, call))
    for (tensor, *_), members in groups.items():
        owner = members[0][0]
        _insert_quantizer(region, tensor, owner, names[owner], [call for _, call in members])
    install_graph(region.module, region.graph)


def _decided(
    qconfig: QConfig, call: fx.Node, root: nn.Module, fixed_min_rule: FixedMinRule
) -> QConfig:
    """Settle an automatic ``fixed_min`` by what the graph says about the input."""
    arguments = constructor_arguments(qconfig.activation)[1]
    if arguments.get("fixed_min", True) is not None:
        return qconfig
    fixed_min = is_nonnegative_input(call, root, fixed_min_rule)
    return qconfig._replace(activation=qconfig.activation.with_args(fixed_min=fixed_min))


def _settings(constructor: Any) -> Any:
    """Return what must be equal for two consumers of one tensor to share a quantizer."""
    cls, arguments = constructor_arguments(constructor)
    return cls, tuple(sorted(arguments.items(), key=lambda item: item[0]))


def _swap(module: nn.Module, qconfig: QConfig) -> QATLayer:
    """Turn a float layer into its quantization-aware class, keeping the object and its hooks."""
    qat_class = qat_class_of(type(module))
    assert qat_class is not None, "model_facts lets only layers with such a class through"
    layer = become(module, qat_class)
    layer.attach(qconfig)
    return layer


def _insert_quantizer(
    region: Region, tensor: fx.Node, owner: QATLayer, name: str, consumers: list[fx.Node]
) -> None:
    """Quantize ``tensor`` once, before its first consumer, for all of ``consumers``."""
    owner.add_module("input_fake_quant", _make_input_fake_quant(owner, name))
    target = f"{region.local_name(name)}.input_fake_quant"
    with region.graph.inserting_before(min(consumers)):
        quantized = region.graph.call_module(target, (tensor,))
    for consumer in consumers:
        consumer.replace_input_with(tensor, quantized)


def quantize_island_layer(module: nn.Module, name: str, qconfig: QConfig) -> None:
    """Let a layer that an island calls quantize its own input."""
    layer = _swap(module, qconfig)
    layer.add_module("input_fake_quant", _make_input_fake_quant(layer, name))
    layer.quantizes_input = True


def _make_input_fake_quant(layer: QATLayer, name: str) -> FakeQuantizeBase:
    fake_quant: FakeQuantizeBase = layer.qconfig.activation()
    if isinstance(fake_quant, ULQFakeQuantize):
        fake_quant.layer_name = name
    return fake_quant.to(layer.weight.device).train(layer.training)
