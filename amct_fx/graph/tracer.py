"""fx tracing that never gives up: what cannot be traced becomes an island.

An *island* is a module that stays the Python module it was. Its children are traced on their own,
down to single layers, so every model can be prepared. A *region* is a module whose forward was
traced. Source: design.md, "How prepare works", step 2.
"""

from __future__ import annotations

import copy
import inspect
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.fx.proxy import TraceError
from torch.utils._pytree import tree_flatten

from amct_fx.errors import ModelError

__all__ = ["Capture", "Island", "Region", "capture"]

_TORCH_DIRECTORY = str(Path(torch.__file__).parent)
_OWN_FILE = __file__


@dataclass(frozen=True)
class Island:
    """A module that runs its own Python code because tracing it would change what it does.

    ``holds_layers`` is ``False`` for parts such as stochastic depth, where nothing is lost.
    """

    name: str
    type_name: str
    reason: str
    source: str | None = None
    holds_layers: bool = True

    def __str__(self) -> str:
        """Return ``name (Type): reason [file:line]``."""
        place = f" [{self.source}]" if self.source else ""
        return f"{self.name or '<model>'} ({self.type_name}): {self.reason}{place}"


@dataclass
class Region:
    """A traced module: its dotted name in the model, the module, and its graph."""

    name: str
    module: nn.Module
    graph: fx.Graph

    def full_name(self, target: str) -> str:
        """Return the name in the model of ``target``, which is relative to the region."""
        return f"{self.name}.{target}" if self.name else target

    def local_name(self, name: str) -> str:
        """Return what :meth:`full_name` made ``name`` from."""
        return name.removeprefix(f"{self.name}.") if self.name else name


@dataclass
class Capture:
    """Everything tracing found: regions, islands, and leaves that islands call themselves."""

    regions: list[Region] = field(default_factory=list)
    islands: list[Island] = field(default_factory=list)
    island_leaves: list[str] = field(default_factory=list)


def capture(
    model: nn.Module,
    is_layer: Callable[[nn.Module], bool],
    *,
    example_inputs: Any = None,
    strict: bool = False,
    functional: bool = False,
) -> Capture:
    """Trace ``model`` as far as it can be traced.

    Args:
        model: The model, in any mode; it is the same afterwards.
        is_layer: Says which modules are layers of interest: they are never traced into, and parts
            of the model without any of them are left alone.
        example_inputs: A tensor or a tuple of arguments. When given and the whole model was traced,
            its graph must compute on them what the model computes, or the model becomes an island.
        strict: Refuse islands.
        functional: Also trace parts that hold no layer but weight matrices of their own.

    Returns:
        The regions, islands and single layers, in ``named_modules()`` order.

    Raises:
        ModelError: With ``strict``, if some part cannot be traced; lists the reasons.
    """

    def is_wanted(module: nn.Module) -> bool:
        return is_layer(module) or (functional and _owns_matrix(module))

    walk = _Walk(is_layer, is_wanted)
    walk.visit(model, "")
    found = walk.found
    whole = bool(found.regions) and found.regions[0].module is model
    if whole and example_inputs is not None and not _same_outputs(found.regions[0], example_inputs):
        reason = "its traced graph computes something else on example_inputs"
        walk = _Walk(is_layer, is_wanted)
        found = walk.found
        found.islands.append(Island("", type(model).__name__, reason))
        walk.visit_children(model, "")
    blocking = [str(island) for island in found.islands if island.holds_layers]
    if strict and blocking:
        message = "strict=True, but these parts cannot be traced:\n  " + "\n  ".join(blocking)
        raise ModelError(message)
    return found


def _same_outputs(region: Region, example_inputs: Any) -> bool:
    """Compare the graph with the module in eval mode; random state and modes are restored."""
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    model = region.module
    modes = {module: module.training for module in model.modules()}
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            expected = model(*copy.deepcopy(inputs))
            traced = fx.GraphModule(model, copy.deepcopy(region.graph))
            actual = traced(*copy.deepcopy(inputs))
    finally:
        for module, mode in modes.items():
            module.training = mode
    return _equal(expected, actual)


def _equal(a: Any, b: Any) -> bool:
    left, left_spec = tree_flatten(a)
    right, right_spec = tree_flatten(b)
    return left_spec == right_spec and all(
        torch.equal(x, y)
        if isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
        else bool(x == y)
        for x, y in zip(left, right, strict=True)
    )


class _Walk:
    """Visits a model from its root and decides what becomes a region and what an island."""

    def __init__(
        self, is_layer: Callable[[nn.Module], bool], is_wanted: Callable[[nn.Module], bool]
    ) -> None:
        self.found = Capture()
        self._is_layer = is_layer
        self._is_wanted = is_wanted
        self._seen: set[nn.Module] = set()

    def visit(self, module: nn.Module, name: str) -> None:
        """Trace ``module``, or visit its children when it becomes an island."""
        if module in self._seen:
            return
        self._seen.add(module)
        if self._is_layer(module):
            self.found.island_leaves.append(name)
            return
        if not any(self._is_wanted(part) for part in module.modules()):
            return
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            self.visit_children(module, name)
            return
        tracer = IslandTracer(self._is_layer)
        island = tracer.trace_or_explain(module, name)
        if island is not None:
            self.found.islands.append(island)
            self.visit_children(module, name)
            return
        region = Region(name, module, tracer.graph)
        self.found.regions.append(region)
        for path, refusal in tracer.islands.items():
            inner, inner_name = module.get_submodule(path), region.full_name(path)
            holds_layers = any(self._is_layer(part) for part in inner.modules())
            self.found.islands.append(refusal.named(inner_name, holds_layers=holds_layers))
            self.visit_children(inner, inner_name)

    def visit_children(self, module: nn.Module, name: str) -> None:
        """Visit the direct children of an island."""
        for child_name, child in module.named_children():
            self.visit(child, f"{name}.{child_name}" if name else child_name)


def _owns_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))


@dataclass(frozen=True)
class _Refusal:
    type_name: str
    reason: str
    source: str | None = None

    def named(self, name: str, *, holds_layers: bool = True) -> Island:
        return Island(name, self.type_name, self.reason, self.source, holds_layers)


class IslandTracer(fx.Tracer):
    """An ``fx.Tracer`` that turns a sub-module it cannot trace into one opaque call."""

    def __init__(self, is_layer: Callable[[nn.Module], bool]) -> None:
        super().__init__()
        self.proxy_buffer_attributes = True
        self.islands: dict[str, _Refusal] = {}
        self._is_layer = is_layer

    def trace_or_explain(self, module: nn.Module, name: str) -> Island | None:
        """Trace ``module`` into ``self.graph``; return the reason as an :class:`Island` if not."""
        refusal = _refuse_before_tracing(module, self._is_layer) or _refuse_root(module)
        if refusal is None:
            try:
                with _traced_training_flags(module, self, self._is_opaque):
                    self.trace(module)
                _name_original_classes(self.graph)
            except Exception as error:  # user code may raise anything when it meets a proxy
                refusal = _explain(module, error)
        return None if refusal is None else refusal.named(name)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Say what a branch depends on when it is the mode of the module."""
        if obj.node.op == "get_attr" and str(obj.node.target).endswith("training"):
            message = "its forward branches on self.training"
            raise TraceError(message)
        return super().to_bool(obj)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Keep layers, islands, and torch's own modules as one call."""
        return module_qualified_name in self.islands or self._is_opaque(m)

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Trace into ``m``, or record one call to it when that is not possible."""
        path = self.path_of_module(m)
        if self.is_leaf_module(m, path):
            return super().call_module(m, forward, args, kwargs)
        refusal = _refuse_before_tracing(m, self._is_layer)
        if refusal is None:
            last = next(reversed(self.graph.nodes), None)
            stack = list(self.module_stack.items())
            try:
                return super().call_module(m, forward, args, kwargs)
            except Exception as error:  # as above
                refusal = _explain(m, error)
                self._forget_since(last)
                self.module_stack.clear()
                self.module_stack.update(stack)
        self.islands[path] = refusal
        return super().call_module(m, forward, args, kwargs)

    def _is_opaque(self, module: nn.Module) -> bool:
        if self._is_layer(module):
            return True
        if not module.__module__.startswith(("torch.nn", "torch.ao.nn")):
            return False
        return not isinstance(module, nn.Sequential) and not self._owns_layers(module)

    def _owns_layers(self, module: nn.Module) -> bool:
        return any(self._is_layer(child) for child in module.modules())

    def _forget_since(self, last: fx.Node | None) -> None:
        """Erase the nodes that a failed attempt recorded, newest first."""
        for node in reversed(list(self.graph.nodes)):
            if node is last:
                return
            self.graph.erase_node(node)


def _refuse_before_tracing(
    module: nn.Module, is_layer: Callable[[nn.Module], bool]
) -> _Refusal | None:
    """Say why ``module`` must not even be tried: tracing it would silently change it."""
    type_name = type(module).__name__
    if "forward" in module.__dict__:
        return _Refusal(type_name, "its forward was replaced on the instance")
    if module._forward_hooks or module._forward_pre_hooks:
        return _Refusal(type_name, "it has forward hooks, which must run at every call")
    library = module.__module__.startswith("torch.nn")
    if library and not isinstance(module, nn.Sequential) and not is_layer(module):
        owns = any(is_layer(child) for child in module.modules())
        return _Refusal(type_name, "torch.nn container that decides at run time") if owns else None
    return None


def _refuse_root(module: nn.Module) -> _Refusal | None:
    """Refuse signatures that tracing would freeze: ``*args``, ``**kwargs``, ``mask=None``."""
    type_name = type(module).__name__
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return _Refusal(type_name, f"forward takes *{parameter.name}")
        if parameter.default is None:
            reason = f"argument {parameter.name!r} of forward is optional"
            return _Refusal(type_name, reason, _definition(module))
    return None


def _definition(module: nn.Module) -> str | None:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None


def _explain(module: nn.Module, error: Exception) -> _Refusal:
    """Turn what tracing raised into a reason, with the line of the user's code."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    reason = f"it cannot be traced: {text}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_TORCH_DIRECTORY) and frame.filename != _OWN_FILE
    ]
    source = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
    return _Refusal(type(module).__name__, reason, source)


class _TracedTraining:
    """Stands in for ``module.training`` while the module is traced into.

    A forward that hands the flag on, as in ``F.dropout(x, training=self.training)``, records a node
    that reads it at every call; one that branches on it cannot be traced and becomes an island.
    Either way today's mode is not frozen into the graph.
    """

    def __init__(self, tracer: fx.Tracer) -> None:
        self.tracer = tracer

    def __get__(self, module: nn.Module, owner: type) -> Any:
        path = self.tracer.path_of_module(module)
        target = f"{path}.training" if path else "training"
        return self.tracer.create_proxy("get_attr", target, (), {})

    def __set__(self, module: nn.Module, value: bool) -> None:
        message = "its forward changes self.training"
        raise AttributeError(message)


@contextmanager
def _traced_training_flags(
    root: nn.Module, tracer: fx.Tracer, is_opaque: Callable[[nn.Module], bool]
) -> Iterator[None]:
    """Let every module that will be traced into read its ``training`` flag through the graph."""
    flag = {"training": _TracedTraining(tracer)}
    classes = {module: type(module) for module in root.modules() if not is_opaque(module)}
    watched = {cls: _subclass(cls, flag) for cls in set(classes.values())}
    try:
        for module, cls in classes.items():
            module.__class__ = watched[cls]
        yield
    finally:
        for module, cls in classes.items():
            module.__class__ = cls


def _subclass(cls: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (cls,), {**names, **members})


def _name_original_classes(graph: fx.Graph) -> None:
    """Let the nodes name the users' classes again, which pickle can find."""
    for node in graph.nodes:
        node.type = None  # annotations may name local classes
        stack = node.meta.get("nn_module_stack")
        if stack is not None:
            node.meta["nn_module_stack"] = {
                key: (name, _original(cls)) for key, (name, cls) in stack.items()
            }


def _original(cls: type) -> type:
    return cls.__mro__[1] if isinstance(vars(cls).get("training"), _TracedTraining) else cls
