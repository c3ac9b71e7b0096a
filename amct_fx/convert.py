"""The verb ``convert``: a trained model becomes an integer one.

The recipe: copy, eval mode, freeze the scales, fold batch norms, replace layers and quantizers.
Source: design.md, "How convert works"; spec/quantization.md sections 4 and 5.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, fx, nn
from torch.ao.quantization import FakeQuantizeBase

from amct_fx.checks import check_prepared_model
from amct_fx.errors import ConvertError
from amct_fx.fold import foldable_batch_norm
from amct_fx.graph import (
    GraphForward,
    fx_graph_of,
    install_graph,
    layer_input,
    module_of,
    regions,
)
from amct_fx.nn.become import become
from amct_fx.nn.integer import BatchNormAffine, integer_weight
from amct_fx.nn.qat import QATLayer
from amct_fx.nn.quantized import Dequantize, Quantize, quantized_class_of

__all__ = ["convert_amct"]


def convert_amct(model: nn.Module) -> nn.Module:
    """Return the integer model of a prepared one.

    Weights become int8 codes, biases int32 codes, batch norms behind convolutions are folded,
    each input quantizer becomes a quantize and a dequantize. The result is an ordinary module in
    eval mode; ``torch.onnx.export`` writes it as QuantizeLinear/DequantizeLinear with INT8
    initializers.

    Args:
        model: A prepared model whose ranges were calibrated; its mode does not matter, and it is
        not
            changed.

    Returns:
        The converted model, in eval mode.

    Raises:
        ConvertError: A quantizer was never calibrated, a value is not finite, or a bias does not
        fit
            into int32; names the layer.
        ModelStateError: The model is not prepared, already converted, or wrapped.
        ModelTypeError: ``model`` is no ``nn.Module``.

    Example:
        >>> from amct_fx import prepare_qat_amct
        >>> prepared = prepare_qat_amct(nn.Sequential(nn.Linear(4, 2)))
        >>> _ = prepared(torch.randn(8, 4))
        >>> convert_amct(prepared)[0].weight_codes.dtype
        torch.int8
    """
    check_prepared_model(model)
    _check_calibrated(model)
    converted = copy.deepcopy(model).eval()
    with torch.no_grad():
        for name, region in list(regions(converted)):
            _convert_region(region, name)
        for name, layer in list(_remaining_layers(converted)):
            _convert_island_layer(layer, name)
    return converted


def _check_calibrated(model: nn.Module) -> None:
    waiting = [
        name.removesuffix(".input_fake_quant")
        for name, module in model.named_modules()
        if isinstance(module, FakeQuantizeBase) and not getattr(module, "is_calibrated", True)
    ]
    if waiting:
        message = (
            f"the input ranges of {', '.join(waiting)} were never calibrated; run at least "
            "batch_num forward passes on real data before convert_amct"
        )
        raise ConvertError(message)


def _convert_region(region: GraphForward, name: str) -> None:
    graph = fx_graph_of(region)
    folded: set[nn.Module] = set()
    quantizers: dict[fx.Node, Quantize] = {}
    for node in list(graph.nodes):
        module = module_of(node, region)
        if isinstance(module, FakeQuantizeBase):
            quantizers[node] = _freeze(module, str(node.target))
    for node in list(graph.nodes):
        layer = module_of(node, region)
        if isinstance(layer, QATLayer):
            label = f"{name}.{node.target}" if name else str(node.target)
            source = layer_input(node)
            assert source is not None, "prepare quantizes only layers with a tensor input"
            batch_norm, batch_norm_node = foldable_batch_norm(node, region, label)
            _convert_layer(layer, quantizers[source], batch_norm, label)
            if batch_norm_node is not None:
                folded |= _bypass(batch_norm_node, node, region)
    for node, quantize in quantizers.items():
        _replace_quantizer(node, quantize, region)
    _drop_modules(region, graph, folded)
    install_graph(region, graph)


def _freeze(fake_quant: FakeQuantizeBase, name: str) -> Quantize:
    """Turn an activation fake-quantizer into a :class:`Quantize` with today's scale."""
    scale, zero_point = fake_quant.calculate_qparams()
    bits = getattr(fake_quant, "num_bits", 8)
    dtypes = {8: torch.int8, 16: torch.int16}
    finite = bool(torch.isfinite(scale).all())
    if bits not in dtypes or not finite:
        what = "its range is not finite" if not finite else f"{bits}-bit activations have no type"
        message = f"{name.removesuffix('.input_fake_quant')}: {what}; choose INT8 or INT16"
        raise ConvertError(message)
    return Quantize(scale.reshape(()), zero_point.reshape(()), dtypes[bits])


def _convert_layer(
    layer: QATLayer, quantize: Quantize, batch_norm: BatchNormAffine | None, name: str
) -> None:
    integer = integer_weight(
        layer,
        weight_scale=layer.weight_scale(),
        num_bits=getattr(layer.weight_fake_quant, "num_bits", 8),
        input_scale=quantize.scale,
        batch_norm=batch_norm,
        name=name,
    )
    quantizes_input, dtype = layer.quantizes_input, layer.weight.dtype
    for key in ("weight_fake_quant", "qconfig"):
        delattr(layer, key)
    converted = become(layer, quantized_class_of(layer.float_class))
    converted.adopt(integer, dtype)
    converted.quantizes_input = quantizes_input


def _bypass(batch_norm: fx.Node, layer: fx.Node, region: nn.Module) -> set[nn.Module]:
    """Let the readers of a folded batch norm read the layer; return the module it called."""
    module = module_of(batch_norm, region)
    batch_norm.replace_all_uses_with(layer)
    batch_norm.graph.erase_node(batch_norm)
    return set() if module is None else {module}


def _drop_modules(region: nn.Module, graph: fx.Graph, folded: set[nn.Module]) -> None:
    """Replace folded batch norms that nothing calls any more by ``nn.Identity``."""
    graph.eliminate_dead_code(lambda node: node.op != "get_attr")
    called = {module_of(node, region) for node in graph.nodes}
    for parent in list(region.modules()):
        for key, child in parent._modules.items():
            if child in folded and child not in called:
                parent._modules[key] = nn.Identity()


def _replace_quantizer(node: fx.Node, quantize: Quantize, region: nn.Module) -> None:
    """Put ``quantize`` and its dequantize where the fake-quantizer was, in graph and owner."""
    path = str(node.target).removesuffix(".input_fake_quant")
    owner = region.get_submodule(path)
    _own_quantizers(owner, quantize)
    with node.graph.inserting_before(node):
        codes = node.graph.call_module(f"{path}.input_quantize", node.args)
        values = node.graph.call_module(f"{path}.input_dequantize", (codes,))
    node.replace_all_uses_with(values)
    node.graph.erase_node(node)


def _own_quantizers(owner: nn.Module, quantize: Quantize) -> None:
    del owner.input_fake_quant
    owner.add_module("input_quantize", quantize)
    weight = owner.weight
    assert isinstance(weight, Tensor)
    owner.add_module("input_dequantize", Dequantize(quantize, weight.dtype))


def _remaining_layers(model: nn.Module) -> Iterator[tuple[str, QATLayer]]:
    for name, module in model.named_modules():
        if isinstance(module, QATLayer):
            yield name, module


def _convert_island_layer(layer: QATLayer, name: str) -> None:
    quantize = _freeze(layer.input_fake_quant, name)
    _convert_layer(layer, quantize, None, name)
    _own_quantizers(layer, quantize)
