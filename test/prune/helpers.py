"""Planning without configuration files."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from amct_fx.backend_config import is_layer
from amct_fx.config import FilterPruneConfig, M4N2PruneConfig
from amct_fx.graph import capture
from amct_fx.prune import PruneOptions, PrunePlan, follow_channels
from amct_fx.prune.oracles import column_mask_oracle

Setting = FilterPruneConfig | M4N2PruneConfig
_LAYERS = (nn.modules.conv._ConvNd, nn.Linear)


def settings_for(
    model: nn.Module, mode: str, ratio: float, asc: bool, skip: Collection[str] = ()
) -> dict[str, Setting]:
    """Prune every layer that the mode lets a global block reach."""
    found: dict[str, Setting] = {}
    for name, module in model.named_modules():
        if not isinstance(module, _LAYERS) or name in skip:
            continue
        groups, inputs = getattr(module, "groups", 1), getattr(module, "in_channels", 0)
        if mode == "amct" and (type(module) not in (nn.Conv2d, nn.Linear) or groups == inputs):
            continue
        if not groups == inputs > 1:
            found[name] = FilterPruneConfig(ratio, asc)
    return found


def plan_for(
    model: nn.Module,
    example: Any,
    *,
    mode: str = "native",
    importance: str = "mean",
    ratio: float = 0.5,
    asc: bool = False,
    skip: Collection[str] = (),
    settings: dict[str, Setting] | None = None,
    **options: Any,
) -> PrunePlan:
    """Plan with one ratio for all layers."""
    chosen = settings_for(model, mode, ratio, asc, skip) if settings is None else settings
    captured = capture(model, is_layer)
    details = PruneOptions(mode=mode, importance=importance, **options)
    return follow_channels(model, captured.regions, chosen, example, details).plan


def kept(plan: PrunePlan) -> dict[str, list[int]]:
    """Return the channels that stay of every layer that loses some."""
    return {name: rows.tolist() for name, rows in plan.kept_rows().items()}


def assert_exact(model: nn.Module, plan: PrunePlan, example: Any) -> None:
    """Compare masked and pruned model, with gradients, in eval and train mode, in float64."""
    for train in (False, True):
        found = column_mask_oracle(model, plan, example, train=train, double=True, rows=train)
        assert found.worst < 1e-9, (train, found)
    single = column_mask_oracle(model, plan, example)
    assert single.outputs < 1e-5, single


def numbers(text: str) -> list[int]:
    """Read "1 2 3"."""
    return [int(word) for word in text.split()]


def without(count: int, text: str) -> list[int]:
    """Return the numbers below ``count`` that are not in the text."""
    gone = numbers(text)
    return [i for i in range(count) if i not in gone]


__all__ = ["assert_exact", "kept", "numbers", "plan_for", "settings_for", "torch", "without"]
