"""The QuantizeLinear/DequantizeLinear forms: unsigned activations, float weights, pairs.

Source: spec/deploy.md sections 2 and 6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from onnx import NodeProto

    from amct_fx.onnx.graph import Graph
    from amct_fx.onnx.layers import LayerCall

__all__ = ["name_layers", "use_unsigned_activations"]


def name_layers(graph: Graph, calls: list[LayerCall]) -> None:
    """Name operators and quantizers after the layers they belong to."""
    seen: set[str] = set()
    for call in calls:
        call.node.name = call.name
        if call.bias_add is not None:
            call.bias_add.name = f"{call.name}.add"
        codes = call.quantize.output[0]
        if codes not in seen:
            seen.add(codes)
            call.quantize.name = f"{call.name}.quant"
            for i, reader in enumerate(graph.readers(codes)):
                if reader.op_type == "DequantizeLinear":
                    reader.name = f"{call.name}.quant.back{i or ''}"
    for node in graph.nodes:
        if node.op_type in ("QuantizeLinear", "DequantizeLinear"):
            _drop_needless_axis(graph, node)


def _drop_needless_axis(graph: Graph, node: NodeProto) -> None:
    """Drop the axis that one exporter writes where there is one scale for the tensor."""
    scale = graph.array(node.input[1])
    if scale is not None and scale.ndim == 0:
        kept = [item for item in node.attribute if item.name != "axis"]
        node.ClearField("attribute")
        node.attribute.extend(kept)


def use_unsigned_activations(graph: Graph) -> None:
    """Let 8-bit activations be UINT8, 128 above INT8: the same steps, and onnxruntime is faster.

    INT16 activations stay: nothing is faster with UINT16.
    """
    made: dict[int, str] = {}
    for quantize in graph.nodes:
        if quantize.op_type != "QuantizeLinear":
            continue
        zero = graph.array(quantize.input[2])
        if zero is None or zero.dtype != np.int8 or zero.ndim:
            continue
        value = int(zero) + 128
        name = made.setdefault(value, f"zero_point_{value}")
        graph.add_initializer(name, np.array(value, np.uint8))
        quantize.input[2] = name
        for reader in graph.readers(quantize.output[0]):
            if reader.op_type == "DequantizeLinear":
                reader.input[2] = name
    graph.changed()
