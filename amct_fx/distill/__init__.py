"""Blockwise distillation: which parts of a model are trained together."""

from __future__ import annotations

from amct_fx.distill.facts import distill_facts
from amct_fx.distill.groups import Group, find_groups, groups_of_names

__all__ = ["Group", "distill_facts", "find_groups", "groups_of_names"]
