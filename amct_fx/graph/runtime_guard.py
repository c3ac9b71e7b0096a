"""When a module may run its graph, and when it must run the user's Python code.

A graph relies on the form of the call and on the attributes that the traced code read. Both are
compared at every run.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amct_fx.errors import ModelStateError
from amct_fx.graph.attributes import Watched, unchanged

if TYPE_CHECKING:
    from torch import nn

    from amct_fx.graph.signature import CallForm

__all__ = ["OPEN", "Guard", "guarded_forward"]


@dataclass(frozen=True)
class Guard:
    """What a graph relies on.

    Attributes:
        form: The form of call that the graph is for, ``None`` if it serves every call.
        watched: The plain attributes whose values the graph holds.
        exclusive: Whether anything else is refused, because the layers were changed for this graph.
    """

    form: CallForm | None = None
    watched: Watched = ()
    exclusive: bool = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Guard:
        """Return the guard itself: it never changes."""
        return self

    @property
    def is_open(self) -> bool:
        """Whether there is nothing to compare."""
        return self.form is None and not self.watched


OPEN = Guard()
"""The guard of a graph that serves every call."""


def guarded_forward(
    guard: Guard, run: Callable[..., Any], original: type[nn.Module]
) -> Callable[..., Any]:
    """Return a forward that runs the graph where it may, and the user's code elsewhere.

    Args:
        guard: What the graph relies on.
        run: The code of the graph; takes the module and the leaves of the form, or the arguments.
        original: The user's class.
    """
    form = guard.form

    @functools.wraps(original.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if unchanged(self._watched_values):
            if form is None:
                return run(self, *args, **kwargs)
            leaves = form.leaves(args, kwargs)
            if leaves is not None:
                return run(self, *leaves)
        if guard.exclusive:
            raise ModelStateError(_refusal(original.__name__, form))
        return original.forward(self, *args, **kwargs)

    return forward


def _refusal(name: str, form: CallForm | None) -> str:
    called = f" for calls as {form}" if form is not None else ""
    return (
        f"{name} was pruned{called}; it cannot be called in another form, nor after a change of "
        "the attributes that its forward reads"
    )
