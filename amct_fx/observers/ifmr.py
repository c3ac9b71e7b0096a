"""Observers: they look at data and tell a range; they never change what passes through."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.ao.quantization import ObserverBase

from amct_fx.errors import CalibrationError
from amct_fx.observers._base import KeywordChecked
from amct_fx.observers._checks import (
    check_floating,
    check_keywords,
    check_num_bits,
    check_positive_int,
)
from amct_fx.observers._ifmr import BatchCollector, finite_extremes, ifmr_search
from amct_fx.observers._ulq import ulq_qparams


class _RangeObserver(KeywordChecked, ObserverBase):
    """Base of the observers: range and flag as buffers of final shape."""

    clip_max: Tensor
    clip_min: Tensor
    scale: Tensor
    zero_point: Tensor
    calibrated: Tensor

    def __init__(
        self,
        *,
        num_bits: int,
        symmetric: bool,
        dtype: torch.dtype,
        is_dynamic: bool,
        factory_kwargs: dict[str, Any] | None,
    ) -> None:
        super().__init__(dtype=dtype, is_dynamic=is_dynamic)
        self.num_bits = check_num_bits(num_bits)
        self.symmetric = symmetric
        self.quant_min = -(2 ** (num_bits - 1))
        self.quant_max = 2 ** (num_bits - 1) - 1
        self.qscheme = torch.per_tensor_symmetric if symmetric else torch.per_tensor_affine
        device = (factory_kwargs or {}).get("device")
        for name in ("clip_max", "clip_min", "scale", "calibrated"):
            self.register_buffer(name, torch.zeros(1, device=device, dtype=torch.float32))
        self.register_buffer("zero_point", torch.zeros(1, device=device, dtype=torch.int32))

    @classmethod
    def with_args(cls, **kwargs: Any) -> Any:
        """Return a constructor with these keywords set, for a ``QConfig``.

        Raises:
            TypeError: A keyword is unknown; the message names the one probably meant.
        """
        check_keywords(cls, kwargs)
        return super().with_args(**kwargs)

    @property
    def is_calibrated(self) -> bool:
        """Whether the observer has seen all it waits for; reads the device."""
        return bool(self.calibrated > 0)

    def _finite_extremes(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (max, min) of a batch after checking dtype and finiteness."""
        check_floating(x, "the observed data")
        return finite_extremes(x)

    @torch.no_grad()
    def _keep(
        self,
        clips: tuple[Tensor, Tensor],
        qparams: tuple[Tensor, Tensor],
    ) -> None:
        """Store a range in place and set the flag."""
        self.clip_max.copy_(clips[0])
        self.clip_min.copy_(clips[1])
        self.scale.copy_(qparams[0])
        self.zero_point.copy_(qparams[1])
        self.calibrated.fill_(1.0)

    def _range_repr(self) -> str:
        """Return the range for ``extra_repr``."""
        return f"clip_max={self.clip_max.item():.6g}, clip_min={self.clip_min.item():.6g}"


class IFMRObserver(_RangeObserver):
    """Collects ``batch_num`` batches and searches the range with the least error (IFMR).

    The search runs when the last batch arrives; the data is dropped then, and later batches are
    ignored. Each element counts once, whatever the sizes of the batches.

    Args:
        num_bits: Width of the integer codes, 2 to 16.
        symmetric: Search with offset 0, as QAT does.
        batch_num: Number of batches.
        dtype: torch.ao's name of the integer type.
        is_dynamic: For torch.ao; must stay false.
        factory_kwargs: ``device`` of the buffers.

    Example:
        >>> observer = IFMRObserver(batch_num=2)
        >>> _ = observer(torch.tensor([0.1, 0.5, -0.3, 0.9, 2.0]))
        >>> observer
        IFMRObserver(num_bits=8, symmetric=True, batches 1/2)
        >>> _ = observer(torch.tensor([-1.5, 0.7, 0.05, -0.01, 1.1]))
        >>> clip_max, clip_min = observer.calculate_clips()
        >>> print(f"{clip_max.item():.9g} {clip_min.item():.9g}")
        2.11999989 -2.13669276
    """

    def __init__(
        self,
        *,
        num_bits: int = 8,
        symmetric: bool = True,
        batch_num: int = 1,
        dtype: torch.dtype = torch.qint8,
        is_dynamic: bool = False,
        factory_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            num_bits=num_bits,
            symmetric=symmetric,
            dtype=dtype,
            is_dynamic=is_dynamic,
            factory_kwargs=factory_kwargs,
        )
        self.batch_num = check_positive_int("batch_num", batch_num)
        self._collector = BatchCollector(num_bits, batch_num, symmetric)

    def forward(self, x: Tensor) -> Tensor:
        """Collect ``x`` and return it.

        Raises:
            CalibrationError: NaN or infinity in ``x``; it is not collected then.
        """
        if self.is_calibrated or x.numel() == 0:
            return x
        self._finite_extremes(x)
        found = self._collector.add(x.detach())
        if found is not None:
            self._keep((found.clip_max, found.clip_min), (found.scale, found.offset))
        return x

    @torch.no_grad()
    def calculate_clips(self) -> tuple[Tensor, Tensor]:
        """Return ``(clip_max, clip_min)``, float32 ``(1,)``.

        Before ``batch_num`` batches were seen, the search runs over those at hand and they are
        kept.

        Raises:
            CalibrationError: No batch was seen.
        """
        return self._search()[:2]

    @torch.no_grad()
    def calculate_qparams(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return ``(scale, zero_point)``, float32 and int32 ``(1,)``."""
        return self._search()[2:]

    def extra_repr(self) -> str:
        """Return bits, kind of search and state."""
        seen = len(self._collector.batches)
        state = self._range_repr() if self.is_calibrated else f"batches {seen}/{self.batch_num}"
        return f"num_bits={self.num_bits}, symmetric={self.symmetric}, {state}"

    def _search(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return clips, scale and offset of all batches, or of those at hand."""
        if self.is_calibrated:
            stored = (self.clip_max, self.clip_min, self.scale, self.zero_point)
            return tuple(t.clone() for t in stored)  # type: ignore[return-value]
        if not self._collector.batches:
            message = "the observer has seen no data; run a calibration batch through the model"
            raise CalibrationError(message)
        found = ifmr_search(
            self._collector.batches, num_bits=self.num_bits, symmetric=self.symmetric
        )
        return found.clip_max, found.clip_min, found.scale, found.offset


class MinMaxObserver(_RangeObserver):
    """Keeps the largest and smallest value seen.

    Args:
        num_bits: Width of the integer codes, 2 to 16.
        symmetric: Use offset 0.
        dtype: torch.ao's name of the integer type.
        is_dynamic: For torch.ao; must stay false.
        factory_kwargs: ``device`` of the buffers.

    Example:
        >>> observer = MinMaxObserver()
        >>> _ = observer(torch.tensor([1.5, 0.2])), observer(torch.tensor([-0.9]))
        >>> observer
        MinMaxObserver(num_bits=8, symmetric=False, clip_max=1.5, clip_min=-0.9)
        >>> observer.calculate_qparams()
        (tensor([0.0094]), tensor([-32], dtype=torch.int32))
    """

    def __init__(
        self,
        *,
        num_bits: int = 8,
        symmetric: bool = False,
        dtype: torch.dtype = torch.qint8,
        is_dynamic: bool = False,
        factory_kwargs: dict[str, Any] | None = None,
    ) -> None:
        super().__init__(
            num_bits=num_bits,
            symmetric=symmetric,
            dtype=dtype,
            is_dynamic=is_dynamic,
            factory_kwargs=factory_kwargs,
        )

    def forward(self, x: Tensor) -> Tensor:
        """Widen the range to hold ``x`` and return it.

        Raises:
            CalibrationError: NaN or infinity in ``x``; the range is unchanged then.
        """
        if x.numel() == 0:
            return x
        largest, smallest = self._finite_extremes(x)
        if self.is_calibrated:
            largest = torch.maximum(largest, self.clip_max)
            smallest = torch.minimum(smallest, self.clip_min)
        clips = largest, smallest
        self._keep(clips, ulq_qparams(*clips, num_bits=self.num_bits, symmetric=self.symmetric))
        return x

    def calculate_clips(self) -> tuple[Tensor, Tensor]:
        """Return ``(max, min)`` of all data, float32 ``(1,)``.

        Raises:
            CalibrationError: No batch was seen.
        """
        self._require_data()
        return self.clip_max.clone(), self.clip_min.clone()

    def calculate_qparams(self) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Return ``(scale, zero_point)``, float32 and int32 ``(1,)``."""
        self._require_data()
        return self.scale.clone(), self.zero_point.clone()

    def extra_repr(self) -> str:
        """Return bits, scheme and range."""
        state = self._range_repr() if self.is_calibrated else "no data"
        return f"num_bits={self.num_bits}, symmetric={self.symmetric}, {state}"

    def _require_data(self) -> None:
        """Raise unless a batch was seen."""
        if not self.is_calibrated:
            message = "the observer has seen no data; run a calibration batch through the model"
            raise CalibrationError(message)
