"""What a model costs while channels are taken away, in closed form or measured.

Every term is a constant times the size of one tensor, or the time that a layer with a weight of
that size takes; and every group takes known lengths off the axes of known tensors. So a step costs
as many multiplications, or measurements of a new width, as it touches terms. Source:
spec/pruning.md section 11, "Cost".
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from amct_fx.prune.latency import LayerClock
    from amct_fx.prune.plan import PrunePlan
    from amct_fx.prune.plan_parts import PruneGroup

__all__ = ["CostModel", "Metric", "Taken"]

Metric: TypeAlias = Literal["macs", "params", "bitops", "latency"]
"""What is to become smaller."""

Taken: TypeAlias = Mapping[int, Sequence[int]]
"""Units that go, by number of their group."""


@dataclass(frozen=True)
class _Term:
    """A constant times the number of elements of a tensor; ``number`` is that of a call."""

    factor: float
    tensor: str
    shape: tuple[int, ...]
    number: int = 0


class CostModel:
    """The cost of a model of which groups of channels lose units.

    Args:
        plan: Its groups and costs.
        metric: What to count.
        factors: For ``"bitops"`` the product of the bits, by name of the layer.
        clock: For ``"latency"``, measures the layers.

    Example:
        >>> from torch import nn, ones
        >>> from amct_fx import prune_plan
        >>> cfg = '''prune_config { filter_pruner {
        ...     balanced_l2_norm_filter_prune { prune_ratio: 0.5 } } }'''
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))
        >>> cost = CostModel(prune_plan(model, cfg, ones(1, 3, 2, 2)))
        >>> cost.total, cost.saving({0: [0, 1, 2, 3]})
        (160, 80)
    """

    def __init__(
        self,
        plan: PrunePlan,
        metric: Metric = "macs",
        factors: Mapping[str, float] | None = None,
        clock: LayerClock | None = None,
    ) -> None:
        self._clock = clock
        self._terms, self._rest = _terms(plan, metric, factors or {})
        self._lengths: dict[tuple[str, int], int] = {}
        self._gone: dict[tuple[str, int], int] = defaultdict(int)
        self._axes = {group.id: self._axes_of(group) for group in plan.groups}
        touched: dict[str, list[int]] = defaultdict(list)
        for number, term in enumerate(self._terms):
            touched[term.tensor].append(number)
        self._touched = {
            group: sorted({i for tensor, _ in axes for i in touched.get(tensor, ())})
            for group, axes in self._axes.items()
        }
        self._values = [self._value(term) for term in self._terms]
        self.total = self._rest + sum(self._values)

    def saving(self, taken: Taken) -> float:
        """Return what the model gets cheaper when groups lose some more units now.

        Args:
            taken: The units, by number of the group.
        """
        touched = sorted({number for group in taken for number in self._touched[group]})
        self._take(taken, 1)
        after = sum(self._value(self._terms[number]) for number in touched)
        self._take(taken, -1)
        return sum(self._values[number] for number in touched) - after

    def remove(self, taken: Taken) -> None:
        """Let groups lose some more units."""
        self._apply(taken, 1)

    def restore(self, taken: Taken) -> None:
        """Give groups units back that they lost."""
        self._apply(taken, -1)

    def _apply(self, taken: Taken, sign: int) -> None:
        self._take(taken, sign)
        for group in taken:
            for number in self._touched[group]:
                self._values[number] = self._value(self._terms[number])
        self.total = self._rest + sum(self._values)

    def _axes_of(self, group: PruneGroup) -> dict[tuple[str, int], int | list[int]]:
        """Return how much a unit takes off each axis of each tensor, a list where units differ.

        The units of a layer whose result is split are columns of different layers.
        """
        axes: dict[tuple[str, int], list[int]] = {}
        for member in group.members:
            if member.role in ("input", "norm"):
                continue
            key = member.key, member.axis
            lengths = list(map(len, member.positions))
            axes[key] = list(map(sum, zip(axes.get(key, [0] * len(lengths)), lengths, strict=True)))
            self._lengths[key] = member.shape[member.axis] * member.groups
        return {
            key: lengths if any(n != lengths[0] for n in lengths) else lengths[0]
            for key, lengths in axes.items()
        }

    def _take(self, taken: Taken, sign: int) -> None:
        for group, units in taken.items():
            for key, lengths in self._axes[group].items():
                if isinstance(lengths, int):
                    self._gone[key] += sign * len(units) * lengths
                else:
                    self._gone[key] += sign * sum(lengths[unit] for unit in units)

    def _value(self, term: _Term) -> float:
        sizes = list(term.shape)
        for axis, size in enumerate(sizes):
            full = self._lengths.get((term.tensor, axis))
            if full is not None:
                sizes[axis] = size * (full - self._gone[term.tensor, axis]) // full
        if self._clock is not None:
            return self._clock.seconds(term.number, sizes)
        return term.factor * math.prod(sizes)


def _terms(
    plan: PrunePlan, metric: Metric, factors: Mapping[str, float]
) -> tuple[list[_Term], float]:
    """Return the terms that pruning changes, and the constant rest."""
    if metric == "params":
        shapes = {
            member.key: member.shape
            for group in plan.groups
            for member in group.members
            if member.role in ("row", "column", "attached") and not member.buffer
        }
        changing = sum(math.prod(shape) for shape in shapes.values())
        return [_Term(1, key, shape) for key, shape in shapes.items()], plan.parameters - changing
    terms = [
        _Term(cost.positions * factors.get(cost.name, 1), cost.tensor, cost.shape, number)
        for number, cost in enumerate(plan.costs)
    ]
    return terms, 0
