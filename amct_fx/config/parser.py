"""From the text of a ``.cfg`` file to a :class:`CompressionConfig`."""

from __future__ import annotations

from typing import Any

from amct_fx.config.halves import build, read_activation, read_prune, read_weight
from amct_fx.config.schema import (
    SKIP_FIELDS,
    CompressionConfig,
    LayerOverride,
    Source,
    TypeOverride,
    WeightConfig,
)
from amct_fx.config.textproto import Located, read_message
from amct_fx.errors import ConfigError

__all__ = ["ROOT_FIELDS", "parse_cfg"]

#: The fields that a file may begin with.
ROOT_FIELDS = (
    "batch_num",
    "retrain_data_quant_config",
    "retrain_weight_quant_config",
    "prune_config",
    "override_layer_configs",
    "override_layer_types",
    "fakequant_precision_mode",
    *SKIP_FIELDS.values(),
)


def parse_cfg(
    text: str,
    *,
    file: str | None = None,
    dialect: str = "auto",
    ignore_empty_prune: bool = False,
    keep_places: bool = True,
) -> CompressionConfig:
    """Read the protobuf text format of AMCTRetrainConfig.

    Args:
        text: The file's content.
        file: Name of the file, for messages.
        dialect: ``"mindspore"`` refuses the fields that the MindSpore grammar lacks.
        ignore_empty_prune: Take a ``prune_config`` without content for an absent one.
        keep_places: Remember where each part stands.

    Raises:
        ConfigError: When the text does not follow the grammar or a value is out of range.

    Example:
        >>> config = parse_cfg('batch_num: 2 skip_layers: "conv1"')
        >>> config.batch_num, config.skip_layers
        (2, ('conv1',))
        >>> parse_cfg("batch_num: many")
        Traceback (most recent call last):
        amct_fx.errors.ConfigError: <config>:1:12: batch_num must be a whole number from 0 to ...
    """
    from amct_fx.config import retrain_pb2

    schema = None
    if dialect == "mindspore":
        from amct_fx.config import retrain_mindspore_pb2

        schema = retrain_mindspore_pb2.AMCTRetrainConfig.DESCRIPTOR
    root = read_message(
        text,
        retrain_pb2.AMCTRetrainConfig(),
        file=file,
        schema=schema,
        schema_name="MindSpore",
        keep_places=keep_places,
    )
    if ignore_empty_prune:
        _drop_empty_prune(root.message)
    return _config(root, file)


def _drop_empty_prune(message: Any) -> None:
    """Take away each ``prune_config`` without content."""
    for level in (message, *message.override_layer_configs, *message.override_layer_types):
        if not level.prune_config.ListFields():
            level.ClearField("prune_config")


def _config(root: Located, file: str | None) -> CompressionConfig:
    """Build the configuration from the root message."""
    skips: dict[str, Any] = {}
    places: dict[tuple[str, str], Source] = {}
    for attribute, field in SKIP_FIELDS.items():
        entries = root.strings(field)
        skips[attribute] = tuple(name for name, _ in entries)
        places.update({(attribute, name): source for name, source in entries})
    mode = root.scalar("fakequant_precision_mode")
    try:
        return CompressionConfig(
            batch_num=1 if root.scalar("batch_num") is None else root.scalar("batch_num"),
            activation=read_activation(root.child("retrain_data_quant_config")),
            weight=_weight(root),
            prune=read_prune(root.child("prune_config")),
            **skips,
            layer_overrides=tuple(map(_layer_override, root.children("override_layer_configs"))),
            type_overrides=tuple(map(_type_override, root.children("override_layer_types"))),
            fakequant_precision_mode=None if mode is None else "FORCE_FP16_QUANT",
            file=file,
            skip_sources=places,
        )
    except ConfigError as error:
        if error.line is not None:
            raise
        raise root.error(error.message, field="batch_num") from None


def _weight(part: Located) -> WeightConfig | None:
    """Read the weight half of one level."""
    return read_weight(part.child("retrain_weight_quant_config"), "weights_retrain_algo")


def _layer_override(part: Located) -> LayerOverride:
    """Read the override of one layer."""
    name = part.required("layer_name")
    part.owner = f"layer {name!r}"
    return build(
        LayerOverride,
        part,
        name=name,
        activation=read_activation(part.child("retrain_data_quant_config")),
        weight=_weight(part),
        prune=read_prune(part.child("prune_config")),
    )


def _type_override(part: Located) -> TypeOverride:
    """Read the override of one layer type."""
    name = part.required("layer_type")
    part.owner = f"type {name!r}"
    return build(
        TypeOverride,
        part,
        type=name,
        activation=read_activation(part.child("retrain_data_quant_config")),
        weight=_weight(part),
        prune=read_prune(part.child("prune_config")),
    )
