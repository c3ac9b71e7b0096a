"""Split a gradient by where the values were clipped, without bool masks.

Elementwise float kernels are vectorized; those with bool operands are not, and cost three to five
times as much. Every element of the gradient lands in exactly one part, unchanged, so parts that
are added elementwise round like the formulas with masks. NaN counts as inside (and makes every
sum NaN).

Example:
    >>> import torch
    >>> x, g = torch.tensor([-2.0, 0.5, 1.0, 3.0]), torch.tensor([1.0, 2.0, 3.0, 4.0])
    >>> clamped, excess = clip_with_excess(x, torch.tensor(-1.0), torch.tensor(1.0))
    >>> clamped.tolist(), excess.tolist()
    ([-1.0, 0.5, 1.0, 1.0], [-1.0, 0.0, 0.0, 2.0])
    >>> grad_inside(g, excess).tolist(), grad_above(g, excess).tolist()
    ([0.0, 2.0, 3.0, 0.0], [0.0, 0.0, 0.0, 4.0])
    >>> grad_above(g, -excess).tolist()  # below
    [1.0, 0.0, 0.0, 0.0]
"""

from __future__ import annotations

import torch
from torch import Tensor

from amct_fx._compat import same_strides

_DENORM_MIN = 2.0**-149
"""Smallest positive float32: any nonzero excess is at least as large."""

# The overloads by name: choosing one by its arguments costs as much as a small tensor.
_masked = torch.ops.aten.hardtanh_backward.default
_masked_out = torch.ops.aten.hardtanh_backward.grad_input


def clip_with_excess(values: Tensor, lowest: Tensor, highest: Tensor) -> tuple[Tensor, Tensor]:
    """Return ``values`` clamped (a fresh tensor), and ``values`` minus that.

    Args:
        values: float32.
        lowest: Lower end of the range, broadcastable to ``values``.
        highest: Upper end of the range.
    """
    clamped = values.clamp_max(highest).clamp_min_(lowest)
    return clamped, values - clamped


def grad_between(grad: Tensor, values: Tensor, below: float, above: float, out: Tensor) -> Tensor:
    """Write ``grad`` where ``below < values < above``, else 0, into ``out``."""
    written: Tensor = _masked_out(grad, values, below, above, grad_input=out)
    return written


def grad_inside(grad: Tensor, excess: Tensor, out: Tensor | None = None) -> Tensor:
    """Return ``grad`` where nothing was clipped, else 0; ``out`` may be ``excess``."""
    limits = -_DENORM_MIN, _DENORM_MIN
    if out is None:
        result: Tensor = _masked(grad, excess, *limits)
        return result
    written: Tensor = _masked_out(grad, excess, *limits, grad_input=out)
    return written


def grad_above(grad: Tensor, excess: Tensor) -> Tensor:
    """Return ``grad`` where the excess is positive, else 0."""
    result: Tensor = torch.ops.aten.threshold_backward(grad, excess, 0)
    return result


def like(grad: Tensor, values: Tensor) -> Tensor:
    """Return ``grad`` in float32 and in the memory format of ``values``."""
    if grad.dtype == torch.float32 and same_strides(grad, values):
        return grad
    return torch.empty_like(values).copy_(grad)
