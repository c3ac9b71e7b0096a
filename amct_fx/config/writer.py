"""From a :class:`CompressionConfig` back to the fields of a ``.cfg`` file, and to its text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from amct_fx.config.schema import (
    SKIP_FIELDS,
    ActivationConfig,
    CompressionConfig,
    DataType,
    FilterPruneConfig,
    LayerOverride,
    PruneConfig,
    TypeOverride,
    WeightConfig,
)
from amct_fx.errors import ConfigTypeError

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["fields_to_text", "to_cfg", "to_fields"]

_COMMENTS = {
    "batch_num": "Batches that the range search collects at the start of training.",
    "fakequant_precision_mode": "Arithmetic of the fake-quantizers.",
    "retrain_data_quant_config": "Activations of every layer.",
    "retrain_weight_quant_config": "Weights of every layer.",
    "prune_config": "Pruning of every layer.",
    "skip_layers": "Layers that are neither quantized nor pruned.",
    "skip_layer_types": "Types of layers that are neither quantized nor pruned.",
    "quant_skip_layers": "Layers that are not quantized.",
    "quant_skip_types": "Types of layers that are not quantized.",
    "regular_prune_skip_layers": "Layers that are not pruned.",
    "regular_prune_skip_types": "Types of layers that are not pruned.",
    "override_layer_types": "Settings by layer type.",
    "override_layer_configs": "Settings of single layers.",
}
_WIDTH = 88
_ENUM_FIELDS = frozenset({"dst_type", "n_out_of_m_type", "fakequant_precision_mode"})
_ESCAPES = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r", "\t": "\\t"}


def to_cfg(config: CompressionConfig) -> str:
    """Return the text of a ``.cfg`` file; see :meth:`CompressionConfig.to_cfg`.

    A resolved configuration, as read from JSON, becomes one that means the same for its model: the
    settings of the layers that are on, and a list of those that are off.
    """
    comment = ""
    if config.resolved:
        comment = "# Made from a JSON file; it means the same for the model of that file only.\n\n"
        config = _unresolved(config)
    blocks = []
    for name, value in to_fields(config).items():
        lines = "\n".join(_lines({name: value}, ""))
        blocks.append(f"# {_COMMENTS[name]}\n{lines}\n")
    return comment + "\n".join(blocks)


def _unresolved(config: CompressionConfig) -> CompressionConfig:
    """Return an ordinary configuration with the same effect."""
    disabled = set(config.quant_skip_layers)
    enabled = [
        replace(
            override,
            activation=override.activation or ActivationConfig(),
            weight=override.weight or WeightConfig(),
        )
        for override in config.layer_overrides
        if override.name not in disabled
    ]
    return replace(config, resolved=False, layer_overrides=tuple(enabled))


def to_fields(config: CompressionConfig) -> dict[str, Any]:
    """Return the fields of the ``.cfg`` file as dicts, lists and plain values.

    Example:
        >>> to_fields(CompressionConfig(activation=ActivationConfig(fixed_min=True)))
        {'retrain_data_quant_config': {'ulq_quantize': {'fixed_min': True}}}
    """
    fields: dict[str, Any] = {}
    if config.batch_num != 1:
        fields["batch_num"] = config.batch_num
    if config.fakequant_precision_mode is not None:
        fields["fakequant_precision_mode"] = config.fakequant_precision_mode
    fields |= _parts(config)
    for attribute, field in SKIP_FIELDS.items():
        if getattr(config, attribute):
            fields[field] = list(getattr(config, attribute))
    if config.type_overrides:
        fields["override_layer_types"] = [
            {"layer_type": override.type, **_parts(override)} for override in config.type_overrides
        ]
    if config.layer_overrides:
        fields["override_layer_configs"] = [
            {"layer_name": override.name, **_parts(override)} for override in config.layer_overrides
        ]
    return fields


def _parts(level: CompressionConfig | LayerOverride | TypeOverride) -> dict[str, Any]:
    """Return the data half, the weight half and the pruning of one level."""
    parts: dict[str, Any] = {}
    if level.activation is not None:
        parts["retrain_data_quant_config"] = {"ulq_quantize": _activation(level.activation)}
    if level.weight is not None:
        parts["retrain_weight_quant_config"] = {level.weight.algo: _weight(level.weight)}
    if level.prune is not None:
        parts["prune_config"] = _prune(level.prune)
    return parts


def _activation(half: ActivationConfig) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if half.clip_max is not None:
        fields["clip_max_min"] = {"clip_max": half.clip_max, "clip_min": half.clip_min}
    if half.fixed_min is not None:
        fields["fixed_min"] = half.fixed_min
    return fields | _data_type(half)


def _weight(half: WeightConfig) -> dict[str, Any]:
    fields = _data_type(half)
    if half.channel_wise is not None:
        fields["channel_wise"] = half.channel_wise
    return fields


def _data_type(half: ActivationConfig | WeightConfig) -> dict[str, Any]:
    """Return the integer type unless it is INT8, which the MindSpore grammar cannot say."""
    return {} if half.dst_type is DataType.INT8 else {"dst_type": half.dst_type.name}


def _prune(prune: PruneConfig) -> dict[str, Any]:
    if isinstance(prune, FilterPruneConfig):
        algo = {"prune_ratio": prune.prune_ratio, "ascend_optimized": prune.ascend_optimized}
        return {"filter_pruner": {"balanced_l2_norm_filter_prune": algo}}
    selective = {"n_out_of_m_type": "M4N2", "update_freq": prune.update_freq}
    return {"n_out_of_m_pruner": {"l1_selective_prune": selective}}


def fields_to_text(fields: Mapping[str, Any]) -> str:
    """Return fields in protobuf text format.

    Raises:
        ConfigTypeError: For a value that no field can hold.

    Example:
        >>> print(fields_to_text({"batch_num": 2, "skip_layers": ["a", "b"]}))
        batch_num: 2
        skip_layers: "a"
        skip_layers: "b"
    """
    return "\n".join(_lines(fields, ""))


def _lines(fields: Mapping[str, Any], indent: str) -> Iterator[str]:
    """Yield the lines of a message; what fits into one line stands in one."""
    for name, value in fields.items():
        elements: Sequence[Any] = value if isinstance(value, (list, tuple)) else [value]
        for element in elements:
            line = f"{indent}{_inline(name, element)}"
            if not isinstance(element, Mapping) or len(line) <= _WIDTH:
                yield line
                continue
            yield f"{indent}{name} {{"
            yield from _lines(element, indent + "  ")
            yield f"{indent}}}"


def _inline(name: str, value: object) -> str:
    """Return one field, with all that is in it, as one line."""
    if not isinstance(value, Mapping):
        return f"{name}: {_scalar(name, value)}"
    inner = []
    for key, item in value.items():
        elements: Sequence[Any] = item if isinstance(item, (list, tuple)) else [item]
        inner += [_inline(key, element) for element in elements]
    return " ".join([name, "{", *inner, "}"])


def _scalar(name: str, value: object) -> str:
    """Return one value as it stands in a file."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        if name in _ENUM_FIELDS and value.isidentifier():
            return value
        return '"' + "".join(map(_escape, value)) + '"'
    message = f"{name} cannot be {value!r} ({type(value).__name__})"
    raise ConfigTypeError(message)


def _escape(character: str) -> str:
    """Return a character as it stands in a quoted string."""
    if character in _ESCAPES:
        return _ESCAPES[character]
    if character.isprintable():
        return character
    return "".join(f"\\{byte:03o}" for byte in character.encode("utf-8", "surrogatepass"))
