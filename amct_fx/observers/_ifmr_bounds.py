"""Which candidates of the range search can win, told by a histogram.

The error of quantizing x, |q(x) - x|, never changes faster than x itself. So the loss of a bin of
half width δ around c lies within ``count · δ (2 |q(c) - c| + δ)`` of ``count · (q(c) - c)²``. One
pass over the data and a table of bins bound the losses of all candidates, strictly. For eight bits
about ten of 61 candidates remain to be computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["SAFE_RANGE", "Candidates", "survivors"]

SAFE_RANGE = 1e15
"""Squares of larger errors could leave float32."""

_BINS = 1 << 15
_FEW = 1 << 16
"""Fewer elements than this are searched as fast without a histogram."""

_CHUNK = 1 << 18
_ROUNDING = 1e-5
"""Relative error that float32 arithmetic may add to a loss, generously."""


class Candidates(NamedTuple):
    """Scales and limits of the codes (offset taken off) of candidate ranges, float32 vectors."""

    scales: Tensor
    lowest: Tensor
    highest: Tensor

    def select(self, index: Tensor) -> Candidates:
        """Return some of them."""
        return Candidates(*(field[index] for field in self))

    def errors(self, values: Tensor) -> Tensor:
        """Return ``clamp(RNE(x/s), lowest, highest)·s - x``, float32 [candidates, elements]."""
        # 0-d operands keep the kernels vectorized
        some = tuple(field[0] if len(field) == 1 else field[:, None] for field in self)
        error = (values / some[0]).round_().clamp_max_(some[2]).clamp_min_(some[1])
        return error.mul_(some[0]).sub_(values).reshape(len(self.scales), len(values))


def survivors(
    batches: Sequence[Tensor], candidates: Candidates, upper: Tensor, lower: Tensor
) -> Iterable[int]:
    """Return the indices of the candidates that may have the least loss.

    Args:
        batches: Finite vectors.
        candidates: The candidates.
        upper: The k largest elements in descending order, float32; those before the last are the
            only elements above it.
        lower: The k smallest elements in ascending order.
    """
    everyone = range(len(candidates.scales))
    low, high = lower[-1].item(), upper[-1].item()
    width = (high - low) / _BINS
    count = sum(batch.numel() for batch in batches)
    smallest_scale = candidates.scales.min().item()
    too_large = max(upper[0].item(), -lower[0].item()) > SAFE_RANGE
    if count < _FEW or width <= 0 or width * 32 > smallest_scale or too_large:
        return everyone
    counts = _histogram(batches, low, width).to(torch.float32)
    centers = torch.arange(_BINS, device=upper.device, dtype=torch.float32)
    error = candidates.errors(centers.add_(0.5).mul_(width).add_(low)).abs_()
    slack = error @ counts
    # The histogram counted the outermost elements at its ends.
    ends = torch.stack([upper[-1], lower[-1]])
    beyond = candidates.errors(torch.cat([upper[:-1], lower[:-1]])).square().sum(1)
    beyond -= candidates.errors(ends).square().sum(1) * (len(upper) - 1)
    loss = error.mul_(error) @ counts + beyond
    delta = 0.51 * width
    margin = slack * (2 * delta) + count * delta**2 + loss.abs() * _ROUNDING
    possible = loss - margin <= (loss + margin).min()
    return [index for index, may_win in enumerate(possible.tolist()) if may_win]


def _histogram(batches: Sequence[Tensor], low: float, width: float) -> Tensor:
    """Count the elements in each bin; those outside count in the first and the last."""
    counts = torch.zeros(_BINS, dtype=torch.int64, device=batches[0].device)
    for part in (part for batch in batches for part in batch.split(_CHUNK)):
        bins = (part.to(torch.float32) - low).div_(width).clamp_(0, _BINS - 1)
        counts += torch.bincount(bins.to(torch.int32), minlength=_BINS)
    return counts
