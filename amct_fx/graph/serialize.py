"""fx graphs as plain data: what pickle and ``copy.deepcopy`` of a traced module carry.

``fx.Graph`` itself does not pickle in every torch version, and ``fx.GraphModule`` pickles source
code that is traced again at load. A list of nodes is simpler, exact, and keeps the names of the
nodes.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.node import map_aggregate

__all__ = ["GraphRecord", "graph_from_record", "graph_to_record"]


class NodeRef(NamedTuple):
    """Stands for another node, by name, inside the arguments of a node."""

    name: str


@dataclass(frozen=True)
class FunctionRef:
    """A function that pickle cannot find by its own name, such as ``F.max_pool2d``."""

    module: str
    name: str

    def resolve(self) -> Any:
        """Import the module and walk the dotted name."""
        found: Any = importlib.import_module(self.module)
        for part in self.name.split("."):
            found = getattr(found, part)
        return found


@dataclass(frozen=True)
class NodeRecord:
    """One node: opcode, name, target, arguments with :class:`NodeRef` in place of nodes."""

    op: str
    name: str
    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    stack: Any


@dataclass(frozen=True)
class GraphRecord:
    """All nodes of a graph, in order."""

    nodes: tuple[NodeRecord, ...]

    def __deepcopy__(self, memo: dict[int, Any]) -> GraphRecord:
        """Return the record itself: it never changes, and building a graph copies what may."""
        return self


def graph_to_record(graph: fx.Graph) -> GraphRecord:
    """Describe ``graph`` as plain data.

    Example:
        >>> graph = fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU())).graph
        >>> copy = graph_from_record(graph_to_record(graph))
        >>> str(copy) == str(graph)
        True
    """
    return GraphRecord(tuple(_node_to_record(node) for node in graph.nodes))


def graph_from_record(record: GraphRecord) -> fx.Graph:
    """Build the graph that :func:`graph_to_record` described."""
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}

    def restore(value: Any) -> Any:
        if isinstance(value, NodeRef):
            return nodes[value.name]
        if isinstance(value, tuple) and not hasattr(value, "_fields"):
            return tuple(restore(item) for item in value)
        if isinstance(value, list):
            return [restore(item) for item in value]
        if isinstance(value, dict):
            return {key: restore(item) for key, item in value.items()}
        if isinstance(value, slice):
            return slice(restore(value.start), restore(value.stop), restore(value.step))
        return value

    for item in record.nodes:
        target = item.target.resolve() if isinstance(item.target, FunctionRef) else item.target
        node = graph.create_node(
            item.op, target, restore(item.args), restore(item.kwargs), name=item.name
        )
        if item.stack is not None:
            node.meta["nn_module_stack"] = item.stack.copy()
        nodes[item.name] = node
    return graph


def _node_to_record(node: fx.Node) -> NodeRecord:
    def refer(other: Any) -> Any:
        return NodeRef(other.name) if isinstance(other, fx.Node) else other

    args = map_aggregate(node.args, refer)
    kwargs = map_aggregate(node.kwargs, refer)
    target = _portable(node.target) if node.op == "call_function" else node.target
    return NodeRecord(
        node.op,
        node.name,
        target,
        _plain(args),
        _plain(kwargs),
        node.meta.get("nn_module_stack"),
    )


def _plain(value: Any) -> Any:
    """Turn fx's immutable lists and dicts into ordinary ones, which every version unpickles."""
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return tuple(_plain(item) for item in value)
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _portable(function: Callable[..., Any] | str) -> Any:
    """Return ``function`` itself, or a :class:`FunctionRef` when pickle could not name it."""
    if isinstance(function, torch._ops.OpOverload):
        namespace, _, name = function._name.partition("::")
        name = name if "." in name else f"{name}.default"
        return FunctionRef("torch", f"ops.{namespace}.{name}")
    qualname = getattr(function, "__qualname__", "")
    if "<locals>" not in qualname:
        return function
    name = function.__name__ if callable(function) else str(function)
    for module in ("torch.nn.functional", "torch"):
        for candidate in (name, *_names_of(function, module)):
            ref = FunctionRef(module, candidate)
            try:
                if ref.resolve() is function:
                    return ref
            except AttributeError:
                continue
    return function


def _names_of(function: Any, module: str) -> tuple[str, ...]:
    """Find the public names under which ``module`` offers ``function``."""
    scope = vars(importlib.import_module(module))
    return tuple(name for name, value in scope.items() if value is function)
