"""Whether a configuration says of the layers what the student was prepared with.

``distill`` takes from its configuration the groups only; how a layer is quantized was decided when
the student was prepared. What contradicts that is refused, not ignored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amct_fx.config.distill_json import DistillPlan
from amct_fx.config.schema import Source
from amct_fx.distillation.calibrate import calibration_batches
from amct_fx.nn.geometry import constructor_arguments
from amct_fx.nn.qat_layer import QATLayer
from amct_fx.observers import ULQWeightFakeQuantize

if TYPE_CHECKING:
    from torch import nn

    from amct_fx.config import LayerSpec, Resolution
    from amct_fx.config.distill import DistillConfig

__all__ = ["check_same_settings"]

_ADVICE = "prepare the student with this configuration, or leave these settings out"


def check_same_settings(
    student: nn.Module, config: DistillConfig | DistillPlan, resolution: Resolution
) -> None:
    """Refuse settings of layers that the student does not have.

    A JSON says everything about every layer. A ``.cfg`` says only what is written in it: a layer
    without any setting of its own may be as it is in the student.

    Args:
        student: The prepared model.
        config: The configuration.
        resolution: What it means for the layers of the model.

    Raises:
        ConfigError: Names the first layer, the setting, and both values.
    """
    complete = isinstance(config, DistillPlan)
    file = config.quantization.file if isinstance(config, DistillPlan) else config.file
    for spec in resolution.layers.values():
        layer = student.get_submodule(spec.name)
        found = _difference(spec, layer, complete=complete)
        if found is not None:
            what, wanted, given, source = found
            message = (
                f"layer {spec.name!r}: {what} is {wanted} in the configuration and {given} in the "
                f"student; {_ADVICE}"
            )
            raise (source if source.line else Source(file)).error(message)
    prepared = calibration_batches(student)
    if (complete or config.batch_num != 1) and config.batch_num != prepared:
        message = (
            f"batch_num is {config.batch_num} in the configuration and {prepared} in the student; "
            f"{_ADVICE}"
        )
        raise Source(file).error(message)


def _difference(
    spec: LayerSpec, layer: nn.Module, *, complete: bool
) -> tuple[str, Any, Any, Source] | None:
    """Return the first setting that differs, both values, and where it is written."""
    origins = (spec.activation_origin, spec.weight_origin)
    written = [origin for origin in origins if origin.level != "default"]
    quantized = isinstance(layer, QATLayer)
    if spec.quantize != quantized:
        if complete or written or not spec.quantize:
            source = written[0].source if written else Source(None)
            return "quant_enable", spec.quantize, quantized, source
        return None
    if not isinstance(layer, QATLayer):
        return None
    for origin, wanted, given in (
        (spec.activation_origin, _activation(spec), _activation_of(layer)),
        (spec.weight_origin, _weight(spec), _weight_of(layer)),
    ):
        if not complete and origin.level == "default":
            continue
        for key, value in wanted.items():
            if value != given[key]:
                return key, value, given[key], origin.source
    return None


def _activation(spec: LayerSpec) -> dict[str, Any]:
    half = spec.activation
    settings = {
        "dst_type": half.dst_type.name,
        "fixed_min": half.fixed_min,
        "clip_max": _or_found(half.clip_max),
        "clip_min": _or_found(half.clip_min),
    }
    if half.fixed_min is None:  # automatic: any of both
        del settings["fixed_min"]
    return settings


def _activation_of(layer: QATLayer) -> dict[str, Any]:
    _, given = constructor_arguments(layer.qconfig.activation)
    return {
        "dst_type": f"INT{given.get('num_bits', 8)}",
        "fixed_min": bool(given.get("fixed_min")),
        "clip_max": _or_found(given.get("clip_max")),
        "clip_min": _or_found(given.get("clip_min")),
    }


def _or_found(value: Any) -> Any:
    return "found from data" if value is None else value


def _weight(spec: LayerSpec) -> dict[str, Any]:
    half = spec.weight
    return {
        "algo": half.algo.replace("retrain", "distill"),
        "dst_type": half.dst_type.name,
        "channel_wise": half.channel_wise,
    }


def _weight_of(layer: QATLayer) -> dict[str, Any]:
    made, given = constructor_arguments(layer.qconfig.weight)
    learned = isinstance(made, type) and issubclass(made, ULQWeightFakeQuantize)
    return {
        "algo": "ulq_distill" if learned else "arq_distill",
        "dst_type": f"INT{given.get('num_bits', 8)}",
        "channel_wise": given.get("ch_axis") is not None,
    }
