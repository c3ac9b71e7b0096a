"""The fake-quantizer of weights with a learned scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amct_fx.errors import CalibrationError, ConfigError, ModelStateError
from amct_fx.observers._arq import (
    arq_qparams,
    weight_ulq_apply,
    weight_ulq_scale,
)
from amct_fx.observers._base import AmctFakeQuantize
from amct_fx.observers._checks import check_positive_int
from amct_fx.observers._geometry import count_rows
from amct_fx.observers._scale import EPS
from amct_fx.observers.arq import check_rows


class ULQWeightFakeQuantize(AmctFakeQuantize):
    """Fake-quantizes a weight with a learned scale (weight-ULQ), started by ARQ.

    The scale is a parameter from construction. It takes the ARQ scale of the weight in
    :meth:`initialize` or in the first forward. The effective scale is always positive and finite:
    where an optimizer step left less than 1.19e-7 (or NaN, infinity), the ARQ scale of the current
    weight is used, and a training forward writes it back into the parameter. The gradient goes to
    the parameter in any case.

    Args:
        num_bits: Width of the integer codes, 2 to 16.
        ch_axis: ``None`` for one scale, 0 for one per output channel, 1 for one per output
            channel of a transposed convolution.
        groups: Groups of the transposed convolution.
        num_channels: Number of scales, needed when ``ch_axis`` is given. 1 means one scale for
            the whole tensor; ``ch_axis`` then only says how many elements an output channel has,
            which the gradient depends on.
        layer_name: Name for messages.
        factory_kwargs: ``device`` of the parameter, as torch.ao's layers pass it.

    Attributes:
        scale: Learned scale, float32 ``(num_channels,)`` or ``(1,)``.
        zero_point: int32 zeros of the same shape. Not in the state dict.
        calibrated: Greater than 0 once the scale has been initialised, float32 ``(1,)``.
        kept_share: Share of the input channels that pruning keeps; the gradient of the scale counts
            only their elements in a row.

    Example:
        >>> fake_quant = ULQWeightFakeQuantize(ch_axis=0, num_channels=2)
        >>> weight = torch.tensor([[0.5, -1.0, 0.25, 0.1], [1.0, -1.0, 0.3, 0.7]])
        >>> fake_quant.initialize(weight)
        >>> fake_quant.scale
        Parameter containing:
        tensor([0.0078, 0.0079], requires_grad=True)
        >>> fake_quant(weight).sum().backward()
        >>> fake_quant.scale.grad.shape
        torch.Size([2])
    """

    scale: torch.nn.Parameter

    def __init__(
        self,
        *,
        num_bits: int = 8,
        ch_axis: int | None = None,
        groups: int = 1,
        num_channels: int | None = None,
        layer_name: str = "",
        factory_kwargs: dict[str, Any] | None = None,
    ) -> None:
        per_channel = ch_axis is not None and num_channels != 1
        scheme = torch.per_channel_symmetric if per_channel else torch.per_tensor_symmetric
        super().__init__(num_bits=num_bits, qscheme=scheme, layer_name=layer_name)
        if ch_axis is not None and num_channels is None:
            message = (
                f"{self._label()}a learned scale per channel needs num_channels, because the "
                "parameter must exist before the optimizer is made"
            )
            raise ConfigError(message)
        self.ch_axis = ch_axis
        self.groups = check_positive_int("groups", groups)
        self.num_channels = 1
        if ch_axis is not None and num_channels is not None:
            self.num_channels = check_positive_int("num_channels", num_channels)
        self._calibrated = False
        self.kept_share = 1.0
        device = (factory_kwargs or {}).get("device")
        scale = torch.ones(self.num_channels, device=device, dtype=torch.float32)
        self.scale = torch.nn.Parameter(scale)
        self.register_buffer(
            "zero_point", torch.zeros_like(scale, dtype=torch.int32), persistent=False
        )
        self.register_buffer("calibrated", torch.zeros(1, device=device, dtype=torch.float32))

    def initialize(self, weight: Tensor) -> None:
        """Set the scale to the ARQ scale of ``weight``, in place.

        Raises:
            CalibrationError: The weight holds NaN or infinity; nothing has changed then.
            ModelError: The weight does not have ``num_channels`` output channels.
        """
        axis = self.ch_axis if self.num_channels > 1 else None
        scale = arq_qparams(weight, num_bits=self.num_bits, ch_axis=axis, groups=self.groups)
        check_rows(scale, self.num_channels, weight, self._label())
        if not bool(torch.isfinite(scale).all()):
            message = f"{self._label()}the weight holds NaN or infinity"
            raise CalibrationError(message)
        with torch.no_grad():
            self.scale.copy_(scale)
            self.calibrated.fill_(1.0)
        self._calibrated = True

    def forward(self, x: Tensor) -> Tensor:
        """Fake-quantize the weight ``x``.

        Args:
            x: Weight in the layout of its layer, any floating dtype.

        Returns:
            The fake-quantized weight, or ``x`` itself while fake-quantization is switched off.
        """
        self._check_input(x, "the weight")
        if not self._calibrated:
            return self._forward_uncalibrated(x)
        if not self._fake_quant_on:
            return x
        effective = self._effective_scale(x)
        scale = self.scale
        if self.kept_share != 1.0:
            scale = scale * self.kept_share**-0.5  # for its gradient; the value is not used
        y = weight_ulq_apply(x, scale, effective, self.num_bits, self.ch_axis, self.groups)
        if self.training:
            with torch.no_grad():
                self.scale.copy_(effective)
        return y

    def calculate_qparams(  # type: ignore[override]
        self, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ``(scale, zero_point)`` as the next forward would use them.

        Args:
            weight: The weight. Without it the learned scale must be valid as it is.

        Returns:
            float32 and int32 zeros, shape ``(num_channels,)``.

        Raises:
            ModelStateError: No weight was given, and the scale was never initialised or an
                optimizer step has just left the valid range.
        """
        if weight is not None:
            if not self.is_calibrated:
                axis = self.ch_axis if self.num_channels > 1 else None
                scale = arq_qparams(
                    weight, num_bits=self.num_bits, ch_axis=axis, groups=self.groups
                )
            else:
                scale = self._effective_scale(weight)
            return scale, self.zero_point.clone()
        scale = self.scale.detach().to(torch.float32, copy=True)
        valid = torch.isfinite(scale) & (scale >= EPS)
        if not self.is_calibrated or not bool(valid.all()):
            message = f"{self._label()}no valid scale is known: call calculate_qparams(weight)"
            raise ModelStateError(message)
        return scale, self.zero_point.clone()

    def extra_repr(self) -> str:
        """Return bits, geometry and state."""
        parts = [f"num_bits={self.num_bits}"]
        if self.ch_axis is not None:
            parts.append(f"ch_axis={self.ch_axis}")
            if self.groups != 1:
                parts.append(f"groups={self.groups}")
            parts.append(f"num_channels={self.num_channels}")
        if not self.is_calibrated:
            parts.append("not initialised")
        else:
            parts.append("learning" if self.scale.requires_grad else "frozen")
        return ", ".join(parts) + self._switches_repr()

    def _start(self, x: Tensor) -> Tensor:
        """Take the ARQ scale of the weight in the first forward."""
        if not self._notice_calibration():
            if not self._observer_on:
                return x
            self.initialize(x)
        return self.forward(x)

    def _effective_scale(self, weight: Tensor) -> Tensor:
        """Return the positive, finite scale of this forward, a fresh float32 tensor."""
        if self.num_channels > 1:
            rows = count_rows(weight, self.ch_axis, self.groups)
            if rows != self.num_channels:
                check_rows(weight.new_empty(rows), self.num_channels, weight, self._label())
        return weight_ulq_scale(
            weight,
            self.scale,
            num_bits=self.num_bits,
            ch_axis=self.ch_axis,
            groups=self.groups,
        )
