"""The JSON form: one entry per layer of one model, nothing inherited.

Writing follows AMCT's layout byte for byte, from a :class:`Resolution`. Reading gives a
:class:`CompressionConfig` with ``resolved=True``; whether its layers exist is decided, as always,
by :func:`amct_fx.config.resolve.resolve`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from amct_fx.config.files import write_text
from amct_fx.config.json_object import JsonObject, Lines, dump_json
from amct_fx.config.schema import (
    ActivationConfig,
    CompressionConfig,
    DataType,
    LayerOverride,
    Source,
    WeightConfig,
)
from amct_fx.errors import ConfigError, ConfigTypeError

if TYPE_CHECKING:
    import os

    from amct_fx.config.specs import Resolution

__all__ = [
    "DATA_KEYS",
    "WEIGHT_KEYS",
    "activation_to_dict",
    "parse_json_config",
    "read_activation",
    "resolution_to_dict",
    "resolved_to_dict",
    "save_json_config",
]

_HEAD = ("version", "batch_num", "fakequant_precision_mode")
_LAYER_KEYS = ("retrain_enable", "retrain_data_config", "retrain_weight_config")
DATA_KEYS = ("algo", "clip_max", "clip_min", "fixed_min", "dst_type")
WEIGHT_KEYS = ("algo", "channel_wise", "dst_type")


def save_json_config(path: str | os.PathLike[str], resolution: Resolution) -> None:
    """Write the JSON form of a resolved configuration; a crash leaves the old file.

    Raises:
        ConfigError: When it prunes, which the JSON form cannot say.
    """
    write_text(path, dump_json(resolution_to_dict(resolution)))


def resolution_to_dict(resolution: Resolution) -> dict[str, Any]:
    """Return the JSON form of a resolved configuration, disabled layers included."""
    if resolution.prune:
        message = "the JSON form cannot hold pruning; keep the .cfg file"
        raise ConfigError(message)
    result = _head(resolution)
    for name, spec in resolution.layers.items():
        result[name] = {
            "retrain_enable": spec.quantize,
            "retrain_data_config": activation_to_dict(spec.activation),
            "retrain_weight_config": _weight_to_dict(spec.weight),
        }
    return result


def resolved_to_dict(config: CompressionConfig) -> dict[str, Any]:
    """Return the JSON form of a configuration that was read from JSON."""
    result = _head(config)
    disabled = set(config.quant_skip_layers)
    for override in config.layer_overrides:
        layer: dict[str, Any] = {"retrain_enable": override.name not in disabled}
        if override.activation is not None:
            layer["retrain_data_config"] = activation_to_dict(override.activation)
        if override.weight is not None:
            layer["retrain_weight_config"] = _weight_to_dict(override.weight)
        result[override.name] = layer
    return result


def _head(config: Resolution | CompressionConfig) -> dict[str, Any]:
    """Return the keys in front of the layers."""
    head: dict[str, Any] = {"version": 1}
    if config.fakequant_precision_mode is not None:
        head["fakequant_precision_mode"] = config.fakequant_precision_mode
    return head | {"batch_num": config.batch_num}


def activation_to_dict(half: ActivationConfig) -> dict[str, Any]:
    """Return a data half; what was found automatically is left out."""
    result: dict[str, Any] = {"algo": "ulq_quantize"}
    if half.clip_max is not None:
        result |= {"clip_max": half.clip_max, "clip_min": half.clip_min}
    if half.fixed_min is not None:
        result["fixed_min"] = half.fixed_min
    return result | {"dst_type": half.dst_type.name}


def _weight_to_dict(half: WeightConfig) -> dict[str, Any]:
    """Return a weight half; the two algorithms have their keys in different orders."""
    keys = {"channel_wise": half.channel_wise, "dst_type": half.dst_type.name}
    order = ("channel_wise", "dst_type")
    if half.algo == "ulq_retrain":
        order = ("dst_type", "channel_wise")
    return {"algo": half.algo} | {key: keys[key] for key in order if keys[key] is not None}


def parse_json_config(
    value: Mapping[Any, Any], *, text: str = "", file: str | None = None
) -> CompressionConfig:
    """Read the JSON form.

    Args:
        value: The JSON object.
        text: Its text, to find lines for messages; may be left out.
        file: Name of the file, for messages.

    Raises:
        ConfigError: For an unknown key or a value out of range.
        ConfigTypeError: For a value of the wrong type.

    Example:
        >>> config = parse_json_config({"version": 1, "batch_num": 2, "fc": {}})
        >>> config.resolved, config.batch_num, config.layer_overrides
        (True, 2, (LayerOverride(name='fc', activation=None, weight=None, prune=None),))
    """
    head = JsonObject(value, Source(file), "")
    if head.typed("version", int, 1) != 1:
        message = f"version must be 1, not {value['version']!r}"
        raise head.source.error(message)
    mode = head.choice("fakequant_precision_mode", ("FORCE_FP16_QUANT", "DEFAULT"), "DEFAULT")
    lines = Lines(text)
    overrides = []
    disabled = []
    for name, layer in value.items():
        if name in _HEAD:
            continue
        if not isinstance(name, str):
            message = f"a layer is named by a string, not by {name!r}"
            raise ConfigTypeError(message, file=file)
        place = Source(file, lines.find(name))
        if name.startswith("regular_prune_"):
            message = f"{name}: the JSON form cannot hold pruning"
            raise place.error(message)
        entry = JsonObject(layer, place, f"layer {name!r}: ", _LAYER_KEYS)
        overrides.append(_override(name, entry))
        if not entry.typed("retrain_enable", bool, True):
            disabled.append(name)
    try:
        return CompressionConfig(
            batch_num=head.typed("batch_num", int, 1),
            fakequant_precision_mode=None if mode == "DEFAULT" else "FORCE_FP16_QUANT",
            layer_overrides=tuple(overrides),
            quant_skip_layers=tuple(disabled),
            resolved=True,
            file=file,
        )
    except ConfigError as error:
        if isinstance(error, ConfigTypeError):
            raise
        raise head.source.error(error.message) from None


def _override(name: str, entry: JsonObject) -> LayerOverride:
    """Read one layer."""
    data = entry.object("retrain_data_config", DATA_KEYS)
    weight = entry.object("retrain_weight_config", WEIGHT_KEYS)
    return LayerOverride(
        name,
        activation=None if data is None else data.build(read_activation),
        weight=None if weight is None else weight.build(_read_weight),
        source=entry.source,
    )


def read_activation(data: JsonObject) -> ActivationConfig:
    """Read a data half."""
    data.choice("algo", ("ulq_quantize",), "ulq_quantize")
    return ActivationConfig(
        clip_max=data.typed("clip_max", float, None),
        clip_min=data.typed("clip_min", float, None),
        fixed_min=data.typed("fixed_min", bool, None),
        dst_type=DataType[data.choice("dst_type", tuple(DataType.__members__), "INT8")],
        source=data.source,
    )


def _read_weight(weight: JsonObject) -> WeightConfig:
    return WeightConfig(
        algo=weight.choice("algo", ("arq_retrain", "ulq_retrain"), "arq_retrain"),
        dst_type=DataType[weight.choice("dst_type", tuple(DataType.__members__), "INT8")],
        channel_wise=weight.typed("channel_wise", bool, None),
        source=weight.source,
    )
