"""Builds the model of each format out of what PyTorch's exporter makes of a converted model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct_fx.errors import ExportError
from amct_fx.nn.quantized import QuantizedLayer
from amct_fx.onnx.arguments import FORMATS, check_outputs
from amct_fx.onnx.ascend import check_for_atc, pack_weights, rewrite_for_ascend
from amct_fx.onnx.fake_quant import lower_to_standard
from amct_fx.onnx.fusing import drop_needless_clips, fold_unfused_weights, repeat_quantizers
from amct_fx.onnx.graph import Graph
from amct_fx.onnx.layers import LayerCall, find_layers, name_activations
from amct_fx.onnx.pairs import pair_weights
from amct_fx.onnx.qdq import name_layers, use_unsigned_activations
from amct_fx.onnx.recurrent import keep_recurrent_layers_whole
from amct_fx.onnx.source import Request, export_model, opsets_for

if TYPE_CHECKING:
    import onnx
    from torch import nn

    from amct_fx.onnx.arguments import Inputs
    from amct_fx.onnx.source import Exporter

__all__ = ["Options", "build"]


@dataclass(frozen=True)
class Options:
    """What some formats can vary; see :func:`amct_fx.export_onnx`.

    ``free_opset`` says that the operator set is only the default, so that a newer one will do.
    """

    signed_activations: bool = False
    fold_unfused_weights: bool = False
    free_opset: bool = False


def build(
    model: nn.Module,
    inputs: Inputs,
    format: str,
    opset: int,
    exporter: Exporter,
    options: Options,
) -> onnx.ModelProto:
    """Return the model of one format.

    Args:
        model: A converted model in eval mode, of our own: it may be changed.
        inputs: Checked inputs.
        format: A known format.
        opset: Version of the default operator set.
        exporter: Which exporter to use.
        options: What else was asked for.

    Raises:
        ArgumentError: The outputs do not have the names or axes that were asked for.
        ExportError: The exporter or the format cannot hold the model.
    """
    if format in ("ascend", "fake_quant", "qdq_pairs"):
        keep_recurrent_layers_whole(model)
    preferred = FORMATS[format].preferred if opset >= 18 else "torchscript"
    if inputs.dynamic_shapes is not None and exporter == "auto":
        exporter = "dynamo"
    request = Request(
        args=inputs.args,
        opsets=opsets_for(exporter, preferred, opset, least=18 if options.free_opset else opset),
        input_names=inputs.input_names,
        output_names=inputs.output_names,
        dynamic_axes=inputs.dynamic_axes,
        dynamic_shapes=inputs.dynamic_shapes,
    )
    graph = Graph(export_model(model, request))
    check_outputs(graph.output_ranks(), inputs)
    calls = find_layers(graph, model)
    _check_found(model, calls)
    _BUILDERS[format](graph, calls, model, options)
    return graph.save()


def _check_found(model: nn.Module, calls: list[LayerCall]) -> None:
    layers = [name for name, m in model.named_modules() if isinstance(m, QuantizedLayer)]
    if layers and not calls:
        message = (
            f"the exported graph calls none of the quantized layers ({', '.join(layers[:5])}); "
            "their results may not reach an output for these args"
        )
        raise ExportError(message)


def _build_qdq(graph: Graph, calls: list[LayerCall], model: nn.Module, options: Options) -> None:
    name_layers(graph, calls)
    if not options.signed_activations:
        use_unsigned_activations(graph)
    if options.fold_unfused_weights:
        fold_unfused_weights(graph, calls)
    graph.prune()


def _build_qdq_full(
    graph: Graph, calls: list[LayerCall], model: nn.Module, options: Options
) -> None:
    name_layers(graph, calls)
    if not options.signed_activations:
        use_unsigned_activations(graph)
    drop_needless_clips(graph)
    repeat_quantizers(graph, calls)
    if options.fold_unfused_weights:
        fold_unfused_weights(graph, calls)
    graph.prune()


def _build_qdq_pairs(
    graph: Graph, calls: list[LayerCall], model: nn.Module, options: Options
) -> None:
    name_layers(graph, calls)
    pair_weights(graph, calls)
    graph.prune()


def _build_ascend(graph: Graph, calls: list[LayerCall], model: nn.Module, options: Options) -> None:
    check_for_atc(calls)
    name_activations(graph, model)
    rewrite_for_ascend(graph, calls)
    pack_weights(graph, {call.path_name: call.layer for call in calls})


def _build_fake_quant(
    graph: Graph, calls: list[LayerCall], model: nn.Module, options: Options
) -> None:
    name_activations(graph, model)
    rewrite_for_ascend(graph, calls)
    lower_to_standard(graph)


_BUILDERS: dict[str, Callable[[Graph, list[LayerCall], nn.Module, Options], None]] = {
    "qdq": _build_qdq,
    "qdq_full": _build_qdq_full,
    "qdq_pairs": _build_qdq_pairs,
    "ascend": _build_ascend,
    "fake_quant": _build_fake_quant,
}
