"""One spec per layer: by name over by type over global over the defaults.

This module knows nothing of torch. It takes the facts about a model as plain values, so that its
rules can be read, and tested, on their own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from amct_fx.choices import check_choices
from amct_fx.config.dialect import check_dialect, detect_dialect
from amct_fx.config.layer_types import CONV_TYPES
from amct_fx.config.messages import listing, warn
from amct_fx.config.names import Lookup, look_up_names
from amct_fx.config.rules import RETRAIN, Rules
from amct_fx.config.schema import (
    ActivationConfig,
    CompressionConfig,
    DataType,
    FilterPruneConfig,
    LayerOverride,
    PruneConfig,
    Source,
    TypeOverride,
    WeightConfig,
)
from amct_fx.config.specs import (
    LayerFacts,
    LayerSpec,
    LinearChannelWise,
    ModelFacts,
    Origin,
    Resolution,
)
from amct_fx.errors import ModelError

__all__ = ["LayerFacts", "LayerSpec", "ModelFacts", "Origin", "Resolution", "resolve"]


def resolve(
    config: CompressionConfig,
    facts: ModelFacts,
    *,
    linear_channel_wise: LinearChannelWise = False,
    dialect: str = "auto",
    rules: Rules = RETRAIN,
) -> Resolution:
    """Decide for each eligible layer whether and how it is quantized and pruned.

    Args:
        config: The configuration.
        facts: Facts about the model.
        linear_channel_wise: Accept ``channel_wise: true`` in the override of a Linear by name;
            ``"all"`` takes it for each Linear for which the configuration does not say false.
        dialect: ``"auto"``, ``"pytorch"`` or ``"mindspore"``; there is more to warn of in the last.
        rules: Those of training, or of distillation.

    Raises:
        ConfigError: When the configuration does not fit the model.
        ModelError: When the model has nothing to compress.

    Example:
        >>> facts = ModelFacts((LayerFacts("fc", "Linear", in_channels=20, packing_sizes=(20,)),))
        >>> spec = resolve(CompressionConfig(), facts).layers["fc"]
        >>> spec.quantize, spec.weight.channel_wise
        (True, False)
    """
    check_dialect(dialect)
    check_choices(linear_channel_wise=(linear_channel_wise, (False, True, "all")))
    if dialect == "auto":
        dialect = detect_dialect(config)
    prune = config.has_prune_message
    quantize = config.resolved or config.has_quant_message or not prune
    eligible = [layer for layer in facts.layers if layer.eligible or (prune and layer.prunable)]
    _check_model(facts, rules, quantize=quantize, prune=prune)
    lookup = look_up_names(config, facts, rules, quantize=quantize, prune=prune, dialect=dialect)
    resolver = _Resolver(config, lookup, quantize, prune, rules)
    specs = [resolver.spec(layer) for layer in eligible]
    resolver.warn()
    others = [layer for layer in facts.layers if prune and layer not in eligible]
    specs = _decide_channel_wise(specs, linear_channel_wise=linear_channel_wise)
    _check_pairs(specs, rules)
    _check_something_left(config, specs, quantize=quantize, prune=prune)
    specs = _fall_back_from_int4(specs, eligible)
    if dialect == "mindspore":
        _warn_of_unsupported_by_mindspore(specs, eligible)
    return Resolution(
        quantize=quantize,
        prune=prune,
        batch_num=config.batch_num,
        fakequant_precision_mode=config.fakequant_precision_mode,
        layers={spec.name: spec for spec in specs},
        never_pruned={layer.name: why for layer in others if (why := resolver.never_pruned(layer))},
    )


@dataclass
class _Resolver:
    """The decisions for one layer after the other; it collects what is worth a warning."""

    config: CompressionConfig
    lookup: Lookup
    quantize: bool
    prune: bool
    rules: Rules

    def __post_init__(self) -> None:
        self.reenabled: list[str] = []
        self.not_pruned: list[str] = []

    def spec(self, layer: LayerFacts) -> LayerSpec:
        """Return the spec of one layer."""
        overrides = self.lookup.overrides(layer)
        if self.config.resolved:
            overrides = overrides[:1]
        reason = self._why_not_quantized(layer, overrides)
        activation, activation_origin = self._pick(overrides, "activation")
        weight, weight_origin = self._pick(overrides, "weight")
        prune, prune_origin, prune_reason = self._prune(layer, overrides)
        return LayerSpec(
            name=layer.name,
            layer_type=layer.layer_type,
            quantize=reason is None,
            activation=activation or ActivationConfig(),
            weight=weight or WeightConfig(),
            prune=prune,
            reason=reason,
            prune_reason=prune_reason,
            activation_origin=activation_origin,
            weight_origin=weight_origin,
            prune_origin=prune_origin,
        )

    def never_pruned(self, layer: LayerFacts) -> str | None:
        """Return why a layer that can never be pruned is not; ``None``: no setting reaches it."""
        return self._prune(layer, self.lookup.overrides(layer))[2]

    def warn(self) -> None:
        """Issue one warning for each kind of surprise."""
        if self.reenabled:
            names = listing(self.reenabled)
            warn(f"an override beats the skip lists, so these are quantized: {names}")
        if self.not_pruned:
            warn(
                "for pruning the skip lists beat an override, so these are not pruned: "
                f"{listing(self.not_pruned)}"
            )

    def _why_not_quantized(
        self, layer: LayerFacts, overrides: list[LayerOverride | TypeOverride]
    ) -> str | None:
        """Return why a layer stays float; ``None``: it is quantized."""
        skip = self.lookup.quant_skip(layer)
        if layer.reason is not None:
            return layer.reason
        if not self.quantize:
            return "quantization is off: the configuration only prunes"
        if self.config.resolved:
            return skip or (None if overrides else "the configuration does not list it")
        if skip and self.rules.skip_beats_override:
            return skip
        if any(item.activation is not None or item.weight is not None for item in overrides):
            if skip:
                self.reenabled.append(layer.name)
            return None
        if skip:
            return skip
        has_global = self.config.activation is not None or self.config.weight is not None
        if self.prune and not has_global:
            return "quantization is set for other layers only"
        return None

    def _prune(
        self, layer: LayerFacts, overrides: list[LayerOverride | TypeOverride]
    ) -> tuple[PruneConfig | None, Origin, str | None]:
        """Return how a layer is pruned, who says so, and why it is not pruned."""
        prune, origin = self._pick(overrides, "prune")
        if prune is None:
            return None, Origin(), None
        requested = origin.level in ("layer", "type")
        if reason := layer.why_not_prunable(prune, requested=requested):
            return None, Origin(), reason
        if skip := self.lookup.prune_skip(layer):
            if requested:
                self.not_pruned.append(layer.name)
            return None, Origin(), skip
        return prune, origin, None

    def _pick(self, overrides: list[LayerOverride | TypeOverride], part: str) -> tuple[Any, Origin]:
        """Return a part from the strongest level that has it, and where that is."""
        for override in overrides:
            value = getattr(override, part)
            if isinstance(override, LayerOverride) and value is not None:
                return value, Origin("layer", value.source, override.name)
            if isinstance(override, TypeOverride) and value is not None:
                return value, Origin("type", value.source, override.type)
        value = getattr(self.config, part)
        if value is not None:
            return value, Origin("global", value.source)
        return None, Origin()


def _check_model(facts: ModelFacts, rules: Rules, *, quantize: bool, prune: bool) -> None:
    """Raise unless the model has layers that the features could reach."""
    if quantize and not any(layer.eligible for layer in facts.layers):
        reasons = "; ".join(f"{layer.name!r}: {layer.reason}" for layer in facts.layers[:5])
        message = (
            f"the model has no layer that can be quantized{reasons and f' ({reasons})'}; "
            f"these types can: {', '.join(rules.types)}"
        )
        raise ModelError(message)
    if prune and not any(layer.prunable for layer in facts.layers):
        found = [(layer, layer.why_not_prunable(FilterPruneConfig(0.5))) for layer in facts.layers]
        reasons = "; ".join(f"{layer.name!r}: {why}" for layer, why in found[:5])
        message = f"the model has no layer that can be pruned{reasons and f' ({reasons})'}"
        raise ModelError(message)


def _decide_channel_wise(
    specs: list[LayerSpec], *, linear_channel_wise: LinearChannelWise
) -> list[LayerSpec]:
    """Make ``channel_wise`` a bool everywhere."""
    flattened = []
    result = []
    for spec in specs:
        channel_wise = spec.weight.channel_wise
        is_linear = spec.layer_type == "Linear"
        if linear_channel_wise == "all":
            channel_wise = channel_wise is not False
        elif channel_wise is None:
            channel_wise = not is_linear
        elif channel_wise and is_linear and spec.weight_origin.level != "layer":
            channel_wise = False
            if spec.quantize:
                flattened.append(spec.name)
        elif channel_wise and is_linear and not linear_channel_wise:
            message = (
                f"layer {spec.name!r}: channel_wise: true is not for Linear; leave it out, or pass "
                "linear_channel_wise=True"
            )
            raise spec.weight_origin.source.error(message)
        result.append(replace(spec, weight=replace(spec.weight, channel_wise=channel_wise)))
    if flattened:
        warn(f"channel_wise: true is not for Linear; one scale is used for: {listing(flattened)}")
    return result


def _check_pairs(specs: list[LayerSpec], rules: Rules) -> None:
    """Raise for the first pair of widths that cannot be combined; name all layers that have it."""
    bad = [
        (spec, (spec.activation.dst_type, spec.weight.dst_type))
        for spec in specs
        if spec.quantize and (spec.activation.dst_type, spec.weight.dst_type) not in rules.pairs
    ]
    if not bad:
        return
    first, pair = bad[0]
    names = [spec.name for spec, widths in bad if widths == pair]
    culprit = first.weight_origin if pair[0] is DataType.INT8 else first.activation_origin
    message = (
        f"{pair[0].name} activations with {pair[1].name} weights are not supported "
        f"(layers {listing(names)}); use {' or '.join(rules.pairs.values())}"
    )
    raise culprit.source.error(message)


def _check_something_left(
    config: CompressionConfig, specs: list[LayerSpec], *, quantize: bool, prune: bool
) -> None:
    """Raise when a feature is on and reaches no layer."""
    for feature, is_on, reached in (
        ("quantized", quantize, any(spec.quantize for spec in specs)),
        ("pruned", prune, any(spec.prune is not None for spec in specs)),
    ):
        if is_on and not reached:
            message = f"no layer is left to be {feature}: all are skipped"
            raise Source(config.file).error(message)


def _fall_back_from_int4(specs: list[LayerSpec], layers: list[LayerFacts]) -> list[LayerSpec]:
    """Turn INT4 weights into INT8 where two codes do not fit into a byte."""
    fallen = []
    result = []
    for spec, layer in zip(specs, layers, strict=True):
        reason = _why_no_int4(layer) if spec.weight.dst_type is DataType.INT4 else None
        if reason is None:
            result.append(spec)
            continue
        if spec.quantize:
            fallen.append(f"{spec.name!r} ({reason})")
        result.append(replace(spec, weight=replace(spec.weight, dst_type=DataType.INT8)))
    if fallen:
        warn(f"INT4 weights become INT8 where they cannot be packed: {', '.join(fallen)}")
    return result


def _why_no_int4(layer: LayerFacts) -> str | None:
    """Return why INT4 codes of a layer cannot be packed; ``None``: they can."""
    if layer.layer_type in CONV_TYPES and layer.groups > 1:
        return f"{layer.groups} groups"
    odd = [size for size in layer.packing_sizes if size % 2]
    return f"{odd[0]} input channels, an odd number" if odd else None


def _warn_of_unsupported_by_mindspore(specs: list[LayerSpec], layers: list[LayerFacts]) -> None:
    """Warn of convolutions that MindSpore's tool left float."""
    names = [
        layer.name
        for spec, layer in zip(specs, layers, strict=True)
        if spec.quantize
        and layer.layer_type in CONV_TYPES
        and (any(step != 1 for step in layer.dilation) or 1 < layer.groups < layer.in_channels)
    ]
    if names:
        warn(
            "convolutions with dilation, or with groups but not depthwise, are quantized here; "
            f"amct_mindspore did not support them: {listing(names)}"
        )
