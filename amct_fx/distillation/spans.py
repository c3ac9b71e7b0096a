"""What lies between two nodes of a graph, and what reads a tensor.

Two kinds of nodes are looked through. Dropout and Identity compute nothing in eval mode. A node
that reads the shape of a tensor, and what is computed from that, carries no values, so it is
neither a consumer nor a way from one layer to another.
"""

from __future__ import annotations

import builtins
import operator
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from amct_fx.graph import layer_input, module_of

__all__ = ["between", "is_crossed", "only_consumer", "paths_between", "shape_readers"]

_CROSSED: frozenset[Any] = frozenset(
    {
        *(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Identity),
        *(F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout),
    }
)
_SHAPE_METHODS = frozenset({"dim", "ndimension", "numel", "size"})
_SHAPE_ATTRIBUTES = frozenset({"device", "dtype", "ndim", "shape"})
_ARITHMETIC: frozenset[Any] = frozenset(
    {
        *(operator.getitem, operator.add, operator.sub, operator.mul, operator.floordiv),
        *(operator.truediv, operator.mod, operator.neg),
    }
)


def is_crossed(node: fx.Node, root: nn.Module) -> bool:
    """Say whether ``node`` is a Dropout or an Identity."""
    kind = type(module_of(node, root)) if node.op == "call_module" else node.target
    return kind in _CROSSED


def shape_readers(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the nodes that know shapes and types of tensors, and no values.

    Example:
        >>> from torch import fx, nn
        >>> graph = fx.symbolic_trace(nn.Flatten()).graph
        >>> shape_readers(graph)
        frozenset()
    """
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if _reads_shape(node) or (
            node.target in _ARITHMETIC
            and node.all_input_nodes
            and found.issuperset(node.all_input_nodes)
        ):
            found.add(node)
    return frozenset(found)


def _reads_shape(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _SHAPE_METHODS
    return node.target is builtins.getattr and node.args[1] in _SHAPE_ATTRIBUTES


def only_consumer(
    node: fx.Node, root: nn.Module, ignored: Iterable[fx.Node] = ()
) -> fx.Node | None:
    """Return the node that reads the values of ``node`` as its input, if it is the only reader.

    Args:
        node: Where to start.
        root: The module that the graph belongs to.
        ignored: Nodes that do not count as readers.
    """
    ignored = frozenset(ignored)
    while True:
        readers = [user for user in node.users if user not in ignored]
        if len(readers) != 1 or layer_input(readers[0]) is not node:
            return None
        if not is_crossed(readers[0], root):
            return readers[0]
        node = readers[0]


def paths_between(start: fx.Node, end: fx.Node, ignored: Iterable[fx.Node] = ()) -> int:
    """Count the ways that lead from one node to another; there is one to the node itself.

    Example:
        >>> from torch import fx
        >>> graph = fx.Graph()
        >>> x = graph.placeholder("x")
        >>> y = graph.call_function(torch.add, (graph.call_function(torch.abs, (x,)), x))
        >>> paths_between(x, y), paths_between(y, x), paths_between(x, x)
        (2, 0, 1)
    """
    ignored = frozenset(ignored)
    ways = {start: 1}
    node = start
    while node is not end:
        node = node.next
        if node.op == "root":
            return 0
        found = sum(ways.get(source, 0) for source in node.all_input_nodes)
        if found and node not in ignored:
            ways[node] = found
    return ways.get(end, 0)


def between(start: fx.Node, end: fx.Node) -> tuple[fx.Node, ...]:
    """Return the nodes on all ways from one node to another, both included, in graph order."""
    reached = {start}
    order = [start]
    node = start
    while node is not end:
        node = node.next
        if not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            order.append(node)
    needed = {end}
    for node in reversed(order):
        if node in needed:
            needed.update(reached.intersection(node.all_input_nodes))
    return tuple(node for node in order if node in needed)
