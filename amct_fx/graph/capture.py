"""Tracing a whole model: regions, and islands for what cannot be traced.

An *island* is a module that stays the Python module it was. Its children are traced on their own,
down to single layers, so every model can be prepared. A *region* is a module whose forward was
traced. Source: design.md, "How prepare works", step 2.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten

from amct_fx.errors import ModelError
from amct_fx.graph.augmented import writes_inputs
from amct_fx.graph.facts import layer_calls
from amct_fx.graph.questions import CodeReader
from amct_fx.graph.quick import trace_module
from amct_fx.graph.recording import Recording, record_calls
from amct_fx.graph.region import GraphForward, fx_graph_of, guard_of
from amct_fx.graph.runtime_guard import OPEN, Guard
from amct_fx.graph.shapes import ShapeFacts, tried_on
from amct_fx.graph.signature import CallForm, as_call
from amct_fx.graph.tracer import IslandTracer, Refusal, refuse_signature
from amct_fx.graph.trial import trial

__all__ = ["Capture", "Island", "Region", "capture"]


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
    """A traced module: its dotted name in the model, the module, and its graph.

    Attributes:
        guard: What the graph relies on.
    """

    name: str
    module: nn.Module
    graph: fx.Graph
    guard: Guard = OPEN

    def full_name(self, target: str) -> str:
        """Return the name in the model of ``target``, which is relative to the region."""
        return f"{self.name}.{target}" if self.name else target

    def local_name(self, name: str) -> str:
        """Return what :meth:`full_name` made ``name`` from."""
        return name.removeprefix(f"{self.name}.") if self.name else name


@dataclass
class Capture:
    """Everything tracing found.

    Attributes:
        regions: Traced parts.
        islands: Parts that stay Python.
        island_leaves: Names of the layers that quantize their own input, since Python calls them.
        shared_inputs: Names of those among them that read one tensor of the example inputs' run.
        facts: The shapes that the example inputs showed, where one graph holds the whole model.
    """

    regions: list[Region] = field(default_factory=list)
    islands: list[Island] = field(default_factory=list)
    island_leaves: list[str] = field(default_factory=list)
    shared_inputs: list[list[str]] = field(default_factory=list)
    facts: ShapeFacts | None = None

    def why_not_traced(self, name: str) -> str | None:
        """Say which part that stays Python a layer is in, and why; ``None`` if it is in none."""
        around = [
            part for part in self.islands if name.startswith(f"{part.name}." * bool(part.name))
        ]
        if not around:
            return None
        inner = max(around, key=lambda part: len(part.name))
        return f"{inner.name or 'the model'} is not traced: {inner.reason}"


def capture(
    model: nn.Module,
    is_layer: Callable[[nn.Module], bool],
    *,
    example_inputs: Any = None,
    strict: bool = False,
    functional: bool = False,
    also: Callable[[nn.Module], bool] | None = None,
    calls: Recording | None = None,
) -> Capture:
    """Trace ``model`` as far as it can be traced.

    Args:
        model: The model, in any mode; it is the same afterwards.
        is_layer: Says which modules are layers of interest: they are never traced into, and parts
            of the model without any of them are left alone.
        example_inputs: A tensor, a tuple of arguments, or a dict of them by name. They show in
            which form each part is called: ``None`` for an optional argument, the value of a flag.
            If the whole model was traced, its graph must compute on them what the model
            computes, or the model becomes an island.
        strict: Refuse islands.
        functional: Also trace parts that hold no layer but weight matrices of their own.
        also: Says which other modules make a part worth tracing.
        calls: What a run on ``example_inputs`` showed, if there was one already.

    Returns:
        The regions, islands and single layers, in ``named_modules()`` order.

    Raises:
        ModelError: With ``strict``, if some part cannot be traced; lists the reasons.
    """

    def is_wanted(module: nn.Module) -> bool:
        other = functional and _owns_matrix(module)
        return is_layer(module) or other or (also is not None and also(module))

    if calls is None:
        calls = Recording() if example_inputs is None else record_calls(model, example_inputs)
    walk = _Walk(is_layer, is_wanted, calls.forms)
    walk.visit(model, "")
    walk.keep_uncalled_layers()
    found = walk.found
    whole = bool(found.regions) and found.regions[0].module is model
    if whole and calls.ran:
        found.facts = _facts(found.regions[0], example_inputs, calls)
    if whole and calls.dry is not None and found.facts is None:  # values may show that it is right
        calls = record_calls(model, example_inputs, dry=False)
        found.facts = _facts(found.regions[0], example_inputs, calls)
    if whole and calls.ran and found.facts is None:
        reason = "its traced graph computes something else on example_inputs"
        walk = _Walk(is_layer, is_wanted, calls.forms)
        found = walk.found
        found.islands.append(Island("", type(model).__name__, reason))
        walk.visit_children(model, "")
        walk.keep_uncalled_layers()
    if len(found.regions) > 1:
        found.facts = None  # the graph of the whole says nothing of the others
    names = {model.get_submodule(name): name for name in found.island_leaves}
    for group in calls.readers_of_one_tensor(names):
        found.shared_inputs.append([names[layer] for layer in group])
    blocking = [str(island) for island in found.islands if island.holds_layers]
    if strict and blocking:
        message = "strict=True, but these parts cannot be traced:\n  " + "\n  ".join(blocking)
        raise ModelError(message)
    return found


def _facts(region: Region, example_inputs: Any, calls: Recording) -> ShapeFacts | None:
    """Return the shapes in the graph of the whole model; ``None`` if it computes something else.

    The graph is compared with what the model returned when its calls were recorded. Hooks, as those
    that record, let some of torch's modules take another path; where there are differences, the
    model is run again without them.
    """
    if calls.dry is not None:
        return _facts_if_equal(region, example_inputs, calls, calls.outputs)
    with torch.random.fork_rng(devices=[]):
        assert calls.random_state is not None
        torch.set_rng_state(calls.random_state)
        facts = _facts_if_equal(region, example_inputs, calls, calls.outputs)
    if facts is not None:
        return facts
    args, kwargs = copy.deepcopy(as_call(example_inputs))
    with torch.random.fork_rng(devices=[]):
        with trial(region.module), torch.no_grad():
            expected = region.module(*args, **kwargs)
        plain = replace(calls, results={})
        return _facts_if_equal(region, example_inputs, plain, expected)


def _facts_if_equal(
    region: Region, example_inputs: Any, calls: Recording, expected: Any
) -> ShapeFacts | None:
    """Run the graph; where it cannot even run, it does not return what the model did."""
    try:
        outputs, facts = tried_on(region, example_inputs, calls)
        return facts if _equal(expected, outputs) else None
    except Exception:  # the model itself ran: `for part in x.chunk(3)` made fewer parts
        return None


def _equal(a: Any, b: Any) -> bool:
    """Compare two results of any structure; what cannot be compared is taken to be equal."""
    left, left_spec = tree_flatten(a)
    right, right_spec = tree_flatten(b)
    return left_spec == right_spec and all(map(_equal_leaf, left, right))


def _equal_leaf(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        both = isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor)
        if a is b:
            return True
        return both and a.shape == b.shape and torch.allclose(a, b, equal_nan=True)
    if type(a) is not type(b):
        return False
    if is_dataclass(a) or hasattr(a, "__dict__"):
        return _equal(vars(a), vars(b))
    try:
        return bool(a == b)
    except Exception:  # the objects are the user's
        return True


class _Walk:
    """Visits a model from its root and decides what becomes a region and what an island."""

    def __init__(
        self,
        is_layer: Callable[[nn.Module], bool],
        is_wanted: Callable[[nn.Module], bool],
        forms: Mapping[nn.Module, CallForm],
    ) -> None:
        self.found = Capture()
        self._is_layer = is_layer
        self._is_wanted = is_wanted
        self._forms = forms
        self._reader = CodeReader()
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
        if isinstance(module, (fx.GraphModule, GraphForward)):
            self._adopt_graph(module, name)
            return
        tracer, form, refusal = self._trace(module)
        if refusal is None and name and writes_inputs(tracer.writes):
            refusal = Refusal(type(module).__name__, "its forward changes its input (as x += 1)")
        if refusal is not None:
            self._add_island(module, name, refusal)
            return
        region = Region(name, module, tracer.graph, Guard(form, tracer.watched))
        self.found.regions.append(region)
        for path, refusal in tracer.islands.items():
            self._add_island(module.get_submodule(path), region.full_name(path), refusal)

    def _trace(self, module: nn.Module) -> tuple[IslandTracer, CallForm | None, Refusal | None]:
        """Trace for every call, or for the form of call that the example inputs showed."""
        form = self._forms.get(module)
        tracer = IslandTracer(self._is_layer)
        refusal = refuse_signature(module)
        if refusal is None and (form is None or not form.has_none):
            tracer, refusal = trace_module(module, self._is_layer, reader=self._reader)
            if refusal is None:
                return tracer, None, None
        if form is None:
            return tracer, None, refusal
        tracer, refusal = trace_module(module, self._is_layer, form, self._forms, self._reader)
        return tracer, replace(form, undecided=frozenset(tracer.undecided)), refusal

    def keep_uncalled_layers(self) -> None:
        """Let layers that only calls of another form reach look after themselves."""
        regions = self.found.regions
        called = {m for region in regions for m in layer_calls(region.graph, region.module)}
        for region in regions:
            for path, module in region.module.named_modules() if region.guard.form else ():
                if self._is_layer(module) and not {module} & (called | self._seen):
                    self._seen.add(module)
                    self.found.island_leaves.append(region.full_name(path))

    def _adopt_graph(self, module: fx.GraphModule | GraphForward, name: str) -> None:
        """Take a graph that a module runs as it is; what it calls whole is an island."""
        graph = module.graph if isinstance(module, fx.GraphModule) else fx_graph_of(module)
        region = Region(name, module, copy.deepcopy(graph), guard_of(module))
        self.found.regions.append(region)
        for node in region.graph.nodes:
            node.type = None
            inner = module.get_submodule(str(node.target)) if node.op == "call_module" else None
            if inner is None or self._is_layer(inner) or inner in self._seen:
                continue
            if any(self._is_layer(part) for part in inner.modules()):
                self._seen.add(inner)
                reason = "the fx graph of the model calls it as one operation"
                refusal = Refusal(type(inner).__name__, reason)
                self._add_island(inner, region.full_name(str(node.target)), refusal)

    def _add_island(self, module: nn.Module, name: str, refusal: Refusal) -> None:
        holds_layers = any(self._is_layer(part) for part in module.modules())
        self.found.islands.append(
            Island(name, refusal.type_name, refusal.reason, refusal.source, holds_layers)
        )
        self.visit_children(module, name)

    def visit_children(self, module: nn.Module, name: str) -> None:
        """Visit the direct children of an island."""
        for child_name, child in module.named_children():
            self.visit(child, f"{name}.{child_name}" if name else child_name)


def _owns_matrix(module: nn.Module) -> bool:
    return any(parameter.dim() > 1 for parameter in module.parameters(recurse=False))
