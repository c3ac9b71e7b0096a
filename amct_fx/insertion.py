"""Swapping layers and inserting input quantizers, in traced parts and in islands."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from amct_fx.errors import ConfigError
from amct_fx.graph import (
    Capture,
    FixedMinRule,
    Region,
    initial_hidden_state,
    install_graph,
    is_nonnegative,
    layer_calls,
    layer_input,
    settled,
    tensor_version,
)
from amct_fx.nn.become import become, changes_its_input, float_class_of
from amct_fx.nn.geometry import constructor_arguments
from amct_fx.nn.qat import QATLayer, qat_class_of
from amct_fx.nn.qat_rnn import RecurrentLayer

if TYPE_CHECKING:
    from torch import fx
    from torch.ao.quantization import FakeQuantizeBase, QConfig

__all__ = ["check_tied_weights", "insert_quantizers"]


@dataclass(frozen=True)
class _Consumer:
    """One layer that will read a quantized tensor, with all its calls."""

    layer: QATLayer
    name: str
    calls: list[fx.Node]


def insert_quantizers(
    model: nn.Module,
    captured: Capture,
    qconfigs: Mapping[str, QConfig],
    fixed_min_rule: FixedMinRule,
) -> None:
    """Make every chosen layer quantization-aware, in traced parts and in islands.

    Args:
        model: The model; changed in place.
        captured: Its traced parts and the layers that islands call.
        qconfigs: The QConfig of every layer to quantize, by name.
        fixed_min_rule: Decides an automatic ``fixed_min``.
    """
    weights = WeightQuantizers()
    for region in captured.regions:
        quantize_region(region, qconfigs, fixed_min_rule, weights)
    layers = {
        name: quantize_island_layer(model.get_submodule(name), name, qconfigs[name], weights)
        for name in captured.island_leaves
        if name in qconfigs
    }
    for names in captured.shared_inputs:
        _share_island_quantizers({name: layers[name] for name in names if name in layers})


def quantize_region(
    region: Region,
    qconfigs: Mapping[str, QConfig],
    fixed_min_rule: FixedMinRule,
    weights: WeightQuantizers,
) -> None:
    """Swap the layers of a traced part and insert one quantizer for each quantized tensor.

    Consumers share a quantizer when they read the same values with equal settings; the first of
    them in ``named_modules()`` order owns it. A layer called several times has one quantizer
    for all its inputs, and shares it with no other layer. Source: spec/config.md sections 5 and 7.

    Args:
        region: A traced part; its modules and its graph are changed.
        qconfigs: The QConfig of every layer to quantize, by name in the model.
        fixed_min_rule: Decides an automatic ``fixed_min``.
        weights: The weight fake-quantizers made so far, for tied weights.
    """
    names = {module: region.full_name(name) for name, module in region.module.named_modules()}
    calls = layer_calls(region.graph, region.module)
    groups: dict[Any, list[_Consumer]] = {}
    for module, name in names.items():
        if name not in qconfigs or module not in calls:
            continue
        if changes_its_input(module):
            quantize_island_layer(module, name, qconfigs[name], weights)
            continue
        nodes = calls[module]
        decide = functools.partial(
            _decided, qconfigs[name].activation, nodes, region, fixed_min_rule
        )
        qconfig = qconfigs[name]._replace(activation=decide(layer_input))
        layer = _swap(module, qconfig, weights)
        if isinstance(layer, RecurrentLayer):
            layer.attach_hidden(decide(initial_hidden_state), name)
        key = _values_read(nodes, region.module), _settings(qconfig.activation)
        groups.setdefault(key, []).append(_Consumer(layer, name, nodes))
    for consumers in groups.values():
        _insert_quantizer(region, consumers)
    install_graph(region.module, region.graph, region.guard)


def _values_read(calls: list[fx.Node], root: nn.Module) -> Any:
    """Return what identifies the values a layer reads: tensor and version, or its own calls."""
    tensor = layer_input(calls[0])
    if len(calls) > 1 or tensor is None:
        return tuple(calls)
    return tensor, tensor_version(tensor, calls[0], root)


def _decided(
    activation: Any,
    calls: list[fx.Node],
    region: Region | None,
    fixed_min_rule: FixedMinRule,
    tensor_of: Callable[[fx.Node], fx.Node | None],
) -> Any:
    """Settle what the graph knows: an automatic ``fixed_min``, the batches of a reused layer.

    Args:
        activation: Constructor of the quantizer.
        calls: All calls of its layer; none if nothing is known of them.
        region: The traced part that the graph belongs to; ``None`` if nothing is known.
        fixed_min_rule: Decides an automatic ``fixed_min``.
        tensor_of: Gives the tensor that the quantizer sees in a call.
    """
    arguments = constructor_arguments(activation)[1]
    decided: dict[str, Any] = {}
    if arguments.get("fixed_min", True) is None:
        decided["fixed_min"] = region is not None and all(
            is_nonnegative(
                tensor_of(call),
                call,
                region.module,
                fixed_min_rule,
                settled(call, region.guard.form),
            )
            for call in calls
        )
    if len(calls) > 1 and "batch_num" in arguments:
        decided["batch_num"] = arguments["batch_num"] * len(calls)
    return activation.with_args(**decided) if decided else activation


def _settings(constructor: Any) -> Any:
    """Return what must be equal for two consumers of one tensor to share a quantizer."""
    cls, arguments = constructor_arguments(constructor)
    return cls, tuple(sorted(arguments.items(), key=lambda item: item[0]))


class WeightQuantizers:
    """The weight fake-quantizers made so far; layers with one weight get one fake-quantizer."""

    def __init__(self) -> None:
        self._made: dict[int, FakeQuantizeBase] = {}

    def share(self, layer: QATLayer) -> None:
        """Give ``layer`` the fake-quantizers of earlier layers with the same weight tensors."""
        for weight, attribute in layer.weight_quantizers.items():
            tensor = getattr(layer, weight)
            if isinstance(tensor, nn.Parameter):  # else computed anew, so no other layer holds it
                setattr(
                    layer, attribute, self._made.setdefault(id(tensor), getattr(layer, attribute))
                )


def check_tied_weights(model: nn.Module, qconfigs: Mapping[str, QConfig]) -> None:
    """Refuse layers that share a weight and would quantize it differently.

    Args:
        model: The float model.
        qconfigs: The QConfig of every layer to quantize, by name.

    Raises:
        ConfigError: Names the two layers.
    """
    first: dict[int, tuple[str, Any, Any]] = {}
    for name, qconfig in qconfigs.items():
        layer = model.get_submodule(name)
        arguments = constructor_arguments(qconfig.weight)[1]
        axis = arguments.get("ch_axis")
        settings = _settings(qconfig.weight)[0], arguments.get("num_bits", 8), axis is None
        for parameter in layer.parameters(recurse=False):
            if parameter.dim() < 2:
                continue
            other, theirs, their_axis = first.setdefault(id(parameter), (name, settings, axis))
            if theirs != settings or their_axis != axis:
                advice = (
                    "write the same weight half for both"
                    if theirs != settings
                    else "their output channels lie along different axes: skip one of them, or "
                    "write channel_wise: false for both"
                )
                message = (
                    f"layers {other!r} and {name!r} share one weight but are given different "
                    f"weight settings; {advice}"
                )
                raise ConfigError(message)


def _swap(module: nn.Module, qconfig: QConfig, weights: WeightQuantizers) -> QATLayer:
    """Turn a float layer into its quantization-aware class, keeping the object and its hooks."""
    qat_class = qat_class_of(float_class_of(module))
    assert qat_class is not None, "model_facts lets only layers with such a class through"
    layer = become(module, qat_class)
    layer.attach(qconfig)
    weights.share(layer)
    return layer


def _insert_quantizer(region: Region, consumers: list[_Consumer]) -> None:
    """Quantize each tensor that ``consumers`` read, once, before its first reader."""
    owner = consumers[0]
    owner.layer.own_input_fake_quant(owner.layer.qconfig.activation, owner.name)
    for consumer in consumers[1:]:
        consumer.layer.share_input_quantizer(owner.layer)
    target = f"{region.local_name(owner.name)}.input_fake_quant"
    layers = {call: consumer.layer for consumer in consumers for call in consumer.calls}
    readers: dict[Any, list[fx.Node]] = {}
    for call in layers:
        readers.setdefault(_values_read([call], region.module), []).append(call)
    for nodes in readers.values():
        tensor = layer_input(nodes[0])
        if tensor is None:
            continue
        with region.graph.inserting_before(min(nodes)):
            quantized = region.graph.call_module(target, (tensor,))
        for node in nodes:
            _replace_input(node, quantized)
            node.update_kwarg("quantized", True)
            if layers[node].reads_float_input:
                node.update_kwarg("float_input", tensor)


def _replace_input(node: fx.Node, tensor: fx.Node) -> None:
    """Let a layer call read ``tensor`` as its first argument; the others stay, even if equal."""
    if node.args:
        node.update_arg(0, tensor)
    else:
        node.update_kwarg("input", tensor)


def quantize_island_layer(
    module: nn.Module, name: str, qconfig: QConfig, weights: WeightQuantizers
) -> QATLayer:
    """Let a layer always quantize its own input: it is called by an island, or has a pre-hook.

    Nothing is known of that input, so an automatic ``fixed_min`` is false.
    """
    activation = _decided(qconfig.activation, [], None, "relu", layer_input)
    layer = _swap(module, qconfig._replace(activation=activation), weights)
    if isinstance(layer, RecurrentLayer):
        layer.attach_hidden(activation, name)
    layer.own_input_fake_quant(activation, name)
    layer.quantizes_input = True
    return layer


def _share_island_quantizers(layers: Mapping[str, QATLayer]) -> None:
    """Let layers of islands that read one tensor with equal settings use one quantizer.

    Each of them quantizes the tensor, so the quantizer sees every batch once for each layer.
    """
    groups: dict[Any, dict[str, QATLayer]] = {}
    for name, layer in layers.items():
        if not isinstance(layer, RecurrentLayer):
            groups.setdefault(_settings(layer.qconfig.activation), {})[name] = layer
    for group in groups.values():
        (name, owner), *others = group.items()
        if not others:
            continue
        activation = owner.qconfig.activation
        arguments = constructor_arguments(activation)[1]
        if "batch_num" in arguments:
            activation = activation.with_args(batch_num=arguments["batch_num"] * len(group))
        owner.own_input_fake_quant(activation, name)
        for _, layer in others:
            del layer.input_fake_quant
            layer.share_input_quantizer(owner)
