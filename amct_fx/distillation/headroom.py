"""Keeping learned clips from cutting what other samples may hold.

A handful of samples does not show the extremes of all data. Between the largest value that they
hold and the clip a training sees no loss at all, only finer steps, so it would tighten every clip
to that value, or below; on other data the clipped values then cost more than the finer steps bring.
So a clip is not tightened to less than a margin beyond the extremes of the calibration samples. It
may start tighter, and it may always widen.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amct_fx.distillation.sync import ranks
from amct_fx.observers import ULQFakeQuantize

__all__ = ["Headroom"]


class Headroom:
    """The tightest clips that a group may learn.

    Args:
        module: The group; its quantizers are watched.
        margin: Share of the extremes that stays free, such as 0.1; ``None``: no limits.
    """

    def __init__(self, module: nn.Module, margin: float | None) -> None:
        self._margin = margin
        self._quantizers = [
            part
            for part in module.modules()
            if isinstance(part, ULQFakeQuantize) and margin is not None
        ]
        self._extremes: list[Tensor] = []
        self._limits: list[tuple[Tensor, Tensor]] = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Note the extremes of what the quantizers read in the body, and derive the limits."""
        self._extremes = [_nothing(part.clip_max) for part in self._quantizers]
        hooks = [
            part.register_forward_pre_hook(_Watch(extremes))
            for part, extremes in zip(self._quantizers, self._extremes, strict=True)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        if self._extremes:
            self._derive()

    @torch.no_grad()
    def apply(self) -> None:
        """Widen the clips that an optimizer step has made too tight, in place."""
        for part, (upper, lower) in zip(self._quantizers, self._limits, strict=True):
            part.clip_max.clamp_(min=upper)
            part.clip_min.clamp_(max=lower)

    @torch.no_grad()
    def _derive(self) -> None:
        table = torch.stack(self._extremes)
        if ranks() > 1:
            dist.all_reduce(table, dist.ReduceOp.MAX)
        self._limits = []
        for part, (upper, lower) in zip(self._quantizers, table, strict=True):
            wide = 1.0 + (self._margin or 0.0)
            # what was tighter from the start was chosen so, by the range search or the user
            self._limits.append(
                (
                    torch.minimum(part.clip_max, upper * wide).clamp(min=0.0),
                    torch.maximum(part.clip_min, -lower * wide).clamp(max=0.0),
                )
            )


class _Watch:
    """A hook that widens ``(largest, -smallest)`` in place."""

    def __init__(self, extremes: Tensor) -> None:
        self._extremes = extremes

    @torch.no_grad()
    def __call__(self, _module: nn.Module, args: tuple[Any, ...]) -> None:
        tensor = args[0]
        if tensor.numel():
            low, high = tensor.detach().aminmax()
            found = torch.stack([high, -low]).to(self._extremes)
            torch.maximum(self._extremes, found, out=self._extremes)


def _nothing(like: Tensor) -> Tensor:
    return torch.full((2,), -torch.inf, device=like.device, dtype=torch.float32)
