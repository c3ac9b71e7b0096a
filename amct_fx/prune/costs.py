"""Multiply-accumulates of a model, from the shapes of its graph.

A weight element is used once at each place: a convolution costs ``numel(weight)`` times the places
of its output, for one example. Source: spec/pruning.md section 11, "Cost".
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from amct_fx.config import M4N2PruneConfig
from amct_fx.prune.plan_parts import LayerCost

if TYPE_CHECKING:
    from amct_fx.prune.channels.steps import Replay
    from amct_fx.prune.channels.walk import LayerUse, Walk

__all__ = ["layer_costs", "m4n2_density"]


def layer_costs(walk: Walk, state: Replay) -> tuple[LayerCost, ...]:
    """Return the cost of every call of a layer; the plan fills in that after pruning."""
    return tuple(_cost(walk, state, use) for use in walk.uses)


def _cost(walk: Walk, state: Replay, use: LayerUse) -> LayerCost:
    macs = math.prod(use.weight) * use.positions
    density = 1.0
    if isinstance(walk.settings.get(use.name), M4N2PruneConfig):
        density = m4n2_density(_columns_after(state, use))
    tensor = f"{use.name}.size{use.part}" if use.rows is None else use.rows[0]
    return LayerCost(use.name, use.kind, use.weight, use.positions, macs, macs, density, tensor)


def _columns_after(state: Replay, use: LayerUse) -> int:
    """Return the length of the axis along which 2:4 sparsity forms its groups."""
    if use.columns is None:
        return 1
    _, axis = use.columns
    left = state.selections.get(use.columns)
    if left is None:
        return use.weight[axis]
    return left.numel() // (1 if use.kind == "deconv" else use.groups)


def m4n2_density(length: int) -> float:
    """Return the share of weights that stays along an axis of ``length``.

    Example:
        >>> [round(m4n2_density(n), 3) for n in (2, 3, 6, 8)]
        [1.0, 0.667, 0.667, 0.5]
    """
    if length <= 2:
        return 1.0
    full, rest = divmod(length, 4)
    return (2 * full + min(rest, 2)) / length
