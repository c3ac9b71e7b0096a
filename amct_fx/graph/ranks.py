"""How long a shape is, where a forward unpacks one: ``(*x.shape[:-1], heads, -1)``.

Tracing knows no shapes, but example inputs show the rank of every argument of every module. The
graph checks it again at each run.
"""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from amct_fx.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Sized

    from torch import fx

__all__ = ["RANK", "expect_length", "expect_parts", "known_length", "parts_made"]

RANK = "amct_fx_rank"
"""Key of ``node.meta`` under which the rank of a tensor stands, if it is known."""


def known_length(node: fx.Node) -> int | None:
    """Return the length of what ``node`` makes, if that is a shape, or a slice of one.

    Args:
        node: A node of a graph that is being traced.
    """
    source: Any = node.args[0] if node.args else None
    rank: int | None = getattr(source, "meta", {}).get(RANK)
    if node.target is getattr and node.args[1] == "shape":
        return rank
    if node.op == "call_method" and node.target == "size" and len(node.args) == 1:
        return rank
    part: Any = node.args[1] if node.target is operator.getitem else None
    if not isinstance(part, slice):
        return None
    bounds = (part.start, part.stop, part.step)
    constant = all(bound is None or isinstance(bound, int) for bound in bounds)
    length = known_length(source) if constant else None
    return None if length is None else len(range(length)[part])


def parts_made(node: fx.Node) -> int | None:
    """Return how many parts a chunk or split makes, if its arguments say so.

    A chunk into two or three makes fewer only of an axis with fewer than five elements; where
    example inputs show it, the model stays Python, and otherwise :func:`expect_parts` does.

    Args:
        node: A node of a graph that is being traced.
    """
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    key = {"chunk": "chunks", "split": "split_size_or_sections"}.get(name)
    if node.op not in ("call_function", "call_method") or key is None:
        return None
    given: Any = node.args[1] if len(node.args) > 1 else node.kwargs.get(key)
    if name == "split":
        return len(given) if isinstance(given, (tuple, list)) else None
    return given if given in (2, 3) else None


def expect_parts(parts: Sized, count: int) -> None:
    """Look whether a chunk made as many parts as the graph reads, which holds this call.

    Raises:
        ModelError: If there are fewer.
    """
    if len(parts) < count:
        message = (
            f"the model was traced where a chunk makes {count} parts, and now it makes "
            f"{len(parts)}; prepare it with example_inputs of this shape"
        )
        raise ModelError(message)


def expect_length(sizes: Sized, length: int) -> Any:
    """Return ``sizes``; the graph holds this call where it relies on a length.

    Raises:
        ModelError: If there are more or fewer of them than there were while tracing.
    """
    if len(sizes) != length:
        message = (
            f"the model was traced where a shape had {length} sizes, and now it has {len(sizes)}; "
            "prepare it with example_inputs of this rank"
        )
        raise ModelError(message)
    return sizes
