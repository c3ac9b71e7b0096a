"""What onnxruntime fuses into integer kernels, and rewrites that let it fuse more.

A Conv becomes an integer kernel only if its result is quantized at once, or behind a Relu that the
quantizer makes needless. Repeating a quantizer right behind the Conv changes no code: rounding to
the same steps commutes with Relu, Clip, MaxPool and moving values. Source: spec/deploy.md
section 3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from onnx import NodeProto, helper, numpy_helper

from amct_fx.onnx.layers import MOVES_VALUES

if TYPE_CHECKING:
    from amct_fx.onnx.graph import Graph
    from amct_fx.onnx.layers import LayerCall

__all__ = ["drop_needless_clips", "fold_unfused_weights", "is_fused", "repeat_quantizers"]

_COMMUTES = ("Relu", "Clip", "MaxPool", *(op for op in MOVES_VALUES if op not in ("Pad", "Cast")))
_INTEGER = ("Add", "Mul", "AveragePool", "GlobalAveragePool", "Concat")


@dataclass(frozen=True)
class _Steps:
    """Scale, zero point and largest code of a QuantizeLinear."""

    scale: float
    zero: int
    lowest: int
    highest: int

    @property
    def starts_at_zero(self) -> bool:
        return self.zero == self.lowest


def _steps(graph: Graph, quantize: NodeProto) -> _Steps:
    scale, zero = graph.array(quantize.input[1]), graph.array(quantize.input[2])
    assert scale is not None, "scales are constants"
    assert zero is not None, "zero points are constants"
    limits = np.iinfo(zero.dtype)
    return _Steps(float(scale), int(zero), int(limits.min), int(limits.max))


def drop_needless_clips(graph: Graph) -> None:
    """Remove a Clip from zero that its quantizer makes anyway: what is above gets the last code."""
    for quantize in [node for node in graph.nodes if node.op_type == "QuantizeLinear"]:
        clip = graph.producer(quantize.input[0])
        if clip is None or clip.op_type != "Clip" or len(graph.readers(clip.output[0])) > 1:
            continue
        if _is_needless(graph, clip, _steps(graph, quantize)) and _is_inner(graph, clip.output[0]):
            quantize.input[0] = clip.input[0]
            graph.changed()


def _is_needless(graph: Graph, clip: NodeProto, steps: _Steps) -> bool:
    bounds = [graph.array(name) if name else None for name in clip.input[1:3]]
    low, high = (float(b) if b is not None else None for b in (*bounds, None, None)[:2])
    if low != 0 or not steps.starts_at_zero:
        return False
    return high is None or round(high / steps.scale) >= steps.highest - steps.zero


def repeat_quantizers(graph: Graph, calls: list[LayerCall]) -> None:
    """Put a copy of a quantizer between an integer operation and what stands before the quantizer.

    Also behind what moves values between a quantizer and a layer, so that the layer reads a
    DequantizeLinear.
    """
    integer = {id(call.node) for call in calls if call.node.op_type == "Conv"}
    integer |= {id(node) for node in graph.nodes if _runs_on_integers(graph, node)}
    for quantize in [node for node in graph.nodes if node.op_type == "QuantizeLinear"]:
        tensor = _tensor_to_repeat_at(graph, quantize, integer)
        if tensor is not None:
            _repeat(graph, quantize, tensor)
    for call in calls:
        if call.path and call.node.op_type == "Conv":
            _repeat(graph, call.quantize, call.node.input[0], readers=[call.node])


def _runs_on_integers(graph: Graph, node: NodeProto) -> bool:
    """Say whether an operation, its result quantized, has an integer kernel."""
    makers = [graph.producer(name) for name in node.input if name]
    return node.op_type in _INTEGER and all(
        maker is not None and maker.op_type == "DequantizeLinear" for maker in makers
    )


def _tensor_to_repeat_at(graph: Graph, quantize: NodeProto, integer: set[int]) -> str | None:
    """Return the tensor behind a Conv that the values of ``quantize`` come from unchanged."""
    between: list[NodeProto] = []
    tensor = quantize.input[0]
    maker = graph.producer(tensor)
    while maker is not None and _is_inner(graph, tensor) and len(graph.readers(tensor)) == 1:
        if id(maker) in integer:
            break
        if maker.op_type not in _COMMUTES:
            return None
        between.insert(0, maker)
        tensor = maker.input[0]
        maker = graph.producer(tensor)
    if maker is None or id(maker) not in integer or not between:
        return None
    if len(graph.readers(maker.output[0])) > 1 or not _is_inner(graph, maker.output[0]):
        return None
    first = between[0]
    if first.op_type == "Relu" and _steps(graph, quantize).starts_at_zero:
        return str(first.output[0]) if len(between) > 1 else None
    return str(maker.output[0])


def _repeat(
    graph: Graph, quantize: NodeProto, tensor: str, readers: list[NodeProto] | None = None
) -> None:
    """Quantize and dequantize ``tensor`` as ``quantize`` does, for the given readers or all."""
    name = f"{quantize.name}.early{len(graph.nodes)}"
    parameters = list(quantize.input[1:])
    codes, values = f"{name}.codes", f"{name}.values"
    pair = [
        helper.make_node("QuantizeLinear", [tensor, *parameters], [codes], name=name),
        helper.make_node("DequantizeLinear", [codes, *parameters], [values], name=f"{name}.back"),
    ]
    readers = readers or graph.readers(tensor)
    first = min(readers, key=graph.position)
    for reader in readers:
        reader.input[:] = [values if item == tensor else item for item in reader.input]
    graph.insert(pair, before=first)


def _is_inner(graph: Graph, tensor: str) -> bool:
    return tensor not in graph.outputs


def is_fused(graph: Graph, call: LayerCall) -> bool:
    """Say whether onnxruntime (CPU) runs a layer in an integer kernel."""
    if call.node.op_type in ("Gemm", "MatMul"):
        return True
    if call.node.op_type != "Conv" or call.path:
        return False
    tensor = call.node.output[0]
    readers = graph.readers(tensor)
    if len(readers) != 1 or not _is_inner(graph, tensor):
        return False
    behind_relu = readers[0].op_type == "Relu"
    if behind_relu:
        tensor = readers[0].output[0]
        readers = graph.readers(tensor)
    if len(readers) != 1 or readers[0].op_type != "QuantizeLinear" or not _is_inner(graph, tensor):
        return False
    return not behind_relu or _steps(graph, readers[0]).starts_at_zero


def fold_unfused_weights(graph: Graph, calls: list[LayerCall]) -> None:
    """Store weights and biases as floats where onnxruntime would dequantize them in every run.

    The values stay those of the integers.
    """
    for call in calls:
        if is_fused(graph, call) or call.node.op_type in ("LSTM", "GRU"):
            continue
        for position, kind in ((1, "weight"), (2, "bias")):
            if len(call.node.input) > position:
                value = getattr(call.layer, kind).detach().float().cpu().numpy()
                name = f"{call.path_name}.{kind}"
                graph.initializers.setdefault(name, numpy_helper.from_array(value, name))
                call.node.input[position] = name
    graph.changed()
