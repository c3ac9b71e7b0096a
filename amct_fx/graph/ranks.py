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

__all__ = ["RANK", "expect_length", "known_length"]

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
