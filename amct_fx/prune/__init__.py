"""Pruning: whole channels by L2 norm, and two of every four weights."""

from amct_fx.prune.kept import kept_indices
from amct_fx.prune.masks import keep_zeros
from amct_fx.prune.options import PruneMode, PruneOptions
from amct_fx.prune.parametrization import M4N2, FilterNorm, filter_norm, m4n2
from amct_fx.prune.plan import PrunePlan
from amct_fx.prune.plan_parts import PinnedLayer, PruneGroup
from amct_fx.prune.planning import follow_channels, prune_plan
from amct_fx.prune.record import PruneRecord, add_prune_record, read_prune_record
from amct_fx.prune.remove import remove_channels
from amct_fx.prune.search import ChannelSearch, search_channel_pruning

__all__ = [
    "M4N2",
    "ChannelSearch",
    "FilterNorm",
    "PinnedLayer",
    "PruneGroup",
    "PruneMode",
    "PruneOptions",
    "PrunePlan",
    "PruneRecord",
    "add_prune_record",
    "filter_norm",
    "follow_channels",
    "keep_zeros",
    "kept_indices",
    "m4n2",
    "prune_plan",
    "read_prune_record",
    "remove_channels",
    "search_channel_pruning",
]
