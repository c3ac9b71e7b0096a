"""Questions that a forward asks and that tracing cannot see, found in its code.

A proxy cannot notice ``type(x) is Tensor`` or ``hasattr(x, "scores")``, and nothing is recorded for
``torch.is_grad_enabled()`` or for an autograd function that returns its argument. The graph would
hold today's answer for ever. So the code that a forward can reach by name is read.
"""

from __future__ import annotations

import dis
import inspect
import random
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["GENERATORS", "CodeReader", "Question"]

GENERATORS = (random.Random, torch.Generator, np.random.Generator, np.random.RandomState)
"""Objects that draw random numbers from a state of their own."""

Question = tuple[str, str]
"""The reason why a forward cannot be traced, and ``file:line``."""

_MODES = {
    "is_grad_enabled": "whether gradients are recorded",
    "is_inference_mode_enabled": "whether inference mode is on",
    "is_autocast_enabled": "whether autocast is on",
    "is_autocast_cpu_enabled": "whether autocast is on",
    "get_autocast_dtype": "for the dtype of autocast",
    "get_autocast_gpu_dtype": "for the dtype of autocast",
    "get_autocast_cpu_dtype": "for the dtype of autocast",
}
_COMPARISONS = ("IS_OP", "COMPARE_OP", "CONTAINS_OP")
_NEAR = 8
"""How many instructions after ``type(x)`` a comparison of it is expected."""
_DEPTH = 4
"""How many calls deep functions are followed."""
_LIBRARIES = ("torch.", "amct_fx.", "numpy.")


class CodeReader:
    """Reads the code of each class once."""

    def __init__(self) -> None:
        self._read: dict[Any, tuple[Question | None, list[Any]]] = {}

    def question_in(self, module: nn.Module, cls: type[nn.Module]) -> Question | None:
        """Find a question in a forward, or in what it calls by name.

        Args:
            module: A module that is to be traced into.
            cls: Its class.
        """
        return self._reading_of(module, cls)[0]

    def generators_of(self, module: nn.Module, cls: type[nn.Module]) -> list[Any]:
        """Return the random generators that a forward reaches by a global name.

        Args:
            module: A module that is to be traced into.
            cls: Its class.
        """
        return self._reading_of(module, cls)[1]

    def _reading_of(
        self, module: nn.Module, cls: type[nn.Module]
    ) -> tuple[Question | None, list[Any]]:
        own = [value for value in vars(module).values() if type(value) is FunctionType]
        key = (cls, *own)
        if key not in self._read:
            seen: set[Any] = set()
            starts = [cls.forward, *own]
            functions = [f for start in starts for f in _reachable(start, cls, _DEPTH, seen)]
            questions = filter(None, map(_question, functions))
            self._read[key] = next(questions, None), list(_generators(functions))
        return self._read[key]


def _generators(functions: list[FunctionType]) -> Iterator[Any]:
    for function in functions:
        for name in function.__code__.co_names:
            value = function.__globals__.get(name)
            if isinstance(value, GENERATORS):
                yield value


def _question(function: FunctionType) -> Question | None:
    return _mode(function) or _function(function) or _about_a_value(function)


def _reachable(function: Any, owner: type, depth: int, seen: set[Any]) -> Iterator[FunctionType]:
    """Yield a function, and the functions and methods of the user's that it names."""
    function = inspect.unwrap(function)
    if not isinstance(function, FunctionType) or function in seen or depth == 0:
        return
    if f"{function.__module__}.".startswith(_LIBRARIES):
        return
    seen.add(function)
    yield function
    for name in function.__code__.co_names:
        for found in (function.__globals__.get(name), inspect.getattr_static(owner, name, None)):
            found = found.fget if isinstance(found, property) else found
            found = getattr(found, "__func__", found)  # static and class methods
            if name != "forward":
                yield from _reachable(found, owner, depth - 1, seen)


def _mode(function: FunctionType) -> Question | None:
    for name, what in _MODES.items():
        if name in function.__code__.co_names:
            return f"its forward asks {what}", _place(function.__code__, name)
    return None


def _function(function: FunctionType) -> Question | None:
    """Find an ``autograd.Function``: one that returns its argument leaves no trace in a graph."""
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if isinstance(value, type) and issubclass(value, torch.autograd.Function):
            return "its forward calls an autograd.Function", _place(function.__code__, name)
    return None


def _about_a_value(function: FunctionType) -> Question | None:
    """Find ``type(x)`` that is compared, and ``hasattr(x, …)``, of a local variable."""
    code = function.__code__
    instructions = [i for i in dis.get_instructions(code) if i.opname not in ("PUSH_NULL", "CACHE")]
    other = {*code.co_varnames[:1], *_loop_variables(instructions)}
    for index, instruction in enumerate(instructions[:-1]):
        asked, value = instruction.argval, instructions[index + 1]
        if instruction.opname != "LOAD_GLOBAL" or asked not in ("type", "hasattr"):
            continue
        names = value.argval if isinstance(value.argval, tuple) else (value.argval,)
        if not value.opname.startswith("LOAD_FAST") or names[0] in other:
            continue
        near = [following.opname for following in instructions[index : index + _NEAR]]
        if asked != "type" or any(name in near for name in _COMPARISONS):
            what = "attributes" if asked == "hasattr" else "type"
            return f"its forward asks for the {what} of a value", _place(code, asked)
    return None


def _loop_variables(instructions: list[dis.Instruction]) -> Iterator[Any]:
    """Yield the variables of loops: what a forward loops over is mostly its own modules."""
    for index, instruction in enumerate(instructions):
        if instruction.opname == "FOR_ITER":
            for following in instructions[index + 1 : index + 4]:
                if following.opname.startswith("STORE_FAST"):
                    yield following.argval


def _place(code: CodeType, name: str) -> str:
    """Return the file and line where ``name`` is first used."""
    offsets = [i.offset for i in dis.get_instructions(code) if i.argval == name]
    lines = [line for start, line in dis.findlinestarts(code) if line and start <= offsets[0]]
    return f"{code.co_filename}:{lines[-1] if lines else code.co_firstlineno}"
