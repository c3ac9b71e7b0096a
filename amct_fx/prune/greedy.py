"""The greedy search: always take the channels that cost the loss least for what they save.

Source: spec/pruning.md section 11, "Greedy".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from amct_fx.prune.cost import CostModel
    from amct_fx.prune.plan import PruneGroup

__all__ = ["GreedySearch", "Step"]

_ALIGNMENT = 16


@dataclass(frozen=True)
class Step:
    """One step of a search.

    Attributes:
        group: The group that loses units.
        units: How many.
        ratio: Cost before over cost after it.
    """

    group: int
    units: int
    ratio: float


class GreedySearch:
    """Takes channels step by step until the model is cheap enough.

    Args:
        cost: The cost of the model; changed along the way.
        progress: Called after each step with the ratio.
    """

    def __init__(self, cost: CostModel, progress: Callable[[float], None] | None = None) -> None:
        self.cost = cost
        self.steps: list[Step] = []
        self._progress = progress

    def channel_prune_search(
        self,
        groups: Sequence[PruneGroup],
        scores: Sequence[Sequence[float]],
        settings: tuple[float, bool, float],
    ) -> dict[int, tuple[int, ...]]:
        """Return the units that each group keeps.

        Args:
            groups: The groups of a plan.
            scores: One for each unit of each group.
            settings: The ratio to reach, whether to keep multiples of 16, and the largest share
                that a group may lose.
        """
        target, aligned, largest = settings
        queues = [_Queue(g, s, aligned, largest) for g, s in zip(groups, scores, strict=True)]
        full = self.cost.total
        while full / self.cost.total < target:
            queue = min(filter(_Queue.step, queues), key=self._price, default=None)
            if queue is None:
                break
            units = queue.step()
            self.cost.remove(queue.group.id, units)
            queue.take(units)
            self.steps.append(Step(queue.group.id, units, full / self.cost.total))
            if self._progress is not None:
                self._progress(full / self.cost.total)
        return {queue.group.id: queue.kept for queue in queues}

    def _price(self, queue: _Queue) -> float:
        """Return the score that goes for each unit of cost that is saved now."""
        units = queue.step()
        saved = self.cost.saving(queue.group.id, units)
        return queue.score(units) / saved if saved > 0 else math.inf


class _Queue:
    """The units of one group in the order in which they go, each block on its own."""

    def __init__(
        self, group: PruneGroup, scores: Sequence[float], aligned: bool, largest: float
    ) -> None:
        self.group = group
        self._scores = scores
        width = group.channels // group.balance
        self._blocks = [
            sorted(range(start, start + width), key=lambda unit: scores[unit])
            for start in range(0, group.channels, width)
        ]
        self._unit = math.lcm(_ALIGNMENT, group.balance) if aligned else group.balance
        least = math.ceil(group.channels * (1 - largest) - 1e-6)
        self._least = max(1, group.balance, least)

    @property
    def kept(self) -> tuple[int, ...]:
        """The units that are left."""
        return tuple(sorted(unit for block in self._blocks for unit in block))

    def step(self) -> int:
        """Return how many units the next step takes; 0 if there is none."""
        left = sum(map(len, self._blocks))
        units = left % self._unit or self._unit
        fits = left - units >= self._least and units % self.group.balance == 0
        return units if fits else 0

    def score(self, units: int) -> float:
        """Return the scores of the next units."""
        share = units // self.group.balance
        return sum(self._scores[unit] for block in self._blocks for unit in block[:share])

    def take(self, units: int) -> None:
        """Let the next units go."""
        share = units // self.group.balance
        self._blocks = [block[share:] for block in self._blocks]
