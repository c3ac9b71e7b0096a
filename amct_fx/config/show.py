"""Show people what a configuration does to a model, and where it is wrong."""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from amct_fx.config.files import read_text
from amct_fx.config.schema import FilterPruneConfig
from amct_fx.errors import AmctError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from amct_fx.config.schema import ActivationConfig, PruneConfig, WeightConfig
    from amct_fx.config.specs import LayerFacts, LayerSpec, ModelFacts, Origin, Resolution
    from amct_fx.errors import ConfigError

__all__ = ["Row", "format_rows", "point_at", "rows"]

_WIDTH = 100


@dataclass(frozen=True)
class Row:
    """What happens to one layer, in words.

    Args:
        layer: Name of the layer.
        type: Its class.
        activation: How its input is quantized; ``"float"``: not at all.
        activation_from: Level and line that say so.
        weight: How its weight is quantized.
        weight_from: Level and line that say so.
        pruning: How it is pruned; ``"-"``: not at all.
        pruning_from: Level and line that say so.
        reason: Why it stays float, or is not pruned.
    """

    layer: str
    type: str
    activation: str
    activation_from: str
    weight: str
    weight_from: str
    pruning: str
    pruning_from: str
    reason: str


def rows(resolution: Resolution, facts: ModelFacts) -> list[Row]:
    """Return one row per layer of a quantizable type, left-out ones with the reason.

    Example:
        >>> from amct_fx.config import CompressionConfig, LayerFacts, ModelFacts, resolve
        >>> layers = LayerFacts("fc", "Linear"), LayerFacts("x", "GRU", reason="unused")
        >>> facts = ModelFacts(layers)
        >>> print(format_rows(rows(resolve(CompressionConfig(), facts), facts)))
        layer  type    activation   from     weight           from     pruning  from  reason
        fc     Linear  INT8 (IFMR)  default  INT8 ARQ tensor  default  -
        x      GRU     float                 float                     -              unused
    """
    return [_row(resolution.layers.get(layer.name), layer) for layer in facts.layers]


def _row(spec: LayerSpec | None, layer: LayerFacts) -> Row:
    """Return the row of one layer."""
    if spec is None:
        name, reason = layer.name, layer.reason or ""
        return Row(name, layer.layer_type, "float", "", "float", "", "-", "", reason)
    reasons = [spec.reason] if spec.reason else []
    if spec.prune_reason:
        reasons.append(f"not pruned: {spec.prune_reason}")
    return Row(
        layer=spec.name,
        type=spec.layer_type,
        activation=_activation(spec.activation) if spec.quantize else "float",
        activation_from=_from(spec.activation_origin) if spec.quantize else "",
        weight=_weight(spec.weight) if spec.quantize else "float",
        weight_from=_from(spec.weight_origin) if spec.quantize else "",
        pruning=_prune(spec.prune),
        pruning_from=_from(spec.prune_origin) if spec.prune is not None else "",
        reason="; ".join(reasons),
    )


def _from(origin: Origin) -> str:
    """Return level and line; the file is the same for all layers."""
    line = origin.source.line
    return f"{origin.label}, line {line}" if line else origin.label


def _activation(half: ActivationConfig) -> str:
    start = "IFMR" if half.clip_max is None else f"{half.clip_min:g} … {half.clip_max:g}"
    fixed = {None: "", True: ", fixed_min", False: ", no fixed_min"}[half.fixed_min]
    return f"{half.dst_type.name} ({start}{fixed})"


def _weight(half: WeightConfig) -> str:
    algo = half.algo.removesuffix("_retrain").upper()
    return f"{half.dst_type.name} {algo} {'channel' if half.channel_wise else 'tensor'}"


def _prune(prune: PruneConfig | None) -> str:
    if prune is None:
        return "-"
    if isinstance(prune, FilterPruneConfig):
        return f"filter {prune.prune_ratio:g}"
    return f"2:4, refresh {prune.update_freq}" if prune.update_freq else "2:4"


def format_rows(table: Iterable[Row]) -> str:
    """Return rows as text with aligned columns."""
    header = tuple("from" if name.endswith("_from") else name for name in Row.__dataclass_fields__)
    lines = [header, *(astuple(row) for row in table)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    padded = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "\n".join(padded)


def point_at(error: ConfigError, *, text: str | None = None) -> str:
    """Return the message of an error with the line that is wrong and a caret under the column.

    Args:
        error: The error.
        text: The configuration, when it did not come from a file.

    Example:
        >>> from amct_fx.config import load_config
        >>> from amct_fx.errors import ConfigError
        >>> try:
        ...     load_config("batch_num: many")
        ... except ConfigError as error:
        ...     print(point_at(error, text="batch_num: many"))
        <config>:1:12: batch_num must be a whole number from 0 to 4294967295, not many
        batch_num: many
                   ^
    """
    if text is None and error.file is not None:
        try:
            text = read_text(error.file)
        except AmctError:
            text = None
    if text is None or error.line is None:
        return str(error)
    lines = text.split("\n")
    if error.line > len(lines):
        return str(error)
    line = lines[error.line - 1].rstrip("\r")
    if error.column is None:
        return f"{error}\n{line[:_WIDTH]}"
    start = max(0, error.column - _WIDTH)
    # Tabs stay tabs, so that the caret stands where the terminal puts the column.
    before = line[start : error.column - 1]
    blank = "".join("\t" if character == "\t" else " " for character in before)
    return f"{error}\n{line[start : start + _WIDTH]}\n{blank}^"
