"""The prune plan as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from amct_fx.config import FilterPruneConfig, M4N2PruneConfig
from amct_fx.errors import PruneError
from amct_fx.prune.choices import whole_numbers
from amct_fx.prune.levels import Block, Level
from amct_fx.prune.options import PruneOptions
from amct_fx.prune.plan import PrunePlan
from amct_fx.prune.plan_parts import LayerCost, Member, PinnedLayer, PruneGroup

__all__ = ["plan_from_json", "plan_to_json"]

_VERSION = 1


def plan_to_json(plan: PrunePlan, *, indent: int | None = None) -> str:
    """Return a plan as JSON; see :meth:`PrunePlan.to_json`."""
    groups = []
    for group in plan.groups:
        plain = {k: v for k, v in vars(group).items() if k != "members"}
        groups.append({**plain, "members": [_member_to_json(m) for m in group.members]})
    content = {
        "version": _VERSION,
        "options": asdict(plan.options),
        "settings": {name: _setting_to_json(item) for name, item in plan.settings.items()},
        "inputs": plan.inputs,
        "levels": [asdict(level) for level in plan.levels],
        "groups": groups,
        "pinned": [asdict(layer) for layer in plan.pinned],
        "costs": [asdict(cost) for cost in plan.costs],
        "parameters": plan.parameters,
        "parameters_after": plan.parameters_after,
        "macs": plan.macs,
        "macs_after": plan.macs_after,
    }
    return json.dumps(content, indent=indent)


def plan_from_json(text: str) -> PrunePlan:
    """Read a plan; see :meth:`PrunePlan.from_json`."""
    try:
        content = json.loads(text)
        if content["version"] != _VERSION:
            message = f"version {content['version']} of the plan is not known"
            raise PruneError(message)
        return _plan_from_json(content)
    except PruneError:
        raise
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        message = f"the text is no prune plan: {type(error).__name__}: {error}"
        raise PruneError(message) from error


def _member_to_json(member: Member) -> dict[str, Any]:
    """Write consecutive positions as their first one."""
    plain = {k: v for k, v in vars(member).items() if k != "positions"}
    first = member.positions[0][0] if member.positions and member.positions[0] else 0
    if all(p == (first + i,) for i, p in enumerate(member.positions)):
        return {**plain, "first": first, "count": len(member.positions)}
    return {**plain, "positions": member.positions}


def _member_from_json(content: dict[str, Any]) -> Member:
    if "first" in content:
        first, count = content.pop("first"), content.pop("count")
        positions = tuple((first + i,) for i in range(count))
    else:
        positions = tuple(tuple(item) for item in content.pop("positions"))
    content["shape"] = tuple(content["shape"])
    content.setdefault("buffer", content["parameter"].startswith("running_"))  # of older plans
    return Member(**content, positions=positions)


def _setting_to_json(setting: Any) -> dict[str, Any]:
    names = ("prune_ratio", "ascend_optimized", "update_freq")
    return {name: getattr(setting, name) for name in names if hasattr(setting, name)}


def _group_from_json(content: dict[str, Any]) -> PruneGroup:
    members = tuple(_member_from_json(member) for member in content.pop("members"))
    name = f"group {content['id']!r}"
    content["kept"] = whole_numbers(content["kept"], f"the units that {name} keeps")
    units = content["channels"]
    for member in members:
        if len(member.positions) != units or not _fit(member):
            message = f"the plan is damaged: {member.key} does not fit the {units} units of {name}"
            raise PruneError(message)
    lists: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in content.items()}
    return PruneGroup(**lists, members=members)


def _fit(member: Member) -> bool:
    """Say whether the positions of a member are places of its axis."""
    return all(0 <= place < member.length for places in member.positions for place in places)


def _level_from_json(content: dict[str, Any]) -> Level:
    blocks = [
        Block(block["fixed"], tuple(tuple(part) for part in block["parts"]))
        for block in content["blocks"]
    ]
    return Level(content["node"], content["reason"], tuple(blocks))


def _plan_from_json(content: dict[str, Any]) -> PrunePlan:
    settings = {
        name: FilterPruneConfig(**item) if "prune_ratio" in item else M4N2PruneConfig(**item)
        for name, item in content["settings"].items()
    }
    costs = [{**item, "shape": tuple(item["shape"])} for item in content["costs"]]
    return PrunePlan(
        groups=tuple(_group_from_json(item) for item in content["groups"]),
        pinned=tuple(PinnedLayer(**item) for item in content["pinned"]),
        costs=tuple(LayerCost(**item) for item in costs),
        parameters=int(content["parameters"]),
        parameters_after=int(content["parameters_after"]),
        options=PruneOptions(**content["options"]),
        settings=settings,
        inputs=tuple((tuple(shape), dtype) for shape, dtype in content["inputs"]),
        levels=tuple(map(_level_from_json, content.get("levels", []))),
    )
