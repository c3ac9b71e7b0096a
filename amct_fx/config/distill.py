"""Configurations of blockwise distillation: their ``.cfg`` grammar and typed form.

What is quantized, and how, follows the rules of :mod:`amct_fx.config.resolve` with one difference:
here a skip beats an override. :meth:`DistillConfig.quantization` gives what resolution needs.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from amct_fx.config.files import read_source
from amct_fx.config.halves import build, read_activation, read_weight
from amct_fx.config.resolve import resolve
from amct_fx.config.rules import DISTILL
from amct_fx.config.schema import (
    ActivationConfig,
    CompressionConfig,
    DataType,
    LayerOverride,
    Placed,
    Source,
    TypeOverride,
    WeightConfig,
)
from amct_fx.config.textproto import read_message
from amct_fx.errors import ConfigError, ConfigTypeError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from amct_fx.config.distill_json import DistillPlan
    from amct_fx.config.specs import ModelFacts, Resolution
    from amct_fx.config.textproto import Located

__all__ = [
    "DISTILL_FIELDS",
    "DistillConfig",
    "DistillGroup",
    "load_distill_config",
    "parse_distill_cfg",
    "resolve_distill",
]

#: The fields that a file may begin with.
DISTILL_FIELDS = (
    "batch_num",
    "group_size",
    "data_dump",
    "distill_group",
    "distill_data_quant_config",
    "distill_weight_quant_config",
    "distill_override_layers",
    "distill_override_layer_types",
    "quant_skip_layers",
    "quant_skip_layer_types",
)


@dataclass(frozen=True)
class DistillGroup(Placed):
    """All that lies on the path between two modules is trained together.

    Args:
        start: Name of the first module.
        end: Name of the last one.
    """

    start: str
    end: str


@dataclass(frozen=True)
class DistillConfig:
    """Everything a distillation ``.cfg`` says, before it meets a model.

    Args:
        batch_num: Batches that the range search collects.
        group_size: Units of layers that are joined into one group.
        data_dump: Keep the teacher's activations on disk.
        groups: Groups chosen by the user; the rest is found automatically.
        activation: Data half of every layer, or ``None`` for the defaults.
        weight: Weight half of every layer, or ``None`` for the defaults.
        quant_skip_layers: Names of layers that are distilled but not quantized.
        quant_skip_types: Types of such layers.
        layer_overrides: Settings of single layers.
        type_overrides: Settings by layer type.

    Example:
        >>> DistillConfig(group_size=0)
        Traceback (most recent call last):
        amct_fx.errors.ConfigError: group_size must be at least 1, not 0
    """

    batch_num: int = 1
    group_size: int = 1
    data_dump: bool = False
    groups: tuple[DistillGroup, ...] = ()
    activation: ActivationConfig | None = None
    weight: WeightConfig | None = None
    quant_skip_layers: tuple[str, ...] = ()
    quant_skip_types: tuple[str, ...] = ()
    layer_overrides: tuple[LayerOverride, ...] = ()
    type_overrides: tuple[TypeOverride, ...] = ()
    file: str | None = field(default=None, compare=False, repr=False, kw_only=True)
    skip_sources: Mapping[tuple[str, str], Source] = field(
        default_factory=dict, compare=False, repr=False, kw_only=True
    )

    def __post_init__(self) -> None:
        """Check the numbers and the integer types; the rest checks itself."""
        for name in ("batch_num", "group_size"):
            value = getattr(self, name)
            if type(value) is not int:
                message = f"{name} must be int, not {type(value).__name__} ({value!r})"
                raise ConfigTypeError(message)
            if value < 1:
                message = f"{name} must be at least 1, not {value}"
                raise ConfigError(message)
        levels = self.quantization().overrides
        halves = [self.activation, self.weight, *(level.activation for level in levels)]
        for half in (*halves, *(level.weight for level in levels)):
            if half is not None and half.dst_type is DataType.INT16:
                message = "distillation knows the types INT8 and INT4, not INT16"
                raise half.source.error(message)

    def quantization(self) -> CompressionConfig:
        """Return what :func:`amct_fx.config.resolve.resolve` needs."""
        return CompressionConfig(
            batch_num=self.batch_num,
            activation=self.activation,
            weight=self.weight,
            quant_skip_layers=self.quant_skip_layers,
            quant_skip_types=self.quant_skip_types,
            layer_overrides=self.layer_overrides,
            type_overrides=self.type_overrides,
            file=self.file,
            skip_sources=self.skip_sources,
        )


def resolve_distill(
    config: DistillConfig | DistillPlan, facts: ModelFacts, *, linear_channel_wise: bool = False
) -> Resolution:
    """Decide for each eligible layer how it is quantized; a skip beats an override.

    Args:
        config: The configuration, from a ``.cfg`` or a JSON.
        facts: Facts about the model, with reasons for what distillation cannot quantize.
        linear_channel_wise: Accept ``channel_wise: true`` in the override of a Linear by name.
    """
    return resolve(
        config.quantization() if isinstance(config, DistillConfig) else config.quantization,
        facts,
        linear_channel_wise=linear_channel_wise,
        rules=DISTILL,
    )


def load_distill_config(
    source: str | os.PathLike[str] | DistillConfig | None,
) -> DistillConfig:
    """Read the path or the text of a distillation ``.cfg``; ``None`` means the defaults.

    Example:
        >>> load_distill_config("group_size: 2").group_size
        2
    """
    if source is None:
        return DistillConfig()
    if isinstance(source, DistillConfig):
        return source
    text, file = read_source(source, DISTILL_FIELDS)
    return parse_distill_cfg(text, file=file)


def parse_distill_cfg(text: str, *, file: str | None = None) -> DistillConfig:
    """Read the protobuf text format of AMCTDistillConfig.

    Raises:
        ConfigError: When the text does not follow the grammar or a value is out of range.
    """
    from amct_fx.config import distill_pb2

    root = read_message(text, distill_pb2.AMCTDistillConfig(), file=file)
    given: dict[str, Any] = {
        name: value
        for name in ("batch_num", "group_size", "data_dump")
        if (value := root.scalar(name)) is not None
    }
    names = root.strings("quant_skip_layers")
    types = root.strings("quant_skip_layer_types")
    places = {("quant_skip_layers", name): source for name, source in names}
    places |= {("quant_skip_types", name): source for name, source in types}
    try:
        return DistillConfig(
            **given,
            groups=tuple(map(_group, root.children("distill_group"))),
            activation=read_activation(root.child("distill_data_quant_config")),
            weight=_weight(root),
            quant_skip_layers=tuple(name for name, _ in names),
            quant_skip_types=tuple(name for name, _ in types),
            layer_overrides=tuple(
                build(LayerOverride, part, name=_owner(part, "layer"), **_halves(part))
                for part in root.children("distill_override_layers")
            ),
            type_overrides=tuple(
                build(TypeOverride, part, type=_owner(part, "type"), **_halves(part))
                for part in root.children("distill_override_layer_types")
            ),
            file=file,
            skip_sources=places,
        )
    except ConfigError as error:
        if error.line is not None:
            raise
        raise root.error(error.message, field=error.message.split()[0]) from None


def _group(part: Located) -> DistillGroup:
    """Read one group."""
    start, end = part.required("start_layer_name"), part.required("end_layer_name")
    for field_name, value in (("start_layer_name", start), ("end_layer_name", end)):
        if not value:
            message = f"{field_name} is empty; write the name of a module, as named_modules() does"
            raise part.error(message, field=field_name)
    return build(DistillGroup, part, start=start, end=end)


def _owner(part: Located, kind: str) -> str:
    """Return the layer or type that an override is for, and remember it for messages."""
    name = str(part.required(f"layer_{'name' if kind == 'layer' else 'type'}"))
    part.owner = f"{kind} {name!r}"
    return name


def _halves(part: Located) -> dict[str, Any]:
    """Read both halves of an override."""
    activation = read_activation(part.child("distill_data_quant_config"))
    return {"activation": activation, "weight": _weight(part)}


def _weight(part: Located) -> WeightConfig | None:
    """Read the weight half of one level."""
    return read_weight(part.child("distill_weight_quant_config"), "weights_quant_algo")
