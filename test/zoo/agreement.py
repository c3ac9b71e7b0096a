"""How far the outputs of two models are apart."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_flatten

__all__ = ["Agreement", "agreement_of", "tensors_of"]


@dataclass(frozen=True)
class Agreement:
    """The worst output: largest difference as a part of the range, and cosine."""

    difference: float
    cosine: float


def tensors_of(outputs: Any) -> list[Tensor]:
    """Return the floating-point tensors in the outputs of a model, in order."""
    leaves, _ = tree_flatten(outputs)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def agreement_of(expected: list[Tensor], actual: list[Tensor]) -> Agreement:
    """Compare outputs pair by pair.

    Raises:
        ValueError: If number or shapes differ.
    """
    if [output.shape for output in expected] != [output.shape for output in actual]:
        message = f"shapes {[o.shape for o in actual]} instead of {[o.shape for o in expected]}"
        raise ValueError(message)
    pairs = [(a.double(), b.double()) for a, b in zip(expected, actual, strict=True)]
    return Agreement(
        max(_relative_difference(left, right) for left, right in pairs),
        min(_cosine(left, right) for left, right in pairs),
    )


def _relative_difference(left: Tensor, right: Tensor) -> float:
    extent = max(float(left.max() - left.min()), float(left.abs().max()), 1e-9)
    return float((left - right).abs().max()) / extent


def _cosine(left: Tensor, right: Tensor) -> float:
    norms = float(left.norm() * right.norm())
    return float((left * right).sum()) / norms if norms > 0 else 1.0
