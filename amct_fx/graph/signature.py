"""The form of a call: which arguments are tensors, which are ``None``, which are constants.

``forward(x, mask=None, return_loss=True)`` is several functions under one name. A graph holds one
of them, so a module with such arguments is traced for the form of call that example inputs show,
and the module that runs the graph compares every later call with that form. A call of another form
runs the user's Python code. Nothing is frozen: only what was compared is.
"""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

__all__ = [
    "CallForm",
    "as_call",
    "call_form",
]

_MISSING = inspect.Parameter.empty
_CONSTANTS = (bool, str, torch.dtype, torch.device, torch.layout, enum.Enum)


@dataclass(frozen=True)
class _Constant:
    """A value that a branch may depend on; every call must pass an equal one."""

    value: Any

    def fits(self, value: Any, leaves: list[Any]) -> bool:
        if self.value is None or value is None:
            return value is self.value
        return type(value) is type(self.value) and bool(value == self.value)

    def build(self, placeholder: Callable[[], Any]) -> Any:
        return self.value

    def __str__(self) -> str:
        return repr(self.value)


@dataclass(frozen=True)
class _Leaf:
    """A tensor of one rank, or a number: the graph takes it as an input, so any will do."""

    kind: str
    rank: int | None = None

    def fits(self, value: Any, leaves: list[Any]) -> bool:
        leaves.append(value)
        return _leaf_kind(value) == self.kind and _rank(value) == self.rank

    def build(self, placeholder: Callable[[], Any]) -> Any:
        return placeholder()

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True)
class _Sequence:
    """A tuple or list of a fixed length."""

    kind: type[tuple[Any, ...]] | type[list[Any]]
    items: tuple[Any, ...]

    def fits(self, value: Any, leaves: list[Any]) -> bool:
        same = type(value) is self.kind and len(value) == len(self.items)
        return same and all(
            item.fits(part, leaves) for item, part in zip(self.items, value, strict=True)
        )

    def build(self, placeholder: Callable[[], Any]) -> Any:
        return self.kind([item.build(placeholder) for item in self.items])

    def __str__(self) -> str:
        text = ", ".join(str(item) for item in self.items)
        return f"[{text}]" if self.kind is list else f"({text})"


@dataclass(frozen=True)
class _Dict:
    """A dict with fixed keys."""

    items: tuple[tuple[str, Any], ...]

    def fits(self, value: Any, leaves: list[Any]) -> bool:
        same = type(value) is dict and len(value) == len(self.items)
        return same and all(
            key in value and item.fits(value[key], leaves) for key, item in self.items
        )

    def build(self, placeholder: Callable[[], Any]) -> Any:
        return {key: item.build(placeholder) for key, item in self.items}

    def __str__(self) -> str:
        return "{" + ", ".join(f"{key!r}: {item}" for key, item in self.items) + "}"


@dataclass(frozen=True)
class _Parameters:
    """The named parameters of a forward, in order, with their defaults.

    Attributes:
        positional: Names and defaults of what may be passed by position.
        keywords: Names and defaults of what must be passed by name.
    """

    positional: tuple[tuple[str, Any], ...]
    keywords: tuple[tuple[str, Any], ...]

    def normal(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Write a call with all named arguments by position; ``None`` if one is missing."""
        rest = dict(kwargs)
        values = list(args)
        for name, default in self.positional[len(args) :]:
            values.append(rest.pop(name, default))
        for name, default in self.keywords:
            rest.setdefault(name, default)
        if any(value is _MISSING for value in (*values, *rest.values())):
            return None
        return tuple(values), rest


@dataclass(frozen=True)
class CallForm:
    """What must be the same in every call that a graph may serve.

    Attributes:
        parameters: Bring a call into the form that is compared; ``None`` to compare it literally.
        args: The positional arguments.
        kwargs: The keyword arguments.
        undecided: Names of the inner parts that the traced code called with constants: calls of
            another form may reach them in another way.

    Example:
        >>> class Masked(nn.Module):
        ...     def forward(self, x, mask=None): ...
        >>> form = call_form(Masked(), (torch.ones(2),), {})
        >>> print(form)
        (tensor, None)
        >>> form.leaves((torch.zeros(3),), {"mask": None})
        [tensor([0., 0., 0.])]
        >>> form.leaves((torch.zeros(3), torch.ones(3)), {}) is None
        True
    """

    parameters: _Parameters | None
    args: _Sequence
    kwargs: _Dict
    undecided: frozenset[str] = frozenset()

    @property
    def has_none(self) -> bool:
        """Whether any argument is ``None``, which no placeholder can stand for."""
        return any(isinstance(part, _Constant) and part.value is None for part in self._parts())

    def _parts(self) -> Iterator[Any]:
        yield from _flat(self.args)
        yield from _flat(self.kwargs)

    def leaves(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Return the inputs of the graph, or ``None`` for a call of another form."""
        call = (args, kwargs) if self.parameters is None else self.parameters.normal(args, kwargs)
        found: list[Any] = []
        if call is None or not self.args.fits(call[0], found):
            return None
        return found if self.kwargs.fits(call[1], found) else None

    def ranks(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Iterator[tuple[Any, int | None]]:
        """Yield the arguments of another call, each with the rank of the tensor in this one."""
        call = (args, kwargs) if self.parameters is None else self.parameters.normal(args, kwargs)
        if call is None or len(call[0]) != len(self.args.items):
            return
        named = dict(self.kwargs.items)
        pairs = [*zip(call[0], self.args.items, strict=True)]
        pairs += [(value, named.get(name)) for name, value in call[1].items()]
        for value, item in pairs:
            yield value, item.rank if isinstance(item, _Leaf) else None

    def build(self, placeholder: Callable[[], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Make a call of this form out of what ``placeholder`` returns, one for each leaf."""
        return self.args.build(placeholder), self.kwargs.build(placeholder)

    def __str__(self) -> str:
        """Return the arguments as they would be written."""
        named = [f"{key}={item}" for key, item in self.kwargs.items]
        return f"({', '.join([str(item) for item in self.args.items] + named)})"


def call_form(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    known: dict[type[nn.Module], Any] | None = None,
) -> CallForm | None:
    """Describe a call of ``module``; ``None`` if an argument is an object that nothing is known of.

    Args:
        module: What was called.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        known: What is known of classes that were called before; the class is added.
    """
    cls, found = type(module), {} if known is None else known
    if cls not in found:
        found[cls] = _parameters_of(cls)
    parameters = found[cls]
    call = (args, dict(kwargs)) if parameters is None else parameters.normal(args, kwargs)
    if call is None:
        return None
    try:
        described, named = _describe(tuple(call[0])), _describe(call[1])
    except TypeError:
        return None
    assert isinstance(described, _Sequence)
    assert isinstance(named, _Dict)
    return CallForm(parameters, described, named)


def as_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a call: a tuple has them by position, a dict by name.

    Example:
        >>> as_call({"input_ids": 1}), as_call(2), as_call(({"one": "dict"},))
        (((), {'input_ids': 1}), ((2,), {}), (({'one': 'dict'},), {}))
    """
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    return (example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)), {}


def _parameters_of(cls: type[nn.Module]) -> _Parameters | None:
    """Return the parameters of a forward; ``None`` under a decorator, which may see the call."""
    if hasattr(cls.forward, "__wrapped__"):
        return None
    parameters = list(inspect.signature(cls.forward).parameters.values())[1:]
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    return _Parameters(
        tuple((p.name, p.default) for p in positional), tuple((p.name, p.default) for p in keywords)
    )


def _describe(value: Any) -> Any:
    kind = type(value)
    if value is None or isinstance(value, _CONSTANTS):
        return _Constant(value)
    if _leaf_kind(value) is not None:
        return _Leaf(str(_leaf_kind(value)), _rank(value))
    if kind in (tuple, list):
        return _Sequence(kind, tuple(_describe(item) for item in value))
    if kind is dict:
        return _Dict(tuple((key, _describe(item)) for key, item in value.items()))
    message = f"{kind.__name__} is no part of a call form"
    raise TypeError(message)


def _flat(part: Any) -> Iterator[Any]:
    if isinstance(part, _Sequence):
        for item in part.items:
            yield from _flat(item)
    elif isinstance(part, _Dict):
        for _, item in part.items:
            yield from _flat(item)
    else:
        yield part


def _rank(value: Any) -> int | None:
    return value.dim() if isinstance(value, torch.Tensor) else None


def _leaf_kind(value: Any) -> str | None:
    """Return ``"tensor"``, ``"int"`` or ``"float"``, ``None`` for anything else."""
    if isinstance(value, torch.Tensor):
        return "tensor"
    if isinstance(value, (int, torch.SymInt)) and not isinstance(value, bool):
        return "int"
    return "float" if isinstance(value, (float, torch.SymFloat)) else None
