"""The typed form of a configuration: frozen dataclasses that can be compared and hashed.

A configuration that exists is valid in itself: the classes check types and ranges when they are
made. What it means for one model is the business of :mod:`amct_fx.config.resolve`.

Every part remembers where it was read (:class:`Source`). That serves messages only and takes no
part in comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from amct_fx.config.floats import float32, shortest_float32
from amct_fx.errors import ConfigError, ConfigTypeError

if TYPE_CHECKING:
    import os

__all__ = [
    "ActivationConfig",
    "CompressionConfig",
    "DataType",
    "FilterPruneConfig",
    "LayerOverride",
    "M4N2PruneConfig",
    "PruneConfig",
    "Source",
    "TypeOverride",
    "WeightConfig",
]

WeightAlgo: TypeAlias = Literal["arq_retrain", "ulq_retrain"]
PrecisionMode: TypeAlias = Literal["FORCE_FP16_QUANT"]

UINT32_MAX = 2**32 - 1
MAX_MESSAGE = 2000

#: Skip list of CompressionConfig: name of the field in a file.
SKIP_FIELDS = {
    "skip_layers": "skip_layers",
    "skip_types": "skip_layer_types",
    "quant_skip_layers": "quant_skip_layers",
    "quant_skip_types": "quant_skip_types",
    "prune_skip_layers": "regular_prune_skip_layers",
    "prune_skip_types": "regular_prune_skip_types",
}


class DataType(Enum):
    """Width of the integers that values are quantized to.

    Example:
        >>> DataType.INT8.bits
        8
        >>> DataType["INT4"]
        <DataType.INT4: 4>
    """

    INT4 = 4
    INT8 = 8
    INT16 = 16

    @property
    def bits(self) -> int:
        """Number of bits."""
        return self.value


@dataclass(frozen=True)
class Source:
    """A place in a configuration file.

    Example:
        >>> str(Source("quant.cfg", 12, 3))
        'quant.cfg:12:3'
        >>> str(Source(None, 12, 3))
        'line 12'
    """

    file: str | None = None
    line: int | None = None
    column: int | None = None

    def __str__(self) -> str:
        """Return ``file:line:column``, as far as known."""
        if self.file is None:
            return f"line {self.line}" if self.line else "the configuration"
        return ":".join(str(part) for part in (self.file, self.line, self.column) if part)

    def error(self, message: str) -> ConfigError:
        """Return the exception that says ``message`` about this place; a very long one is cut."""
        if len(message) > MAX_MESSAGE:
            message = f"{message[:MAX_MESSAGE]} …"
        return ConfigError(message, file=self.file, line=self.line, column=self.column)


NOWHERE = Source()


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Base of the parts that remember where they were read.

    Args:
        source: The place; it takes no part in comparisons.
    """

    source: Source = field(default=NOWHERE, compare=False, repr=False)


@dataclass(frozen=True)
class ActivationConfig(Placed):
    """How the input of a layer is quantized: the "data half".

    Args:
        clip_max: Upper end of the range at the start, > 0; ``None``: found from data (IFMR).
        clip_min: Lower end, < 0; both clips are given, or none. They are kept as float32 values.
        fixed_min: Keep the lower end at 0; ``None``: yes behind a ReLU.
        dst_type: Integer type.

    Example:
        >>> ActivationConfig(clip_max=6.0, clip_min=-6.0).clip_max
        6.0
        >>> ActivationConfig(clip_max=6.0)
        Traceback (most recent call last):
        amct_fx.errors.ConfigError: clip_min is missing: give clip_max and clip_min, or neither
    """

    clip_max: float | None = None
    clip_min: float | None = None
    fixed_min: bool | None = None
    dst_type: DataType = DataType.INT8

    def __post_init__(self) -> None:
        """Check types and ranges."""
        _check_type("fixed_min", self.fixed_min, bool, type(None))
        _check_type("dst_type", self.dst_type, DataType)
        for name, other in (("clip_max", "clip_min"), ("clip_min", "clip_max")):
            _check_type(name, getattr(self, name), float, int, type(None))
            if getattr(self, name) is None and getattr(self, other) is not None:
                message = f"{name} is missing: give clip_max and clip_min, or neither"
                raise ConfigError(message)
        if self.clip_max is not None and self.clip_min is not None:
            object.__setattr__(self, "clip_max", _clip("clip_max", self.clip_max, sign=1))
            object.__setattr__(self, "clip_min", _clip("clip_min", self.clip_min, sign=-1))


@dataclass(frozen=True)
class WeightConfig(Placed):
    """How the weight of a layer is quantized: the "weight half".

    Args:
        algo: ``"arq_retrain"``: the scale follows the weight; ``"ulq_retrain"``: it is trained.
        dst_type: Integer type.
        channel_wise: One scale per output channel; ``None``: for every type but Linear.
    """

    algo: WeightAlgo = "arq_retrain"
    dst_type: DataType = DataType.INT8
    channel_wise: bool | None = None

    def __post_init__(self) -> None:
        """Check types and names."""
        _check_choice("algo", self.algo, ("arq_retrain", "ulq_retrain"))
        _check_type("dst_type", self.dst_type, DataType)
        _check_type("channel_wise", self.channel_wise, bool, type(None))


@dataclass(frozen=True)
class FilterPruneConfig(Placed):
    """Whole output channels with the smallest L2 norm are removed.

    Args:
        prune_ratio: Share to remove, between 0 and 1, both excluded. It is kept as the shortest
            decimal of its float32 value, so 0.35 stays 0.35.
        ascend_optimized: Keep a multiple of 16 channels.
    """

    prune_ratio: float
    ascend_optimized: bool = True

    def __post_init__(self) -> None:
        """Check the range."""
        _check_type("prune_ratio", self.prune_ratio, float, int)
        _check_type("ascend_optimized", self.ascend_optimized, bool)
        ratio = shortest_float32(self.prune_ratio)
        if not 0 < ratio < 1:
            message = f"prune_ratio must be between 0 and 1, both excluded, not {ratio}"
            raise ConfigError(message)
        object.__setattr__(self, "prune_ratio", ratio)


@dataclass(frozen=True)
class M4N2PruneConfig(Placed):
    """Two of every four neighbouring weights are kept.

    Args:
        update_freq: Training steps between two choices of the mask; 0: it is chosen once.
    """

    update_freq: int = 0

    def __post_init__(self) -> None:
        """Check the range."""
        _check_uint32("update_freq", self.update_freq)


PruneConfig: TypeAlias = FilterPruneConfig | M4N2PruneConfig


@dataclass(frozen=True)
class LayerOverride(Placed):
    """Settings of one layer; a part that is given replaces the whole part of the levels below.

    Args:
        name: Dotted path of the module.
        activation: Data half, or ``None`` to inherit it.
        weight: Weight half, or ``None`` to inherit it.
        prune: Pruning, or ``None`` to inherit it.
    """

    name: str
    activation: ActivationConfig | None = None
    weight: WeightConfig | None = None
    prune: PruneConfig | None = None

    def __post_init__(self) -> None:
        """Check types."""
        _check_type("name", self.name, str)
        _check_halves(self)


@dataclass(frozen=True)
class TypeOverride(Placed):
    """Settings of all layers of one type; the class name may be spelled as in any dialect.

    Args:
        type: Layer type such as ``"Conv2d"`` or ``"nn.Dense"``.
        activation: Data half, or ``None`` to inherit it.
        weight: Weight half, or ``None`` to inherit it.
        prune: Pruning, or ``None`` to inherit it.
    """

    type: str
    activation: ActivationConfig | None = None
    weight: WeightConfig | None = None
    prune: PruneConfig | None = None

    def __post_init__(self) -> None:
        """Check types."""
        _check_type("type", self.type, str)
        _check_halves(self)


@dataclass(frozen=True)
class CompressionConfig:
    """Everything a configuration says, before it meets a model.

    Args:
        batch_num: Batches that the range search collects at the start of training.
        activation: Data half of every layer, or ``None`` for the defaults.
        weight: Weight half of every layer, or ``None`` for the defaults.
        prune: Pruning of every layer, or ``None``.
        skip_layers: Names of layers that are neither quantized nor pruned.
        skip_types: Types of such layers.
        quant_skip_layers: Names of layers that are not quantized.
        quant_skip_types: Types of such layers.
        prune_skip_layers: Names of layers that are not pruned.
        prune_skip_types: Types of such layers.
        layer_overrides: Settings of single layers.
        type_overrides: Settings by layer type.
        fakequant_precision_mode: ``"FORCE_FP16_QUANT"``, or ``None``.
        resolved: The overrides list all layers, nothing is inherited and a layer that is not listed
            stays float. So it is with a JSON file, which was made for one model.

    Example:
        >>> config = CompressionConfig(batch_num=2, skip_layers=("conv1",))
        >>> config == CompressionConfig(skip_layers=["conv1"], batch_num=2)
        True
    """

    batch_num: int = 1
    activation: ActivationConfig | None = None
    weight: WeightConfig | None = None
    prune: PruneConfig | None = None
    skip_layers: tuple[str, ...] = ()
    skip_types: tuple[str, ...] = ()
    quant_skip_layers: tuple[str, ...] = ()
    quant_skip_types: tuple[str, ...] = ()
    prune_skip_layers: tuple[str, ...] = ()
    prune_skip_types: tuple[str, ...] = ()
    layer_overrides: tuple[LayerOverride, ...] = ()
    type_overrides: tuple[TypeOverride, ...] = ()
    fakequant_precision_mode: PrecisionMode | None = None
    resolved: bool = field(default=False, kw_only=True)
    file: str | None = field(default=None, compare=False, repr=False, kw_only=True)
    skip_sources: Mapping[tuple[str, str], Source] = field(
        default_factory=dict, compare=False, repr=False, kw_only=True
    )

    def __post_init__(self) -> None:
        """Check types and ranges; turn lists into tuples."""
        _check_uint32("batch_num", self.batch_num)
        if self.batch_num == 0:
            message = "batch_num must be at least 1, not 0"
            raise ConfigError(message)
        _check_halves(self)
        for name in SKIP_FIELDS:
            object.__setattr__(self, name, _tuple_of(name, getattr(self, name), str))
        for name, kind in (("layer_overrides", LayerOverride), ("type_overrides", TypeOverride)):
            object.__setattr__(self, name, _tuple_of(name, getattr(self, name), kind))
        _check_choice(
            "fakequant_precision_mode", self.fakequant_precision_mode, ("FORCE_FP16_QUANT", None)
        )
        _check_type("resolved", self.resolved, bool)
        if self.resolved:
            self._check_resolved()

    def _check_resolved(self) -> None:
        """Raise ConfigError when there is something from which a layer could inherit."""
        own = {"batch_num", "fakequant_precision_mode", "layer_overrides", "quant_skip_layers"}
        for name in field_names(type(self)):
            if name not in {*own, "resolved"} and getattr(self, name) not in ((), None):
                message = f"a resolved configuration has settings by layer only, and no {name}"
                raise ConfigError(message)
        names = [override.name for override in self.layer_overrides]
        if any(override.prune is not None for override in self.layer_overrides):
            message = "a resolved configuration cannot prune"
            raise ConfigError(message)
        if len(set(names)) < len(names) or not set(names).issuperset(self.quant_skip_layers):
            message = "a resolved configuration lists each layer once, disabled ones included"
            raise ConfigError(message)

    def skip_source(self, list_name: str, entry: str) -> Source:
        """Return where ``entry`` stands in the skip list called ``list_name``.

        Example:
            >>> str(CompressionConfig().skip_source("skip_layers", "conv1"))
            'the configuration'
        """
        return self.skip_sources.get((list_name, entry), Source(self.file))

    @classmethod
    def from_any(
        cls, source: str | os.PathLike[str] | Mapping[str, Any] | CompressionConfig | None
    ) -> CompressionConfig:
        """Make a configuration from a path, a text, a dict or ``None``: :func:`load_config`.

        Example:
            >>> CompressionConfig.from_any({"batch_num": 2}).batch_num
            2
        """
        from amct_fx.config.load import load_config

        return load_config(source)

    def to_cfg(self) -> str:
        """Return the text of a ``.cfg`` file, with comments, that reads back equal.

        Example:
            >>> print(CompressionConfig(batch_num=2, skip_layers=("conv1",)).to_cfg())
            # Batches that the range search collects at the start of training.
            batch_num: 2
            <BLANKLINE>
            # Layers that are neither quantized nor pruned.
            skip_layers: "conv1"
            <BLANKLINE>
        """
        from amct_fx.config.writer import to_cfg

        return to_cfg(self)

    def to_json_dict(self) -> dict[str, Any]:
        """Return plain dicts, lists and values that :meth:`from_any` reads back equal.

        The keys are the fields of a ``.cfg`` file. A configuration that was read from JSON gives
        the keys of that JSON.

        Example:
            >>> CompressionConfig(batch_num=2, skip_layers=("conv1",)).to_json_dict()
            {'batch_num': 2, 'skip_layers': ['conv1']}
        """
        from amct_fx.config.json_config import resolved_to_dict
        from amct_fx.config.writer import to_fields

        return resolved_to_dict(self) if self.resolved else to_fields(self)

    @property
    def overrides(self) -> tuple[LayerOverride | TypeOverride, ...]:
        """Both kinds of overrides."""
        return self.layer_overrides + self.type_overrides

    @property
    def has_quant_message(self) -> bool:
        """Whether any level says how to quantize."""
        levels = (self, *self.overrides)
        return any(level.activation is not None or level.weight is not None for level in levels)

    @property
    def has_prune_skips(self) -> bool:
        """Whether a list names layers that are not pruned."""
        return bool(self.prune_skip_layers or self.prune_skip_types)

    @property
    def has_prune_message(self) -> bool:
        """Whether any level says how to prune."""
        return any(level.prune is not None for level in (self, *self.overrides))


def _check_type(name: str, value: object, *kinds: type) -> None:
    """Raise ConfigTypeError unless ``value`` is one of ``kinds``; a bool is no number."""
    is_bool = isinstance(value, bool) and bool not in kinds
    if isinstance(value, kinds) and not is_bool:
        return
    expected = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
    hint = ""
    if kinds == (DataType,) and isinstance(value, str) and value in DataType.__members__:
        hint = f"; write DataType.{value}"
    message = f"{name} must be {expected}, not {type(value).__name__} ({value!r}){hint}"
    raise ConfigTypeError(message)


def _check_choice(name: str, value: object, choices: tuple[object, ...]) -> None:
    """Raise ConfigError unless ``value`` is one of ``choices``."""
    if value not in choices:
        message = f"{name} must be {' or '.join(map(repr, choices))}, not {value!r}"
        raise ConfigError(message)


def _check_uint32(name: str, value: object) -> None:
    """Raise unless ``value`` is an int that fits the grammar's uint32."""
    _check_type(name, value, int)
    if not 0 <= value <= UINT32_MAX:  # type: ignore[operator]
        message = f"{name} must be a whole number from 0 to {UINT32_MAX}, not {value}"
        raise ConfigError(message)


def _check_halves(level: CompressionConfig | LayerOverride | TypeOverride) -> None:
    """Raise ConfigTypeError unless the three parts of a level have their types."""
    _check_type("activation", level.activation, ActivationConfig, type(None))
    _check_type("weight", level.weight, WeightConfig, type(None))
    _check_type("prune", level.prune, FilterPruneConfig, M4N2PruneConfig, type(None))


def _tuple_of(name: str, value: object, kind: type) -> tuple[Any, ...]:
    """Return ``value`` as a tuple of ``kind``; raise ConfigTypeError when it is something else."""
    if isinstance(value, str) or not isinstance(value, (tuple, list)):
        message = f"{name} must be a tuple of {kind.__name__}, not {type(value).__name__}"
        raise ConfigTypeError(message)
    for index, item in enumerate(value):
        _check_type(f"{name}[{index}]", item, kind)
    return tuple(value)


def _clip(name: str, value: float, *, sign: int) -> float:
    """Return a clip as float32; raise ConfigError unless it is finite and on its side of 0."""
    single = float32(value)
    if not (math.isfinite(single) and single * sign > 0):
        bound = "> 0" if sign > 0 else "< 0"
        message = f"{name} must be finite and {bound}, not {single}"
        raise ConfigError(message)
    return single


def field_names(cls: type) -> tuple[str, ...]:
    """Return the names of the fields that count, without the places.

    Example:
        >>> field_names(M4N2PruneConfig)
        ('update_freq',)
    """
    return tuple(item.name for item in fields(cls) if item.compare)
