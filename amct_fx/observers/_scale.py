"""Small pieces of the scale formulas, with as few kernels as they can be written in."""

from __future__ import annotations

import torch
from torch import Tensor

EPS = 1.192092896e-7
"""Float32 machine epsilon: a smaller scale counts as no range at all."""

_BELOW_EPS = 2.0**-23 - 2.0**-47
"""The float32 number before EPS."""


def as_float32(x: Tensor) -> Tensor:
    """Return ``x`` in float32; asking for the dtype first is cheaper than a needless ``x.to``."""
    return x if x.dtype == torch.float32 else x.to(torch.float32)


def one_below_eps(scale: Tensor) -> Tensor:
    """Replace what is less than :data:`EPS` by 1, in place; NaN stays.

    Example:
        >>> one_below_eps(torch.tensor([EPS, EPS * 0.9999999, 0.0, 0.5])).tolist()
        [1.1920928955078125e-07, 1.0, 1.0, 0.5]
    """
    return torch.threshold_(scale, _BELOW_EPS, 1.0)


def true_divide(x: Tensor, number: int) -> Tensor:
    """Divide by a number, correctly rounded on every device.

    Accelerators turn the division by a Python number into a multiplication with its reciprocal,
    which is another float; a division by a tensor stays one.
    """
    return x / number if x.is_cpu else x / torch.full_like(x, number)


def symmetric_scale(largest: Tensor, smallest: Tensor, num_bits: int) -> Tensor:
    """Return the scale with offset 0 of the range from ``smallest`` to ``largest``.

    ``max(|a|, |z|) / D`` where ``D = h`` if ``|a| < |z|``, else ``h - 1``; 1 below :data:`EPS`.

    Example:
        >>> symmetric_scale(torch.tensor([1.27, 0.5]), torch.tensor([-1.27, -1.28]), 8)
        tensor([0.0100, 0.0100])
    """
    half = 2 ** (num_bits - 1)
    above, below = largest.abs(), smallest.abs()
    scale = torch.where(above < below, below / half, true_divide(above, half - 1))
    return one_below_eps(scale)
