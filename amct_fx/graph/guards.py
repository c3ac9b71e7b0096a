"""What tracing would change without a word, turned into an error that makes an island.

An fx graph records operations on proxies and nothing else. These guards notice the rest: code
under ``no_grad`` or autocast, random numbers that do not depend on a proxy, attributes that forward
writes, questions about the type of a proxy, and the training flag.
"""

from __future__ import annotations

import dis
import os
import pickle
import random
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partialmethod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import fx, nn
from torch.fx.proxy import Attribute, TraceError

from amct_fx.graph.attributes import note_reads
from amct_fx.graph.augmented import OPERATORS
from amct_fx.graph.questions import GENERATORS

if TYPE_CHECKING:
    from types import CodeType, FrameType

__all__ = [
    "TORCH_DIRECTORY",
    "GuardedProxy",
    "State",
    "Unregistered",
    "constant_remover",
    "constants_removed",
    "modes",
    "original_class",
    "refuse_special_calls",
    "refuse_unread_questions",
    "restored_random_state",
    "traced_training_flags",
    "unusual_modes",
]

TORCH_DIRECTORY = str(Path(torch.__file__).parent)
ANSWERED = "amct_fx_answered"
"""Marks a node that read the training flag and was told a mode."""

_QUESTIONS = ("training", "dtype", "device", "requires_grad", "is_cuda", "layout")
_SPECIAL = {
    "apply": os.path.join("torch", "autograd", "function.py"),  # noqa: PTH118  the end of a path
    "checkpoint": os.path.join("torch", "utils", "checkpoint.py"),  # noqa: PTH118
}
_SPECIAL_NAMES = {"apply": "an autograd.Function", "checkpoint": "torch.utils.checkpoint"}
_TRACE_FILE = fx.Tracer.trace.__code__.co_filename
_CONSTANT = "_tensor_constant"
"""Prefix of the attributes under which fx keeps constant tensors at the root."""
_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), nn.Parameter})
"""Classes whose values hold nothing that could change unseen; most attributes are of these."""
_EMPTY: Mapping[type, Any] = {dict: {}, OrderedDict: {}, list: []}
"""The content of empty containers, such as the hooks of most modules."""


class GuardedProxy(fx.Proxy):
    """A proxy that refuses to say of which class it is: the answer would choose a branch for ever.

    torch itself may ask; it takes proxies for what they are.
    """

    def __getattr__(self, k: str) -> Any:
        """Record at once what may be compared by identity; fx would wait for a use."""
        if k in _QUESTIONS:
            return self.tracer.create_proxy("call_function", getattr, (self, k), {})
        return _GuardedAttribute(self, k)

    def __len__(self) -> int:
        """Return the length of a shape that is known, for ``[*x.shape]``, which asks."""
        length: int | None = getattr(self.tracer, "length_of", lambda _: None)(self)
        if length is None:
            self._refuse("length")
        return length

    def __float__(self) -> float:
        """Refuse to be a number, even where the code catches the error."""
        self._refuse("value")

    def __int__(self) -> int:
        """Refuse to be a number, even where the code catches the error."""
        self._refuse("value")

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse ``tensor.data = …`` and its like, which a graph would lose."""
        if hasattr(torch.Tensor, name):
            message = f"its forward sets {name} of a tensor"
            self._complain(message)
            raise TraceError(message)
        super().__setattr__(name, value)

    def _augment(self, compute: Callable[[Any, Any], Any], other: Any) -> Any:
        """Record ``self += other`` as ``self + other``, as fx does, and tell the tracer."""
        result = compute(self, other)
        note = getattr(self.tracer, "note_write", None)
        if note is not None:
            note(self.node, result.node)
        return result

    def _refuse(self, what: str) -> NoReturn:
        message = f"its forward asks for the {what} of a tensor"
        self._complain(message)
        raise TraceError(message)

    def _complain(self, message: str) -> None:
        note = getattr(self.tracer, "note_complaint", None)
        if note is not None:
            note(message)

    def _class_for_outsiders(self) -> type:
        """Refuse ``isinstance(value, …)`` in code outside torch."""
        if _may_ask_for_types(sys._getframe(1).f_code):
            message = "its forward asks for the type of a value"
            self._complain(message)
            raise TraceError(message)
        return GuardedProxy

    __class__: Any = property(_class_for_outsiders)


for _name, _compute in OPERATORS.items():
    setattr(GuardedProxy, _name, partialmethod(GuardedProxy._augment, _compute))


def _may_ask_for_types(code: CodeType) -> bool:
    """Say whether it may be the code itself that asks, not a function of torch that it calls.

    Functions written in C, such as ``torch.cat``, look at arguments in the frame of the caller.
    """
    if code.co_filename.startswith(TORCH_DIRECTORY):
        return code.co_name == "is_tensor"
    questions = {"isinstance", "issubclass", "__class__"}
    names = questions.intersection((*code.co_names, *code.co_varnames, *code.co_freevars))
    return bool(names) or any(step.opname == "MATCH_CLASS" for step in dis.get_instructions(code))


class _GuardedAttribute(Attribute, GuardedProxy):
    """What ``value.name`` gives: a node once it is used, a method if it is called."""

    @property
    def node(self) -> fx.Node:
        """The node; made anew if a failed attempt has erased it."""
        if self._node is not None and self._node._erased:
            self._node = None
        return super().node

    @node.setter
    def node(self, node: fx.Node) -> None:
        self._node = node


def modes() -> tuple[Any, ...]:
    """Return the modes that context managers in a forward may change."""
    autocast = [
        (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in ("cpu", "cuda")
    ]
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), *autocast


def refuse_special_calls(frame: FrameType | None) -> None:
    """Raise TraceError under calls whose meaning a graph would lose.

    Args:
        frame: Where the record of an operation starts; its callers are looked at.
    """
    while frame is not None:
        code = frame.f_code
        if code.co_name in _SPECIAL and code.co_filename.endswith(_SPECIAL[code.co_name]):
            message = f"its forward calls {_SPECIAL_NAMES[code.co_name]}"
            raise TraceError(message)
        if code.co_filename == _TRACE_FILE and code.co_name == "trace":
            return
        frame = frame.f_back


@contextmanager
def unusual_modes() -> Iterator[None]:
    """Trace in modes that no forward asks for, so that every context manager in it shows."""
    with torch.enable_grad(), torch.autocast("cpu", torch.float16):
        if torch.cuda.is_available():
            with torch.autocast("cuda", torch.float16):
                yield
        else:
            yield


def refuse_unread_questions(nodes: Iterable[fx.Node]) -> None:
    """Raise TraceError for attributes that were read and then compared by identity.

    ``self.training is True`` and ``x.dtype is torch.float16`` ask a proxy, which is neither.

    Args:
        nodes: What a forward recorded.
    """
    for node in nodes:
        asked = node.args[1] if node.target is getattr and len(node.args) > 1 else node.target
        name = str(asked).rpartition(".")[2]
        read = node.op in ("get_attr", "call_function") and name in _QUESTIONS
        if read and not node.users and ANSWERED not in node.meta:
            message = f"its forward compares {name} by identity"
            raise TraceError(message)


class State:
    """What a forward may change besides its result: attributes of its modules, random states.

    Args:
        module: A module that is about to be traced into; its sub-modules are watched too.
        generators: Random generators that are no attributes of a module.
    """

    def __init__(self, module: nn.Module, generators: Sequence[Any] = ()) -> None:
        self._attributes = {part: _Attributes.of(part) for part in module.modules()}
        self._random = _random_states()
        self._generators = [(generator, _drawn(generator)) for generator in generators]

    def check(self) -> None:
        """Raise TraceError if the forward changed anything."""
        for part, before in self._attributes.items():
            changed = _Attributes.of(part).changed_since(before)
            if changed:
                message = f"its forward sets {min(changed)} of a {type(part).__name__}"
                raise TraceError(message)
        own = all(_drawn(generator) == before for generator, before in self._generators)
        if not own or not _same_random_states(_random_states(), self._random):
            message = "its forward draws random numbers that do not depend on its inputs"
            raise TraceError(message)

    def restore(self) -> None:
        """Undo what the forward set."""
        for part, before in self._attributes.items():
            for name in set(vars(part)) - before.values.keys() - {"training"}:
                del part.__dict__[name]
            part.__dict__.update(before.values)
            for name, content in before.contents.items():
                _restore_content(before.values[name], content)
        _set_random_states(self._random)
        for generator, drawn in self._generators:
            _set_drawn(generator, drawn)


def _restore_content(value: Any, content: Any) -> None:
    if isinstance(content, dict):
        target = vars(value) if isinstance(content, _Vars) else value
        target.clear()
        target.update(content)
    elif isinstance(content, list):
        value[:] = content
    elif isinstance(content, _Drawn):
        _set_drawn(value, content)
    elif isinstance(content, tuple) and value._version != content[0]:
        with torch.no_grad():
            value.copy_(content[1])


def constant_remover(model: nn.Module) -> Callable[[], None]:
    """Return what takes away the constant tensors that tracing leaves at ``model`` from now on."""
    before = {module: _constants(module) for module in model.modules()}

    def remove() -> None:
        for module, known in before.items():
            for name in _constants(module) - known:
                delattr(module, name)

    return remove


@contextmanager
def constants_removed(model: nn.Module) -> Iterator[None]:
    """Take away the constant tensors that tracing in the block left at modules of ``model``."""
    remove = constant_remover(model)
    try:
        yield
    finally:
        remove()


def _constants(module: nn.Module) -> set[str]:
    return {name for name in vars(module) if name.startswith(_CONSTANT)}


@contextmanager
def restored_random_state() -> Iterator[None]:
    """Leave the random states as they were."""
    before = _random_states()
    try:
        yield
    finally:
        _set_random_states(before)


class _Attributes(NamedTuple):
    """The attributes of a module, and what may change inside those that are no atoms."""

    values: dict[str, Any]
    contents: dict[str, Any]

    @classmethod
    def of(cls, module: nn.Module) -> _Attributes:
        values = {
            name: value
            for name, value in vars(module).items()
            if name != "training" and not name.startswith(_CONSTANT)
        }
        inner = {
            name: _content(value) for name, value in values.items() if type(value) not in _ATOMS
        }
        return cls(values, inner)

    def changed_since(self, before: _Attributes) -> set[str]:
        """Return the names of attributes that were set, changed inside, or hold proxies."""
        changed = before.values.keys() - self.values.keys()
        for name, value in self.values.items():
            same = name in before.values and value is before.values[name]
            if same and type(value) in _ATOMS:
                continue
            now, old = self.contents.get(name), before.contents.get(name)
            if same and now is not None and now is old:
                continue  # still empty
            if not same or not _same(now, old) or _holds_proxy(value):
                changed.add(name)
        return changed


def _content(value: Any) -> Any:
    """Return what may change inside an attribute: a shallow copy, or a tensor and its version.

    ``type`` is asked, not ``isinstance``: the value may be a guarded proxy.
    """
    kind = type(value)
    if kind in _ATOMS or kind in (tuple, set):
        return None
    if kind in _EMPTY:
        return value.copy() if value else _EMPTY[kind]
    if issubclass(type(value), GENERATORS):
        return _drawn(value)
    if type(value) is torch.Tensor and not value.is_inference():
        return value._version, value.detach().clone()
    plain = not issubclass(type(value), (nn.Module, torch.Tensor, type, fx.Proxy))
    return _Vars(vars(value)) if plain and hasattr(value, "__dict__") else None


class _Drawn(bytes):
    """The state of a random generator."""


def _drawn(generator: Any) -> _Drawn:
    if isinstance(generator, torch.Generator):
        return _Drawn(generator.get_state().numpy().tobytes())
    if isinstance(generator, random.Random):
        return _Drawn(pickle.dumps(generator.getstate()))
    numpy = isinstance(generator, np.random.RandomState)
    return _Drawn(pickle.dumps(generator.get_state() if numpy else generator.bit_generator.state))


def _set_drawn(generator: Any, state: _Drawn) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    elif isinstance(generator, random.Random):
        generator.setstate(pickle.loads(state))
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(pickle.loads(state))
    else:
        generator.bit_generator.state = pickle.loads(state)


class _Vars(dict[str, Any]):
    """The attributes of a plain object."""


def _holds_proxy(value: Any, depth: int = 4) -> bool:
    """Look for proxies in containers and plain objects that hang on an attribute."""
    kind = type(value)
    if kind in _ATOMS:
        return False
    if issubclass(kind, fx.Proxy):
        return True
    if depth == 0 or issubclass(kind, (nn.Module, torch.Tensor, type)):
        return False
    if issubclass(kind, dict):
        return any(_holds_proxy(item, depth - 1) for item in value.values())
    if issubclass(kind, (list, tuple, set, frozenset, deque)):
        return any(_holds_proxy(item, depth - 1) for item in value)
    return any(_holds_proxy(item, depth - 1) for item in getattr(value, "__dict__", {}).values())


def _same(left: Any, right: Any) -> bool:
    """Compare the contents of one attribute at two times."""
    if isinstance(left, _Drawn):
        return bool(left == right)
    if isinstance(left, tuple):
        return bool(left[0] == right[0])
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(left[key] is right[key] for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))
    return True


def _random_states() -> tuple[Any, Any, Any]:
    return torch.get_rng_state(), random.getstate(), np.random.get_state()


def _set_random_states(states: tuple[Any, Any, Any]) -> None:
    torch.set_rng_state(states[0])
    random.setstate(states[1])
    np.random.set_state(states[2])


def _same_random_states(a: tuple[Any, Any, Any], b: tuple[Any, Any, Any]) -> bool:
    numpy = a[2][2] == b[2][2] and bool((a[2][1] == b[2][1]).all())
    return bool(torch.equal(a[0], b[0])) and a[1] == b[1] and numpy


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
        raise TraceError(message)


@contextmanager
def traced_training_flags(
    root: nn.Module, tracer: Any, is_opaque: Callable[[nn.Module], bool]
) -> Iterator[None]:
    """Let every module that will be traced into read its ``training`` flag through the graph.

    Reads of its plain attributes are noted.

    The flags of opaque modules are hidden instead: a forward that asks a child for its mode fails
    to trace and becomes an island.

    Args:
        root: The module to trace.
        tracer: An ``fx.Tracer`` with a method ``note_read``.
        is_opaque: Says which modules are recorded as one call.
    """
    opaque = {module for module in root.modules() if is_opaque(module)}
    classes = {module: type(module) for module in root.modules() if module not in opaque}
    flag = _TracedTraining(tracer)
    watched = {
        cls: _subclass(cls, {"training": flag, "__getattribute__": note_reads(tracer, cls)})
        for cls in set(classes.values())
    }
    hidden = {module: module.__dict__.pop("training") for module in opaque}
    try:
        for module, cls in classes.items():
            module.__class__ = watched[cls]
        yield
    finally:
        for module, cls in classes.items():
            module.__class__ = cls
        for module, mode in hidden.items():
            module.__dict__["training"] = mode


def original_class(cls: type) -> type:
    """Return the user's class of a class that :func:`traced_training_flags` made."""
    return cls.__mro__[2] if isinstance(vars(cls).get("training"), _TracedTraining) else cls


class Unregistered:
    """First base of generated classes: keeps the user's ``__init_subclass__`` from seeing them."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Do nothing, and do not pass it on."""


def _subclass(cls: type[nn.Module], members: dict[str, Any]) -> type[nn.Module]:
    names = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
    return type(cls.__name__, (Unregistered, cls), {**names, **members})
