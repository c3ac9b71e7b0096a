"""What prepare decided, kept with the model so that reports can say why a layer stayed float."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from amct_fx.config.messages import counted

if TYPE_CHECKING:
    from torch import Tensor, nn

    from amct_fx.config import CompressionConfig, LayerFacts, LayerSpec, ModelFacts, Resolution
    from amct_fx.graph import Capture, Island
    from amct_fx.prune.plan import PrunePlan

__all__ = [
    "LayerDecision",
    "Preparation",
    "Recipe",
    "preparation_of",
    "record_conversion",
    "record_preparation",
]

_ATTRIBUTE = "_amct_preparation"


@dataclass(frozen=True)
class LayerDecision:
    """One layer of a quantizable type.

    Attributes:
        name: Its name.
        layer_type: Its class.
        reason: Why it stays float, ``None`` if it does not.
        override: The override that quantizes it, such as ``"type 'Linear'"``; it beats any skip.
    """

    name: str
    layer_type: str
    reason: str | None
    override: str = ""


@dataclass(frozen=True)
class Recipe:
    """What prepare was asked for: enough to do the same again in another process.

    Attributes:
        config: The configuration, ``None`` when a ``QConfigMapping`` was given.
        options: The keyword arguments of the call that decide what the model becomes.
    """

    config: CompressionConfig | None
    options: Mapping[str, Any]


@dataclass(frozen=True)
class Preparation:
    """What one prepare call decided.

    Attributes:
        layers: All layers of quantizable types, in model order.
        others: Modules of other types that own weight matrices, which stay float.
        islands: Parts with layers that could not be traced.
        recipe: What the call was asked for.
        converted: Whether the model was converted since.
        plan: Which channels go; ``None`` without channel pruning.
        kept: After conversion, what stayed of each parameter: int64 indices by name and axis.
    """

    layers: tuple[LayerDecision, ...]
    others: tuple[LayerDecision, ...]
    islands: tuple[Island, ...]
    recipe: Recipe
    converted: bool = False
    plan: PrunePlan | None = None
    kept: Mapping[str, Mapping[int, Tensor]] = field(
        default_factory=dict, compare=False, repr=False
    )

    def __deepcopy__(self, memo: dict[int, Any]) -> Preparation:
        """Return the decisions themselves: they never change."""
        return self

    @classmethod
    def of(
        cls,
        facts: ModelFacts,
        others: Iterable[LayerFacts],
        quantized: Container[str],
        captured: Capture,
        recipe: Recipe,
        resolution: Resolution | None = None,
        plan: PrunePlan | None = None,
    ) -> Preparation:
        """Collect the decisions of one prepare call; ``resolution`` knows more reasons."""
        specs = {} if resolution is None else resolution.layers
        rest = tuple(LayerDecision(item.name, item.layer_type, item.reason) for item in others)
        elsewhere = {item.name for item in rest}
        layers = tuple(
            LayerDecision(
                layer.name,
                layer.layer_type,
                None if layer.name in quantized else _why_float(layer, specs.get(layer.name)),
                _override_of(specs.get(layer.name), recipe.config),
            )
            for layer in facts.layers
            if layer.name not in elsewhere
        )
        islands = tuple(island for island in captured.islands if island.holds_layers)
        return cls(layers, rest, islands, recipe, plan=plan)

    @property
    def headline(self) -> str:
        """One line: how many layers are quantized."""
        quantized = sum(layer.reason is None for layer in self.layers)
        parts = f", {counted(len(self.islands), 'part')} not traced" if self.islands else ""
        return f"prepared {quantized} of {len(self.layers)} layers{parts}"


def _override_of(spec: LayerSpec | None, config: CompressionConfig | None) -> str:
    """Return the override that quantizes a layer even if it is skipped, ``""`` for none."""
    if spec is None or not spec.quantize or config is None or config.resolved:
        return ""
    origins = (spec.activation_origin, spec.weight_origin)
    return next((item.label for item in origins if item.level in ("layer", "type")), "")


def _why_float(layer: LayerFacts, spec: LayerSpec | None) -> str:
    told = spec.reason if spec is not None else None
    return layer.reason or told or "the configuration skips it"


def record_preparation(model: nn.Module, preparation: Preparation) -> None:
    """Keep ``preparation`` with the model; copies and pickles carry it."""
    setattr(model, _ATTRIBUTE, preparation)


def record_removal(
    model: nn.Module, plan: PrunePlan, kept: Mapping[str, Mapping[int, Tensor]]
) -> None:
    """Note which channels were cut from ``model``, and what stayed of its parameters."""
    preparation = preparation_of(model)
    if preparation is not None:
        record_preparation(model, replace(preparation, plan=plan, kept=kept))


def record_conversion(model: nn.Module) -> None:
    """Note that ``model`` is converted now."""
    preparation = preparation_of(model)
    if preparation is not None:
        record_preparation(model, replace(preparation, converted=True))


def preparation_of(model: nn.Module) -> Preparation | None:
    """Return what :func:`record_preparation` kept, ``None`` for a model that was never prepared."""
    found = getattr(model, _ATTRIBUTE, None)
    return found if isinstance(found, Preparation) else None
