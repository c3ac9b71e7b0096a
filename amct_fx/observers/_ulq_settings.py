"""What one forward of ULQ computes with, and the constants that its backward needs.

The formulas work on one quantizer or on a vector with an element for each of many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

_TINY = torch.finfo(torch.float32).tiny
"""Smaller numbers count as 0 on a processor that flushes them."""


class Limits(NamedTuple):
    """The representable range as numbers, where the host knows them.

    Attributes:
        lowest: Real value of the lowest code.
        highest: Real value of the highest code.
        below: The float32 number before ``lowest``.
        above: The float32 number behind ``highest``.
    """

    lowest: float
    highest: float
    below: float
    above: float


class Settings(NamedTuple):
    """What one forward computes with.

    Attributes:
        effective: Clips after ``fixed_min`` and the guard, float32 ``(1,)``.
        qparams: Scale and offset, float32 ``(1,)``.
        num_bits: Width of the codes.
        mix: See :func:`gradient_mix`; ``None`` where it was not computed ahead.
        limits: The representable range, ``None`` where only the device knows it.
    """

    effective: tuple[Tensor, Tensor]
    qparams: tuple[Tensor, Tensor]
    num_bits: int
    mix: Tensor | None = None
    limits: Limits | None = None

    @property
    def written(self) -> tuple[Tensor, ...]:
        """What a quantizer stores, in the order of its own ``written``."""
        return (*self.effective, *self.effective, *self.qparams)


@dataclass
class Ahead:
    """Settings that were computed before the forward that they are for.

    Attributes:
        settings: The settings.
        versions: Version counters of the clips then.
        used: Whether the quantizer ran with them.
    """

    settings: Settings
    versions: tuple[int, int]
    used: bool = False

    def __reduce__(self) -> tuple[Any, ...]:  # a copy belongs to no forward
        return type(None), ()


def bounds(qparams: tuple[Tensor, Tensor], num_bits: int) -> tuple[Tensor, Tensor]:
    """Return the real values of the lowest and the highest code."""
    half = 2 ** (num_bits - 1)
    s, o = qparams
    return (-half - o).mul_(s), (half - 1 - o).mul_(s)


def rounding_error(clip: Tensor, scale: Tensor, steps: int) -> Tensor:
    """Return ``e`` of the elements that were clipped to ``clip``: ``(RNE(u) - u) / Q``."""
    u = clip / scale
    return u.round().sub_(u).div_(steps)


def gradient_mix(
    effective: tuple[Tensor, Tensor], qparams: tuple[Tensor, Tensor], num_bits: int
) -> Tensor:
    """Return the weights, ``[*, 3]``, of three sums in the gradient of the upper clip.

    With R = Σ g·(RNE(u) - u) inside, C = Σ g and P = Σ g·u outside, where u = clamp(x)/s:
    S_U = (P + (h + o)·C)/Q is the part of C above the range, S_L = C - S_U the part below, and
    grad_M = R/Q + e_U·S_U + e_L·S_L + S_U is linear in R, C and P. grad_m is ``C - grad_M``.
    Source: houses.md 5.1, with the rounding error taken from u and not from the output, whose codes
    may round otherwise at ties.

    Example:
        >>> clips, qparams = (torch.tensor([1.5]), torch.tensor([-1.5])), (torch.tensor([1.0]),) * 2
        >>> [f"{v:.4f}" for v in gradient_mix(clips, qparams, 2)[0].tolist()]
        ['0.3333', '1.1667', '0.4444']
    """
    half, steps = 2 ** (num_bits - 1), 2**num_bits - 1
    s, o = qparams
    at_upper, at_lower = (rounding_error(clip, s, steps) for clip in effective)
    position = (1 + at_upper - at_lower).div_(steps)
    return torch.stack(
        (torch.full_like(s, 1 / steps), at_lower + position * (half + o), position), dim=-1
    )


def host_limits(qparams: tuple[Tensor, Tensor], num_bits: int) -> list[Limits]:
    """Return the limits of every element of a vector on the CPU."""
    lowest, highest = bounds(qparams, num_bits)
    infinity = torch.tensor(torch.inf)
    below = torch.nextafter(lowest, -infinity).clamp_max_(-_TINY)
    above = torch.nextafter(highest, infinity).clamp_min_(_TINY)
    columns = (t.tolist() for t in (lowest, highest, below, above))
    return [Limits(*row) for row in zip(*columns, strict=True)]
