"""The greedy search: always take the channels that cost the loss least for what they save.

Where the last step would overshoot by more than the tolerance, dearer steps that end within it are
taken instead, if there are such. Source: spec/pruning.md section 11, "Greedy".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from amct_fx.prune.cost import CostModel
    from amct_fx.prune.levels import Level
    from amct_fx.prune.plan_parts import PruneGroup

__all__ = ["TOLERANCE", "GreedySearch", "Step"]

TOLERANCE = 0.02
"""By which share the ratio that is reached may be above the ratio that is asked for."""

_ALIGNMENT = 16
_Move: TypeAlias = dict[int, int]
"""Units to take by number of the group; several groups where blocks must stay equal."""


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
        levels: Blocks that must keep equal counts although several groups make them: these groups
            lose units together.
    """

    def __init__(
        self,
        cost: CostModel,
        progress: Callable[[float], None] | None = None,
        levels: Sequence[Level] = (),
    ) -> None:
        self.cost = cost
        self.steps: list[Step] = []
        self._full = cost.total
        self._progress = progress
        self._levels = levels
        self._queues: dict[int, _Queue] = {}

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
        self._queues = {
            g.id: _Queue(g, s, aligned, largest) for g, s in zip(groups, scores, strict=True)
        }
        while self._ratio < target:
            move = min(self._moves(), key=self._price, default=None)
            if move is None:
                break
            if not (self._overshoots(move, target) and self._land(target)):
                self._take(move)
            if self._progress is not None:
                self._progress(self._ratio)
        return {number: queue.kept for number, queue in self._queues.items()}

    @property
    def _ratio(self) -> float:
        return self._full / self.cost.total

    def _moves(self) -> Iterator[_Move]:
        """Return what may go next: for each group its next units, with those of other groups."""
        for number, queue in self._queues.items():
            units = queue.step()
            if not units:
                continue
            if not any(level.has(number) for level in self._levels):
                yield {number: units}
            elif (move := self._joint(number, units)) is not None:
                yield move

    def _joint(self, first: int, units: int) -> _Move | None:
        """Let other groups lose units until all blocks are equal again; ``None``: they cannot."""
        move = {first: units}
        while True:
            left = {n: q.left - move.get(n, 0) for n, q in self._queues.items()}
            uneven = next((x for x in self._levels if len(set(x.counts(left))) > 1), None)
            if uneven is None:
                return move
            counts = uneven.counts(left)
            fullest = uneven.blocks[counts.index(max(counts))]
            more = ((n, self._queues[n].step(move.get(n, 0))) for n, _, _ in fullest.parts)
            number, units = next((pair for pair in more if pair[1]), (-1, 0))
            if not units:
                return None
            move[number] = move.get(number, 0) + units

    def _units(self, move: _Move) -> dict[int, list[int]]:
        """Return the units that a move takes."""
        return {number: self._queues[number].next(units) for number, units in move.items()}

    def _price(self, move: _Move) -> float:
        """Return the score that goes for each unit of cost that is saved now."""
        taken = self._units(move)
        saved = self.cost.saving(taken)
        score = sum(self._queues[number].score(units) for number, units in taken.items())
        return score / saved if saved > 0 else math.inf

    def _overshoots(self, move: _Move, target: float) -> bool:
        """Say whether a move leads above the tolerance."""
        return self._full > target * (1 + TOLERANCE) * (
            self.cost.total - self.cost.saving(self._units(move))
        )

    def _land(self, target: float) -> bool:
        """Take moves that end within the tolerance; none if that is impossible."""
        taken: list[_Move] = []
        while self._ratio < target:
            fitting = [move for move in self._moves() if not self._overshoots(move, target)]
            move = min(fitting, key=self._price, default=None)
            if move is None:
                for earlier in reversed(taken):
                    self._give_back(earlier)
                return False
            taken.append(move)
            self._take(move)
        return True

    def _take(self, move: _Move) -> None:
        """Take the next units of groups."""
        self.cost.remove(self._units(move))
        for number, units in move.items():
            self._queues[number].take(units)
            self.steps.append(Step(number, units, self._ratio))

    def _give_back(self, move: _Move) -> None:
        """Undo the last move."""
        for number, units in move.items():
            self._queues[number].take(-units)
            self.steps.pop()
        self.cost.restore(self._units(move))


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
        self._taken = 0  # of each block
        self._unit = math.lcm(_ALIGNMENT, group.balance) if aligned else group.balance
        least = math.ceil(group.channels * (1 - largest) - 1e-6)
        self._least = max(1, group.balance, least)

    @property
    def kept(self) -> tuple[int, ...]:
        """The units that are left."""
        return tuple(sorted(unit for block in self._blocks for unit in block[self._taken :]))

    @property
    def left(self) -> int:
        """How many units are left."""
        return self.group.channels - self._taken * self.group.balance

    def step(self, before: int = 0) -> int:
        """Return how many units a step takes, after ``before`` others; 0 if there is none."""
        left = self.left - before
        units = left % self._unit or self._unit
        fits = left - units >= self._least and units % self.group.balance == 0
        return units if fits else 0

    def next(self, units: int) -> list[int]:
        """Return the next units to go."""
        end = self._taken + units // self.group.balance
        return [unit for block in self._blocks for unit in block[self._taken : end]]

    def score(self, units: Iterable[int]) -> float:
        """Return the scores of units."""
        return sum(self._scores[unit] for unit in units)

    def take(self, units: int) -> None:
        """Let the next units go, or with a negative number give the last ones back."""
        self._taken += units // self.group.balance
