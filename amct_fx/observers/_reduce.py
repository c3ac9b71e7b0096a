"""Vectors on the memory of tensors, for sums over them in one pass."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["as_vector", "flatten_in_memory_order"]


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
