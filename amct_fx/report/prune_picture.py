"""The prune plan as plain data for a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

__all__ = ["prune_picture"]


def prune_picture(plan: Any) -> dict[str, Any]:
    """Return groups with the channels that stay, layers that are not pruned, and the totals.

    Args:
        plan: What ``amct_fx.prune_plan`` returned.
    """
    return {
        "groups": [_group(group) for group in _of(plan, "groups", ())],
        "pinned": [
            {key: str(_of(item, key, "") or "") for key in ("name", "code", "text")}
            for item in _of(plan, "pinned", ())
        ],
        "totals": _totals(plan),
    }


def _totals(plan: Any) -> str:
    """Return the parameters and multiply-accumulates before and after."""
    names = ("parameters", "MACs")
    values = [
        (_of(plan, key.lower(), None), _of(plan, f"{key.lower()}_after", None)) for key in names
    ]
    texts = [
        f"{key} {before:,} → {after:,}"
        for key, (before, after) in zip(names, values, strict=True)
        if before is not None and after is not None
    ]
    return ", ".join(texts) or str(_of(plan, "totals", "") or "")


def _group(group: Any) -> dict[str, Any]:
    kept = [int(index) for index in _of(group, "kept", ())]
    return {
        "id": str(_of(group, "id", "")),
        "producers": [_name(item) for item in _of(group, "producers", ())],
        "consumers": [_name(item) for item in _of(group, "consumers", ())],
        "channels": int(_of(group, "channels", 0)) or len(kept),
        "kept": kept,
        "note": str(_of(group, "note", "") or ""),
    }


def _name(item: Any) -> str:
    return item if isinstance(item, str) else str(_of(item, "name", item))


def _of(value: Any, key: str, default: Any) -> Any:
    if isinstance(value, Mapping):
        return value.get(key, default)
    found = getattr(value, key, default)
    return found if found is not None or not isinstance(default, Iterable) else default
