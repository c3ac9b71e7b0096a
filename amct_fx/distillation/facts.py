"""Which layers distillation can quantize. Source: spec/distillation.md section 5."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from amct_fx.backend_config import model_facts
from amct_fx.config.rules import DISTILL

if TYPE_CHECKING:
    from collections.abc import Collection

    from torch import nn

    from amct_fx.config import LayerFacts, ModelFacts
    from amct_fx.graph import Capture

__all__ = ["distill_facts"]


def distill_facts(model: nn.Module, captured: Capture) -> ModelFacts:
    """Describe the layers of ``model``, with the reasons why distillation leaves some float.

    Args:
        model: The traced model.
        captured: What tracing found.

    Example:
        >>> from torch import nn
        >>> from amct_fx.backend_config import is_layer
        >>> from amct_fx.graph import capture
        >>> model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.Linear(8, 8))
        >>> [layer.reason for layer in distill_facts(model, capture(model, is_layer)).layers]
        ['distillation quantizes Conv2d and Linear, not Conv1d', None]
    """
    facts = model_facts(model, captured)
    hidden = frozenset(captured.island_leaves)
    layers = tuple(replace(layer, reason=_reason(layer, hidden)) for layer in facts.layers)
    return replace(facts, layers=layers)


def _reason(layer: LayerFacts, hidden: Collection[str]) -> str | None:
    if layer.layer_type not in DISTILL.types:
        return f"distillation quantizes {' and '.join(DISTILL.types)}, not {layer.layer_type}"
    if layer.reason is None and layer.name in hidden:
        return "the code that calls it cannot be traced, so no group can hold it"
    return layer.reason
