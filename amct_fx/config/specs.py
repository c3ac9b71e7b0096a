"""What resolution takes and gives: facts about a model in, one spec per layer out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Literal, TypeAlias

from amct_fx.config.layer_types import PRUNABLE_BESIDES, PRUNABLE_BY_FILTER, PRUNABLE_BY_M4N2
from amct_fx.config.schema import (
    NOWHERE,
    ActivationConfig,
    FilterPruneConfig,
    PruneConfig,
    Source,
    WeightConfig,
)

__all__ = [
    "LayerFacts",
    "LayerSpec",
    "Level",
    "LinearChannelWise",
    "ModelFacts",
    "Origin",
    "PruneMode",
    "Resolution",
]

Level: TypeAlias = Literal["default", "global", "type", "layer"]
LinearChannelWise: TypeAlias = bool | Literal["all"]
"""Which Linear layers may have a scale for each output: none, by name, or all."""

PruneMode: TypeAlias = Literal["native", "amct"]
"""Which layers can be pruned: all that are safe, or those of AMCT."""


@dataclass(frozen=True)
class LayerFacts:
    """What resolution must know about one module.

    Args:
        name: Its first name in ``named_modules()``.
        layer_type: Class name, such as ``"Conv2d"``; of the original class when parametrized.
        groups: Groups of a convolution.
        in_channels: Input channels or features.
        packing_sizes: Sizes of the axes along which INT4 codes are packed in pairs.
        reason: Why it is not quantized; ``None``: it can be.
        dilation: Dilation of a convolution.
        prune_reason: Why it is not pruned; ``None``: it can be; left out: the same ``reason``.
        uses: How often one forward uses its weight.
        prune_mode: Decides which types can be pruned.
    """

    name: str
    layer_type: str
    groups: int = 1
    in_channels: int = 0
    packing_sizes: tuple[int, ...] = ()
    reason: str | None = None
    dilation: tuple[int, ...] = ()
    prune_reason: str | EllipsisType | None = ...
    uses: int = 1
    prune_mode: PruneMode = "amct"

    @property
    def eligible(self) -> bool:
        """Whether the layer can be quantized."""
        return self.reason is None

    @property
    def depthwise(self) -> bool:
        """Whether each input channel is its own group."""
        return self.groups == self.in_channels > 1

    @property
    def prunable(self) -> bool:
        """Whether at least one kind of pruning can be applied, where an override asks for it."""
        types = PRUNABLE_BY_M4N2 | PRUNABLE_BY_FILTER | self._types_besides
        return self._why_never_pruned is None and self.layer_type in types

    def why_not_prunable(self, prune: PruneConfig, *, requested: bool = True) -> str | None:
        """Return why this kind of pruning cannot be applied; ``None``: it can.

        Args:
            prune: The kind.
            requested: Whether an override asks for it; else a setting for all layers does.

        Example:
            >>> LayerFacts("dw", "Conv2d", groups=8, in_channels=8).why_not_prunable(
            ...     FilterPruneConfig(0.5)
            ... )
            'filter pruning needs a convolution with fewer groups than input channels'
        """
        if reason := self._why_never_pruned:
            return reason
        if isinstance(prune, FilterPruneConfig):
            return self._why_no_filters()
        types = PRUNABLE_BY_M4N2 | (self._types_besides if requested else frozenset())
        if self.layer_type not in types:
            return f"2:4 pruning is for {_list(types)}, not for {self.layer_type}"
        return f"one forward uses its weight {self.uses} times" if self.uses > 1 else None

    def _why_no_filters(self) -> str | None:
        types = PRUNABLE_BY_FILTER | self._types_besides
        if self.layer_type not in types:
            return f"filter pruning is for {_list(types)}, not for {self.layer_type}"
        if self.prune_mode == "native" and self.depthwise:
            return "the channels of a depthwise convolution follow those of its input"
        as_many_groups = self.layer_type == "Conv2d" and self.groups == self.in_channels
        if self.prune_mode == "amct" and as_many_groups:
            return "filter pruning needs a convolution with fewer groups than input channels"
        return None

    @property
    def _why_never_pruned(self) -> str | None:
        return self.reason if isinstance(self.prune_reason, EllipsisType) else self.prune_reason

    @property
    def _types_besides(self) -> frozenset[str]:
        return PRUNABLE_BESIDES if self.prune_mode == "native" else frozenset()


def _list(types: frozenset[str]) -> str:
    return ", ".join(sorted(types))


@dataclass(frozen=True)
class ModelFacts:
    """What resolution must know about a model.

    Args:
        layers: All modules of quantizable types in ``named_modules()`` order.
        modules: Class name of every module, by name.
        prune_mode: Decides which types can be pruned.
        makers: The layer that makes the channels of a module which only passes them on, by name.
    """

    layers: tuple[LayerFacts, ...]
    modules: Mapping[str, str] = field(default_factory=dict)
    prune_mode: PruneMode = "amct"
    makers: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Origin:
    """Which level a setting came from, and where it stands.

    Example:
        >>> str(Origin("type", Source("quant.cfg", 7, 3), "Conv2d"))
        "type 'Conv2d' (quant.cfg:7:3)"
        >>> str(Origin())
        'default'
    """

    level: Level = "default"
    source: Source = NOWHERE
    entry: str = ""

    def __str__(self) -> str:
        """Return the level, its entry and the place, as far as known."""
        return f"{self.label} ({self.source})" if self.source.line else self.label

    @property
    def label(self) -> str:
        """The level and its entry."""
        return f"{self.level} {self.entry!r}" if self.entry else self.level


@dataclass(frozen=True)
class LayerSpec:
    """What happens to one eligible layer.

    Args:
        name: Dotted path of the module.
        layer_type: Class name.
        quantize: Whether it is quantized.
        activation: Its data half; ``fixed_min`` is ``None`` when it follows the graph.
        weight: Its weight half, with ``channel_wise`` decided and after the INT4 fall-back.
        prune: How it is pruned, or ``None``.
        reason: Why it is not quantized; ``None`` when it is.
        prune_reason: Why a pruning that is set for it does not reach it, or ``None``.
        activation_origin: Where the data half came from.
        weight_origin: Where the weight half came from.
        prune_origin: Where the pruning came from.
    """

    name: str
    layer_type: str
    quantize: bool
    activation: ActivationConfig
    weight: WeightConfig
    prune: PruneConfig | None = None
    reason: str | None = None
    prune_reason: str | None = None
    activation_origin: Origin = Origin()
    weight_origin: Origin = Origin()
    prune_origin: Origin = Origin()


@dataclass(frozen=True)
class Resolution:
    """A configuration that has met a model.

    Args:
        quantize: Whether quantization is on.
        prune: Whether pruning is on.
        batch_num: Batches that the range search collects.
        fakequant_precision_mode: ``"FORCE_FP16_QUANT"`` or ``None``.
        layers: One spec per layer that can be quantized, or pruned where pruning is on, in
            ``named_modules()`` order.
        never_pruned: Why pruning does not reach the other layers that it is set for, by name.
    """

    quantize: bool
    prune: bool
    batch_num: int
    fakequant_precision_mode: str | None
    layers: Mapping[str, LayerSpec]
    never_pruned: Mapping[str, str] = field(default_factory=dict)

    @property
    def prune_settings(self) -> dict[str, PruneConfig]:
        """How each layer is pruned, by name; layers that are not are absent."""
        specs = self.layers.values()
        return {spec.name: spec.prune for spec in specs if spec.prune is not None}

    @property
    def prune_reasons(self) -> dict[str, str]:
        """Why the settings of pruning do not reach other layers, by name."""
        specs = self.layers.values()
        found = {spec.name: spec.prune_reason for spec in specs if spec.prune_reason}
        return found | dict(self.never_pruned)
