"""The verb ``convert``: a trained model becomes an integer one.

The recipe: copy, eval mode, remove what is pruned, freeze the scales, fold batch norms, replace
layers and quantizers.
Source: design.md, "How convert works"; spec/quantization.md sections 4 and 5.
"""

from __future__ import annotations

from collections.abc import Container, Iterator

import torch
from torch import fx, nn
from torch.ao.quantization import FakeQuantizeBase

from amct_fx.backends import Backend, lowering_for
from amct_fx.checks import check_prepared_model
from amct_fx.config.messages import listing
from amct_fx.copying import copy_model
from amct_fx.distributed import RangeMerger
from amct_fx.errors import ConvertError
from amct_fx.fold import foldable_batch_norm, used_elsewhere
from amct_fx.freezing import frozen_quantizers, replace_fake_quantizers
from amct_fx.graph import (
    GraphForward,
    fx_graph_of,
    guard_of,
    install_graph,
    layer_calls,
    layer_input,
    module_of,
    regions,
)
from amct_fx.grouping import QuantizerGroups
from amct_fx.nn.matmul import convert_matmuls
from amct_fx.nn.qat import QATLayer
from amct_fx.nn.quantized import Quantize
from amct_fx.pruning import remove_pruned
from amct_fx.report.preparation import record_conversion
from amct_fx.root_hooks import remove_hooks
from amct_fx.unused import leave_unused_layers_float

__all__ = ["convert_amct"]


def convert_amct(model: nn.Module, *, backend: Backend = None) -> nn.Module:
    """Return the integer model of a prepared one.

    Weights become int8 codes, biases int32 codes, batch norms behind convolutions are folded,
    each input quantizer becomes a quantize and a dequantize. The result is an ordinary module in
    eval mode; ``torch.onnx.export`` writes it as QuantizeLinear/DequantizeLinear with INT8
    initializers.

    Args:
        model: A prepared model whose ranges were calibrated; its mode does not matter, and it is
            not changed.
        backend: ``None`` for a model that runs and exports everywhere. ``"npu"`` or an
            :class:`amct_fx.npu.NpuOptions` for one whose layers call the integer operators of
            torch-npu where they can; :func:`amct_fx.npu.lowering_of` says which do, and why others
            do not.

    Returns:
        The converted model, in eval mode.

    Raises:
        ArgumentError: There is no such backend.
        BackendError: torch-npu is not installed, or cannot be imported; says why.
        ConvertError: A quantizer was never calibrated, a value is not finite, or a bias does not
            fit into int32; names the layer.
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
    lower = lowering_for(backend)
    converted = copy_model(model).eval()
    RangeMerger.detach(converted)
    remove_hooks(converted, QuantizerGroups)
    leave_unused_layers_float(converted)
    _check_calibrated(converted)
    remove_pruned(converted)
    with torch.no_grad():
        parts = list(regions(converted))
        foreign = [
            used_elsewhere(region, [other for _, other in parts if other is not region])
            for _, region in parts
        ]
        for (name, region), used in zip(parts, foreign, strict=True):
            _convert_region(region, name, used)
        for name, layer in list(_remaining_layers(converted)):
            _convert_island_layer(layer, name)
        convert_matmuls(converted)
    record_conversion(converted)
    return lower(converted.eval())  # the new quantizers too


def _check_calibrated(model: nn.Module) -> None:
    waiting = dict.fromkeys(
        name.rpartition(".")[0] or "the model"
        for name, module in model.named_modules()
        if isinstance(module, FakeQuantizeBase) and not getattr(module, "is_calibrated", True)
    )
    if waiting:
        message = (
            f"the input ranges of {listing(waiting, limit=5)} were never calibrated; run at least "
            "batch_num forward passes on real data before convert_amct"
        )
        raise ConvertError(message)


def _convert_region(region: GraphForward, name: str, foreign: Container[nn.Module | None]) -> None:
    graph = fx_graph_of(region)
    folded: set[nn.Module] = set()
    calls = layer_calls(graph, region)
    quantizers = frozen_quantizers(calls)
    if not quantizers and not any(isinstance(layer, QATLayer) for layer in calls):
        return  # it was only pruned
    for layer, nodes in calls.items():
        if not isinstance(layer, QATLayer) or layer.quantizes_input:
            continue
        label = f"{name}.{nodes[0].target}" if name else str(nodes[0].target)
        source = layer_input(nodes[0])
        assert source is not None, "prepare quantizes only layers with a tensor input"
        batch_norm, following = foldable_batch_norm(nodes, region, label, foreign)
        layer.convert(quantizers[module_of(source, region)], batch_norm, label)
        _forget_float_input(nodes)
        for batch_norm_node, node in zip(following, nodes, strict=False):
            folded |= _bypass(batch_norm_node, node, region)
    replace_fake_quantizers(calls, quantizers, region)
    _drop_modules(region, graph, folded)
    install_graph(region, graph, guard_of(region))


def _forget_float_input(calls: list[fx.Node]) -> None:
    """Drop what only the calibration of recurrent layers reads."""
    for call in calls:
        call.kwargs = {key: value for key, value in call.kwargs.items() if key != "float_input"}


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


def _remaining_layers(model: nn.Module) -> Iterator[tuple[str, QATLayer]]:
    for name, module in model.named_modules():
        if isinstance(module, QATLayer):
            yield name, module


def _convert_island_layer(layer: QATLayer, name: str) -> None:
    owner = layer.input_owner
    if owner is layer:
        quantize = Quantize.from_fake_quant(layer.input_fake_quant, name)
        layer.convert(quantize, name=name).own_input_quantizer(quantize)
    else:  # the owner comes first in named_modules() order, so it is converted already
        layer.convert(owner.input_quantize, name=name)
