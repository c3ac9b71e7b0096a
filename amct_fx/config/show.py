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
    from amct_fx.config.specs import LayerFacts, LayerSpec, ModelFacts, Resolution
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
        weight: How its weight is quantized.
        pruning: How it is pruned.
        origin: Where these settings come from.
        reason: Why it stays float.
    """

    layer: str
    type: str
    activation: str
    weight: str
    pruning: str
    origin: str
    reason: str


def rows(resolution: Resolution, facts: ModelFacts) -> list[Row]:
    """Return one row per layer of a quantizable type, left-out ones with the reason.

    Example:
        >>> from amct_fx.config import CompressionConfig, LayerFacts, ModelFacts, resolve
        >>> layers = LayerFacts("fc", "Linear"), LayerFacts("x", "GRU", reason="unused")
        >>> facts = ModelFacts(layers)
        >>> print(format_rows(rows(resolve(CompressionConfig(), facts), facts)))
        layer  type    activation   weight           pruning  origin   reason
        fc     Linear  INT8 (IFMR)  INT8 ARQ tensor  -        default
        x      GRU     float        float            -                 unused
    """
    return [_row(resolution.layers.get(layer.name), layer) for layer in facts.layers]


def _row(spec: LayerSpec | None, layer: LayerFacts) -> Row:
    """Return the row of one layer."""
    if spec is None:
        reason = layer.reason or ""
        return Row(layer.name, layer.layer_type, "float", "float", "-", "", reason)
    origins = [spec.activation_origin, spec.weight_origin] if spec.quantize else []
    if spec.prune is not None:
        origins.append(spec.prune_origin)
    return Row(
        layer=spec.name,
        type=spec.layer_type,
        activation=_activation(spec.activation) if spec.quantize else "float",
        weight=_weight(spec.weight) if spec.quantize else "float",
        pruning=_prune(spec.prune),
        origin=", ".join(dict.fromkeys(map(str, origins))),
        reason=spec.reason or "",
    )


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
    header = tuple(Row.__dataclass_fields__)
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
