"""Merging the calibrated ranges of all ranks, in one reduction.

Every rank calibrates on its own data; without merging, one rank's range would win silently. At the
end of the training forward with number ``batch_num`` all ranks meet in a single all-reduce over all
quantizers that learn a range. Whether they meet depends on facts that all ranks share, never on
what one of them has seen: the number of training forwards, the configuration, and the table that
the last reduction gave to all of them. A rank that skipped a layer gives it weight 0 and takes what
the others found. As long as the table says that no rank has a range for some quantizer, the ranks
meet again after each later training forward. Afterwards averaged gradients keep the clips equal and
nothing is communicated. Source: spec/quantization.md section 7.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amct_fx._compat import is_exporting
from amct_fx.config.messages import listing
from amct_fx.errors import ModelStateError
from amct_fx.observers import ULQFakeQuantize, ULQWeightFakeQuantize
from amct_fx.observers._base import AmctFakeQuantize, in_recomputation
from amct_fx.root_hooks import attach_hooks, remove_hooks

__all__ = [
    "RangeMergeRule",
    "RangeMerger",
    "ignore_quantizer_buffers",
    "merge_ranges_across_ranks",
]

logger = logging.getLogger("amct_fx")

RangeMergeRule = Literal["mean", "max"]
"""``"mean"``: the mean of the local clips. ``"max"``: the widest rank wins."""

_MORE_MEETINGS = 100
"""How often the ranks meet again for layers that no rank has run yet."""

_IGNORED = "_ddp_params_and_buffers_to_ignore"
"""Where DistributedDataParallel looks for names of tensors to leave alone."""

_Learning = ULQFakeQuantize | ULQWeightFakeQuantize


class RangeMerger:
    """Forward hooks of a prepared model that merge freshly calibrated ranges over the ranks.

    Args:
        batch_num: Number of model forwards that calibrate.
        rule: How local clips become one.

    Attributes:
        done: Whether there is nothing left to merge.
    """

    def __init__(self, batch_num: int, rule: RangeMergeRule = "mean") -> None:
        self.batch_num = batch_num
        self.rule: RangeMergeRule = rule
        self.done = False
        self._training_forwards = 0

    def attach(self, model: nn.Module) -> None:
        """Register both hooks on the root of a model that was prepared just now."""
        self.done = not _waiting(model)  # the configuration gives all ranges
        attach_hooks(model, self)
        ignore_quantizer_buffers(model)

    @staticmethod
    def detach(model: nn.Module) -> None:
        """Remove what :meth:`attach` did to ``model``, before it is converted."""
        remove_hooks(model, RangeMerger)
        ours = set(_quantizer_buffers(model))
        rest = [name for name in getattr(model, _IGNORED, ()) if name not in ours]
        if rest:
            setattr(model, _IGNORED, rest)
        elif hasattr(model, _IGNORED):
            delattr(model, _IGNORED)

    def before(self, model: nn.Module, _args: Any) -> None:
        """Refuse to calibrate a sharded model.

        Raises:
            ModelStateError: Some quantizers have no range, and the model is sharded: FSDP throws
                away what a forward writes into parameters, so the ranges would be lost.
        """
        if not self.done and _several_ranks():
            _outside_of_graphs(self._check_sharding, model)

    def after(self, model: nn.Module, _args: Any, _output: Any) -> None:
        """Count a training forward; merge, if this was one for it."""
        if not self.done and model.training and _several_ranks():
            _outside_of_graphs(self._count_and_merge, model)

    def _check_sharding(self, model: nn.Module) -> None:
        if not _is_sharded(model):
            return
        waiting = len(_waiting(model))
        if waiting:
            message = (
                f"{waiting} quantizers have no range yet and the model is sharded; run "
                "batch_num forwards on calibration data before fully_shard(model)"
            )
            raise ModelStateError(message)
        self.done = True

    def _count_and_merge(self, model: nn.Module) -> None:
        if in_recomputation():
            return
        self._training_forwards += 1
        if self._training_forwards < self.batch_num:
            return
        missing = merge_ranges_across_ranks(model, self.rule)
        self.done = not missing
        if missing and self._training_forwards >= self.batch_num + _MORE_MEETINGS:
            self.done = True
            logger.warning(
                "no rank has run %s in %d training forwards; if they run later, every rank keeps "
                "the range of its own data: call merge_ranges_across_ranks then",
                listing(missing),
                self._training_forwards,
            )


def merge_ranges_across_ranks(model: nn.Module, rule: RangeMergeRule = "mean") -> list[str]:
    """Give all ranks the same clips, in one all-reduce; without a process group do nothing.

    Must be called on all ranks. Clips that are equal everywhere keep their exact values. Learned
    weight scales are merged like clips.

    Args:
        model: A prepared model, the same on all ranks.
        rule: ``"mean"`` or ``"max"``.

    Returns:
        The names of the quantizers that no rank has calibrated, the same list on all ranks; they
        stay as they are.
    """
    quantizers = _learning_quantizers(model)
    if not quantizers or not _several_ranks():
        return []
    rows = [_row(quantizer, rule) for quantizer in quantizers.values()]
    table = torch.cat(rows)  # float64: the mean of equal float32 values is exactly that value
    dist.all_reduce(table, dist.ReduceOp.SUM if rule == "mean" else dist.ReduceOp.MAX)
    missing = []
    parts = table.split([len(row) for row in rows])
    for (name, quantizer), part in zip(quantizers.items(), parts, strict=True):
        count, merged = part[0], part[1:]
        if bool(count > 0):
            _set_range(quantizer, merged / count if rule == "mean" else merged, rule)
        else:
            missing.append(name)
    return missing


def ignore_quantizer_buffers(model: nn.Module) -> None:
    """Keep DistributedDataParallel from broadcasting the buffers of quantizers inside ``model``.

    Otherwise the first rank's "calibrated" would end another rank's calibration. Prepare does this
    for the model it returns; a larger module around it that is wrapped as a whole needs it too.

    Args:
        model: The module that will be wrapped; parameters and other buffers are broadcast as ever.

    Example:
        >>> from amct_fx import prepare_qat_amct
        >>> larger = nn.Sequential(prepare_qat_amct(nn.Sequential(nn.Linear(4, 2))))
        >>> ignore_quantizer_buffers(larger)
        >>> [n for n in larger._ddp_params_and_buffers_to_ignore if n.endswith("calibrated")]
        ['0.0.input_fake_quant.calibrated']
    """
    given = getattr(model, _IGNORED, ())
    setattr(model, _IGNORED, list(dict.fromkeys([*given, *_quantizer_buffers(model)])))


def _quantizer_buffers(model: nn.Module) -> list[str]:
    return [
        f"{name}.{key}" if name else key
        for name, module in model.named_modules()
        if isinstance(module, AmctFakeQuantize)
        for key, _ in module.named_buffers()
        if key != "kept_channels"  # follows the masks, which are those of the first rank
    ]


def _row(quantizer: _Learning, rule: RangeMergeRule) -> Tensor:
    """Return the flag and the values, zeros (or -inf) for a rank without a range."""
    values = _values(quantizer, rule)
    row = torch.cat([values.new_ones(1), values])
    if quantizer.is_calibrated:
        return row
    return torch.zeros_like(row) if rule == "mean" else torch.full_like(row, -torch.inf)


def _values(quantizer: _Learning, rule: RangeMergeRule) -> Tensor:
    """Return clips or weight scale as float64; with ``"max"``, so that larger means wider."""
    if isinstance(quantizer, ULQWeightFakeQuantize):
        return quantizer.scale.detach().double()
    lower = quantizer.clip_min.detach().double()
    return torch.cat([quantizer.clip_max.detach().double(), -lower if rule == "max" else lower])


@torch.no_grad()
def _set_range(quantizer: _Learning, values: Tensor, rule: RangeMergeRule) -> None:
    """Take merged values, unless they are what is there."""
    if quantizer.is_calibrated and torch.equal(_values(quantizer, rule), values):
        return
    if isinstance(quantizer, ULQFakeQuantize):
        quantizer.set_clips(values[0], -values[1] if rule == "max" else values[1])
        return
    quantizer.scale.copy_(values)
    quantizer.calibrated.fill_(1.0)


def _learning_quantizers(model: nn.Module) -> dict[str, _Learning]:
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (ULQFakeQuantize, ULQWeightFakeQuantize))
    }


def _waiting(model: nn.Module) -> list[str]:
    """Return the names of the quantizers that have no range on this rank."""
    found = _learning_quantizers(model).items()
    return [name for name, quantizer in found if not quantizer.is_calibrated]


def _several_ranks() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _outside_of_graphs(method: Callable[[nn.Module], None], model: nn.Module) -> None:
    """Call ``method(model)``; ``torch.compile`` breaks its graph here, an export leaves it out."""
    if is_exporting():
        return
    if torch.compiler.is_compiling():
        method = torch.compiler.disable(method)
    method(model)


def _is_sharded(model: nn.Module) -> bool:
    """Say whether FSDP2 manages a part of the model; asked by name, its import is slow."""
    classes = {cls.__name__ for module in model.modules() for cls in type(module).__mro__}
    return "FSDPModule" in classes
