"""AMCT's simulation file: the deploy graph with integers held in floats, for stock onnxruntime.

Every operator of the deploy graph is lowered to standard ones, so the file computes what the
deploy file means. Source: spec/deploy.md section 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from amct_fx.onnx.graph import Graph, attribute, attributes

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

__all__ = ["lower_to_standard"]

_LIMITS = {"INT4": (-8, 7), "INT8": (-128, 127), "INT16": (-32768, 32767)}
_RECURRENT = {"BasicLSTMInplaceFillWindowCache": "LSTM", "BasicGRUInplaceFillWindowCache": "GRU"}
_QUANT_DTYPES = {2: "INT8", 6: "INT16"}


def lower_to_standard(graph: Graph) -> None:
    """Replace everything that only ATC knows by float operators on integers.

    Args:
        graph: What :func:`amct_fx.onnx.ascend.rewrite_for_ascend` made, with one weight code in
            each int8; changed.
    """
    lower: dict[str, Callable[[Graph, NodeProto], None]] = {
        "AscendQuant": _lower_quant,
        "AscendDequant": _lower_dequant,
        **dict.fromkeys(_RECURRENT, _lower_recurrent),
    }
    for node in list(graph.nodes):
        if node.op_type in lower:
            lower[node.op_type](graph, node)
    graph.prune()


def _lower_quant(graph: Graph, node: NodeProto) -> None:
    low, high = _LIMITS[attribute(node, "dst_type")]
    name = f"{node.name}.fakequant"
    nodes, output = _quantize_nodes(
        graph, name, node.input[0], attribute(node, "scale"), attribute(node, "offset"), low, high
    )
    graph.replace_uses(node.output[0], output)
    graph.replace(node, *nodes)


def _lower_dequant(graph: Graph, node: NodeProto) -> None:
    """Multiply by the scale, in the shape of one value for each output channel."""
    name = node.name.removesuffix(".dequant")
    operator, bias = _integer_operator(graph, node.input[0])
    for constant in (operator.input[1], *operator.input[2:], *bias):
        _hold_in_floats(graph, constant)
    dims = len(graph.initializers[operator.input[1]].dims)
    scale = _scales(graph, node.input[1])
    value = scale.reshape(1, -1, *[1] * (dims - 2))
    constant = _constant(graph, f"{name}.fakedequant.dqscale", value)
    step = f"{name}.fakedequant.mul"
    output = node.output[0]
    if output not in graph.outputs:
        graph.replace_uses(output, f"{step}.output0")
        output = f"{step}.output0"
    if attribute(node, "dtype", 0) == 0:
        made = [helper.make_node("Mul", [node.input[0], constant], [output], name=step)]
    else:
        made = [
            helper.make_node("Mul", [node.input[0], constant], [f"{step}.float"], name=step),
            helper.make_node(
                "Cast", [f"{step}.float"], [output], name=f"{step}.cast", to=TensorProto.FLOAT16
            ),
        ]
    graph.replace(node, *made)


def _integer_operator(graph: Graph, tensor: str) -> tuple[NodeProto, list[str]]:
    """Return the operator that makes an integer tensor, and the bias that an Add gives to it."""
    maker = graph.producer(tensor)
    assert maker is not None, "AscendDequant reads the result of an operator"
    if maker.op_type != "Add":
        return maker, []
    operator = graph.producer(maker.input[0])
    assert operator is not None, "the Add of a bias reads (MatMul, bias)"
    return operator, [maker.input[1]]


def _hold_in_floats(graph: Graph, name: str) -> None:
    array = graph.array(name)
    if array is not None and array.dtype != np.float32:
        graph.initializers[name] = numpy_helper.from_array(array.astype(np.float32), name)


def _scales(graph: Graph, param: str) -> NDArray[np.float32]:
    """Return the float32 scales in the low halves of the uint64 parameters."""
    bits = graph.array(param)
    assert bits is not None, "parameters of AscendDequant are constants"
    return bits.astype(np.uint32).view(np.float32)


def _lower_recurrent(graph: Graph, node: NodeProto) -> None:
    """Make a standard LSTM or GRU with dequantized weights, X and h0 quantized and dequantized."""
    kind, values = _RECURRENT[node.op_type], attributes(node)
    is_lstm = kind == "LSTM"
    x, weight, recurrence, hidden = node.input[:4]
    cell = node.input[4] if is_lstm else ""
    bias, lengths, _empty, params = node.input[4 + is_lstm :]
    low, high = _LIMITS[_QUANT_DTYPES[values["quant_dtype"]]]
    nodes: list[NodeProto] = []
    for which, source in (("x", x), ("h", hidden)):
        if source:
            scale, offset = values[f"quant_scale_{which}"], values[f"quant_offset_{which}"]
            suffix = "" if which == "x" else "_h"
            made, last = _quantize_nodes(
                graph, f"{node.name}.quant{suffix}.fakequant", source, scale, offset, low, high
            )
            back = f"{node.name}.quant{suffix}.fakedequant"
            step = _constant(graph, f"{back}.dqscale", np.float32(1) / np.float32(scale))
            made.append(helper.make_node("Mul", [last, step], [f"{back}.mul.output0"], name=back))
            nodes += made
            x, hidden = (made[-1].output[0], hidden) if which == "x" else (x, made[-1].output[0])
    scales = np.split(_scales(graph, params), 2)
    reciprocals = (values["quant_scale_x"], values["quant_scale_h"])
    for name, of, reciprocal in zip((weight, recurrence), scales, reciprocals, strict=True):
        _dequantize_gates(graph, name, of * np.float32(reciprocal), axis=1)
    if bias:
        rows = graph.initializers[bias].dims[1] // 2
        wide = [np.repeat(of, rows // of.size) for of in scales]
        _dequantize_gates(graph, bias, np.concatenate(wide), axis=1)
    inputs = [x, weight, recurrence, bias, lengths, hidden, *([cell] if is_lstm else [])]
    kept = {
        k: values[k] for k in ("hidden_size", "direction", "linear_before_reset") if k in values
    }
    nodes.append(helper.make_node(kind, inputs, list(node.output), name=node.name, **kept))
    graph.replace(node, *nodes)


def _dequantize_gates(graph: Graph, name: str, step: NDArray[np.float32], axis: int) -> None:
    """Multiply a constant by one scale for each gate, or for each row."""
    codes = graph.array(name)
    assert codes is not None, "weights are constants"
    if codes.dtype == np.float32:
        return
    wide = np.repeat(step, codes.shape[axis] // step.size)
    shape = [1] * codes.ndim
    shape[axis] = -1
    value = codes.astype(np.float32) * wide.reshape(shape)
    graph.initializers[name] = numpy_helper.from_array(value, name)


def _quantize_nodes(
    graph: Graph, name: str, source: str, scale: float, offset: float, low: int, high: int
) -> tuple[list[NodeProto], str]:
    """Return ``clip(round(x * scale) + offset) - offset``, which stays in integer units."""
    values = {"scale": scale, "offset": offset, "min_val": low, "max_val": high}
    constants = {
        key: _constant(graph, f"{name}.{key}", np.float32(value)) for key, value in values.items()
    }
    steps: tuple[tuple[str, list[str]], ...] = (
        ("Mul", ["scale"]),
        ("Round", []),
        ("Add", ["offset"]),
        ("Clip", ["min_val", "max_val"]),
        ("Sub", ["offset"]),
    )
    nodes = []
    for operator, operands in steps:
        step = f"{name}.{operator.lower()}"
        inputs = [source, *(constants[key] for key in operands)]
        nodes.append(helper.make_node(operator, inputs, [f"{step}.output0"], name=step))
        source = f"{step}.output0"
    return nodes, source


def _constant(graph: Graph, name: str, value: NDArray[Any] | np.generic) -> str:
    """Put a Constant at the beginning of the graph and return its tensor."""
    tensor = numpy_helper.from_array(np.asarray(value))
    node = helper.make_node("Constant", [], [f"{name}.output0"], name=name, value=tensor)
    graph.nodes.insert(0, node)
    graph.changed()
    return f"{name}.output0"
