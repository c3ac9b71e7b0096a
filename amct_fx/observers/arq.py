"""The default fake-quantizer of weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from amct_fx.errors import ModelError, ModelStateError
from amct_fx.observers._arq import arq_apply, arq_qparams, quantize_weight, straight_through
from amct_fx.observers._base import AmctFakeQuantize, Slot
from amct_fx.observers._checks import check_positive_int
from amct_fx.observers._recompute import is_traced
from amct_fx.observers._weight_cache import WeightCache


@dataclass
class WeightAhead:
    """Values of a weight that were computed before the forward that they are for.

    Attributes:
        weight: The weight.
        version: Its version counter then.
        scale: Its scale.
        values: Its fake-quantized values.
        used: Whether the quantizer handed them out.
    """

    weight: Tensor
    version: int
    scale: Tensor
    values: Tensor
    used: bool = False


def check_rows(scale: Tensor, num_channels: int, weight: Tensor, label: str) -> None:
    """Raise :class:`ModelError` unless there is one scale for each of ``num_channels``."""
    if scale.numel() != num_channels:
        message = (
            f"{label}the weight of shape {tuple(weight.shape)} has {scale.numel()} output "
            f"channels, the quantizer was made for num_channels={num_channels}"
        )
        raise ModelError(message)


class ARQFakeQuantize(AmctFakeQuantize):
    """Fake-quantizes a weight with a scale recomputed from it in every forward (ARQ).

    Symmetric, codes over the full range. There is nothing to learn, nothing to calibrate, and no
    state that training would have to keep. The gradient of the weight is the identity. While the
    weight does not change, as in evaluation and gradient accumulation, the last result is used.

    Args:
        num_bits: Width of the integer codes, 2 to 16.
        ch_axis: ``None`` for one scale, 0 for one per output channel, 1 for one per output
            channel of a transposed convolution.
        groups: Groups of the transposed convolution.
        num_channels: Number of output channels when ``ch_axis`` is given; lets the module keep
            the last scale, so that ``calculate_qparams()`` works without the weight.
        layer_name: Name for messages.
        factory_kwargs: ``device`` of the buffers, as torch.ao's layers pass it.

    Attributes:
        scale: Scale of the last training forward, float32 ``(num_channels,)`` or ``(1,)``; 0
            before. Not in the state dict.
        zero_point: int32 zeros of the same shape.

    Example:
        >>> fake_quant = ARQFakeQuantize(ch_axis=0, num_channels=2)
        >>> fake_quant
        ARQFakeQuantize(num_bits=8, ch_axis=0, num_channels=2)
        >>> weight = torch.tensor([[0.5, -1.0, 0.25, 0.1], [1.0, -1.0, 0.3, 0.7]])
        >>> fake_quant(weight)[0]
        tensor([ 0.5000, -1.0000,  0.2500,  0.1016])
        >>> [f"{s:.9g}" for s in fake_quant.calculate_qparams()[0].tolist()]
        ['0.0078125', '0.00787401572']
        >>> list(fake_quant.parameters())
        []
    """

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
        scheme = torch.per_tensor_symmetric if ch_axis is None else torch.per_channel_symmetric
        super().__init__(num_bits=num_bits, qscheme=scheme, layer_name=layer_name)
        self.ch_axis = ch_axis
        self.groups = check_positive_int("groups", groups)
        if ch_axis is None:
            num_channels = 1
        elif num_channels is not None:
            check_positive_int("num_channels", num_channels)
        self.num_channels = num_channels
        self._cache = WeightCache()
        self.ahead: Slot[WeightAhead] = Slot()
        device = (factory_kwargs or {}).get("device")
        if num_channels is None:
            self.register_buffer("scale", None)
            self.register_buffer("zero_point", None)
        else:
            scale = torch.zeros(num_channels, device=device, dtype=torch.float32)
            zero_point = torch.zeros(num_channels, device=device, dtype=torch.int32)
            self.register_buffer("scale", scale, persistent=False)
            self.register_buffer("zero_point", zero_point, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Fake-quantize the weight ``x``.

        Args:
            x: Weight in the layout of its layer, any floating dtype.

        Returns:
            The fake-quantized weight, or ``x`` itself while fake-quantization is switched off.
        """
        self._check_input(x, "the weight")
        if not self._fake_quant_on:
            return x
        if not is_traced():
            return straight_through(x, self.values(x))
        scale = self._scale_of(x)
        self._keep(scale)
        return arq_apply(x, scale, self.num_bits, self.ch_axis, self.groups)

    @property
    def is_plain(self) -> bool:
        """Whether a call does nothing but fake-quantize."""
        return self._fake_quant_on and not (self._forward_hooks or self._forward_pre_hooks)

    @torch.no_grad()
    def values(self, x: Tensor) -> Tensor:
        """Return the fake-quantized values of ``x`` without a graph, in eager.

        For layers whose backward passes the gradient of the values to ``x`` themselves.
        """
        ahead = self.ahead.value
        if ahead is not None and ahead.weight is x and ahead.version == x._version:
            ahead.used = True
            return ahead.values
        scale, values = self.known(x) or self.quantized(x, self._scale_of(x))
        self._keep(scale)
        return values

    def known(self, weight: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return scale and values of a weight that did not change, if they were kept."""
        return self._cache.find(weight, (self.num_bits, self.ch_axis, self.groups))

    def quantized(self, weight: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
        """Return ``scale`` and the values of a weight that it makes."""
        settings = (self.num_bits, self.ch_axis, self.groups)
        values = quantize_weight(weight, scale, *settings)
        self._cache.note(weight, settings, scale, values)
        return scale, values

    def _keep(self, scale: Tensor) -> None:
        """Remember the scale of a training forward."""
        if self.training and self.num_channels is not None:
            with torch.no_grad():
                self.scale.copy_(scale)

    def calculate_qparams(  # type: ignore[override]
        self, weight: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return ``(scale, zero_point)``.

        Args:
            weight: The weight; without it the scale of the last training forward is returned.

        Returns:
            float32 and int32 zeros, shape ``(Cout,)`` or ``(1,)``.

        Raises:
            ModelStateError: No weight was given and no scale is kept.
        """
        if weight is not None:
            scale = self._scale_of(weight)
            return scale, torch.zeros_like(scale, dtype=torch.int32)
        if self.num_channels is None or not bool((self.scale > 0).all()):
            message = (
                f"{self._label()}no scale is known yet: call calculate_qparams(weight), or give "
                "num_channels and run a training forward first"
            )
            raise ModelStateError(message)
        return self.scale.clone(), self.zero_point.clone()

    def extra_repr(self) -> str:
        """Return bits and geometry."""
        parts = [f"num_bits={self.num_bits}"]
        if self.ch_axis is not None:
            parts.append(f"ch_axis={self.ch_axis}")
            if self.groups != 1:
                parts.append(f"groups={self.groups}")
            if self.num_channels is not None:
                parts.append(f"num_channels={self.num_channels}")
        return ", ".join(parts) + self._switches_repr()

    def trust_weights(self, trusted: bool = True) -> None:
        """Take the caller's word that the weight does not change; see ``weights_unchanged``."""
        self._cache.clear()
        self._cache.trusted = trusted

    def _scale_of(self, weight: Tensor) -> Tensor:
        """Return the ARQ scale, checked against ``num_channels``."""
        scale = arq_qparams(
            weight, num_bits=self.num_bits, ch_axis=self.ch_axis, groups=self.groups
        )
        self.check_scale(scale, weight)
        return scale

    def check_scale(self, scale: Tensor, weight: Tensor) -> None:
        """Raise :class:`ModelError` unless ``weight`` has as many channels as was promised."""
        if self.num_channels is not None:
            check_rows(scale, self.num_channels, weight, self._label())
