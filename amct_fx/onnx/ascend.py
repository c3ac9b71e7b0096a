"""The deploy graph for ATC: a rewrite of the QuantizeLinear/DequantizeLinear graph.

Each layer becomes AscendQuant, its integer operator, and AscendDequant, in the default domain. The
file is for Ascend's ATC only: ``onnx.checker`` and onnxruntime refuse it, as they do AMCT's.
Source: spec/deploy.md section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from onnx import NodeProto, helper, numpy_helper
from torch import nn

from amct_fx.errors import ExportError
from amct_fx.onnx.graph import Graph, attributes, set_attributes
from amct_fx.onnx.layers import MOVES_VALUES, LayerCall
from amct_fx.onnx.numbers import (
    Range,
    activation_range,
    bias_codes,
    dequant_scale,
    pack_int4,
    packing_axis,
    scale_bits,
    unpack_int4,
    weight_codes,
)
from amct_fx.onnx.recurrent import recurrent_node

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from amct_fx.nn.quantized import QuantizedLayer

__all__ = ["check_for_atc", "pack_weights", "rewrite_for_ascend", "unpack_weights"]


def rewrite_for_ascend(graph: Graph, calls: list[LayerCall]) -> None:
    """Replace every layer by its integer form; no QuantizeLinear is left.

    Args:
        graph: The exported graph; changed.
        calls: What :func:`amct_fx.onnx.layers.find_layers` found in it.

    Raises:
        ExportError: Something in the graph has no form that ATC reads.
    """
    _check_layers(calls)
    quantizers = _Quantizers(graph)
    for call in calls:
        if isinstance(call.layer, nn.RNNBase):
            _replace_recurrent(graph, call)
            continue
        _take_integers(graph, call, quantizers.output_for(call))
        _dequantize(graph, call)
    _forget_quantizers(graph)
    _dequantize_constants(graph)
    for node in graph.nodes:
        if node.op_type == "BatchNormalization" and not attributes(node).get("training_mode"):
            kept = attributes(node)
            kept.pop("training_mode", None)  # the older form has none, and means the same
            set_attributes(node, **kept)
    graph.prune()
    _check_left(graph)


def _check_layers(calls: list[LayerCall]) -> None:
    for call in calls:
        if call.layer.dtype not in (torch.float32, torch.float16):
            dtype = str(call.layer.dtype).removeprefix("torch.")
            message = (
                f"{call.name}: AscendDequant makes float32 or float16, not {dtype}; export "
                "model.float()"
            )
            raise ExportError(message)


def check_for_atc(calls: list[LayerCall]) -> None:
    """Refuse the layers that ATC cannot take although they have an integer form.

    Raises:
        ExportError: Names the layer.
    """
    for call in calls:
        layer = call.layer
        if isinstance(layer, nn.Linear) and dequant_scale(layer, layer.input_quantizer).size > 1:
            message = (
                f"{call.name}: ATC's Gemm takes one weight scale, this Linear has one for each "
                "output; prepare without linear_channel_wise, or use format 'qdq'"
            )
            raise ExportError(message)


class _Quantizers:
    """Makes AscendQuant nodes, one for each tensor, scale, offset and type."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._made: dict[tuple[Any, ...], str] = {}

    def output_for(self, call: LayerCall) -> str:
        """Return the integer tensor that the operator of ``call`` reads."""
        source = _moved(self._graph, call)
        found = activation_range(call.layer.input_quantizer)
        key = (source, found.scale.tobytes(), found.offset, found.bits)
        if key not in self._made:
            node = _ascend_quant(call.name, source, found)
            self._graph.insert([node], before=call.node)
            self._made[key] = node.output[0]
        return self._made[key]


def _ascend_quant(name: str, source: str, found: Range) -> NodeProto:
    return helper.make_node(
        "AscendQuant",
        [source],
        [f"{name}.quant.output0"],
        name=f"{name}.quant",
        scale=float(found.reciprocal),
        offset=float(found.offset),
        dst_type=found.type_name,
    )


def _moved(graph: Graph, call: LayerCall) -> str:
    """Return the tensor to quantize: what only moves values is moved in front of the quantizer.

    Quantizing commutes with moving values, and with padding by zero, whose code is the offset.
    """
    source = call.source
    for i, node in enumerate(n for n in call.path if n.op_type not in ("Cast", "Identity")):
        copied = NodeProto()
        copied.CopyFrom(node)
        copied.name = copied.output[0] = f"{call.name}.input{i}"
        copied.input[0] = source
        graph.insert([copied], before=call.node)
        source = copied.output[0]
    return source


def _take_integers(graph: Graph, call: LayerCall, quantized: str) -> None:
    """Let the operator read integers: input, weight and bias."""
    layer, node = call.layer, call.node
    weight = graph.add_initializer(f"{call.path_name}.sub_module.weight", weight_codes(layer))
    inputs = [quantized, weight]
    bias = bias_codes(layer)
    if bias is not None:
        bias_name = graph.add_initializer(f"{call.path_name}.sub_module.bias", bias)
        if call.bias_add is None:
            inputs.append(bias_name)
        else:
            call.bias_add.input[:] = [node.output[0], bias_name]
            call.bias_add.name = f"{call.name}.add"
    node.input[:] = inputs
    node.name = call.name
    if node.op_type == "Gemm":
        set_attributes(node, alpha=1.0, beta=1.0, transB=0)
    elif node.op_type in ("Conv", "ConvTranspose"):
        kept = attributes(node)
        for key in ("auto_pad", "output_padding"):
            if kept.get(key) in ("NOTSET", [0] * len(kept.get(key) or ())):
                kept.pop(key)
        set_attributes(node, **kept)
    graph.changed()


def _dequantize(graph: Graph, call: LayerCall) -> None:
    """Put AscendDequant behind the operator, or behind the Add of its bias."""
    scale = dequant_scale(call.layer, call.layer.input_quantizer)
    param = graph.add_initializer(f"{call.path_name}.dequant.param", scale_bits(scale))
    last = call.last
    result = last.output[0]
    if result in graph.outputs:
        integers, dequantized = f"{call.name}_output0", result
        last.output[0] = integers
    else:
        integers, dequantized = result, f"{call.name}.dequant.output0"
        graph.replace_uses(integers, dequantized)
    node = helper.make_node(
        "AscendDequant",
        [integers, param],
        [dequantized],
        name=f"{call.name}.dequant",
        dtype=int(call.layer.dtype == torch.float16),
    )
    graph.append_after(last, [node])


def _replace_recurrent(graph: Graph, call: LayerCall) -> None:
    graph.replace(call.node, recurrent_node(graph, call, _moved(graph, call)))


def pack_weights(graph: Graph, layers: Mapping[str, QuantizedLayer]) -> None:
    """Put two INT4 codes into each byte of the weights that have 4 bits.

    Args:
        graph: A deploy graph with one code in each byte; changed.
        layers: The converted layers by module path.

    Raises:
        ExportError: The axis is odd, or the convolution is grouped.
    """
    for name, codes, axis, layer in _int4_weights(graph, layers):
        if codes.shape[axis] % 2 or getattr(layer, "groups", 1) > 1:
            message = (
                f"{name}: INT4 weights are packed in pairs along the input channels, which must be "
                "even, without groups; write wts_type INT8 for this layer"
            )
            raise ExportError(message)
        graph.initializers[name] = numpy_helper.from_array(pack_int4(codes, axis), name)


def unpack_weights(graph: Graph, layers: Mapping[str, QuantizedLayer]) -> None:
    """Undo :func:`pack_weights`."""
    for name, codes, axis, _ in _int4_weights(graph, layers):
        graph.initializers[name] = numpy_helper.from_array(unpack_int4(codes, axis), name)


def _int4_weights(
    graph: Graph, layers: Mapping[str, QuantizedLayer]
) -> Iterator[tuple[str, NDArray[np.int8], int, QuantizedLayer]]:
    """Yield name, codes, packing axis and layer of every INT4 weight in a deploy graph."""
    for path, layer in layers.items():
        for end in ("weight", "recurrence") if layer.weight_bits == 4 else ():
            codes = graph.array(f"{path}.sub_module.{end}")
            if codes is not None:
                yield f"{path}.sub_module.{end}", codes, packing_axis(layer), layer


def _forget_quantizers(graph: Graph) -> None:
    """Let what reads only the shape of a quantized tensor read the float one."""
    graph.prune()
    for node in list(graph.nodes):
        source = graph.producer(node.input[0]) if node.op_type == "DequantizeLinear" else None
        if source is None or source.op_type != "QuantizeLinear":
            continue
        if _only_shape_is_read(graph, node.output[0]):
            graph.replace_uses(node.output[0], source.input[0])


def _only_shape_is_read(graph: Graph, tensor: str) -> bool:
    if tensor in graph.outputs:
        return False
    return all(
        reader.op_type in ("Shape", "Size")
        or (reader.op_type in MOVES_VALUES and _only_shape_is_read(graph, reader.output[0]))
        for reader in graph.readers(tensor)
    )


def _dequantize_constants(graph: Graph) -> None:
    """Let what is no layer read the weight of one, as ``x @ layer.weight.T``, as floats."""
    for node in list(graph.nodes):
        if node.op_type != "DequantizeLinear":
            continue
        codes, scale = graph.array(node.input[0]), graph.array(node.input[1])
        if codes is None or scale is None:
            continue
        zero = graph.array(node.input[2]) if len(node.input) > 2 else None
        axis = attributes(node).get("axis", 1)
        along = [-1 if i == axis % codes.ndim else 1 for i in range(codes.ndim)]
        scale = scale.reshape(along if scale.size > 1 else ())
        steps = codes.astype(scale.dtype)
        if zero is not None:
            steps -= zero.astype(scale.dtype).reshape(along if zero.size > 1 else ())
        values = graph.add_initializer(f"{node.output[0]}.values", steps * scale)
        graph.replace_uses(node.output[0], values)


def _check_left(graph: Graph) -> None:
    for node in graph.nodes:
        if node.op_type == "DequantizeLinear":
            readers = {reader.op_type for reader in graph.readers(node.output[0])}
            message = (
                f"the quantized tensor {node.input[0]!r} is read by {', '.join(sorted(readers))}, "
                "which ATC has no integer form for; quantize only inputs and weights of layers, "
                "so prepare without outputs='quantize'"
            )
            raise ExportError(message)
        if node.domain not in ("", "ai.onnx"):
            message = f"{node.name}: ATC reads no operator {node.domain}::{node.op_type}"
            raise ExportError(message)
