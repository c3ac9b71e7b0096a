"""Converted LSTM and GRU: int8 weight codes, int32 bias codes, the hidden state quantized.

Source: spec/quantization.md sections 3 and 5.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from amct_fx.nn.quantized_layer import Dequantize, IntegerWeight, Quantize, QuantizedLayer
from amct_fx.nn.recurrent import Gates, HiddenState, check_input, run_recurrent

__all__ = ["GRU", "LSTM"]


class _RecurrentLayer(QuantizedLayer):
    """What the converted LSTM and GRU share; weights and biases are dequantized on reading.

    Attributes:
        weight_ih_codes: int8 ``[4H, I]`` (GRU ``[3H, I]``).
        weight_hh_codes: int8 ``[4H, H]`` (GRU ``[3H, H]``).
        bias_ih_codes: int32 ``[4H]``, step: scale of the input times ``weight_ih_scale``.
        bias_hh_codes: int32 ``[4H]``, step: scale of the hidden state times ``weight_hh_scale``.
        hidden_quantize: Quantizer of the hidden state, called before every step.
    """

    parts = ("ih_", "hh_")
    float_parameters = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
    hidden_quantize: Quantize
    hidden_dequantize: Dequantize

    weight_ih_l0 = property(lambda self: self.dequantized_weight("ih_"))
    weight_hh_l0 = property(lambda self: self.dequantized_weight("hh_"))
    bias_ih_l0 = property(lambda self: self.dequantized_bias("ih_"))
    bias_hh_l0 = property(lambda self: self.dequantized_bias("hh_"))

    def adopt(self, integers: Mapping[str, IntegerWeight], dtype: torch.dtype) -> None:
        """Replace the float parameters, of which torch keeps a second list, by buffers."""
        layer: Any = self
        layer._flat_weights_names, layer._flat_weights, layer._flat_weight_refs = [], [], []
        super().adopt(integers, dtype)

    def own_hidden_quantizer(self, quantize: Quantize) -> None:
        """Quantize the hidden state with ``quantize`` before every step."""
        self.hidden_quantize = quantize
        self.hidden_dequantize = Dequantize(quantize, self.dtype)

    def flatten_parameters(self) -> None:
        """Do nothing: there are no float parameters for cuDNN."""

    def forward(
        self, input: Tensor, hx: HiddenState = None, *, quantized: bool = False
    ) -> tuple[Tensor, Any]:
        """Run all steps on dequantized tensors.

        Args:
            input: ``[T, B, I]``, ``[B, T, I]`` with ``batch_first``, or ``[T, I]``.
            hx: Initial state, ``h0`` or ``(h0, c0)``, each ``[1, B, H]`` (``[1, H]``).
            quantized: Whether ``input`` has passed the quantizer already.

        Returns:
            The output, like ``input`` with H features, and the last state in the form of ``hx``.
        """
        layer: Any = self
        check_input(layer, input)
        gates = Gates(self.weight_ih_l0, self.weight_hh_l0, self.bias_ih_l0, self.bias_hh_l0)
        input = self.quantized_input(input, quantized)
        return run_recurrent(layer, input, hx, gates, self._quantized_hidden)

    def _quantized_hidden(self, h: Tensor) -> Tensor:
        quantized: Tensor = self.hidden_dequantize(self.hidden_quantize(h))
        return quantized


class LSTM(_RecurrentLayer, nn.LSTM):  # type: ignore[misc]  # takes no PackedSequence
    """Converted ``torch.nn.LSTM``: one layer, forward direction."""

    float_class = nn.LSTM


class GRU(_RecurrentLayer, nn.GRU):  # type: ignore[misc]  # takes no PackedSequence
    """Converted ``torch.nn.GRU``: one layer, forward direction."""

    float_class = nn.GRU
