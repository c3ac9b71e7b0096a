"""Sums over large tensors, with as few passes and as little loss as possible."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["as_vector", "dot", "flatten_in_memory_order"]

_CHUNK = 1 << 18
"""Elements in one dot product on a CPU: BLAS adds in few float32 accumulators."""


def flatten_in_memory_order(x: Tensor) -> Tensor:
    """Return the elements of ``x`` as a vector, without a copy for any dense memory format."""
    if x.is_contiguous():
        return x.reshape(-1)
    strides = x.stride()
    order = sorted(range(x.dim()), key=lambda axis: -strides[axis])
    return x.permute(order).reshape(-1)


def as_vector(x: Tensor) -> Tensor | None:
    """Return a vector on the memory of ``x`` in its order; ``None`` if ``x`` has gaps in memory."""
    vector = flatten_in_memory_order(x)
    return vector if vector.data_ptr() == x.data_ptr() else None


def dot(a: Tensor, b: Tensor) -> Tensor:
    """Return ``Σ a·b`` of two vectors of one dtype, 0-d.

    Example:
        >>> dot(torch.ones(6), torch.full((6,), 2.0))
        tensor(12.)
    """
    if a.numel() <= _CHUNK or a.device.type != "cpu":
        return torch.dot(a, b)
    parts = zip(a.split(_CHUNK), b.split(_CHUNK), strict=True)
    return torch.stack([torch.dot(left, right) for left, right in parts]).sum()
