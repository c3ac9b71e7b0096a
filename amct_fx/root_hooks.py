"""Objects whose ``before`` and ``after`` run around every forward of a prepared model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from torch import nn

__all__ = ["Around", "attach_hooks", "remove_hooks"]


class Around(Protocol):
    """What runs around a forward."""

    def before(self, model: nn.Module, _args: Any) -> None:
        """Run before the forward of ``model``."""

    def after(self, model: nn.Module, _args: Any, _output: Any) -> None:
        """Run after it."""


def attach_hooks(model: nn.Module, owner: Around) -> None:
    """Register both methods of ``owner`` on the root of a prepared model."""
    model.register_forward_pre_hook(owner.before)
    model.register_forward_hook(owner.after)


def remove_hooks(model: nn.Module, kind: type) -> None:
    """Remove the hooks of ``model`` whose owner is of class ``kind``."""
    for hooks in (model._forward_pre_hooks, model._forward_hooks):
        for key, hook in list(hooks.items()):
            if isinstance(getattr(hook, "__self__", None), kind):
                del hooks[key]
