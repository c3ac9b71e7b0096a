"""An integer interpreter of deploy files: what an NPU is told to compute, in plain numpy.

AscendQuant makes integers; operators subtract its offset, pad with zero, accumulate in integers and
add the int32 bias; AscendDequant multiplies by the scale in the low half of its parameter. All
other nodes go to the reference implementation of ONNX.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from onnx.reference import ReferenceEvaluator

Array = NDArray[Any]
LIMITS = {"INT8": (-128, 127), "INT16": (-32768, 32767)}


def run_deploy(
    model: onnx.ModelProto, inputs: dict[str, Array], *, int4: tuple[str, ...] = ()
) -> dict[str, Array]:
    """Return all tensors of a deploy file; ``int4`` names the weights that are packed."""
    graph = model.graph
    values: dict[str, Array] = {
        item.name: numpy_helper.to_array(item) for item in graph.initializer
    }
    values.update(inputs)
    offsets: dict[str, float] = {}
    channel_first: set[str] = set()
    for node in graph.node:
        attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        read = [values[name] if name else None for name in node.input]
        if node.input and node.input[0] in offsets:
            read[0] = read[0].astype(np.int64) - int(offsets[node.input[0]])
        for i, name in enumerate(node.input):
            if name in int4:
                axis = 2 if "LSTM" in node.op_type or "GRU" in node.op_type else None
                axis = axis if axis is not None else 1 if node.op_type == "Conv" else 0
                read[i] = _unpacked(read[i], axis)
        if node.op_type == "AscendQuant":
            low, high = LIMITS[attributes["dst_type"].decode()]
            offset = attributes["offset"]
            codes = np.rint(read[0] * np.float32(attributes["scale"])) + offset
            made = [np.clip(codes, low, high).astype(np.int32)]
            offsets[node.output[0]] = offset
        elif node.op_type == "AscendDequant":
            made = [
                _dequantized(
                    read[0], read[1], channel_axis=1 if node.input[0] in channel_first else -1
                )
            ]
        elif node.op_type.endswith("InplaceFillWindowCache"):
            made = _recurrent(node.op_type, read, attributes)
        elif len(read) > 1 and read[1] is not None and read[1].dtype == np.int8:
            made = [_OPERATORS[node.op_type](*read, attributes)]
            if node.op_type in ("Conv", "ConvTranspose"):
                channel_first.add(node.output[0])
        elif node.op_type == "Add" and read[1].dtype == np.int32:
            made = [read[0] + read[1]]
        else:
            made = _standard(node, read, model)
        values.update(zip(node.output, made, strict=False))
    return values


def _dequantized(integers: Array, params: Array, channel_axis: int) -> Array:
    assert integers.dtype == np.int64
    assert np.abs(integers).max(initial=0) < 2**31, "an NPU accumulates in int32"
    assert params.dtype == np.uint64
    assert not (params >> np.uint64(32)).any()
    scale = params.astype(np.uint32).view(np.float32)
    if channel_axis == 1:
        scale = scale.reshape(-1, *[1] * (integers.ndim - 2))
    return integers.astype(np.float32) * scale


def _unpacked(packed: Array, axis: int) -> Array:
    low = ((packed.astype(np.int16) & 15) ^ 8) - 8
    high = packed.astype(np.int16) >> 4
    shape = list(packed.shape)
    shape[axis] *= 2
    return np.stack([low, high], axis + 1).reshape(shape).astype(np.int8)


def _conv(x: Array, weight: Array, *rest: Any) -> Array:
    bias, attributes = _bias_and_attributes(rest)
    kernel, dims = weight.shape[2:], weight.ndim - 2
    pads = attributes.get("pads", [0] * 2 * dims)
    strides, dilations = (attributes.get(k, [1] * dims) for k in ("strides", "dilations"))
    groups = attributes.get("group", 1)
    x = np.pad(x, [(0, 0), (0, 0), *zip(pads[:dims], pads[dims:], strict=True)])
    sizes = [
        (x.shape[2 + i] - dilations[i] * (kernel[i] - 1) - 1) // strides[i] + 1 for i in range(dims)
    ]
    grouped = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
    rows = weight.astype(np.int64).reshape(groups, -1, *weight.shape[1:])
    total = np.zeros((x.shape[0], groups, rows.shape[1], *sizes), np.int64)
    for at in itertools.product(*map(range, kernel)):
        window = tuple(
            slice(
                at[i] * dilations[i],
                at[i] * dilations[i] + strides[i] * (sizes[i] - 1) + 1,
                strides[i],
            )
            for i in range(dims)
        )
        part = grouped[(slice(None), slice(None), slice(None), *window)]
        total += np.einsum("bgc...,gkc->bgk...", part, rows[(..., *at)])
    return _with_bias(total.reshape(x.shape[0], -1, *sizes), bias)


def _conv_transpose(x: Array, weight: Array, *rest: Any) -> Array:
    bias, attributes = _bias_and_attributes(rest)
    kernel, dims = weight.shape[2:], weight.ndim - 2
    pads = attributes.get("pads", [0] * 2 * dims)
    strides, dilations = (attributes.get(k, [1] * dims) for k in ("strides", "dilations"))
    extra, groups = attributes.get("output_padding", [0] * dims), attributes.get("group", 1)
    full = [
        strides[i] * (x.shape[2 + i] - 1) + extra[i] + dilations[i] * (kernel[i] - 1) + 1
        for i in range(dims)
    ]
    grouped = x.reshape(x.shape[0], groups, -1, *x.shape[2:])
    rows = weight.astype(np.int64).reshape(groups, -1, *weight.shape[1:])
    total = np.zeros((x.shape[0], groups, weight.shape[1], *full), np.int64)
    for at in itertools.product(*map(range, kernel)):
        window = tuple(
            slice(
                at[i] * dilations[i],
                at[i] * dilations[i] + strides[i] * (x.shape[2 + i] - 1) + 1,
                strides[i],
            )
            for i in range(dims)
        )
        part = np.einsum("bgc...,gck->bgk...", grouped, rows[(..., *at)])
        total[(slice(None), slice(None), slice(None), *window)] += part
    total = total.reshape(x.shape[0], -1, *full)
    crop = tuple(slice(pads[i], full[i] - pads[dims + i]) for i in range(dims))
    return _with_bias(total[(slice(None), slice(None), *crop)], bias)


def _gemm(x: Array, weight: Array, *rest: Any) -> Array:
    bias, attributes = _bias_and_attributes(rest)
    assert attributes == {"alpha": 1.0, "beta": 1.0, "transB": 0}
    return x @ weight.astype(np.int64) + (0 if bias is None else bias)


def _matmul(x: Array, weight: Array, *rest: Any) -> Array:
    return x @ weight.astype(np.int64)


_OPERATORS = {"Conv": _conv, "ConvTranspose": _conv_transpose, "Gemm": _gemm, "MatMul": _matmul}


def _bias_and_attributes(rest: tuple[Any, ...]) -> tuple[Array | None, dict[str, Any]]:
    return (rest[0] if len(rest) > 1 else None), rest[-1]


def _with_bias(total: Array, bias: Array | None) -> Array:
    if bias is None:
        return total
    assert bias.dtype == np.int32
    return total + bias.reshape(-1, *[1] * (total.ndim - 2))


def _recurrent(kind: str, read: list[Any], attributes: dict[str, Any]) -> list[Array]:
    """Run all steps; input and hidden state are quantized before each product."""
    is_lstm = "LSTM" in kind
    x, weight, recurrence, hidden = read[:4]
    cell = read[4][0] if is_lstm else None
    bias, _lengths, _empty, params = read[4 + is_lstm :]
    low, high = LIMITS[{2: "INT8", 6: "INT16"}[attributes["quant_dtype"]]]
    scales = np.split(params.astype(np.uint32).view(np.float32), 2)
    rows = weight.shape[1]
    wide = [np.repeat(scale, rows // scale.size) for scale in scales]
    biases = np.split(bias[0], 2) if bias is not None else (0, 0)

    def product(values: Array, which: str, weights: Array, i: int) -> Array:
        offset = attributes[f"quant_offset_{which}"]
        codes = np.rint(values * np.float32(attributes[f"quant_scale_{which}"])) + offset
        integers = np.clip(codes, low, high).astype(np.int64) - int(offset)
        return (integers @ weights[0].astype(np.int64).T + biases[i]) * wide[i]

    h, outputs = hidden[0], []
    for step in x:
        a, b = product(step, "x", weight, 0), product(h, "h", recurrence, 1)
        if is_lstm:
            i, o, f, g = np.split(a + b, 4, -1)
            cell = _sigmoid(f) * cell + _sigmoid(i) * np.tanh(g)
            h = _sigmoid(o) * np.tanh(cell)
        else:
            (z_x, r_x, n_x), (z_h, r_h, n_h) = (np.split(part, 3, -1) for part in (a, b))
            assert attributes["linear_before_reset"] == 1
            n = np.tanh(n_x + _sigmoid(r_x + r_h) * n_h)
            z = _sigmoid(z_x + z_h)
            h = (1 - z) * n + z * h
        outputs.append(h)
    y = np.stack(outputs)[:, None].astype(np.float32)
    last = [h[None].astype(np.float32)]
    return [y, *last, *([cell[None].astype(np.float32)] if is_lstm else [])]


def _sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def _standard(node: onnx.NodeProto, read: list[Any], model: onnx.ModelProto) -> list[Array]:
    names = [name for name in dict.fromkeys(node.input) if name]
    graph = helper.make_graph(
        [node],
        "one",
        [helper.make_empty_tensor_value_info(name) for name in names],
        [helper.make_empty_tensor_value_info(name) for name in node.output if name],
    )
    alone = helper.make_model(graph, opset_imports=model.opset_import)
    feeds = {name: value for name, value in zip(node.input, read, strict=True) if name}
    return list(ReferenceEvaluator(alone).run(None, feeds))
