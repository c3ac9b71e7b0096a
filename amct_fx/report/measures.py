"""Sums over batches: errors of tensors, histograms, use of codes, channels that are always zero."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "ChannelUse",
    "CodeUse",
    "Codes",
    "ErrorSum",
    "Histogram",
    "HistogramSum",
    "TensorError",
]


@dataclass(frozen=True)
class TensorError:
    """How far a tensor is from the float one.

    Attributes:
        sqnr: Signal to quantization noise ratio in dB: ``10 log10(sum(f²) / sum((q - f)²))``;
            ``inf`` if they are equal.
        cosine: Cosine of the angle between them; 1 if they are equal.
    """

    sqnr: float
    cosine: float

    def __str__(self) -> str:
        """Return both figures."""
        return f"{self.sqnr:.1f} dB, cosine {self.cosine:.5f}"


class ErrorSum:
    """Adds up the error of a tensor over batches.

    Example:
        >>> error = ErrorSum()
        >>> error.add(torch.tensor([3.0, 4.0]), torch.tensor([3.0, 4.5]))
        >>> print(error.result())
        20.0 dB, cosine 0.99846
    """

    def __init__(self) -> None:
        self._sums = [0.0, 0.0, 0.0, 0.0]
        self._elements = 0

    def add(self, expected: Tensor, actual: Tensor) -> None:
        """Add two tensors of one shape; others are left out, as nothing can be said of them."""
        if expected.shape != actual.shape or not expected.is_floating_point():
            return
        f, q = (
            expected.detach().float().flatten(),
            actual.detach().to(expected.device).float().flatten(),
        )
        error = q - f
        sums = torch.stack([f.dot(f), q.dot(q), f.dot(q), error.dot(error)]).tolist()
        self._sums = [old + new for old, new in zip(self._sums, sums, strict=True)]
        self._elements += f.numel()

    @property
    def mean_square(self) -> float:
        """Mean of the squared error."""
        return self._sums[3] / self._elements if self._elements else math.nan

    def result(self) -> TensorError | None:
        """Return the error, ``None`` if nothing was compared."""
        if not self._elements:
            return None
        expected, actual, product, noise = self._sums
        if noise == 0:
            return TensorError(math.inf, 1.0)
        if expected == 0:
            return TensorError(-math.inf, 0.0)
        sqnr = 10 * math.log10(expected / noise) if math.isfinite(noise / expected) else -math.inf
        cosine = product / math.sqrt(expected * actual) if actual > 0 else 0.0
        return TensorError(sqnr, cosine)


@dataclass(frozen=True)
class Histogram:
    """Counts of values in equal bins.

    Attributes:
        low: Lower edge of the first bin.
        high: Upper edge of the last bin.
        counts: Values in each bin.
        clip_min: Lower end of the range that the codes reach, ``None`` if it is not known.
        clip_max: Upper end.
    """

    low: float
    high: float
    counts: tuple[int, ...]
    clip_min: float | None = None
    clip_max: float | None = None


class HistogramSum:
    """A histogram over batches: its range doubles, two bins become one, when values lie outside.

    Args:
        bins: Bins that are shown; inside there are 32 times as many, from ``-R`` to ``R``.

    Example:
        >>> found = HistogramSum(bins=4)
        >>> found.add(torch.tensor([0.0, 0.2, 1.5]))
        >>> found.add(torch.tensor([3.9]))  # the range doubles twice
        >>> found.result().counts
        (2, 1, 0, 1)
    """

    def __init__(self, bins: int = 64) -> None:
        self._bins = bins
        self._fine = 32 * bins
        self._reach = 0.0
        self._counts: Tensor | None = None

    def add(self, values: Tensor) -> None:
        """Count the finite values of a tensor."""
        values = values.detach().float().flatten()
        values = values[torch.isfinite(values)]
        if not values.numel():
            return
        largest = max(float(values.abs().max()), 1e-30)
        if self._counts is None:
            self._reach = largest
            self._counts = torch.zeros(self._fine, dtype=torch.float64)
        while largest > self._reach:
            self._double()
        found = torch.histc(values, self._fine, -self._reach, self._reach)
        self._counts += found.cpu().double()

    def _double(self) -> None:
        assert self._counts is not None
        quarter = self._fine // 4
        halved = self._counts.view(-1, 2).sum(1)
        self._counts = torch.cat([halved.new_zeros(quarter), halved, halved.new_zeros(quarter)])
        self._reach *= 2

    def result(
        self, clip_min: float | None = None, clip_max: float | None = None
    ) -> Histogram | None:
        """Return the part of the histogram that holds all values, in few bins."""
        if self._counts is None or not bool(self._counts.sum() > 0):
            return None
        used = self._counts.nonzero().flatten()
        first, last = int(used[0]), int(used[-1])
        width = math.ceil((last - first + 1) / self._bins)
        end = first + width * self._bins
        padded = torch.cat([self._counts, self._counts.new_zeros(max(end - self._fine, 0))])
        counts = padded[first:end].view(self._bins, width).sum(1)
        step = 2 * self._reach / self._fine
        low = -self._reach + first * step
        high = low + self._bins * width * step
        whole = tuple(int(count) for count in counts.tolist())
        return Histogram(low, high, whole, clip_min, clip_max)


@dataclass(frozen=True)
class CodeUse:
    """How often each integer code occurs.

    Attributes:
        lowest: The lowest code that there is.
        counts: Occurrences of each code, from the lowest to the highest.
        saturated: Share of the values that lie outside of the range and are clipped.
    """

    lowest: int
    counts: tuple[int, ...]
    saturated: float

    @property
    def unused(self) -> int:
        """Number of codes that never occur."""
        return self.counts.count(0)


class Codes:
    """Counts codes over batches.

    Args:
        lowest: Lowest code, such as -128.
        highest: Highest code, such as 127.

    Example:
        >>> codes = Codes(-2, 1)
        >>> codes.add(torch.tensor([-2.0, 0.0, 0.0, 9.0]))
        >>> use = codes.result(); use.counts, use.unused, use.saturated
        ((1, 0, 2, 1), 1, 0.25)
    """

    def __init__(self, lowest: int, highest: int) -> None:
        self._lowest, self._highest = lowest, highest
        self._counts = torch.zeros(highest - lowest + 1, dtype=torch.int64)
        self._saturated = 0

    def add(self, unclamped: Tensor) -> None:
        """Count rounded codes that were not clamped yet; NaN counts as 0."""
        clamped = unclamped.clamp(self._lowest, self._highest).nan_to_num_()
        self._saturated += int((clamped != unclamped).sum())
        index = (clamped - self._lowest).long().flatten()
        self._counts += torch.bincount(index, minlength=len(self._counts)).cpu()

    def result(self) -> CodeUse | None:
        """Return the counts, ``None`` if there are none."""
        total = int(self._counts.sum())
        if not total:
            return None
        return CodeUse(self._lowest, tuple(self._counts.tolist()), self._saturated / total)


class ChannelUse:
    """Notices channels whose codes are 0 in all batches.

    Example:
        >>> use = ChannelUse(axis=1)
        >>> use.add(torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 2.0]]))
        >>> use.dead
        (0,)
    """

    def __init__(self, axis: int) -> None:
        self._axis = axis
        self._used: Tensor | None = None

    def add(self, codes: Tensor) -> None:
        """Look at codes whose zero point was subtracted."""
        if codes.dim() <= self._axis or not codes.numel():
            return
        axis = self._axis % codes.dim()
        others = [index for index in range(codes.dim()) if index != axis]
        used: Any = (codes != 0).sum(dim=others) > 0 if others else codes != 0
        fits = self._used is not None and self._used.shape == used.shape
        self._used = self._used | used.cpu() if fits else used.cpu()

    @property
    def dead(self) -> tuple[int, ...]:
        """Indices of the channels that were never used."""
        if self._used is None:
            return ()
        return tuple((~self._used).nonzero().flatten().tolist())
