"""LSTM and GRU as one ONNX node each: exporting them whole, and their form for ATC.

Source: spec/deploy.md section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from onnx import AttributeProto, NodeProto, helper
from torch import Tensor, nn

from amct_fx.nn.become import become
from amct_fx.nn.quantized import GRU, LSTM
from amct_fx.nn.recurrent import HiddenState, check_input
from amct_fx.onnx.graph import Graph, attribute
from amct_fx.onnx.numbers import (
    activation_range,
    bias_codes,
    dequant_scale,
    scale_bits,
    weight_codes,
)

if TYPE_CHECKING:
    from amct_fx.onnx.layers import LayerCall

__all__ = ["keep_recurrent_layers_whole", "recurrent_node"]

_QUANT_DTYPE = {8: 2, 16: 6}
_PARTS = ("ih_", "hh_")


class _Whole:
    """Runs all steps in one operator, which exporters write as one node.

    The hidden state is quantized only inside the operator of the device; here it stays float.
    """

    def forward(
        self, input: Tensor, hx: HiddenState = None, *, quantized: bool = False
    ) -> tuple[Tensor, Any]:
        """Run torch's kernel on the dequantized input and weights."""
        layer: Any = self
        check_input(layer, input)
        x = layer.quantized_input(input, quantized)
        batched = x.dim() == 3
        if not batched:
            x = x.unsqueeze(0 if layer.batch_first else 1)
        state = _initial_state(layer, x, hx, batched)
        weights = [layer.weight_ih_l0, layer.weight_hh_l0]
        if layer.bias:
            weights += [layer.bias_ih_l0, layer.bias_hh_l0]
        run: Any = torch.lstm if layer.mode == "LSTM" else torch.gru
        first = state if layer.mode == "LSTM" else state[0]
        output, *last = run(x, first, weights, layer.bias, 1, 0.0, False, False, layer.batch_first)
        if not batched:
            output = output.squeeze(0 if layer.batch_first else 1)
            last = [part.squeeze(1) for part in last]
        return output, tuple(last) if layer.mode == "LSTM" else last[0]


class _WholeLSTM(_Whole, LSTM):  # type: ignore[misc]
    pass


class _WholeGRU(_Whole, GRU):  # type: ignore[misc]
    pass


def keep_recurrent_layers_whole(model: nn.Module) -> None:
    """Let the converted LSTM and GRU of our own copy of a model run as one operator each."""
    for module in model.modules():
        if isinstance(module, LSTM):
            become(module, _WholeLSTM)
        elif isinstance(module, GRU):
            become(module, _WholeGRU)


def _initial_state(
    layer: nn.RNNBase, x: Tensor, hx: HiddenState, batched: bool
) -> tuple[Tensor, ...]:
    if hx is None:
        size = x.shape[0] if layer.batch_first else x.shape[1]
        zeros = x.new_zeros(1, size, layer.hidden_size)
        return (zeros, zeros)[: 2 if layer.mode == "LSTM" else 1]
    parts = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    return tuple(part if batched else part.unsqueeze(1) for part in parts)


def recurrent_node(graph: Graph, call: LayerCall, source: str) -> NodeProto:
    """Return the node that ATC reads for one LSTM or GRU.

    Args:
        graph: Gets the integer weights, biases and scales.
        call: The LSTM or GRU node that an exporter wrote.
        source: The float tensor that the operator quantizes itself.
    """
    layer: Any = call.layer
    is_lstm = layer.mode == "LSTM"
    given = list(call.node.input) + [""] * 7
    _bias, lengths, hidden, cell = given[3:7]
    names = [_weight(graph, call, part) for part in _PARTS]
    state = [hidden, cell] if is_lstm else [hidden]
    inputs = [source, *names, *state, _biases(graph, call), lengths, "", _params(graph, call)]
    x, h = (activation_range(q) for q in (layer.input_quantizer, layer.hidden_quantize))
    node = helper.make_node(
        f"Basic{layer.mode}InplaceFillWindowCache",
        inputs,
        list(call.node.output),
        name=call.name,
        hidden_size=layer.hidden_size,
        direction="forward",
        clip=-1.0,
        quant_scale_x=float(x.reciprocal),
        quant_scale_h=float(h.reciprocal),
        quant_offset_x=float(x.offset),
        quant_offset_h=float(h.offset),
        quant_dtype=_QUANT_DTYPE[x.bits],
        quant_sqrt_mode_x=0,
        quant_sqrt_mode_h=0,
    )
    for empty in ("activation_alpha", "activation_beta", "activations"):
        kind = "s" if empty == "activations" else "f"
        node.attribute.append(_empty_list(empty, kind))
    own = (
        ("input_forget", 0)
        if is_lstm
        else ("linear_before_reset", int(attribute(call.node, "linear_before_reset", 0)))
    )
    node.attribute.append(helper.make_attribute(*own))
    return node


def _empty_list(name: str, kind: str) -> Any:
    types = {"s": AttributeProto.STRINGS, "f": AttributeProto.FLOATS}
    return helper.make_attribute(name, [], attr_type=types[kind])


def _weight(graph: Graph, call: LayerCall, part: str) -> str:
    codes = weight_codes(call.layer, part)
    letter = "weight" if part == "ih_" else "recurrence"
    return graph.add_initializer(f"{call.path_name}.sub_module.{letter}", codes)


def _biases(graph: Graph, call: LayerCall) -> str:
    """Add the int32 biases ``[1, 2*G*H]``, of the input first, and return their name."""
    found = [bias_codes(call.layer, part) for part in _PARTS]
    parts = [bias for bias in found if bias is not None]
    if not parts:
        return ""
    return graph.add_initializer(f"{call.path_name}.sub_module.bias", np.concatenate(parts)[None])


def _params(graph: Graph, call: LayerCall) -> str:
    layer: Any = call.layer
    scales = [
        dequant_scale(layer, quantize, part)
        for part, quantize in zip(
            _PARTS, (layer.input_quantizer, layer.hidden_quantize), strict=True
        )
    ]
    params = scale_bits(np.concatenate(scales))
    return graph.add_initializer(f"{call.path_name}.dequant.param", params)
