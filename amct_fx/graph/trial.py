"""Running a model to see what it does, so that nothing of the run stays."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["trial"]

_PARTS = ("_buffers", "_modules", "_parameters")


@contextmanager
def trial(model: nn.Module, *, writes: bool = True) -> Iterator[None]:
    """Put every part of ``model`` into eval mode; modes, buffers and attributes come back.

    A forward may count its calls, keep its last output, or move a buffer in eval mode, too. A part
    that makes parameters or modules in its first forward keeps them, and what it noted of them.

    Args:
        model: Any module, in any mode.
        writes: Whether the run can write into the tensors of the model at all.

    Example:
        >>> class Counting(nn.Module):
        ...     calls = 0
        ...     def forward(self, x):
        ...         self.calls += 1
        ...         return x
        >>> model = Counting()
        >>> with trial(model):
        ...     _ = model(torch.ones(1))
        >>> model.calls, model.training
        (0, True)
    """
    parts = list(model.modules())
    modes = [part.training for part in parts]
    own = [part for part in parts if not isinstance(part, torch.jit.ScriptModule)]
    states = [_State.of(part, writes=writes) for part in own]
    try:
        model.eval()
        yield
    finally:
        for state in states:
            state.restore()
        for part, mode in zip(parts, modes, strict=True):
            if part.training is not mode:
                part.training = mode


@dataclass(frozen=True)
class _State:
    """What a forward may change in one module."""

    module: nn.Module
    shape: tuple[Any, ...]
    attributes: dict[str, Any]
    buffers: dict[str, Tensor | None]
    values: list[tuple[Tensor, int, Tensor]]
    containers: list[tuple[Any, Any]]

    @classmethod
    def of(cls, module: nn.Module, *, writes: bool) -> _State:
        attributes, buffers = dict(vars(module)), dict(module._buffers)
        held = (*attributes.values(), *buffers.values()) if writes else ()
        tensors = [value for value in held if _has_value(value)]
        values = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors]
        own = [value for name, value in attributes.items() if not name.startswith("_")]
        containers = [(value, value.copy()) for value in own if type(value) in (list, dict, set)]
        return cls(module, _shape_of(module), attributes, buffers, values, containers)

    def restore(self) -> None:
        if _shape_of(self.module) != self.shape:
            return
        now = vars(self.module)
        for name in now.keys() - self.attributes.keys():
            del now[name]
        now.update({name: value for name, value in self.attributes.items() if name not in _PARTS})
        for container, content in self.containers:
            container.clear()
            (container.extend if type(container) is list else container.update)(content)
        self.module._buffers.clear()
        self.module._buffers.update(self.buffers)
        with torch.no_grad():
            for tensor, version, value in self.values:
                if tensor.shape != value.shape:
                    tensor.data = value
                elif tensor._version != version or _differs(tensor, value):
                    tensor.copy_(value)


def _shape_of(module: nn.Module) -> tuple[Any, ...]:
    """Return the class and the names of what a module is made of."""
    return type(module), tuple(module._parameters), tuple(module._modules)


def _has_value(value: Any) -> bool:
    return isinstance(value, Tensor) and not value.is_inference()


def _differs(tensor: Tensor, value: Tensor) -> bool:
    """Say whether values were written through ``.data``, which no version counter shows."""
    readable = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta
    return readable and not torch.equal(tensor, value)
