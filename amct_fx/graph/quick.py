"""Tracing in one go, for the many models in which nothing is hidden.

:class:`amct_fx.graph.tracer.IslandTracer` looks for changes before and after the call of every
module, and traces twice to find context managers that switch gradients or autocast. All of that
finds nothing in most models. So the whole forward is traced first in modes that no forward asks
for, and looked at once; whatever shows then is searched for step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.fx.proxy import TraceError
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from amct_fx.graph.attributes import resolved, unchanged
from amct_fx.graph.guards import ANSWERED, unusual_modes
from amct_fx.graph.tracer import IslandTracer, Refusal, reads_training

if TYPE_CHECKING:
    from amct_fx.graph.questions import CodeReader
    from amct_fx.graph.signature import CallForm

__all__ = ["trace_module"]


def trace_module(
    module: nn.Module,
    is_layer: Callable[[nn.Module], bool],
    form: CallForm | None = None,
    forms: Mapping[nn.Module, CallForm] | None = None,
    reader: CodeReader | None = None,
) -> tuple[IslandTracer, Refusal | None]:
    """Trace a module, at once if that goes through and with islands otherwise.

    Args:
        module: The module; it is the same afterwards.
        is_layer: Says which modules are layers, which are never traced into.
        form: The form of call to trace for, ``None`` for every call.
        forms: The forms in which the parts are called.
        reader: Reads the code of the forwards.

    Returns:
        The tracer, which has the graph, and why there is none if so.
    """
    quick = _QuickTracer(is_layer, form, forms, reader)
    if quick.succeeds(module):
        return quick, None
    if quick.asked_for_mode:
        in_eval, in_training = (
            _QuickTracer(is_layer, form, forms, reader, training=mode) for mode in (False, True)
        )
        succeeded = in_eval.succeeds(module) and in_training.succeeds(module)
        if succeeded and _merge(in_eval, in_training):
            return in_eval, None
    careful = IslandTracer(is_layer, form, forms, reader)
    return careful, careful.trace_or_explain(module)


class _QuickTracer(IslandTracer):
    """Traces in unusual modes, and gives up where a part would become an island.

    Args:
        training: What a branch on a training flag is told; ``None`` gives up there as well.
        *args: As of :class:`IslandTracer`.
    """

    def __init__(self, *args: Any, training: bool | None = None) -> None:
        super().__init__(*args)
        self.asked_for_mode = False
        self._training = training

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Answer a branch on the training flag, if there is an answer."""
        self.asked_for_mode = self.asked_for_mode or reads_training(obj.node)
        if self._training is None or not reads_training(obj.node):
            return super().to_bool(obj)
        obj.node.meta[ANSWERED] = True
        return self._training

    def take_reads(self, other: _QuickTracer) -> None:
        """Rely on what another trace of the same module relies on, too."""
        self._reads += other._reads

    def succeeds(self, module: nn.Module) -> bool:
        """Trace ``module``; say whether the graph is all that a careful search would find."""
        if self.refusal_of_root(module) is not None:
            return False
        with unusual_modes(), _HalfPrecision() as half:
            refusal = self._attempt(module)
        return refusal is None and not half.seen and unchanged(resolved(module, self.watched))

    def call_module(
        self,
        m: nn.Module,
        forward: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Trace into ``m``, without a way back."""
        path = self.path_of_module(m)
        if not self.is_leaf_module(m, path):
            if self._refuse_before_tracing(m) is not None:
                message = f"{path} needs a closer look"
                self.note_complaint(message)
                raise TraceError(message)
            self._note_call(m, path, args, kwargs)
        return fx.Tracer.call_module(self, m, forward, args, kwargs)


def _merge(in_eval: _QuickTracer, in_training: _QuickTracer) -> bool:
    """Say whether a module does the same in both modes; the first trace then stands for both.

    So ``if self.training and self.aux_logits`` does not matter without auxiliary heads.
    """
    if _rows(in_eval.graph) != _rows(in_training.graph):
        return False
    in_eval.take_reads(in_training)
    for node in reversed(in_eval.graph.nodes):
        if ANSWERED in node.meta and not node.users:
            in_eval.graph.erase_node(node)
    return True


def _rows(graph: fx.Graph) -> list[tuple[Any, ...]]:
    """Describe a graph, but for flags that nothing but branches read."""
    nodes = [node for node in graph.nodes if node.users or ANSWERED not in node.meta]
    numbers = {node: number for number, node in enumerate(nodes)}

    def numbered(arguments: Any) -> Any:
        return fx.map_arg(arguments, lambda node: ("node", numbers[node]))

    return [(node.op, node.target, numbered(node.args), numbered(node.kwargs)) for node in nodes]


class _HalfPrecision(TorchDispatchMode):
    """Notices constants that come out otherwise in the unusual modes: autocast halves them."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen = False

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run an operation on real tensors, of which there are few while a model is traced."""
        result = func(*args, **(kwargs or {}))
        self.seen = self.seen or any(map(_differs, tree_leaves((args, kwargs, result))))
        return result


def _differs(value: Any) -> bool:
    """Say whether a tensor may depend on the modes."""
    half = (torch.float16, torch.bfloat16)
    return isinstance(value, Tensor) and (value.dtype in half or value.requires_grad)
