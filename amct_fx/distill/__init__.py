"""Blockwise distillation: a student with quantizers follows its float teacher, block by block."""

from __future__ import annotations

from amct_fx.distill.facts import distill_facts
from amct_fx.distill.groups import Group, find_groups, groups_of_names
from amct_fx.distill.history import GroupHistory, History
from amct_fx.distill.loop import choose_inputs
from amct_fx.distill.plan import Distillation, distillation_of, history_of
from amct_fx.distill.prepare import prepare_distill_amct
from amct_fx.distill.run import distill

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
