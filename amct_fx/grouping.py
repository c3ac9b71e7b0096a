"""The scalar arithmetic of all input quantizers of a model, done at once.

Each quantizer turns two learned clips into a scale and an offset, and its backward needs a few more
numbers: about fifty operations on single values, which on an accelerator are as many launches, and
on a CPU cost as much as several passes over a small activation. A forward of the model does them
for all quantizers together, on one vector for each kind, and writes all clips back at its end.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from amct_fx.observers import ULQFakeQuantize
from amct_fx.observers._recompute import is_traced
from amct_fx.observers._together import compute_ahead, write_back
from amct_fx.root_hooks import attach_hooks

if TYPE_CHECKING:
    from torch import nn

__all__ = ["RangeGroups"]


class RangeGroups:
    """Forward hooks of a prepared model that serve all its ULQ quantizers together.

    Copies and pickles look for their quantizers anew.
    """

    def __init__(self) -> None:
        self._root: weakref.ref[nn.Module] | None = None
        self._found: list[ULQFakeQuantize] = []

    def attach(self, model: nn.Module) -> None:
        """Register both hooks on the root of a prepared model."""
        attach_hooks(model, self)

    def before(self, model: nn.Module, _args: Any) -> None:
        """Compute for all quantizers of ``model``."""
        if not is_traced():
            compute_ahead(self._quantizers(model))

    def after(self, model: nn.Module, _args: Any, _output: Any) -> None:
        """Write what the quantizers that ran in training have used; forget the rest."""
        if not is_traced():
            write_back(self._quantizers(model))

    def _quantizers(self, model: nn.Module) -> list[ULQFakeQuantize]:
        if self._root is None or self._root() is not model:
            self._found = [part for part in model.modules() if isinstance(part, ULQFakeQuantize)]
            self._root = weakref.ref(model)
        return self._found

    def __reduce__(self) -> tuple[Any, ...]:
        return RangeGroups, ()
