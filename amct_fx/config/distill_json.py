"""The JSON form of a distillation configuration: the groups, then one entry per layer."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amct_fx.config.files import read_source, read_text, write_text
from amct_fx.config.json_config import (
    DATA_KEYS,
    WEIGHT_KEYS,
    activation_to_dict,
    read_activation,
)
from amct_fx.config.json_object import JsonObject, Lines, dump_json, load_json
from amct_fx.config.messages import warn
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
    from amct_fx.config.distill import DistillConfig
    from amct_fx.config.specs import LayerSpec, Resolution

__all__ = [
    "DistillPlan",
    "distill_to_dict",
    "load_distill",
    "load_distill_json",
    "parse_distill_json",
    "save_distill_json",
]

_HEAD = ("version", "batch_num", "group_size", "data_dump", "distill_group")
_LAYER_KEYS = ("quant_enable", "distill_data_config", "distill_weight_config")
_TYPES = ("INT8", "INT4")


@dataclass(frozen=True)
class DistillPlan:
    """What a distillation JSON says.

    Args:
        batch_num: Batches that the range search collects.
        group_size: Units of layers that were joined into one group.
        data_dump: Keep the teacher's activations on disk.
        groups: Module names of each group.
        quantization: The settings of the layers, resolved.
    """

    batch_num: int
    group_size: int
    data_dump: bool
    groups: tuple[tuple[str, ...], ...]
    quantization: CompressionConfig


def distill_to_dict(
    config: DistillConfig | DistillPlan, groups: Iterable[Iterable[str]], resolution: Resolution
) -> dict[str, Any]:
    """Return the JSON form.

    Args:
        config: The configuration.
        groups: Module names of each group, in the order of the graph.
        resolution: The settings of all eligible layers.
    """
    head: dict[str, Any] = {
        "version": 1,
        "batch_num": config.batch_num,
        "group_size": config.group_size,
        "data_dump": config.data_dump,
        "distill_group": [list(group) for group in groups],
    }
    return head | {name: _layer_to_dict(spec) for name, spec in resolution.layers.items()}


def _layer_to_dict(spec: LayerSpec) -> dict[str, Any]:
    """Return the entry of one layer."""
    weight = {
        "algo": spec.weight.algo.replace("retrain", "distill"),
        "channel_wise": spec.weight.channel_wise,
        "dst_type": spec.weight.dst_type.name,
    }
    return {
        "quant_enable": spec.quantize,
        "distill_data_config": activation_to_dict(spec.activation),
        "distill_weight_config": weight,
    }


def save_distill_json(path: str | os.PathLike[str], value: Mapping[str, Any]) -> None:
    """Write the JSON form; an existing file is replaced with a warning."""
    if Path(path).exists():
        warn(f"{path} exists and is replaced")
    write_text(path, dump_json(value))


def load_distill(source: object) -> DistillConfig | DistillPlan:
    """Read a distillation configuration of any kind.

    Args:
        source: Path or text of a ``.cfg`` or a JSON file, a dict with the keys of the JSON file, a
            :class:`~amct_fx.config.distill.DistillConfig` or :class:`DistillPlan`, which is
            returned, or ``None`` for the defaults.

    Raises:
        ConfigFileNotFoundError: When there is no such file.
        ConfigError: When it cannot be read.

    Example:
        >>> load_distill("group_size: 3").group_size
        3
    """
    from amct_fx.config.distill import (
        DISTILL_FIELDS,
        DistillConfig,
        load_distill_config,
        parse_distill_cfg,
    )

    if isinstance(source, (DistillConfig, DistillPlan)):
        return source
    if source is None:
        return load_distill_config(None)
    if isinstance(source, Mapping):
        return parse_distill_json(source)
    text, file = read_source(source, DISTILL_FIELDS)
    if text.lstrip().startswith("{") or (file and Path(file).suffix.lower() == ".json"):
        return parse_distill_json(load_json(text, file=file), text=text, file=file)
    return parse_distill_cfg(text, file=file)


def load_distill_json(path: str | os.PathLike[str]) -> DistillPlan:
    """Read a distillation JSON file.

    Raises:
        ConfigFileNotFoundError: When there is no such file.
        ConfigError: As for :func:`parse_distill_json`, with the name of the file.
    """
    file = os.fspath(path)
    if not file:
        message = "the name of the distillation JSON is empty"
        raise ConfigError(message)
    text = read_text(file)
    return parse_distill_json(load_json(text, file=file), text=text, file=file)


def parse_distill_json(
    value: Mapping[str, Any], *, text: str = "", file: str | None = None
) -> DistillPlan:
    """Read the JSON form; whether its names exist in a model is checked later.

    Args:
        value: The JSON object.
        text: Its text, to find lines for messages; may be left out.
        file: Name of the file, for messages.

    Raises:
        ConfigError: For a missing or unknown key or a value out of range.
        ConfigTypeError: For a value of the wrong type.

    Example:
        >>> plan = parse_distill_json({"version": 1, "batch_num": 1, "group_size": 1,
        ...     "data_dump": False, "distill_group": [["fc"]], "fc": {"quant_enable": False}})
        >>> plan.groups, plan.quantization.quant_skip_layers
        ((('fc',),), ('fc',))
    """
    head = JsonObject(value, Source(file), "")
    for key in _HEAD:
        if key not in value:
            message = f"the key {key!r} is missing"
            raise head.source.error(message)
    if head.typed("version", int, 1) != 1:
        message = f"version must be 1, not {value['version']!r}"
        raise head.source.error(message)
    for key in ("batch_num", "group_size"):
        if head.typed(key, int, 1) < 1:
            message = f"{key} must be at least 1, not {value[key]}"
            raise head.source.error(message)
    lines = Lines(text)
    overrides, disabled = [], []
    for name, layer in value.items():
        if name not in _HEAD:
            place = Source(file, lines.find(name))
            entry = JsonObject(layer, place, f"layer {name!r}: ", _LAYER_KEYS)
            overrides.append(_override(name, entry))
            if not entry.typed("quant_enable", bool, True):
                disabled.append(name)
    return DistillPlan(
        batch_num=value["batch_num"],
        group_size=value["group_size"],
        data_dump=head.typed("data_dump", bool, False),
        groups=_groups(value["distill_group"], head.source),
        quantization=CompressionConfig(
            batch_num=value["batch_num"],
            layer_overrides=tuple(overrides),
            quant_skip_layers=tuple(disabled),
            resolved=True,
            file=file,
        ),
    )


def _groups(value: object, source: Source) -> tuple[tuple[str, ...], ...]:
    """Read the groups; what they mean for a model is checked when they meet it."""
    is_list = isinstance(value, list) and all(isinstance(group, list) for group in value)
    if not isinstance(value, list) or not is_list:
        message = "distill_group must be a list of lists of module names"
        raise ConfigTypeError(message, file=source.file)
    for name in (name for group in value for name in group):
        if not isinstance(name, str):
            message = f"distill_group holds {name!r}, which is no module name"
            raise ConfigTypeError(message, file=source.file)
    if any(not group for group in value):
        message = "distill_group has an empty group"
        raise source.error(message)
    if not value:
        warn(f"{source}: distill_group is empty: the model is calibrated, and not trained")
    return tuple(tuple(group) for group in value)


def _override(name: str, entry: JsonObject) -> LayerOverride:
    """Read one layer."""
    data = entry.object("distill_data_config", DATA_KEYS)
    weight = entry.object("distill_weight_config", WEIGHT_KEYS)
    return LayerOverride(
        name,
        activation=None if data is None else data.build(_activation),
        weight=None if weight is None else weight.build(_read_weight),
        source=entry.source,
    )


def _activation(data: JsonObject) -> ActivationConfig:
    data.choice("dst_type", _TYPES, "INT8")
    return read_activation(data)


def _read_weight(weight: JsonObject) -> WeightConfig:
    algo = weight.choice("algo", ("arq_distill", "ulq_distill"), "arq_distill")
    return WeightConfig(
        algo="ulq_retrain" if algo == "ulq_distill" else "arq_retrain",
        dst_type=DataType[weight.choice("dst_type", _TYPES, "INT8")],
        channel_wise=weight.typed("channel_wise", bool, None),
        source=weight.source,
    )
