"""The small arithmetic of all quantizers of a model, done at once.

Each input quantizer turns two learned clips into a scale and an offset, and its backward needs a
few more numbers: about fifty operations on single values, which on an accelerator are as many
launches, and on a CPU cost as much as several passes over a small activation. Each weight quantizer
does the like for its scales. A forward of the model does them for all quantizers together, on one
vector for each kind, and writes clips and scales back at its end. Where hooks run within it, which
may change anything, each quantizer computes for itself.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amct_fx.distributed import RangeMerger
from amct_fx.graph import GraphForward, fx_graph_of
from amct_fx.nn.qat import QATLayer
from amct_fx.observers import ARQFakeQuantize, ULQFakeQuantize
from amct_fx.observers._recompute import is_traced
from amct_fx.observers._together import compute_ahead, forget_ahead, quantize_ahead, write_back
from amct_fx.root_hooks import attach_hooks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

__all__ = ["QuantizerGroups"]


class QuantizerGroups:
    """Forward hooks of a prepared model that serve all its quantizers together.

    Copies and pickles look for their quantizers anew.
    """

    def __init__(self) -> None:
        self._root: weakref.ref[nn.Module] | None = None
        self._parts: list[nn.Module] = []
        self._inputs: list[ULQFakeQuantize] = []
        self._layers: list[QATLayer] = []

    def attach(self, model: nn.Module) -> None:
        """Register both hooks on the root of a prepared model."""
        attach_hooks(model, self)

    def before(self, model: nn.Module, _args: Any) -> None:
        """Compute for all quantizers of ``model``."""
        if is_traced():
            return
        self._look_at(model)
        forget_ahead(self._inputs, self._weight_quantizers())  # of a forward that failed
        if any(map(_runs_hooks, self._parts)):  # they may write to ``.data``, which shows nowhere
            return
        compute_ahead(self._inputs)
        if torch.is_grad_enabled():  # else all quantized weights would live at once for nothing
            quantize_ahead(self._weights())

    def after(self, model: nn.Module, _args: Any, _output: Any) -> None:
        """Write what the quantizers that ran in training have used; forget the rest."""
        if is_traced():
            return
        self._look_at(model)
        write_back(self._inputs, self._weight_quantizers())

    def _look_at(self, model: nn.Module) -> None:
        """Find the quantizers of ``model``, and the layers that each forward of it runs."""
        if self._root is not None and self._root() is model:
            return
        self._root = weakref.ref(model)
        self._parts = list(model.modules())
        self._inputs = [part for part in self._parts if isinstance(part, ULQFakeQuantize)]
        called, read = set(), set()
        if isinstance(model, GraphForward):
            nodes = fx_graph_of(model).nodes
            called = {node.target for node in nodes if node.op == "call_module"}
            read = {node.target for node in nodes if node.op == "get_attr"}
        self._layers = [
            part
            for name, part in model.named_modules()
            if name in called
            and isinstance(part, QATLayer)
            and part.weight_names == ("weight",)
            and f"{name}.weight" not in read  # who reads it may change it through ``.data``
        ]

    def _weights(self) -> Iterator[tuple[Tensor, ARQFakeQuantize]]:
        """Yield the weights that are ordinary parameters, and their quantizers."""
        for layer in self._layers:
            weight = layer._parameters.get("weight")
            quantizer = layer._modules["weight_fake_quant"]
            if type(weight) is nn.Parameter and type(quantizer) is ARQFakeQuantize:
                yield weight, quantizer

    def _weight_quantizers(self) -> list[ARQFakeQuantize]:
        return [quantizer for _, quantizer in self._weights()]

    def __reduce__(self) -> tuple[Any, ...]:
        return QuantizerGroups, ()


def _runs_hooks(module: nn.Module) -> bool:
    """Say whether somebody else's hooks run around the forward of ``module``."""
    if not (module._forward_pre_hooks or module._forward_hooks):
        return False
    hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return not all(isinstance(owner, (QuantizerGroups, RangeMerger)) for owner in owners)
