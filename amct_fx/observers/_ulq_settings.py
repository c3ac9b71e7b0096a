"""What one forward of ULQ computes with, and the constants that its backward needs.

The formulas work on one quantizer or on a vector with an element for each of many.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

_TINY = torch.finfo(torch.float32).tiny
"""Smaller numbers count as 0 on a processor that flushes them."""


class HostNumbers(NamedTuple):
    """What backward computes with, as numbers, where the host may read them: on a CPU.

    Attributes:
        lowest: Real value of the lowest code.
        highest: Real value of the highest code.
        below: The float32 number before ``lowest``.
        above: The float32 number behind ``highest``.
        scale: The scale.
        mix: See :func:`gradient_mix`.
    """

    lowest: float
    highest: float
    below: float
    above: float
    scale: float
    mix: list[float]


class Settings(NamedTuple):
    """What one forward computes with.

    Attributes:
        effective: Clips after ``fixed_min`` and the guard, float32 ``(1,)``.
        qparams: Scale and offset, float32 ``(1,)``.
        num_bits: Width of the codes.
        mix: See :func:`gradient_mix`; ``None`` where it was not computed ahead.
        on_host: The same and the ends of the range as numbers; ``None`` where not computed ahead or
            only the device knows them.
    """

    effective: tuple[Tensor, Tensor]
    qparams: tuple[Tensor, Tensor]
    num_bits: int
    mix: Tensor | None = None
    on_host: HostNumbers | None = None

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
    of_total = at_lower + position * (half + o)
    return torch.stack((torch.full_like(s, 1 / steps), of_total, position), dim=-1)


def may_read(x: Tensor) -> bool:
    """Say whether the host may look at ``x`` for nothing: an ordinary tensor on the CPU."""
    return (
        x.is_cpu
        and type(x) in (Tensor, nn.Parameter)
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
    )


def host_numbers(
    effective: tuple[Tensor, Tensor], qparams: tuple[Tensor, Tensor], num_bits: int
) -> list[HostNumbers]:
    """Return the numbers of every element of a vector on the CPU."""
    lowest, highest = bounds(qparams, num_bits)
    infinity = torch.tensor(torch.inf)
    below = torch.nextafter(lowest, -infinity).clamp_max_(-_TINY)
    above = torch.nextafter(highest, infinity).clamp_min_(_TINY)
    columns = [t.view(-1) for t in (lowest, highest, below, above, qparams[0])]
    columns.append(gradient_mix(effective, qparams, num_bits).view(-1, 3))
    return [HostNumbers(*row) for row in zip(*(t.tolist() for t in columns), strict=True)]
