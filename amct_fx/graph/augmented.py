"""``y += 1`` in a forward: a graph computes a new value where Python writes into the old tensor.

That is the same unless something reads the old tensor afterwards, under another name or through a
view. Such a forward stays Python.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch.fx.proxy import TraceError

if TYPE_CHECKING:
    from torch import fx

__all__ = ["OPERATORS", "Write", "refuse_shared_writes", "writes_inputs"]

OPERATORS = {
    f"__i{name.strip('_')}__": getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and_", "or_", "xor")
}
"""What Python computes for an augmented assignment to a value that has no method for it."""
_PARTS = frozenset({"getitem", "chunk", "tensor_split", "split", "unbind", "select", "narrow"})
"""Views of a part; two of them seldom overlap."""
_VIEWS = _PARTS | {
    *("view", "view_as", "reshape", "reshape_as", "flatten", "unflatten", "ravel", "squeeze"),
    *("unsqueeze", "expand", "expand_as", "broadcast_to", "transpose", "swapaxes", "permute"),
    *("movedim", "t", "T", "mT", "diagonal", "detach", "data", "contiguous", "to", "float"),
}
_SIZES = frozenset({"shape", "size", "dim", "ndim", "numel", "expect_length", "expect_parts"})


class Write(NamedTuple):
    """An augmented assignment.

    Attributes:
        old: The value that Python would write into.
        new: What the graph computes instead.
    """

    old: fx.Node
    new: fx.Node


def refuse_shared_writes(graph: fx.Graph, writes: Sequence[Write]) -> None:
    """Raise TraceError where a later operation reads what an augmented assignment writes.

    Args:
        graph: The graph as recorded so far.
        writes: The augmented assignments; those of erased nodes count for nothing.
    """
    alive = _alive(writes)
    if not alive:
        return
    order = {node: place for place, node in enumerate(graph.nodes)}
    for old, new in alive:
        shared = list(_shared(old))
        read = any(order[user] > order[new] for node in shared for user in node.users)
        if read or any(node.op == "get_attr" for node in shared):
            message = "its forward changes a tensor in place (as y += 1) that it reads elsewhere"
            raise TraceError(message)


def writes_inputs(writes: Sequence[Write]) -> bool:
    """Say whether a forward writes into what it was given, which its caller may read again."""
    shared = (node for write in _alive(writes) for node in _shared(write.old))
    return any(node.op == "placeholder" for node in shared)


def _alive(writes: Sequence[Write]) -> list[Write]:
    return [write for write in writes if not write.new._erased and not _is_size(write.old)]


def _shared(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the values whose memory is that of ``node``, or holds it."""
    yield from _views(node, _VIEWS)
    while _name(node) in _VIEWS and node.all_input_nodes:
        before, node = node, node.all_input_nodes[0]
        yield node
        for user in node.users:
            if user is not before and _name(user) in _VIEWS - _PARTS:
                yield from _views(user, _VIEWS)


def _views(node: fx.Node, kinds: frozenset[str]) -> Iterator[fx.Node]:
    """Yield a value and the views of it."""
    yield node
    for user in node.users:
        if _name(user) in kinds and user.all_input_nodes[0] is node:
            yield from _views(user, kinds)


def _is_size(node: fx.Node) -> bool:
    """Say whether a value is a number: a size, or computed from sizes alone."""
    if _name(node) in _SIZES:
        return True
    computed = node.op == "call_function" and bool(node.all_input_nodes)
    return computed and all(map(_is_size, node.all_input_nodes))


def _name(node: fx.Node) -> str:
    """Return the name of an operation; of ``getattr`` that of the attribute."""
    if node.op not in ("call_function", "call_method"):
        return ""
    target: Any = node.args[1] if node.target is getattr else node.target
    return target if isinstance(target, str) else str(getattr(target, "__name__", ""))
