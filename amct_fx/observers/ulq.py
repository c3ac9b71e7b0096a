"""The fake-quantizer of activations."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amct_fx.errors import CalibrationError, ConfigError
from amct_fx.observers._base import AmctFakeQuantize, Slot, in_recomputation
from amct_fx.observers._checks import check_clips, check_positive_int
from amct_fx.observers._ifmr import BatchCollector, finite_extremes
from amct_fx.observers._recompute import Source, SourceOfLast, is_traced
from amct_fx.observers._ulq import (
    ulq_effective_clips,
    ulq_qparams,
    ulq_scale_offset,
)
from amct_fx.observers._ulq_function import ulq_apply
from amct_fx.observers._ulq_settings import Ahead, Settings

Clips = tuple[Tensor, Tensor]

_WRITTEN = ("clip_max", "clip_min", "clip_max_prev", "clip_min_prev", "scale", "zero_point")


class ULQFakeQuantize(AmctFakeQuantize):
    """Fake-quantizes an activation with learned clips (ULQ), started by IFMR.

    Per tensor and asymmetric. The first ``batch_num`` forwards, in training and evaluation alike,
    calibrate: forwards 1 … N-1 use the extremes of their own batch, forward N searches the range
    over all N batches. From then on the clips are ordinary learned parameters; only training
    forwards write (the clips after the guard, in place), evaluation writes nothing, and nothing is
    read on the host.

    Args:
        num_bits: Width of the integer codes, 2 to 16.
        fixed_min: Force the lower clip to 0; ``None`` (automatic) counts as false here.
        clip_max: Explicit upper clip, > 0; then ``clip_min`` is needed too, and no calibration
            takes place.
        clip_min: Explicit lower clip, < 0.
        batch_num: Number of calibration batches N.
        symmetric: Use offset 0.
        force_fp16: Convert for a device that holds scales in half precision; training is the same.
        layer_name: Name for messages.
        factory_kwargs: ``device`` of the parameters, as torch.ao's layers pass it.

    Attributes:
        clip_max: Learned upper clip, float32 ``(1,)``.
        clip_min: Learned lower clip, float32 ``(1,)``.
        clip_max_prev: Upper clip of the last writing forward, float32 ``(1,)``; for the guard.
        clip_min_prev: Lower clip of the last writing forward.
        scale: Scale of the last writing forward, float32 ``(1,)``.
        zero_point: Offset of the last writing forward, int32 ``(1,)``.
        calibrated: Greater than 0 once the range is known, float32 ``(1,)``.
        kept_channels: uint8 ``[C]``, the channels that :meth:`calibrate_on` named, or ``None``.

    Example:
        >>> fake_quant = ULQFakeQuantize(batch_num=2)
        >>> fake_quant
        ULQFakeQuantize(num_bits=8, fixed_min=auto, calibrating 0/2)
        >>> _ = fake_quant(torch.tensor([0.9923644662, 0.0664103478]))
        >>> scale, zero_point = fake_quant.calculate_qparams()
        >>> print(f"{scale.item():.8g} {zero_point.item()}")
        0.0038916254 -128
        >>> _ = fake_quant(torch.tensor([-0.5, 0.25]))
        >>> fake_quant
        ULQFakeQuantize(num_bits=8, fixed_min=auto, clip_max=1.22061, clip_min=-1.23022, \
scale=0.00961109, zero_point=0, learning)
    """

    clip_max_prev: Tensor
    clip_min_prev: Tensor
    kept_channels: Tensor | None

    def __init__(
        self,
        *,
        num_bits: int = 8,
        fixed_min: bool | None = None,
        clip_max: float | None = None,
        clip_min: float | None = None,
        batch_num: int = 1,
        symmetric: bool = False,
        force_fp16: bool = False,
        layer_name: str = "",
        factory_kwargs: dict[str, Any] | None = None,
    ) -> None:
        scheme = torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine
        super().__init__(num_bits=num_bits, qscheme=scheme, layer_name=layer_name)
        # What makes prepare_qat_fx quantize inputs only; see amct_fx.get_backend_config.
        self.is_dynamic = True
        try:
            clips = check_clips(clip_max, clip_min)
        except ConfigError as error:
            message = f"{self._label()}{error.message}"
            raise ConfigError(message) from None
        self.fixed_min = fixed_min
        self.batch_num = check_positive_int("batch_num", batch_num)
        self.symmetric = symmetric
        self.force_fp16 = force_fp16
        self._calibrated = clips is not None
        self._collector = BatchCollector(num_bits, batch_num)
        self._sources = SourceOfLast()
        self.ahead: Slot[Ahead] = Slot()
        flag = torch.zeros(1, device=(factory_kwargs or {}).get("device"), dtype=torch.float32)
        upper, lower = clips or (1.0, -1.0)
        self.clip_max = torch.nn.Parameter(torch.full_like(flag, upper))
        self.clip_min = torch.nn.Parameter(torch.full_like(flag, lower))
        self.register_buffer("clip_max_prev", torch.full_like(flag, upper))
        self.register_buffer("clip_min_prev", torch.full_like(flag, lower))
        scale, zero_point = ulq_qparams(
            *self._effective_clips(), num_bits=num_bits, symmetric=symmetric
        )
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)
        self.register_buffer("calibrated", flag.fill_(float(self._calibrated)))
        self.register_buffer("kept_channels", None)
        self.channel_axis = 1

    def calibrate_on(self, kept: Tensor, axis: int) -> None:
        """Calibrate on some channels only: those that pruning keeps.

        Args:
            kept: Nonzero for each channel that counts.
            axis: Axis of the channels in the input.

        Example:
            >>> fake_quant = ULQFakeQuantize()
            >>> fake_quant.calibrate_on(torch.tensor([1, 0]), axis=1)
            >>> _ = fake_quant(torch.tensor([[1.0, 100.0], [-1.0, 100.0]]))
            >>> fake_quant.clip_max.item() < 1.1
            True
        """
        kept = (kept != 0).to(device=self.clip_max.device, dtype=torch.uint8)
        self.register_buffer("kept_channels", kept)
        self.channel_axis = axis

    def forward(self, x: Tensor) -> Tensor:
        """Fake-quantize ``x``.

        Args:
            x: Activation, any shape, memory format and floating dtype.

        Returns:
            The fake-quantized activation, or ``x`` itself while fake-quantization is switched off.

        Raises:
            CalibrationError: NaN or infinity in a calibration batch; nothing has changed then.
            ModelTypeError: ``x`` is not a floating point tensor.
        """
        self._check_input(x, "the input of the activation quantizer")
        if not self._calibrated:
            return self._forward_uncalibrated(x)
        if not self._fake_quant_on:
            return x
        ahead = None if is_traced() else self.ahead.value
        if ahead is not None and ahead.versions == self.clip_versions:
            ahead.used = True
            return self._apply_settings(x, ahead.settings)
        return self._quantize(x, self._effective_clips(), write=self.training)

    @property
    def quantizes(self) -> bool:
        """Whether the next forward quantizes with the clips, as far as the host knows."""
        return self._calibrated and self._fake_quant_on

    @property
    def clip_versions(self) -> tuple[int, int]:
        """Version counters of both clips."""
        clips = self._parameters
        return clips["clip_max"]._version, clips["clip_min"]._version  # type: ignore[union-attr]

    @property
    def written(self) -> tuple[Tensor, ...]:
        """The tensors that a forward in training writes: clips, previous clips, qparams."""
        held: dict[str, Any] = self._parameters | self._buffers
        return tuple(held[name] for name in _WRITTEN)

    def source_of(self, y: Tensor) -> Source | None:
        """Return what ``y`` was made from, so that a layer need not keep it for backward.

        Known while gradients are recorded in eager, for the last output of this quantizer.
        """
        return self._sources.of(y)

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return ``(scale, zero_point)`` of the current clips; nothing is written.

        Returns:
            float32 ``(1,)`` and int32 ``(1,)``.
        """
        return ulq_qparams(
            *self._effective_clips(), num_bits=self.num_bits, symmetric=self.symmetric
        )

    @torch.no_grad()
    def set_clips(self, clip_max: Tensor | float, clip_min: Tensor | float) -> None:
        """Set the range and end the calibration, for example with the range of all ranks.

        Args:
            clip_max: Upper clip, one value.
            clip_min: Lower clip, one value.

        Example:
            >>> fake_quant = ULQFakeQuantize()
            >>> fake_quant.set_clips(6.0, -2.0)
            >>> fake_quant.is_calibrated, fake_quant.clip_min.item()
            (True, -2.0)
        """
        upper = torch.as_tensor(clip_max).to(self.clip_max).reshape(1)
        lower = torch.as_tensor(clip_min).to(self.clip_min).reshape(1)
        clips = ulq_effective_clips(upper, lower, fixed_min=bool(self.fixed_min))
        qparams = ulq_scale_offset(*clips, self.num_bits, self.symmetric)
        self._write(Settings(clips, qparams, self.num_bits))
        self._collector.batches.clear()
        self.calibrated.fill_(1.0)
        self._calibrated = True

    def extra_repr(self) -> str:
        """Return bits, clips, scale, zero point and state."""
        fixed_min = "auto" if self.fixed_min is None else self.fixed_min
        parts = [f"num_bits={self.num_bits}", f"fixed_min={fixed_min}"]
        if self.symmetric:
            parts.append("symmetric=True")
        if not self.is_calibrated:
            parts.append(f"calibrating {self._batches_seen}/{self.batch_num}")
        elif self.clip_max.is_meta:
            parts.append("meta")
        else:
            (upper, lower), (scale, zero) = self._effective_clips(), self.calculate_qparams()
            parts += [
                f"clip_max={upper.item():.6g}",
                f"clip_min={lower.item():.6g}",
                f"scale={scale.item():.6g}",
                f"zero_point={int(zero.item())}",
                "learning" if self.clip_max.requires_grad else "frozen",
            ]
        return ", ".join(parts) + self._switches_repr()

    def _effective_clips(self) -> Clips:
        """Return the current clips after ``fixed_min`` and the guard, fresh float32 tensors."""
        return ulq_effective_clips(
            self.clip_max,
            self.clip_min,
            fixed_min=bool(self.fixed_min),
            previous=(self.clip_max_prev, self.clip_min_prev),
        )

    def _quantize(self, x: Tensor, effective: Clips, *, write: bool) -> Tensor:
        """Fake-quantize with effective clips; ``write`` keeps them and their scale."""
        with torch.no_grad():
            qparams = ulq_scale_offset(*effective, self.num_bits, self.symmetric)
        settings = Settings(effective, qparams, self.num_bits)
        y = self._apply_settings(x, settings)
        if write:
            self._write(settings)
        return y

    def _apply_settings(self, x: Tensor, settings: Settings) -> Tensor:
        y, source = ulq_apply(x, (self.clip_max, self.clip_min), settings)
        if source is not None:
            self._sources.remember(y, source)
        return y

    @torch.no_grad()
    def _write(self, settings: Settings) -> None:
        """Store clips, scale and offset in place."""
        if torch.compiler.is_compiling():  # the compiler of 2.13 gets _foreach_copy_ wrong here
            for target, value in zip(self.written, settings.written, strict=True):
                target.copy_(value)
        else:
            torch._foreach_copy_(self.written, settings.written)

    def _start(self, x: Tensor) -> Tensor:
        """Run one forward while the range is not known yet."""
        if self._notice_calibration():
            return self.forward(x)
        if not self._observer_on or x.numel() == 0:
            return x
        seen = self._kept_part(x)
        try:
            clips = finite_extremes(seen)
        except CalibrationError as error:
            message = f"{self._label()}{error}"
            raise CalibrationError(message) from None
        recomputed = in_recomputation()
        if not recomputed:
            found = self._collector.add(seen)
            self._batches_seen += 1
            if found is not None:
                clips = found.clip_max, found.clip_min
                self.calibrated.fill_(1.0)
                self._calibrated = True
        effective = ulq_effective_clips(*clips, fixed_min=bool(self.fixed_min))
        if self._fake_quant_on:
            return self._quantize(x, effective, write=not recomputed)
        if not recomputed:
            qparams = ulq_scale_offset(*effective, self.num_bits, self.symmetric)
            self._write(Settings(effective, qparams, self.num_bits))
        return x

    def _kept_part(self, x: Tensor) -> Tensor:
        """Return the channels that count."""
        if self.kept_channels is None:
            return x
        return x.index_select(self.channel_axis, self.kept_channels.nonzero().flatten())

    def _after_load(self) -> None:
        """Drop batches collected before the load."""
        super()._after_load()
        self._collector.batches.clear()
