"""Finding the ranges of a student before its groups are trained.

Source: spec/distillation.md section 9.3, step 2.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from amct_fx.distillation.samples import naming_batch
from amct_fx.distributed import RangeMerger, merge_ranges_across_ranks
from amct_fx.observers._base import AmctFakeQuantize

__all__ = ["calibrate", "calibration_batches"]


def calibration_batches(student: nn.Module) -> int:
    """Return how many batches the ranges of a student are, or were, found on.

    Args:
        student: A prepared model.
    """
    quantizers = (part for part in student.modules() if isinstance(part, AmctFakeQuantize))
    return max((getattr(part, "batch_num", 1) for part in quantizers), default=1)


@torch.no_grad()
def calibrate(student: nn.Module, batches: Iterable[tuple[Any, ...]]) -> None:
    """Run the student in eval mode until all ranges are known, and merge them over the ranks.

    Does nothing if they are known, from a checkpoint or the configuration.

    Args:
        student: The prepared model; its modes stay.
        batches: Arguments of the model; read again from the start if there are too few.
    """
    waiting = [
        part
        for part in student.modules()
        if isinstance(part, AmctFakeQuantize) and not part.is_calibrated
    ]
    if waiting:
        count = max(getattr(part, "batch_num", 1) for part in waiting)
        modes = {module: module.training for module in student.modules()}
        try:
            student.eval()
            for number, arguments in enumerate(itertools.islice(_again(batches), count)):
                with naming_batch(number, arguments):
                    student(*arguments)
        finally:
            for module, mode in modes.items():
                module.training = mode
    merge_ranges_across_ranks(student, _rule(student))


def _again(batches: Iterable[tuple[Any, ...]]) -> Iterable[tuple[Any, ...]]:
    while True:
        yield from batches


def _rule(student: nn.Module) -> Any:
    """Return how the preparation wants ranges to be merged."""
    hooks = (getattr(hook, "__self__", None) for hook in student._forward_hooks.values())
    return next((owner.rule for owner in hooks if isinstance(owner, RangeMerger)), "mean")
