"""What resolution takes and gives: facts about a model in, one spec per layer out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from amct_fx.config.layer_types import PRUNABLE_BY_FILTER, PRUNABLE_BY_M4N2
from amct_fx.config.schema import (
    NOWHERE,
    ActivationConfig,
    FilterPruneConfig,
    PruneConfig,
    Source,
    WeightConfig,
)

__all__ = ["LayerFacts", "LayerSpec", "Level", "ModelFacts", "Origin", "Resolution"]

Level: TypeAlias = Literal["default", "global", "type", "layer"]


@dataclass(frozen=True)
class LayerFacts:
    """What resolution must know about one module.

    Args:
        name: Its first name in ``named_modules()``.
        layer_type: Class name, such as ``"Conv2d"``; of the original class when parametrized.
        groups: Groups of a convolution.
        in_channels: Input channels or features.
        packing_sizes: Sizes of the axes along which INT4 codes are packed in pairs.
        reason: Why it is not eligible; ``None``: it is.
        dilation: Dilation of a convolution.
    """

    name: str
    layer_type: str
    groups: int = 1
    in_channels: int = 0
    packing_sizes: tuple[int, ...] = ()
    reason: str | None = None
    dilation: tuple[int, ...] = ()

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
        """Whether at least one kind of pruning can be applied."""
        return self.eligible and self.layer_type in PRUNABLE_BY_M4N2 | PRUNABLE_BY_FILTER

    def why_not_prunable(self, prune: PruneConfig) -> str | None:
        """Return why this kind of pruning cannot be applied; ``None``: it can.

        Example:
            >>> LayerFacts("dw", "Conv2d", groups=8, in_channels=8).why_not_prunable(
            ...     FilterPruneConfig(0.5)
            ... )
            'filter pruning needs a convolution with fewer groups than input channels'
        """
        if self.reason is not None:
            return self.reason
        is_filter = isinstance(prune, FilterPruneConfig)
        types = PRUNABLE_BY_FILTER if is_filter else PRUNABLE_BY_M4N2
        if self.layer_type not in types:
            kind = "filter pruning" if is_filter else "2:4 pruning"
            return f"{kind} is for {', '.join(sorted(types))}, not for {self.layer_type}"
        if is_filter and self.layer_type == "Conv2d" and self.groups == self.in_channels:
            return "filter pruning needs a convolution with fewer groups than input channels"
        return None


@dataclass(frozen=True)
class ModelFacts:
    """What resolution must know about a model.

    Args:
        layers: All modules of quantizable types in ``named_modules()`` order.
        modules: Class name of every module, by name.
    """

    layers: tuple[LayerFacts, ...]
    modules: Mapping[str, str] = field(default_factory=dict)


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
        layers: One spec per eligible layer, in ``named_modules()`` order.
    """

    quantize: bool
    prune: bool
    batch_num: int
    fakequant_precision_mode: str | None
    layers: Mapping[str, LayerSpec]
