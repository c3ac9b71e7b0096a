"""The configuration dicts of the single-operator classes. Source: spec/deploy.md section 11."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from amct_fx.config.schema import DataType
from amct_fx.errors import ArgumentError, ConfigError, ConfigTypeError, did_you_mean

__all__ = ["OperatorConfig", "operator_config"]

_DATA, _WEIGHT = "retrain_data_config", "retrain_weight_config"
_TOP_KEYS = ("retrain_enable", _DATA, _WEIGHT)
_DATA_KEYS = ("dst_type", "batch_num", "fixed_min", "clip_max", "clip_min", "asymmetric")
_WEIGHT_KEYS = ("dst_type", "weights_retrain_algo", "channel_wise")
_ALGORITHMS = {"arq_retrain": False, "ulq_retrain": True, "ulq_quantize": True}


@dataclass(frozen=True)
class OperatorConfig:
    """How one operator is trained.

    Attributes:
        enabled: Whether anything is quantized.
        num_bits: Bits of the input.
        batch_num: Batches that the range search collects.
        fixed_min: Whether the range begins at 0.
        clip_max: Upper end of the range, ``None`` to search it.
        clip_min: Lower end of the range, ``None`` to search it.
        symmetric: Whether the offset of the input is 0.
        learned_weight_scale: Weight-ULQ instead of ARQ.
        channel_wise: One weight scale for each output channel.
    """

    enabled: bool = True
    num_bits: int = 8
    batch_num: int = 1
    fixed_min: bool = False
    clip_max: float | None = None
    clip_min: float | None = None
    symmetric: bool = False
    learned_weight_scale: bool = False
    channel_wise: bool = True


def operator_config(
    config: object,
    *,
    channel_wise: bool = True,
    data_types: tuple[str, ...] = ("INT8", "INT16"),
    has_weight: bool = True,
    asymmetric: bool = True,
) -> OperatorConfig:
    """Read and check a configuration dict.

    Args:
        config: The dict, or ``None`` for the defaults; it is not changed.
        channel_wise: The default of that key, which is all a Linear may have.
        data_types: What the input may become.
        has_weight: Whether the operator has a weight to quantize.
        asymmetric: The default of that key.

    Raises:
        ConfigError: An unknown key, or a value that is not allowed; names the path of the key.
        ConfigTypeError: A value of a wrong type.
        ArgumentError: ``channel_wise`` for a Linear.

    Example:
        >>> config = {"retrain_data_config": {"dst_type": "INT16", "asymmetric": False}}
        >>> found = operator_config(config)
        >>> found.num_bits, found.symmetric, found.channel_wise
        (16, True, True)
        >>> operator_config({"retrain_data_config": {"dst_typ": "INT8"}})
        Traceback (most recent call last):
        amct_fx.errors.ConfigError: config['retrain_data_config'] has the unknown key 'dst_typ'; \
did you mean 'dst_type'?
    """
    keys = _TOP_KEYS if has_weight else _TOP_KEYS[:2]
    top = _Part("config", {} if config is None else config, keys)
    data = top.part(_DATA, _DATA_KEYS)
    weight = top.part(_WEIGHT, _WEIGHT_KEYS)
    bits = DataType[data.choice("dst_type", data_types, "INT8")].bits
    weight.choice("dst_type", ("INT8",), "INT8")
    algorithm = weight.choice("weights_retrain_algo", tuple(_ALGORITHMS), "arq_retrain")
    per_channel = weight.typed("channel_wise", bool, channel_wise)
    if per_channel and not channel_wise:
        message = "a Linear has one weight scale: 'channel_wise' must be False or left out"
        raise ArgumentError(message)
    clip_max, clip_min = data.clips()
    return OperatorConfig(
        enabled=top.typed("retrain_enable", bool, True),
        num_bits=bits,
        batch_num=data.batch_num(),
        fixed_min=data.typed("fixed_min", bool, False),
        clip_max=clip_max,
        clip_min=clip_min,
        symmetric=not data.typed("asymmetric", bool, asymmetric),
        learned_weight_scale=_ALGORITHMS[algorithm],
        channel_wise=per_channel,
    )


class _Part:
    """One level of the dict; ``path`` says which, for messages."""

    def __init__(self, path: str, value: object, keys: tuple[str, ...]) -> None:
        if not isinstance(value, Mapping):
            message = f"{path} must be a dict, not {type(value).__name__}"
            raise ConfigTypeError(message)
        for key in value:
            if key not in keys:
                message = f"{path} has the unknown key {key!r}{did_you_mean(str(key), keys)}"
                raise ConfigError(message)
        self._path = path
        self._value = value

    def part(self, key: str, keys: tuple[str, ...]) -> _Part:
        """Return the dict under a key, empty when it is absent."""
        return _Part(f"{self._path}[{key!r}]", self._value.get(key, {}), keys)

    def typed(self, key: str, kind: type, default: Any) -> Any:
        """Return a value of exactly one type."""
        value = self._value.get(key, default)
        if type(value) is not kind and value is not default:
            message = (
                f"{self._path}[{key!r}] must be {kind.__name__}, not {value!r} "
                f"({type(value).__name__})"
            )
            raise ConfigTypeError(message)
        return value

    def choice(self, key: str, choices: tuple[str, ...], default: str) -> str:
        """Return one of several words."""
        value = self._value.get(key, default)
        if value not in choices:
            allowed = " or ".join(map(repr, choices))
            message = f"{self._path}[{key!r}] must be {allowed}, not {value!r}"
            raise ConfigError(message + did_you_mean(str(value), choices))
        return str(value)

    def batch_num(self) -> int:
        """Return the number of batches."""
        number: int = self.typed("batch_num", int, 1)
        if number < 1:
            message = f"{self._path}['batch_num'] must be at least 1, not {number}"
            raise ConfigError(message)
        return number

    def clips(self) -> tuple[float | None, float | None]:
        """Return both ends of the range, or ``None`` twice."""
        clips: tuple[float | None, float | None] = (
            self.typed("clip_max", float, None),
            self.typed("clip_min", float, None),
        )
        if (clips[0] is None) != (clips[1] is None):
            given, missing = ("clip_max", "clip_min")[:: 1 if clips[1] is None else -1]
            message = f"{self._path} gives {given} but not {missing}; give both, or none"
            raise ConfigError(message)
        return clips
