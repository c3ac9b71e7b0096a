"""Pruning: whole channels by L2 norm, and two of every four weights."""

from amct_fx.prune.options import PruneMode, PruneOptions
from amct_fx.prune.plan import PinnedLayer, PruneGroup, PrunePlan
from amct_fx.prune.planning import plan_channels, prune_plan
from amct_fx.prune.remove import remove_channels

__all__ = [
    "PinnedLayer",
    "PruneGroup",
    "PruneMode",
    "PruneOptions",
    "PrunePlan",
    "plan_channels",
    "prune_plan",
    "remove_channels",
]
