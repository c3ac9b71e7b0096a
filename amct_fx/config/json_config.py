"""The JSON form: one entry per layer of one model, nothing inherited.

Writing follows AMCT's layout byte for byte, from a :class:`Resolution`. Reading gives a
:class:`CompressionConfig` with ``resolved=True``; whether its layers exist is decided, as always,
by :func:`amct_fx.config.resolve.resolve`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from amct_fx.config.files import write_text
from amct_fx.config.schema import (
    ActivationConfig,
    CompressionConfig,
    DataType,
    LayerOverride,
    Source,
    WeightConfig,
)
from amct_fx.errors import ConfigError, ConfigTypeError, did_you_mean

if TYPE_CHECKING:
    import os

    from amct_fx.config.specs import Resolution

__all__ = [
    "dump_json",
    "load_json",
    "parse_json_config",
    "resolution_to_dict",
    "resolved_to_dict",
    "save_json_config",
]

_HEAD = ("version", "batch_num", "fakequant_precision_mode")
_LAYER_KEYS = ("retrain_enable", "retrain_data_config", "retrain_weight_config")
_DATA_KEYS = ("algo", "clip_max", "clip_min", "fixed_min", "dst_type")
_WEIGHT_KEYS = ("algo", "channel_wise", "dst_type")


def dump_json(value: Mapping[str, Any]) -> str:
    """Return JSON in the layout of the tool: four blanks, no blank behind ``:``, no last newline.

    Example:
        >>> print(dump_json({"version": 1, "batch_num": 2}))
        {
            "version":1,
            "batch_num":2
        }
    """
    return json.dumps(value, indent=4, separators=(",", ":"))


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
            "retrain_data_config": _activation_to_dict(spec.activation),
            "retrain_weight_config": _weight_to_dict(spec.weight),
        }
    return result


def resolved_to_dict(config: CompressionConfig) -> dict[str, Any]:
    """Return the JSON form of a configuration that was read from JSON."""
    result = _head(config)
    for override in config.layer_overrides:
        layer: dict[str, Any] = {"retrain_enable": override.name not in config.quant_skip_layers}
        if override.activation is not None:
            layer["retrain_data_config"] = _activation_to_dict(override.activation)
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


def _activation_to_dict(half: ActivationConfig) -> dict[str, Any]:
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


def load_json(text: str, *, file: str | None = None) -> dict[str, Any]:
    """Return a JSON object in which no key stands twice.

    Raises:
        ConfigError: With line and column, when it is something else.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key, item in pairs:
            if key in result:
                message = f"the key {key!r} is given twice"
                raise ConfigError(message, file=file)
            result[key] = item
        return result

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except json.JSONDecodeError as error:
        message = f"not JSON: {error.msg}"
        raise ConfigError(message, file=file, line=error.lineno, column=error.colno) from None
    except RecursionError:
        message = "the JSON is nested too deeply"
        raise ConfigError(message, file=file) from None
    except ConfigError:
        raise
    except ValueError as error:
        message = f"not JSON: {error}"
        raise ConfigError(message, file=file) from None
    if not isinstance(value, dict):
        message = f"a JSON configuration is an object, not a {type(value).__name__}"
        raise ConfigError(message, file=file)
    return value


def parse_json_config(
    value: Mapping[str, Any], *, text: str = "", file: str | None = None
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
    head = _Object(value, Source(file), "")
    if head.typed("version", int, 1) != 1:
        message = f"version must be 1, not {value['version']!r}"
        raise head.source.error(message)
    mode = head.choice("fakequant_precision_mode", ("FORCE_FP16_QUANT", "DEFAULT"), "DEFAULT")
    lines = _Lines(text)
    overrides = []
    disabled = []
    for name, layer in value.items():
        if name in _HEAD:
            continue
        place = Source(file, lines.find(name))
        if name.startswith("regular_prune_"):
            message = f"{name}: the JSON form cannot hold pruning"
            raise place.error(message)
        entry = _Object(layer, place, f"layer {name!r}: ", _LAYER_KEYS)
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


def _override(name: str, entry: _Object) -> LayerOverride:
    """Read one layer."""
    data = entry.object("retrain_data_config", _DATA_KEYS)
    weight = entry.object("retrain_weight_config", _WEIGHT_KEYS)
    return LayerOverride(
        name,
        activation=None if data is None else data.build(_read_activation),
        weight=None if weight is None else weight.build(_read_weight),
        source=entry.source,
    )


def _read_activation(data: _Object) -> ActivationConfig:
    data.choice("algo", ("ulq_quantize",), "ulq_quantize")
    return ActivationConfig(
        clip_max=data.typed("clip_max", float, None),
        clip_min=data.typed("clip_min", float, None),
        fixed_min=data.typed("fixed_min", bool, None),
        dst_type=DataType[data.choice("dst_type", tuple(DataType.__members__), "INT8")],
        source=data.source,
    )


def _read_weight(weight: _Object) -> WeightConfig:
    return WeightConfig(
        algo=weight.choice("algo", ("arq_retrain", "ulq_retrain"), "arq_retrain"),
        dst_type=DataType[weight.choice("dst_type", tuple(DataType.__members__), "INT8")],
        channel_wise=weight.typed("channel_wise", bool, None),
        source=weight.source,
    )


class _Object:
    """A JSON object that checks the types of its values; messages say whose they are."""

    def __init__(
        self, value: Any, source: Source, owner: str, keys: tuple[str, ...] | None = None
    ) -> None:
        self.source = source
        self._owner = owner
        if not isinstance(value, Mapping):
            message = f"an object is expected, not {value!r:.40}"
            raise self._error(message)
        self._value = value
        for key in value:
            if keys is not None and key not in keys:
                hint = did_you_mean(str(key), keys)
                message = f"unknown key {key!r}{hint} (valid keys: {', '.join(keys)})"
                raise self._error(message)

    def typed(self, key: str, kind: type, default: Any) -> Any:
        """Return a value of exactly this type, or the default when the key is absent."""
        if key not in self._value:
            return default
        value = self._value[key]
        if type(value) is not kind:
            found = f"{type(value).__name__} ({value!r:.40})"
            message = f"{self._owner}{key} must be {kind.__name__}, not {found}"
            raise ConfigTypeError(message, file=self.source.file, line=self.source.line)
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> Any:
        """Return one of the choices, or the default when the key is absent."""
        value = self.typed(key, str, default)
        if value not in choices:
            hint = did_you_mean(value, choices)
            message = f"{key} must be {' or '.join(choices)}, not {value!r}{hint}"
            raise self._error(message)
        return value

    def object(self, key: str, keys: tuple[str, ...]) -> _Object | None:
        """Return the object inside, or ``None`` when the key is absent."""
        if key not in self._value:
            return None
        return _Object(self._value[key], self.source, f"{self._owner}{key}: ", keys)

    def build(self, make: Callable[[_Object], Any]) -> Any:
        """Make a dataclass; say where it stands when a value is out of range."""
        try:
            return make(self)
        except ConfigTypeError:
            raise
        except ConfigError as error:
            if error.message.startswith(self._owner):
                raise
            raise self._error(error.message) from None

    def _error(self, message: str) -> ConfigError:
        return self.source.error(f"{self._owner}{message}")


class _Lines:
    """Find the lines of keys, one after the other, in one pass over the text."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._position = 0
        self._line = 1

    def find(self, key: str) -> int | None:
        """Return the line of the next occurrence of a key."""
        for quoted in (json.dumps(key), json.dumps(key, ensure_ascii=False)):
            position = self._text.find(quoted, self._position)
            if position >= 0:
                self._line += self._text.count("\n", self._position, position)
                self._position = position
                return self._line
        return None
