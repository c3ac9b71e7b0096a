"""A module that runs a traced graph while staying what it was.

``fx.GraphModule`` replaces the user's module: its class, methods and attributes are gone, sub-
module containers become bare ``nn.Module`` objects, and its ``.graph`` attribute makes the
TorchScript ONNX exporter refuse dynamic axes. Here the module object stays; only its class becomes
a subclass of the user's whose ``forward`` is the code generated from the graph. So ``isinstance``,
custom methods, hooks, ``state_dict`` keys, ``train()``/``eval()`` on parts and both exporters keep
working.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx, nn

from amct_fx.errors import ModelStateError, ModelTypeError
from amct_fx.graph.attributes import resolved
from amct_fx.graph.guards import Unregistered
from amct_fx.graph.runtime_guard import OPEN, Guard, guarded_forward
from amct_fx.graph.serialize import GraphRecord, graph_from_record, graph_to_record

__all__ = [
    "GraphForward",
    "PlainModule",
    "check_parts",
    "fx_graph_of",
    "guard_of",
    "install_graph",
    "regions",
]


_GENERATED = ("_fx_graph", "_original_class", "_guard", "_watched_values")


class GraphForward(nn.Module):
    """Mixin of every module whose ``forward`` was generated from an fx graph."""

    _fx_graph: fx.Graph
    _original_class: type[nn.Module]
    _guard: Guard

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Copy and pickle through the user's class: the generated class has no importable name."""
        own = self._original_class.__getstate__(self) if _has_getstate(self) else self.__dict__
        state = {key: value for key, value in own.items() if key not in _GENERATED}
        record = graph_to_record(self._fx_graph)
        return _rebuild, (self._original_class, record, self._guard), state

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        """Copy the graph and share the code that was generated from it."""
        own = getattr(self._original_class, "__deepcopy__", None)
        if own is not None:
            copied: nn.Module = own(self, memo)
            return copied
        build, arguments, state = self.__reduce_ex__(4)
        made: GraphForward = build(*arguments)
        memo[id(self)] = made
        record: GraphRecord = made.__dict__.pop("_graph_record")
        super(GraphForward, made).__setstate__(copy.deepcopy(state, memo))  # type: ignore[no-untyped-call]
        _attach(made, graph_from_record(record), self._guard, type(self).forward)
        return made

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the attributes, then compile the graph, whose modules exist only now."""
        record: GraphRecord = self.__dict__.pop("_graph_record")
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        install_graph(self, graph_from_record(record), self._guard)


def install_graph(module: nn.Module, graph: fx.Graph, guard: Guard = OPEN) -> None:
    """Make ``module`` run ``graph``; its class becomes a subclass of what it was.

    May be called again on the same module after the graph was changed.

    Args:
        module: Owner of every module, parameter and buffer that the graph names.
        graph: The graph to run; checked with ``graph.lint()``.
        guard: What the graph relies on; where that does not hold, the user's Python code runs.
    """
    original = _class_under(module)
    graph.lint()
    generated = fx.GraphModule(nn.Module(), fx.Graph())  # only the code is of interest
    generated.graph = graph
    run: Callable[..., Any] = type(generated).forward
    run = _explaining(run)
    forward = run if guard.is_open else guarded_forward(guard, run, original)
    _attach(module, generated.graph, guard, forward)


def _explaining(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return the generated forward; it says so where a layer that it calls was replaced."""

    @functools.wraps(run)
    def forward(self: GraphForward, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a graph break inside of try would stop the compiler
            return run(self, *args, **kwargs)
        try:
            return run(self, *args, **kwargs)
        except AttributeError:
            check_parts(self)
            raise

    return forward


def check_parts(model: nn.Module) -> None:
    """Refuse a model of which a layer was replaced or removed after its graphs were made.

    Raises:
        ModelStateError: Names the layer, and what the graph misses.
    """
    for prefix, region in regions(model):
        for node in region._fx_graph.nodes:
            if node.op in ("call_module", "get_attr"):
                _check_part(region, prefix, str(node.target))


def _check_part(region: nn.Module, prefix: str, target: str) -> None:
    """Follow a path of a graph through the modules."""
    owner: Any = region
    names = target.split(".")
    for index, name in enumerate(names):
        if not hasattr(owner, name):
            place = ".".join([*([prefix] if prefix else []), *names[:index]])
            where = f"layer {place!r}" if place else "the model"
            message = (
                f"{where} is a {type(owner).__name__} without {name!r} now, which the graph calls; "
                "replace layers in the float model, and prepare that"
            )
            raise ModelStateError(message)
        owner = getattr(owner, name)


def _attach(module: nn.Module, graph: fx.Graph, guard: Guard, forward: Callable[..., Any]) -> None:
    """Let a module run the code that was generated from a graph."""
    original = _class_under(module)
    module.__class__ = _graph_class(original, forward)
    module.__dict__["_original_class"] = original
    module.__dict__["_guard"] = guard
    module.__dict__["_watched_values"] = resolved(module, guard.watched)
    module.__dict__["_fx_graph"] = graph
    graph.owning_module = None


class PlainModule(nn.Module):
    """What an ``fx.GraphModule`` becomes: it has no class of the user's to keep."""


def _class_under(module: nn.Module) -> type[nn.Module]:
    """Return the class that the generated one is to extend."""
    if isinstance(module, GraphForward):
        return module._original_class
    if isinstance(module, fx.GraphModule):
        module.__dict__.pop("_graph", None)
        return PlainModule
    return type(module)


def fx_graph_of(module: nn.Module) -> fx.Graph:
    """Return the graph that ``module`` runs.

    Args:
        module: A prepared or converted model, or a traced part of one.

    Raises:
        ModelTypeError: If ``module`` runs its own Python code.
    """
    if not isinstance(module, GraphForward):
        message = f"{type(module).__name__} runs its own forward, not a traced graph"
        raise ModelTypeError(message)
    return module._fx_graph


def guard_of(module: nn.Module) -> Guard:
    """Return what the graph of ``module`` relies on."""
    return module._guard if isinstance(module, GraphForward) else OPEN


def regions(model: nn.Module) -> Iterator[tuple[str, GraphForward]]:
    """Yield ``(name, module)`` of every traced part of ``model``, ``""`` being the model itself."""
    for name, module in model.named_modules():
        if isinstance(module, GraphForward):
            yield name, module


def _graph_class(original: type[nn.Module], forward: Any) -> type[nn.Module]:
    def new(_: type[nn.Module], *args: Any, **kwargs: Any) -> nn.Module:
        """Make another module, as ``sequential[1:]`` does: the graph is not its forward."""
        return original(*args, **kwargs)

    namespace = {
        "__new__": new,
        "forward": forward,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
    }
    return type(original.__name__, (Unregistered, GraphForward, original), namespace)


def _has_getstate(module: GraphForward) -> bool:
    """Say whether the user's class decides itself what a copy or a pickle holds."""
    own = getattr(module._original_class, "__getstate__", None)
    return own is not None and own is not getattr(object, "__getstate__", None)


def _rebuild(
    original: type[nn.Module],
    record: GraphRecord,
    guard: Guard = OPEN,
) -> nn.Module:
    module = original.__new__(original)
    module.__dict__["_graph_record"] = record
    module.__class__ = _graph_class(original, original.forward)
    module.__dict__["_original_class"] = original
    module.__dict__["_guard"] = guard
    return module
