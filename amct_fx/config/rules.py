"""In which points the configurations of training and of distillation differ."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from amct_fx.config.layer_types import QUANTIZABLE_TYPES
from amct_fx.config.schema import SKIP_FIELDS, DataType

__all__ = ["DISTILL", "RETRAIN", "Rules"]

_PAIRS = {
    (DataType.INT8, DataType.INT8): "INT8 with INT8",
    (DataType.INT8, DataType.INT4): "INT8 with INT4",
    (DataType.INT16, DataType.INT8): "INT16 with INT8",
}


@dataclass(frozen=True)
class Rules:
    """What :func:`amct_fx.config.resolve.resolve` follows.

    Args:
        types: Layer types that can be quantized.
        pairs: Widths of activations and weights that can be combined, with their names.
        skip_beats_override: A skip takes a layer out also when an override names it; otherwise
            the override wins.
        skip_fields: Names of the skip lists in a file, by their names in the typed form.

    Example:
        >>> RETRAIN.skip_beats_override, DISTILL.skip_beats_override
        (False, True)
        >>> DISTILL.types
        ('Conv2d', 'Linear')
    """

    types: tuple[str, ...] = QUANTIZABLE_TYPES
    pairs: Mapping[tuple[DataType, DataType], str] = field(default_factory=lambda: _PAIRS)
    skip_beats_override: bool = False
    skip_fields: Mapping[str, str] = field(default_factory=lambda: SKIP_FIELDS)


RETRAIN = Rules()
DISTILL = Rules(
    types=("Conv2d", "Linear"),
    pairs={pair: name for pair, name in _PAIRS.items() if DataType.INT16 not in pair},
    skip_beats_override=True,
    skip_fields=SKIP_FIELDS | {"quant_skip_types": "quant_skip_layer_types"},
)
