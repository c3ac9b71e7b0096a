"""Quantization-aware LSTM and GRU: one layer, forward direction.

The input is quantized as a whole, the hidden state before every step, by separate quantizers with
the same settings; both weights are fake-quantized once in each forward. Cell state, biases and gate
arithmetic stay float. Source: spec/quantization.md section 3.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amct_fx._compat import forget_autocast_copies, is_exporting
from amct_fx.errors import ModelError
from amct_fx.nn.qat_layer import QATLayer
from amct_fx.nn.quantized import Quantize
from amct_fx.nn.recurrent import (
    Gates,
    HiddenState,
    check_input,
    run_recurrent,
    unsupported_form,
)
from amct_fx.observers import ULQFakeQuantize
from amct_fx.observers.functional import ulq_fake_quantize

if TYPE_CHECKING:
    from torch.ao.quantization import FakeQuantizeBase, QConfig
    from typing_extensions import Self

    from amct_fx.nn.integer import BatchNormAffine
    from amct_fx.nn.quantized import QuantizedLayer

__all__ = ["GRU", "LSTM", "RecurrentLayer"]


class RecurrentLayer(QATLayer):
    """What the quantization-aware LSTM and GRU share.

    Attributes:
        hidden_fake_quant: Fake-quantizer of the hidden state. The range search sees the states
            h0 … h_{T-1} of the float layer, once in each forward of the layer.
        weight_ih_fake_quant: Fake-quantizer of ``weight_ih_l0``, ``[4H, I]`` (GRU ``[3H, I]``).
        weight_hh_fake_quant: Fake-quantizer of ``weight_hh_l0``, ``[4H, H]`` (GRU ``[3H, H]``).
    """

    weight_names = ("weight_ih_l0", "weight_hh_l0")
    reads_float_input = True
    hidden_fake_quant: FakeQuantizeBase

    @classmethod
    def from_float(cls, module: nn.Module, qconfig: QConfig | None = None) -> Self:
        """Return a quantization-aware layer that shares the parameters of ``module``.

        Args:
            module: A layer of exactly the class ``float_class``; it is not changed.
            qconfig: Constructors of the fake-quantizers; default ``module.qconfig``.

        Raises:
            ModelError: If ``module`` has several layers or directions, dropout or a projection.
            TypeError: If ``module`` is of another class, or no ``qconfig`` is known.

        Example:
            >>> from torch.ao.quantization import QConfig
            >>> from amct_fx.observers import ARQFakeQuantize, ULQFakeQuantize
            >>> qconfig = QConfig(ULQFakeQuantize.with_args(), ARQFakeQuantize.with_args(ch_axis=0))
            >>> layer = LSTM.from_float(nn.LSTM(4, 8, batch_first=True), qconfig)
            >>> output, (h, c) = layer(torch.randn(2, 5, 4))
            >>> output.shape, h.shape
            (torch.Size([2, 5, 8]), torch.Size([1, 2, 8]))
        """
        reason = unsupported_form(module) if isinstance(module, nn.RNNBase) else None
        if reason is not None:
            message = f"{cls.__name__}.from_float: {reason}"
            raise ModelError(message)
        return super().from_float(module, qconfig)

    def attach(self, qconfig: QConfig) -> None:
        """Create the fake-quantizers of weights and hidden state."""
        super().attach(qconfig)
        self.attach_hidden(qconfig.activation)
        layer: Any = self
        layer._flat_weights = list(layer._flat_weights)  # torch's list of the parameters, unshared

    def attach_hidden(self, constructor: Callable[..., Any], name: str = "") -> None:
        """Create the fake-quantizer of the hidden state; arguments as for the input's."""
        self.hidden_fake_quant = self.make_activation_fake_quant(constructor, name)

    def forward(
        self,
        input: Tensor,
        hx: HiddenState = None,
        *,
        quantized: bool = False,
        float_input: Tensor | None = None,
    ) -> tuple[Tensor, Any]:
        """Run all steps.

        Args:
            input: ``[T, B, I]``, ``[B, T, I]`` with ``batch_first``, or ``[T, I]``.
            hx: Initial state, ``h0`` or ``(h0, c0)``, each ``[1, B, H]`` (``[1, H]``).
            quantized: Whether ``input`` has passed the quantizer already.
            float_input: ``input`` before its quantizer, where that stands in front of the layer;
                read while the range of the hidden state is not known.

        Returns:
            The output, like ``input`` with H features, and the last state in the form of ``hx``.
        """
        layer: Any = self
        check_input(layer, input, getattr(self.hidden_fake_quant, "layer_name", ""))
        quantize_hidden = self._hidden_quantizer(input if float_input is None else float_input, hx)
        gates = self._gates(self.quantized_weight(name) for name in self.weight_names)
        input = self.quantized_input(input, quantized)
        return run_recurrent(layer, input, hx, gates, quantize_hidden)

    def convert(
        self, input_quantize: Quantize, batch_norm: BatchNormAffine | None = None, name: str = ""
    ) -> QuantizedLayer:
        """Become the converted layer, staying the same object; see :meth:`QATLayer.convert`."""
        assert batch_norm is None, "only convolutions absorb a batch norm"
        hidden_quantize = Quantize.from_fake_quant(self.hidden_fake_quant, name)
        del self.hidden_fake_quant
        names = ("weight_ih_l0", "bias_ih_l0"), ("weight_hh_l0", "bias_hh_l0")
        converted: Any = self.become_quantized(
            {
                "ih_": self.integer_weight(input_quantize, names[0], name=name),
                "hh_": self.integer_weight(hidden_quantize, names[1], name=name),
            }
        )
        converted.own_hidden_quantizer(hidden_quantize)
        result: QuantizedLayer = converted
        return result

    def _hidden_quantizer(self, input: Tensor, hx: HiddenState) -> Callable[[Tensor], Tensor]:
        """Return what quantizes the hidden state in this forward, calibrated if need be."""
        fake_quant = self.hidden_fake_quant
        if not isinstance(fake_quant, ULQFakeQuantize) or fake_quant.is_calibrated:
            return fake_quant
        calibrate = self._calibrate
        if torch.compiler.is_compiling() and not is_exporting():
            calibrate = torch.compiler.disable(calibrate)
        calibrate(input, hx)
        return functools.partial(_quantize_after_calibrating, fake_quant)

    @torch.no_grad()
    def _calibrate(self, input: Tensor, hx: HiddenState) -> None:
        """Show the quantizer the states h0 … h_{T-1} of the float layer, as one batch."""
        layer: Any = self
        states: list[Tensor] = []

        def keep(h: Tensor) -> Tensor:
            states.append(h)
            return h

        gates = self._gates(getattr(layer, name) for name in self.weight_names)
        run_recurrent(layer, input, hx, gates, keep)
        self.hidden_fake_quant(torch.stack(states))
        forget_autocast_copies()

    def _gates(self, weights: Iterable[Tensor]) -> Gates:
        biases = (getattr(self, name, None) for name in ("bias_ih_l0", "bias_hh_l0"))
        return Gates(*weights, *biases)


def _quantize_after_calibrating(fake_quant: ULQFakeQuantize, h: Tensor) -> Tensor:
    """Quantize ``h`` in a forward that has shown its calibration batch: ``h`` is no more data."""
    if fake_quant.is_calibrated:
        quantized: Tensor = fake_quant(h)
        return quantized
    if not (bool(fake_quant.fake_quant_enabled) and bool(fake_quant.observer_enabled)):
        return h
    return ulq_fake_quantize(
        h,
        fake_quant.clip_max,
        fake_quant.clip_min,
        num_bits=fake_quant.num_bits,
        fixed_min=bool(fake_quant.fixed_min),
        previous=(fake_quant.clip_max_prev, fake_quant.clip_min_prev),
        symmetric=fake_quant.symmetric,
    )


class LSTM(RecurrentLayer, nn.LSTM):  # type: ignore[misc]  # takes no PackedSequence
    """Quantization-aware ``torch.nn.LSTM``: one layer, forward direction."""

    float_class = nn.LSTM


class GRU(RecurrentLayer, nn.GRU):  # type: ignore[misc]  # takes no PackedSequence
    """Quantization-aware ``torch.nn.GRU``: one layer, forward direction."""

    float_class = nn.GRU
