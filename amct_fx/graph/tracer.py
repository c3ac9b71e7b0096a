"""An fx tracer that never gives up: what it cannot trace becomes one opaque call."""

from __future__ import annotations

import inspect
import itertools
import keyword
import sys
import traceback
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.fx.immutable_collections import immutable_dict
from torch.fx.proxy import TraceError

from amct_fx.graph.augmented import Write, refuse_shared_writes
from amct_fx.graph.guards import (
    TORCH_DIRECTORY,
    GuardedProxy,
    State,
    modes,
    original_class,
    refuse_special_calls,
    refuse_unread_questions,
    restored_random_state,
    traced_training_flags,
    unusual_modes,
)
from amct_fx.graph.questions import CodeReader
from amct_fx.graph.ranks import RANK, expect_length, expect_parts, known_length, parts_made

if TYPE_CHECKING:
    from amct_fx.graph.attributes import Watched
    from amct_fx.graph.signature import CallForm

__all__ = ["IslandTracer", "Refusal", "kept_python", "refuse_signature"]

_MARK = "_amct_fx_kept_python"
_ADVICE = "example_inputs show in which form it is called"
_SWITCHES = "its forward switches gradients or autocast"
_OWN_FOLDER = str(Path(__file__).parent)


@dataclass(frozen=True)
class Refusal:
    """Why a module was not traced into, and the line of code that prevents it."""

    type_name: str
    reason: str
    source: str | None = None


@contextmanager
def kept_python(model: nn.Module, names: Iterable[str]) -> Iterator[None]:
    """Make islands of parts that could be traced, while a model is prepared.

    Args:
        model: The float model.
        names: Names of the parts; those that the model lacks are passed over.
    """
    modules = dict(model.named_modules())
    parts = [modules[name] for name in names if name in modules]
    try:
        for part in parts:
            part.__dict__[_MARK] = True
        yield
    finally:
        for part in parts:
            del part.__dict__[_MARK]


class IslandTracer(fx.Tracer):
    """An ``fx.Tracer`` that turns a sub-module it cannot trace into one opaque call."""

    def __init__(
        self,
        is_layer: Callable[[nn.Module], bool],
        form: CallForm | None = None,
        forms: Mapping[nn.Module, CallForm] | None = None,
        reader: CodeReader | None = None,
    ) -> None:
        super().__init__()
        self.proxy_buffer_attributes = True
        self.undecided: set[str] = set()
        self._reads: list[tuple[str, str, Any]] = []
        self._form = form
        self._forms = forms or {}
        self._reader = reader or CodeReader()
        self.islands: dict[str, Refusal] = {}
        self._is_layer = is_layer
        self._modes = modes()
        self._complaint: str | None = None
        self._switching: dict[str, Refusal] = {}
        self._parameter_cache: dict[str, fx.Proxy] = {}
        self.writes: list[Write] = []
        self._opaque: dict[nn.Module, bool] = {}

    def trace_or_explain(self, module: nn.Module) -> Refusal | None:
        """Trace ``module`` into ``self.graph``; return the reason if that is not possible."""
        refusal = self.refusal_of_root(module)
        if refusal is not None:
            return refusal
        self._switching = _parts_that_switch_modes(module, self)
        if "" in self._switching:
            return self._switching[""]
        return self._attempt(module)

    def refusal_of_root(self, module: nn.Module) -> Refusal | None:
        """Say why ``module`` must not even be tried."""
        refusal = self._refuse_before_tracing(module)
        return refuse_signature(module) if refusal is None and self._form is None else refusal

    def _attempt(self, module: nn.Module) -> Refusal | None:
        """Trace ``module`` in the modes of the caller; leave nothing behind if that fails."""
        state = self._state_of(module)
        try:
            with restored_random_state(), traced_training_flags(module, self, self._is_opaque):
                self._modes = modes()
                self.trace(module)
                self._check(state, None)
            _name_original_classes(self.graph)
        except Exception as error:  # user code may raise anything when it meets a proxy
            state.restore()
            return _explain(module, error)
        return None

    def note_read(self, module: nn.Module, name: str, value: Any) -> None:
        """Remember that the graph relies on the value of an attribute."""
        self._reads.append((self.path_of_module(module), name, value))

    @property
    def watched(self) -> Watched:
        """The attributes that the graph relies on, each once."""
        return tuple(
            {(path, name): (path, name, value) for path, name, value in self._reads}.values()
        )

    def note_complaint(self, message: str) -> None:
        """Remember that tracing was refused, even if the forward catches the error."""
        self._complaint = message

    def note_write(self, old: fx.Node, new: fx.Node) -> None:
        """Remember an augmented assignment."""
        self.writes.append(Write(old, new))

    def _check(self, state: State, last: fx.Node | None) -> None:
        """Raise TraceError if the forward that just ran did something a graph cannot hold."""
        if self._complaint is not None:
            raise TraceError(self._complaint)
        state.check()
        refuse_shared_writes(self.graph, self.writes)
        refuse_unread_questions(self._recorded_since(last))

    def _recorded_since(self, last: fx.Node | None) -> list[fx.Node]:
        """Return the nodes after ``last``, newest first."""
        newest_first = reversed(list(self.graph.nodes))
        return list(itertools.takewhile(lambda node: node is not last, newest_first))

    def create_args_for_root(
        self, root_fn: Any, is_module: bool, concrete_args: Any = None
    ) -> tuple[Any, list[Any]]:
        """Make one placeholder for each leaf of the call form, if the root is traced for one."""
        if self._form is None:
            made: tuple[Any, list[Any]] = super().create_args_for_root(
                root_fn, is_module, concrete_args
            )
            return made
        numbers = itertools.count()
        args, kwargs = self._form.build(
            lambda: self.create_proxy("placeholder", f"input_{next(numbers)}", (), {})
        )
        self._note_ranks(self._form, args, kwargs)
        return lambda: root_fn(self.root, *args, **kwargs), []

    def _note_ranks(self, form: CallForm, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Remember the ranks that the arguments of a module had when the example inputs ran."""
        for value, rank in form.ranks(args, kwargs):
            if issubclass(type(value), fx.Proxy) and rank is not None:
                value.node.meta[RANK] = rank

    def length_of(self, obj: fx.Proxy) -> int | None:
        """Return how many parts there are, or sizes where another form of call can be told."""
        parts = parts_made(obj.node)
        if parts is not None:
            return parts
        return None if self._form is None else known_length(obj.node)

    def iter(self, obj: fx.Proxy) -> Iterator[Any]:
        """Unpack a shape of known rank, or the parts of a tensor."""
        parts = parts_made(obj.node)
        if parts is not None:
            self.create_proxy("call_function", expect_parts, (obj, parts), {})
            return iter([obj[index] for index in range(parts)])  # type: ignore[index]
        length = self.length_of(obj)
        if length is None:
            self.note_complaint("its forward iterates over a value")
            unpacked: Iterator[Any] = super().iter(obj)
            return unpacked
        sizes = self.create_proxy("call_function", expect_length, (obj, length), {})
        return iter([sizes[index] for index in range(length)])  # type: ignore[index]

    def proxy(self, node: fx.Node) -> fx.Proxy:
        """Make a proxy that refuses questions about its type."""
        return GuardedProxy(node, self)

    def create_node(self, kind: str, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Record a node, unless a context manager in the forward changes what it would do."""
        if kind in ("call_module", "get_attr") and not _can_be_written(target):
            message = f"the code of a graph cannot hold the name {target!r}"
            self.note_complaint(message)
            raise TraceError(message)
        if modes() != self._modes:
            message = _SWITCHES
            self.note_complaint(message)
            raise TraceError(message)
        refuse_special_calls(sys._getframe(1))
        return super().create_node(kind, target, *args, **kwargs)

    def create_arg(self, a: Any) -> Any:
        """Keep the class of a dict, which fx would make a plain one."""
        kind = type(a)
        if not issubclass(kind, dict) or kind in (dict, immutable_dict):
            return super().create_arg(a)
        if is_dataclass(a):
            values = {item.name: self.create_arg(getattr(a, item.name)) for item in fields(a)}
            return self.create_node("call_function", kind, (), values)
        if kind is OrderedDict:
            pairs = [(key, self.create_arg(value)) for key, value in a.items()]
            return self.create_node("call_function", kind, (pairs,), {})
        message = f"its forward makes a {kind.__name__}, which a graph would turn into a dict"
        raise TraceError(message)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        """Read an attribute of a module; remember fx's cache, which may hold erased nodes."""
        self._parameter_cache = parameter_proxy_cache
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Say what a branch depends on when it is the mode of the module."""
        if reads_training(obj.node):
            message = "its forward branches on self.training"
            self.note_complaint(message)
            raise TraceError(message)
        self.note_complaint(
            "symbolically traced variables cannot be used as inputs to control flow"
        )
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
        refusal = self._refuse_before_tracing(m) or self._switching.get(path)
        self._note_call(m, path, args, kwargs)
        if refusal is None:
            last = next(iter(reversed(self.graph.nodes)), None)
            stack, reads = list(self.module_stack.items()), len(self._reads)
            state = self._state_of(m)
            try:
                result = super().call_module(m, forward, args, kwargs)
                self._check(state, last)
            except Exception as error:  # as above
                refusal = _explain(m, error)
                self._complaint = None
                state.restore()
                self._forget_since(last)
                del self._reads[reads:]
                self.module_stack.clear()
                self.module_stack.update(stack)
            else:
                return result
        self.islands[path] = refusal
        return super().call_module(m, forward, args, kwargs)

    def _note_call(
        self, m: nn.Module, path: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Remember what a call tells about ranks, and parts that another form may not reach."""
        if self._form is None:
            return
        if refuse_signature(m) or _passes_constants(args, kwargs):
            self.undecided.add(path)
        if m in self._forms:
            self._note_ranks(self._forms[m], args, kwargs)

    def _refuse_before_tracing(self, module: nn.Module) -> Refusal | None:
        refusal = _refuse_before_tracing(module, self._is_layer)
        if refusal is not None or module.__module__.startswith("torch.nn"):
            return refusal
        cls = original_class(type(module))
        question = self._reader.question_in(module, cls)
        return None if question is None else Refusal(cls.__name__, *question)

    def _state_of(self, module: nn.Module) -> State:
        generators = [
            generator
            for part in module.modules()
            for generator in self._reader.generators_of(part, original_class(type(part)))
        ]
        return State(module, generators)

    def _is_opaque(self, module: nn.Module) -> bool:
        if module not in self._opaque:
            self._opaque[module] = self._is_one_call(module)
        return self._opaque[module]

    def _is_one_call(self, module: nn.Module) -> bool:
        if self._is_layer(module):
            return True
        if not module.__module__.startswith(("torch.nn", "torch.ao.nn")):
            return False
        return not isinstance(module, nn.Sequential) and not self._owns_layers(module)

    def _owns_layers(self, module: nn.Module) -> bool:
        return any(self._is_layer(child) for child in module.modules())

    def _forget_since(self, last: fx.Node | None) -> None:
        """Erase the nodes that a failed attempt recorded, newest first."""
        for node in self._recorded_since(last):
            self.graph.erase_node(node)
        alive = set(self.graph.nodes)
        for name, proxy in list(self._parameter_cache.items()):
            if proxy.node not in alive:
                del self._parameter_cache[name]


def reads_training(node: fx.Node) -> bool:
    """Say whether a node reads the training flag of a module."""
    return node.op == "get_attr" and str(node.target).rpartition(".")[2] == "training"


def _can_be_written(path: str) -> bool:
    """Say whether fx can name a part in code: it writes ``self.a``, or ``getattr(self, "a-b")``."""
    parts = path.split(".")
    return not any(keyword.iskeyword(part) or not set('"\\\r\n').isdisjoint(part) for part in parts)


def _parts_that_switch_modes(module: nn.Module, tracer: IslandTracer) -> dict[str, Refusal]:
    """Find the parts that switch gradients or autocast, in a trial that is thrown away.

    In the modes of the caller ``autocast(enabled=False)`` would change nothing and not show; in the
    modes of the trial, constants that a forward computes would come out in half precision.
    """
    trial = IslandTracer(tracer._is_layer, tracer._form, tracer._forms, tracer._reader)
    with unusual_modes():
        refusal = trial._attempt(module)
    found = {**trial.islands, **({} if refusal is None else {"": refusal})}
    return {path: refusal for path, refusal in found.items() if _SWITCHES in refusal.reason}


def _refuse_before_tracing(
    module: nn.Module, is_layer: Callable[[nn.Module], bool]
) -> Refusal | None:
    """Say why ``module`` must not even be tried: tracing it would silently change it."""
    type_name = type(module).__name__
    if _MARK in module.__dict__:
        return Refusal(type_name, "it was not traced when the checkpoint was saved")
    if "forward" in module.__dict__:
        return Refusal(type_name, "its forward was replaced on the instance")
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    if any((*hooks, module._backward_hooks, module._backward_pre_hooks)):
        return Refusal(type_name, "it has hooks, which must run at every call")
    library = module.__module__.startswith("torch.nn")
    if library and not isinstance(module, nn.Sequential) and not is_layer(module):
        owns = any(is_layer(child) for child in module.modules())
        return Refusal(type_name, "torch.nn container that decides at run time") if owns else None
    return None


def refuse_signature(module: nn.Module) -> Refusal | None:
    """Refuse what tracing would freeze: ``*args``, ``**kwargs``, ``mask=None``.

    Args:
        module: A module that is to be traced, with no known form of call.
    """
    type_name = type(module).__name__
    for parameter in inspect.signature(module.forward).parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            return Refusal(type_name, f"forward takes *{parameter.name}; {_ADVICE}")
        if parameter.default is None:
            reason = f"argument {parameter.name!r} of forward is optional; {_ADVICE}"
            return Refusal(type_name, reason, _definition(module))
    return None


def _passes_constants(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Say whether a traced call passes anything but values of the graph."""
    values = [*args, *kwargs.values()]
    return not all(issubclass(type(value), (fx.Proxy, torch.Tensor)) for value in values)


def _definition(module: nn.Module) -> str | None:
    code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else None


def _explain(module: nn.Module, error: Exception) -> Refusal:
    """Turn what tracing raised into a reason, with the line of the user's code."""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    reason = f"it cannot be traced: {text}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith((TORCH_DIRECTORY, _OWN_FOLDER))
    ]
    source = f"{frames[-1].filename}:{frames[-1].lineno}" if frames else None
    return Refusal(type(module).__name__, reason, source)


def _name_original_classes(graph: fx.Graph) -> None:
    """Let the nodes name the users' classes again, which pickle can find."""
    for node in graph.nodes:
        node.type = None  # annotations may name local classes
        stack = node.meta.get("nn_module_stack")
        if stack is not None:
            node.meta["nn_module_stack"] = {
                key: (name, original_class(cls)) for key, (name, cls) in stack.items()
            }
