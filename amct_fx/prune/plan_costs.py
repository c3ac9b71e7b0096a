"""What a plan leaves of the model, in parameters and multiply-accumulates.

Source: spec/pruning.md section 7.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from amct_fx.prune.plan import PrunePlan
    from amct_fx.prune.plan_parts import LayerCost

__all__ = ["Sizes", "cost_after", "parameters_gone", "remaining_sizes"]

Sizes: TypeAlias = dict[tuple[str, int], tuple[int, int]]
"""By name of a tensor and axis its full and its remaining length."""


def remaining_sizes(plan: PrunePlan) -> Sizes:
    """Return full and remaining length of every axis that loses something."""
    sizes: Sizes = {}
    for group in plan.groups:
        cut = group.cut
        counts: dict[int, int] = {}  # by identity: most members share their positions
        for member in group.members:
            key, places = (member.key, member.axis), member.positions
            full, left = sizes.get(key, (member.length,) * 2)
            if id(places) not in counts:
                counts[id(places)] = sum([len(places[unit]) for unit in cut])
            sizes[key] = full, left - counts[id(places)]
    return sizes


def cost_after(cost: LayerCost, sizes: Sizes) -> LayerCost:
    """Return the cost of a call of a layer with what it has left."""
    shape = list(cost.shape)
    for axis in range(len(shape)):
        full, left = sizes.get((cost.tensor, axis), (1, 1))
        shape[axis] = shape[axis] * left // full
    return replace(cost, macs_after=math.prod(shape) * cost.positions)


def parameters_gone(plan: PrunePlan, sizes: Sizes) -> int:
    """Return how many parameters a plan removes."""
    shapes = {
        member.key: member.shape
        for group in plan.groups
        for member in group.members
        if member.role in ("row", "column", "attached") and not member.buffer
    }
    gone = 0
    for key, shape in shapes.items():
        left = list(shape)
        for axis in range(len(shape)):
            full, rest = sizes.get((key, axis), (1, 1))
            left[axis] = left[axis] * rest // full
        gone += math.prod(shape) - math.prod(left)
    return gone
