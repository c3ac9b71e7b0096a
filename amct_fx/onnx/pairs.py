"""``qdq_pairs``: float weights behind QuantizeLinear and DequantizeLinear, for AMCT's ONNX tool.

``amct_onnx.convert_qat_model`` turns such a file into AMCT's deploy and fake-quant files. It wants
both operators in pairs with the same numbers, on activations and on weights, scales per channel
only for convolutions, and float biases. Source: spec/deploy.md section 6.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from onnx import NodeProto, helper, numpy_helper
from torch import nn

from amct_fx.errors import ExportError
from amct_fx.onnx.graph import set_attributes
from amct_fx.onnx.numbers import dead_scale, weight_codes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amct_fx.nn.quantized import QuantizedLayer
    from amct_fx.onnx.graph import Graph
    from amct_fx.onnx.layers import LayerCall

__all__ = ["pair_weights"]


def pair_weights(graph: Graph, calls: list[LayerCall]) -> None:
    """Let every operator read its weight through a pair, and its bias as floats.

    Args:
        graph: The exported graph; changed.
        calls: The layers in it.

    Raises:
        ExportError: A layer has no form that the tool takes; names it.
    """
    for call in calls:
        _check(call)
    for call in calls:
        layer, node = call.layer, call.node
        node.input[1] = _weight_pair(graph, call)
        if node.op_type == "Gemm":
            set_attributes(node, alpha=1.0, beta=1.0, transB=0)
        bias = layer.dequantized_bias()
        if bias is None:
            continue
        name = f"{call.path_name}.bias"
        value = bias.detach().cpu().numpy().astype(np.float32)
        graph.initializers.setdefault(name, numpy_helper.from_array(value, name))
        if call.bias_add is not None:
            call.bias_add.input[:] = [node.output[0], name]
        else:
            node.input[2] = name
        graph.changed()


def _check(call: LayerCall) -> None:
    layer = call.layer
    problem = None
    if isinstance(layer, nn.RNNBase):
        problem = f"takes no quantized {layer.mode}; list it in quant_skip_layers"
    elif layer.dtype != torch.float32:
        problem = "takes float32 only; export model.float()"
    elif isinstance(layer, nn.Linear) and _common_scale(layer) is None:
        problem = "takes one weight scale for a Linear; prepare without linear_channel_wise"
    elif _is_grouped_transposed(layer) and _common_scale(layer) is None:
        problem = (
            "has no scales per channel for a transposed convolution with groups; write "
            "channel_wise: false for this layer"
        )
    if problem is not None:
        message = f"{call.name}: amct_onnx {problem}, or use format 'ascend'"
        raise ExportError(message)


def _is_grouped_transposed(layer: QuantizedLayer) -> bool:
    return isinstance(layer, (nn.ConvTranspose1d, nn.ConvTranspose2d)) and layer.groups > 1


def _weight_pair(graph: Graph, call: LayerCall) -> str:
    """Add float weight, QuantizeLinear and DequantizeLinear; return the tensor they make."""
    layer, name = call.layer, f"{call.path_name}.weight"
    values = f"{name}.values"
    if graph.producer(values) is not None:  # a second call of the layer
        return values
    codes, scale, axis = weight_codes(layer), _scale(layer), _axis(layer)
    shape = [1] * codes.ndim
    shape[axis] = -1
    weight = codes.astype(np.float32) * scale.reshape(shape if scale.ndim else [])
    graph.add_initializer(name, weight.astype(np.float32))
    parameters = [
        graph.add_initializer(f"{name}.scale", scale),
        graph.add_initializer(f"{name}.zero_point", np.zeros(scale.shape, np.int8)),
    ]
    graph.insert(
        [
            _node("QuantizeLinear", name, [name, *parameters], f"{name}.codes", scale, axis),
            _node("DequantizeLinear", name, [f"{name}.codes", *parameters], values, scale, axis),
        ],
        before=call.node,
    )
    return values


def _node(
    kind: str, name: str, inputs: list[str], output: str, scale: NDArray[np.float32], axis: int
) -> NodeProto:
    label = f"{name}.{'quant' if kind == 'QuantizeLinear' else 'dequant'}"
    channel: dict[str, Any] = {"axis": axis} if scale.ndim else {}
    return helper.make_node(kind, inputs, [output], name=label, **channel)


def _axis(layer: QuantizedLayer) -> int:
    """Return the axis of the output channels in the layout of the operator."""
    return 1 if isinstance(layer, (nn.ConvTranspose1d, nn.ConvTranspose2d)) else 0


def _scale(layer: QuantizedLayer) -> NDArray[np.float32]:
    """Return the scale of a weight, 0-d if one serves the tensor."""
    common = _common_scale(layer)
    if common is not None:
        return np.array(common, np.float32)
    scale: NDArray[np.float32] = layer.weight_scale.detach().cpu().numpy()
    return scale


def _common_scale(layer: QuantizedLayer) -> float | None:
    """Return the scale that all channels with a weight share; rows of zeros fit any."""
    scale = layer.weight_scale.detach()
    if scale.numel() == 1:
        return float(scale)
    dead = dead_scale(layer)
    if dead is not None:
        return float(dead)
    axis = layer._layouts[""].axis
    axes = [i for i in range(layer.weight_codes.dim()) if i != axis]
    living = scale[(layer.weight_codes != 0).sum(axes) > 0]
    unique = torch.unique(living)
    if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) or unique.numel() > 1:
        return None
    return float(unique[0]) if unique.numel() else None
