"""Merging the calibrated ranges of all ranks, once, in one reduction.

Every rank calibrates on its own data; without merging, one rank's range would win silently. At the
end of the training forward with number ``batch_num`` all ranks meet in a single all-reduce over all
input quantizers. Whether they meet depends on the number of training forwards alone, which data
parallel ranks share, never on which layers ran: a rank that skipped a layer gives it weight 0 and
takes what the others found. Afterwards averaged gradients keep the clips equal and nothing is
communicated. Source: spec/quantization.md section 7.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amct_fx.errors import ModelStateError
from amct_fx.observers import ULQFakeQuantize
from amct_fx.observers._base import in_recomputation

__all__ = ["RangeMergeRule", "RangeMerger", "merge_ranges_across_ranks"]

RangeMergeRule = Literal["mean", "max"]
"""``"mean"``: the mean of the local clips. ``"max"``: the widest rank wins."""


class RangeMerger:
    """Forward hooks of a prepared model that merge freshly calibrated ranges over the ranks.

    Args:
        batch_num: Number of model forwards that calibrate.
        rule: How local clips become one.
    """

    def __init__(self, batch_num: int, rule: RangeMergeRule = "mean") -> None:
        self.batch_num = batch_num
        self.rule: RangeMergeRule = rule
        self.done = False
        self._training_forwards = 0
        self._waiting = 0
        self._calibrated_here = False

    def before(self, model: nn.Module, _args: Any) -> None:
        """Count the quantizers that have no range yet.

        Raises:
            ModelStateError: Some have none, and the model is sharded: FSDP throws away what a
                forward writes into parameters, so the ranges would be lost.
        """
        if self.done or torch.compiler.is_compiling():
            return
        self._waiting = _count_waiting(model)
        if self._waiting and _is_sharded(model):
            message = (
                f"{self._waiting} quantizers have no range yet and the model is sharded; run "
                "batch_num forwards on calibration data before fully_shard(model)"
            )
            raise ModelStateError(message)

    def after(self, model: nn.Module, _args: Any, _output: Any) -> None:
        """Merge, if this was the forward for it."""
        if self.done or torch.compiler.is_compiling() or in_recomputation():
            return
        self._calibrated_here |= _count_waiting(model) < self._waiting
        if not model.training:
            return
        self._training_forwards += 1
        if self._training_forwards < self.batch_num:
            return
        self.done = True
        if self._calibrated_here or self._waiting:
            merge_ranges_across_ranks(model, self.rule)

    def attach(self, model: nn.Module) -> None:
        """Register both hooks on the root of a prepared model."""
        model.register_forward_pre_hook(self.before)
        model.register_forward_hook(self.after)

    @staticmethod
    def detach(model: nn.Module) -> None:
        """Remove the hooks of any range merger from ``model``, for a converted model."""
        for hooks in (model._forward_pre_hooks, model._forward_hooks):
            for key, hook in list(hooks.items()):
                if isinstance(getattr(hook, "__self__", None), RangeMerger):
                    del hooks[key]


def merge_ranges_across_ranks(model: nn.Module, rule: RangeMergeRule = "mean") -> None:
    """Give all ranks the same clips, in one all-reduce; without a process group do nothing.

    Must be called on all ranks. Quantizers that no rank has calibrated stay as they are.

    Args:
        model: A prepared model, the same on all ranks.
        rule: ``"mean"`` or ``"max"``.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    quantizers = _quantizers(model)
    if not quantizers:
        return
    table = torch.stack([_row(quantizer, rule) for quantizer in quantizers])
    dist.all_reduce(table, dist.ReduceOp.SUM if rule == "mean" else dist.ReduceOp.MAX)
    for quantizer, (count, upper, lower) in zip(quantizers, table, strict=True):
        if bool(count > 0):
            if rule == "mean":
                upper, lower = upper / count, lower / count
            quantizer.set_clips(upper, lower if rule == "mean" else -lower)


def _row(quantizer: ULQFakeQuantize, rule: RangeMergeRule) -> Tensor:
    """Return ``[count, clip_max, clip_min]``, zeros (or -inf) for a rank without a range."""
    upper, lower = quantizer.clip_max.detach(), quantizer.clip_min.detach()
    if rule == "max":
        lower = -lower
    row = torch.cat([torch.ones_like(upper), upper, lower])
    if quantizer.is_calibrated:
        return row
    return torch.zeros_like(row) if rule == "mean" else torch.full_like(row, -torch.inf)


def _quantizers(model: nn.Module) -> list[ULQFakeQuantize]:
    return [module for module in model.modules() if isinstance(module, ULQFakeQuantize)]


def _is_sharded(model: nn.Module) -> bool:
    """Say whether FSDP2 manages a part of the model; asked by name, its import is slow."""
    classes = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    return "FSDPModule" in classes


def _count_waiting(model: nn.Module) -> int:
    return sum(not quantizer.is_calibrated for quantizer in _quantizers(model))
