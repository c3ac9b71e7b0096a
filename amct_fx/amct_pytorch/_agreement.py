"""Whether a configuration is the one that a model was prepared with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from torch import nn

from amct_fx.config.schema import ActivationConfig, WeightConfig
from amct_fx.errors import ModelStateError
from amct_fx.nn.geometry import weight_geometry
from amct_fx.nn.qat import QATLayer
from amct_fx.observers import ULQFakeQuantize, ULQWeightFakeQuantize
from amct_fx.report.preparation import preparation_of

if TYPE_CHECKING:
    from amct_fx.config import CompressionConfig

__all__ = ["check_agreement"]


def check_agreement(config: CompressionConfig, model: nn.Module, file: str) -> None:
    """Refuse a JSON of another model, or of other settings.

    A ``.cfg`` file is compared as a whole with the one of the preparation, where that is known.

    Args:
        config: What ``config_file`` holds.
        model: The prepared model.
        file: Its path, for messages.

    Raises:
        ModelStateError: Names the layer and both settings.
    """
    preparation = preparation_of(model)
    known = None if preparation is None else preparation.recipe.config
    if known is not None and known.resolved == config.resolved and _same(known, config):
        return
    if not config.resolved:
        if known is None or known.resolved:
            return  # nothing to compare with
        message = f"{file} differs from the .cfg file that the model was prepared with; give that"
        raise ModelStateError(message)
    if difference := next(_differences(config, model), None):
        message = (
            f"{file} contradicts the model, which was prepared with other settings: {difference}; "
            "give the configuration that the model was created with"
        )
        raise ModelStateError(message)


def _same(known: CompressionConfig, config: CompressionConfig) -> bool:
    """Compare what two configurations of the same kind say, wherever they stand."""
    if config.resolved:
        return known.to_json_dict() == config.to_json_dict()
    return known.to_cfg() == config.to_cfg()


def _differences(config: CompressionConfig, model: nn.Module) -> Iterator[str]:
    """Say what differs, layer by layer."""
    off = set(config.quant_skip_layers)
    wanted = {item.name: item for item in config.layer_overrides if item.name not in off}
    found = {name: m for name, m in model.named_modules() if isinstance(m, QATLayer)}
    for name in wanted:
        if name not in found:
            yield f"layer {name!r} is enabled in the file, and not quantized in the model"
    for name, layer in found.items():
        if name not in wanted:
            yield f"layer {name!r} is quantized in the model, and not enabled in the file"
            continue
        half = wanted[name].weight or WeightConfig()
        settings = _weight_settings(half, layer) + _activation_settings(
            wanted[name].activation or ActivationConfig(), config.batch_num, layer
        )
        for setting, theirs, ours in settings:
            if theirs != ours:
                yield f"layer {name!r} has {setting} {theirs} in the file, {ours} in the model"


def _weight_settings(half: WeightConfig, layer: QATLayer) -> list[tuple[str, Any, Any]]:
    """Return name, value in the file and value in the model of the settings of the weight."""
    fake_quants = [getattr(layer, name) for name in layer.weight_quantizers.values()]
    learned = any(isinstance(item, ULQWeightFakeQuantize) for item in fake_quants)
    settings: list[tuple[str, Any, Any]] = [
        ("weight dst_type", half.dst_type.name, f"INT{layer.weight_bits}"),
        ("weight algo", half.algo, "ulq_retrain" if learned else "arq_retrain"),
    ]
    if weight_geometry(layer).num_channels > 1:
        scales = max(layer.weight_scale(name).numel() for name in layer.weight_names)
        default = not isinstance(layer, nn.Linear)
        channel_wise = default if half.channel_wise is None else half.channel_wise
        settings.append(("channel_wise", channel_wise, scales > 1))
    return settings


def _activation_settings(
    half: ActivationConfig, batch_num: int, layer: QATLayer
) -> list[tuple[str, Any, Any]]:
    """Return the same of the input; ranges are learned, so they are not compared."""
    quantizer = layer.input_quantizer
    if not isinstance(quantizer, ULQFakeQuantize):
        return []
    settings: list[tuple[str, Any, Any]] = [
        ("input dst_type", half.dst_type.name, f"INT{quantizer.num_bits}"),
        ("batch_num", batch_num, quantizer.batch_num),
    ]
    if half.fixed_min is not None:
        settings.append(("fixed_min", half.fixed_min, bool(quantizer.fixed_min)))
    return settings
