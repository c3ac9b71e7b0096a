"""From layer specifications to ``torch.ao.quantization`` vocabulary: QConfig and QConfigMapping."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.ao.quantization import QConfig, QConfigMapping

from amct_fx.backend_config import Reuse, is_layer, model_facts
from amct_fx.checks import check_float_model, check_only_quantizes
from amct_fx.config import (
    ActivationConfig,
    CompressionConfig,
    LayerSpec,
    LinearChannelWise,
    ModelFacts,
    Resolution,
    WeightConfig,
    load_config,
    resolve,
)
from amct_fx.copying import copy_model
from amct_fx.errors import ConfigError, ModelError
from amct_fx.graph import capture
from amct_fx.nn.become import float_class_of
from amct_fx.nn.geometry import constructor_arguments, weight_geometry
from amct_fx.observers import (
    AmctFakeQuantize,
    ARQFakeQuantize,
    ULQFakeQuantize,
    ULQWeightFakeQuantize,
)

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "calibration_forwards",
    "check_quantizers",
    "get_qconfig_mapping",
    "qconfig_for_layer",
    "qconfig_mapping_from_resolution",
    "qconfigs_by_layer",
]


def get_qconfig_mapping(
    cfg: str | Mapping[str, Any] | CompressionConfig | None,
    model: nn.Module,
    *,
    linear_channel_wise: LinearChannelWise = False,
    reused: Reuse = "float",
    dialect: str = "auto",
    name_map: Mapping[str, str] | None = None,
) -> QConfigMapping:
    """Resolve a configuration for one model into a ``QConfigMapping``.

    Every layer that will be quantized is listed by name with its QConfig, every eligible layer that
    will not with ``None``; the global entry is ``None``. Print it, edit it, or pass it to
    :func:`amct_fx.prepare_qat_amct` in place of the configuration.

    Args:
        cfg: Path or text of a ``.cfg``, a :class:`CompressionConfig`, or ``None`` for the defaults.
        model: The float model; it is not changed.
        linear_channel_wise: As for :func:`amct_fx.prepare_qat_amct`.
        reused: As for :func:`amct_fx.prepare_qat_amct`.
        dialect: As for :func:`amct_fx.prepare_qat_amct`.
        name_map: As for :func:`amct_fx.prepare_qat_amct`.

    Raises:
        ConfigError: If the configuration is wrong, or does not fit the model.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        >>> mapping = get_qconfig_mapping('skip_layers: "0"', model)
        >>> [(name, qconfig is not None) for name, qconfig in mapping.module_name_qconfigs.items()]
        [('0', False), ('2', True)]
    """
    check_float_model(model)
    config = load_config(cfg, dialect=dialect, name_map=name_map)
    check_only_quantizes(config)
    traced = copy_model(model)
    facts = model_facts(traced, capture(traced, is_layer), reused)
    resolution = resolve(config, facts, linear_channel_wise=linear_channel_wise, dialect=dialect)
    return qconfig_mapping_from_resolution(resolution, model)


def qconfig_mapping_from_resolution(resolution: Resolution, model: nn.Module) -> QConfigMapping:
    """List the QConfig of every eligible layer by name, ``None`` for those that stay float."""
    mapping = QConfigMapping().set_global(None)
    for name, spec in resolution.layers.items():
        made = _qconfig(spec, model.get_submodule(name), resolution) if spec.quantize else None
        mapping.set_module_name(name, made)
    return mapping


def qconfig_for_layer(mapping: QConfigMapping, name: str, module: nn.Module) -> QConfig | None:
    """Look a layer up as torch.ao does: name, parents' names, pattern, type, global.

    Args:
        mapping: Any ``QConfigMapping``.
        name: Dotted name of the layer.
        module: The layer.
    """
    by_name = mapping.module_name_qconfigs
    for prefix in _with_parents(name):
        if prefix in by_name:
            return _as_qconfig(by_name[prefix])
    for pattern, qconfig in mapping.module_name_regex_qconfigs.items():
        if re.match(pattern, name):
            return _as_qconfig(qconfig)
    by_type = mapping.object_type_qconfigs
    return _as_qconfig(by_type.get(float_class_of(module), mapping.global_qconfig))


def qconfigs_by_layer(
    model: nn.Module, facts: ModelFacts, mapping: QConfigMapping, *, needed: bool = True
) -> dict[str, QConfig]:
    """Return the QConfig of every layer that will be quantized, in ``named_modules()`` order.

    Args:
        model: The float model.
        facts: Its layers.
        mapping: Any ``QConfigMapping``.
        needed: Whether it is an error when no layer will be.

    Raises:
        ConfigError: A QConfig has quantizers that are not of this package.
        ModelError: No layer is selected.
    """
    found = {}
    for layer in facts.layers:
        qconfig = qconfig_for_layer(mapping, layer.name, model.get_submodule(layer.name))
        if layer.reason is None and qconfig is not None:
            check_quantizers(layer.name, qconfig)
            found[layer.name] = qconfig
    if needed and not found:
        message = "no layer of the model would be quantized: the QConfigMapping selects none"
        raise ModelError(message)
    return found


def check_quantizers(name: str, qconfig: QConfig) -> None:
    """Refuse a QConfig whose quantizers are not of this package.

    Those of torch.ao work with ``torch.ao.quantization``'s own prepare and convert.

    Args:
        name: Name of the layer.
        qconfig: From a ``QConfigMapping`` of the user's.

    Raises:
        ConfigError: Names the layer and the class.
    """
    for constructor in (qconfig.activation, qconfig.weight):
        cls = constructor_arguments(constructor)[0]
        if not (isinstance(cls, type) and issubclass(cls, AmctFakeQuantize)):
            found = getattr(cls, "__name__", repr(cls))
            message = (
                f"the QConfig of layer {name!r} uses {found}; use ULQFakeQuantize for activations "
                "and ARQFakeQuantize or ULQWeightFakeQuantize for weights, from amct_fx.observers"
            )
            raise ConfigError(message)


def calibration_forwards(qconfigs: Iterable[QConfig]) -> int:
    """Return how many forwards of the model the calibration takes.

    Args:
        qconfigs: The QConfigs of all layers that will be quantized.
    """
    arguments = (constructor_arguments(qconfig.activation)[1] for qconfig in qconfigs)
    return max((given.get("batch_num", 1) for given in arguments), default=1)


def _with_parents(name: str) -> Iterator[str]:
    """Yield ``a.b.c``, ``a.b``, ``a``."""
    yield name
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _as_qconfig(value: Any) -> QConfig | None:
    return value if isinstance(value, QConfig) else None


def _qconfig(spec: LayerSpec, module: nn.Module, resolution: Resolution) -> QConfig:
    force_fp16 = resolution.fakequant_precision_mode == "FORCE_FP16_QUANT"
    return QConfig(
        activation=_activation_constructor(
            spec.activation, resolution.batch_num, force_fp16=force_fp16
        ),
        weight=_weight_constructor(spec.weight, module),
    )


def _activation_constructor(
    config: ActivationConfig, batch_num: int, *, force_fp16: bool
) -> Callable[..., Any]:
    constructor: Callable[..., Any] = ULQFakeQuantize.with_args(
        num_bits=config.dst_type.bits,
        fixed_min=config.fixed_min,
        clip_max=config.clip_max,
        clip_min=config.clip_min,
        batch_num=batch_num,
        **({"force_fp16": True} if force_fp16 else {}),
    )
    return constructor


def _weight_constructor(config: WeightConfig, module: nn.Module) -> Callable[..., Any]:
    classes = {"arq_retrain": ARQFakeQuantize, "ulq_retrain": ULQWeightFakeQuantize}
    geometry = weight_geometry(module).as_arguments(per_channel=bool(config.channel_wise))
    constructor: Callable[..., Any] = classes[config.algo].with_args(
        num_bits=config.dst_type.bits, **geometry
    )
    return constructor
