"""Reading and checking the layers of a record file."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Mapping
from typing import Any, NoReturn

from torch import nn

from amct_fx.checks import check_prepared_model
from amct_fx.errors import RecordError, did_you_mean
from amct_fx.nn.qat import QATLayer
from amct_fx.nn.quantized import QuantizedLayer
from amct_fx.nn.recurrent import ONNX_GATES
from amct_fx.record.layers import LayerRecord
from amct_fx.record.message import read_record_message

__all__ = ["read_record"]

_ACTIVATION_RANGES = {"INT4": (-128, 127), "INT8": (-128, 127), "INT16": (-32768, 32767)}
_WEIGHT_TYPES = ("INT4", "INT6", "INT7", "INT8")


def read_record(
    path: str | os.PathLike[str], model: nn.Module | None = None
) -> dict[str, LayerRecord]:
    """Read and check the layers of a record file.

    Args:
        path: The file, of ours or of AMCT.
        model: The prepared or converted model that the record must fit; ``None`` checks only what
            needs no model.

    Returns:
        By name what it says about each layer, in the order of the file.

    Raises:
        AmctFileNotFoundError: There is no such file.
        RecordParseError: It is no protobuf text; names file, line and column.
        RecordError: A value is missing or wrong, or a layer is no quantized layer of the model;
            names file and layer.
    """
    file = read_record_message(path)
    layers = None if model is None else _quantized_layers(model)
    found: dict[str, LayerRecord] = {}
    for entry in file.record:
        if entry.HasField("kv_cache_value") and not entry.HasField("value"):
            continue  # of another tool, for a cache of keys and values
        try:
            record = _checked(entry, layers)
            if record.name in found:
                _refuse("has two entries")
        except RecordError as error:
            message = f"{os.fspath(path)}: layer {entry.key!r} {error}"
            raise RecordError(message) from None
        found[record.name] = record
    return found


def _quantized_layers(model: nn.Module) -> dict[str, nn.Module]:
    """Return the quantized layers of a prepared or converted model by name."""
    found: dict[str, nn.Module] = {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, (QATLayer, QuantizedLayer))
    }
    if not found:
        check_prepared_model(model)  # says that it is neither
    return found


def _checked(entry: Any, layers: Mapping[str, nn.Module] | None) -> LayerRecord:
    """Return one entry of a record file, checked."""
    layer = None if layers is None else _layer_of(entry.key, layers)
    value = entry.value
    for field in ("scale_d", "offset_d"):
        if not value.HasField(field):
            _refuse(f"has no {field}")
    _check_type("act_type", value.act_type, _ACTIVATION_RANGES)
    _check_type("wts_type", value.wts_type, _WEIGHT_TYPES)
    if value.shift_bit:
        _refuse("has a shift_bit, which quantization-aware training does not use")
    recurrent = len(value.scale_r) > 0 or value.HasField("scale_h") or value.HasField("offset_h")
    if isinstance(layer, nn.RNNBase) or recurrent:
        _check_recurrent(value, layer)
    _check_activation(value, "d")
    _check_weight(value, "w", layer)
    mode = value.fakequant_precision_mode
    return LayerRecord(
        entry.key,
        scale_d=value.scale_d,
        offset_d=value.offset_d,
        scale_w=tuple(value.scale_w),
        act_type=value.act_type,
        wts_type=value.wts_type,
        fakequant_precision_mode=None if mode == "DEFAULT" else mode,
        scale_h=value.scale_h if recurrent else None,
        offset_h=value.offset_h if recurrent else None,
        scale_r=tuple(value.scale_r),
    )


def _layer_of(key: str, layers: Mapping[str, nn.Module]) -> nn.Module:
    if key not in layers:
        _refuse(f"is no quantized layer of the model{did_you_mean(key, layers)}")
    return layers[key]


def _check_type(field: str, found: str, known: Collection[str]) -> None:
    if found not in known:
        _refuse(f"has {field} {found!r}; it must be one of {', '.join(known)}")


def _check_recurrent(value: Any, layer: nn.Module | None) -> None:
    """Check the hidden state and the recurrent weights of an LSTM or GRU."""
    if layer is not None and not isinstance(layer, nn.RNNBase):
        _refuse(f"has values of a hidden state, but is a {type(layer).__name__}")
    for field in ("scale_h", "offset_h"):
        if not value.HasField(field):
            _refuse(f"has no {field}")
    _check_activation(value, "h")
    _check_weight(value, "r", layer)


def _check_activation(value: Any, suffix: str) -> None:
    """Check a scale and an offset of an activation."""
    scale, offset = getattr(value, f"scale_{suffix}"), getattr(value, f"offset_{suffix}")
    _check_scale(f"scale_{suffix}", scale)
    lowest, highest = _ACTIVATION_RANGES[value.act_type]
    if not lowest <= offset <= highest:
        _refuse(
            f"has offset_{suffix} {offset}, outside of {lowest} … {highest} for {value.act_type}"
        )


def _check_weight(value: Any, suffix: str, layer: nn.Module | None) -> None:
    """Check the scales and offsets of a weight."""
    scales, offsets = getattr(value, f"scale_{suffix}"), getattr(value, f"offset_{suffix}")
    for field, values in ((f"scale_{suffix}", scales), (f"offset_{suffix}", offsets)):
        if not values:
            _refuse(f"has no {field}")
    for scale in scales:
        _check_scale(f"scale_{suffix}", scale)
    if len(scales) != len(offsets):
        _refuse(f"has {len(scales)} scale_{suffix} but {len(offsets)} offset_{suffix}")
    if any(offsets):
        _refuse(f"has offset_{suffix} {next(filter(None, offsets))}; weights have offset 0")
    allowed = None if layer is None else _numbers_of_scales(layer)
    if allowed is not None and len(scales) not in allowed:
        _refuse(f"has {len(scales)} scale_{suffix}; it must have {' or '.join(map(str, allowed))}")


def _numbers_of_scales(layer: Any) -> tuple[int, ...]:
    """Return how many scales the weight of a layer may have."""
    if isinstance(layer, nn.RNNBase):
        gates = len(ONNX_GATES[layer.mode])
        return (1, gates, gates * layer.hidden_size)
    return (1, layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels)


def _check_scale(field: str, scale: float) -> None:
    if not math.isfinite(scale) or scale <= 0:
        _refuse(f"has {field} {scale}; scales are finite and greater than 0")


def _refuse(problem: str) -> NoReturn:
    """Raise the error that :func:`read_record` puts file and layer in front of."""
    raise RecordError(problem)
