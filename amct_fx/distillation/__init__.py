"""Blockwise distillation: a student with quantizers follows its float teacher, block by block."""

from __future__ import annotations

from amct_fx.distillation.facts import distill_facts
from amct_fx.distillation.groups import Group, find_groups, groups_of_names
from amct_fx.distillation.history import GroupHistory, History
from amct_fx.distillation.loop import choose_inputs
from amct_fx.distillation.plan import Distillation, distillation_of, history_of
from amct_fx.distillation.prepare import prepare_distill_amct
from amct_fx.distillation.run import distill

__all__ = [
    "Distillation",
    "Group",
    "GroupHistory",
    "History",
    "choose_inputs",
    "distill",
    "distill_facts",
    "distillation_of",
    "find_groups",
    "groups_of_names",
    "history_of",
    "prepare_distill_amct",
]
