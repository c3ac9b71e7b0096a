"""Plain attributes that a forward reads: ``self.scale``, ``self.use_residual``.

A graph holds the value they had while it was traced. So the reads are noted, and the module that
runs the graph compares the values before each run: when the user has changed one, the user's Python
code runs instead.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

import torch
from torch import nn

__all__ = ["Watched", "note_reads", "resolved", "unchanged"]

Watched = tuple[tuple[str, str, Any], ...]
"""Path of a module, name of its attribute, and the value that the graph relies on."""

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
_OF_EVERY_MODULE = frozenset(vars(nn.Module())) | frozenset(vars(nn.Module))
_LIBRARY = (torch.__path__[0], __file__.rpartition("amct_fx")[0] + "amct_fx")
_GONE = object()


class _Tracer(Protocol):
    def note_read(self, module: nn.Module, name: str, value: Any) -> None: ...


def note_reads(tracer: _Tracer, cls: type[nn.Module]) -> Any:
    """Return a ``__getattribute__`` that tells ``tracer`` which plain values user code reads.

    Args:
        tracer: Has a method ``note_read(module, name, value)``.
        cls: The class whose attribute access is extended.
    """
    read = cls.__getattribute__

    def get_attribute(self: nn.Module, name: str) -> Any:
        value = read(self, name)
        if _is_plain(value) and name not in _OF_EVERY_MODULE and not name.startswith("__"):
            by_user = not sys._getframe(1).f_code.co_filename.startswith(_LIBRARY)
            if by_user and _is_stored(self, name):
                tracer.note_read(self, name, value)
        return value

    return get_attribute


def resolved(root: nn.Module, watched: Watched) -> tuple[tuple[nn.Module, str, Any], ...]:
    """Replace paths by modules, once for all runs.

    Args:
        root: The module that runs the graph.
        watched: What the graph relies on.
    """
    return tuple((root.get_submodule(path), name, value) for path, name, value in watched)


def unchanged(watched: tuple[tuple[nn.Module, str, Any], ...]) -> bool:
    """Say whether every attribute still has the value that the graph relies on."""
    for module, name, value in watched:
        now = getattr(module, name, _GONE)
        if now is not value and not (type(now) is type(value) and now == value):
            return False
    return True


def _is_plain(value: Any) -> bool:
    kind = type(value)
    return kind in _PLAIN or (kind is tuple and all(_is_plain(item) for item in value))


def _is_stored(module: nn.Module, name: str) -> bool:
    """Say whether a name is a value of the object or its class, not computed by a property."""
    if name in object.__getattribute__(module, "__dict__"):
        return True
    owners = (vars(cls) for cls in type(module).__mro__)
    return any(name in owner and _is_plain(owner[name]) for owner in owners)
