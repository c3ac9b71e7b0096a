"""Check the names and types of a configuration against a model, and look them up.

The names of layers and types that a file gives either mean something in the model, or are an error
with close matches, or are a warning: a skip entry that has no effect, a type that this model lacks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from amct_fx.config.layer_types import LayerType, resolve_type
from amct_fx.config.messages import listing, warn
from amct_fx.config.rules import RETRAIN, Rules
from amct_fx.config.schema import (
    SKIP_FIELDS,
    CompressionConfig,
    FilterPruneConfig,
    LayerOverride,
    PruneConfig,
    TypeOverride,
)
from amct_fx.config.specs import LayerFacts, ModelFacts
from amct_fx.errors import ConfigError, did_you_mean

__all__ = ["Lookup", "look_up_names"]

_LISTS_FOR_QUANT = (
    ("skip_layers", "skip_types"),
    ("quant_skip_layers", "quant_skip_types"),
)
_LISTS_FOR_PRUNE = (
    ("skip_layers", "skip_types"),
    ("prune_skip_layers", "prune_skip_types"),
)


@dataclass
class Lookup:
    """The entries of a configuration, ready to be asked about a layer."""

    by_name: dict[str, LayerOverride] = field(default_factory=dict)
    by_type: list[tuple[LayerType, TypeOverride]] = field(default_factory=list)
    skip_names: dict[str, frozenset[str]] = field(default_factory=dict)
    skip_types: dict[str, list[tuple[LayerType, str]]] = field(default_factory=dict)
    config: CompressionConfig = field(default_factory=CompressionConfig)
    rules: Rules = RETRAIN

    def overrides(self, layer: LayerFacts) -> list[LayerOverride | TypeOverride]:
        """Return the overrides that apply to a layer, the strongest first."""
        found: list[LayerOverride | TypeOverride] = []
        if layer.name in self.by_name:
            found.append(self.by_name[layer.name])
        # A depthwise spelling is narrower than Conv2d and therefore stronger.
        narrow_first = sorted(self.by_type, key=lambda item: not item[0].depthwise_only)
        for layer_type, override in narrow_first:
            if layer_type.matches(layer.layer_type, depthwise=layer.depthwise):
                found.append(override)
        return found

    def quant_skip(self, layer: LayerFacts) -> str | None:
        """Return which entry takes a layer out of quantization, or ``None``."""
        return self._skip(layer, _LISTS_FOR_QUANT)

    def prune_skip(self, layer: LayerFacts) -> str | None:
        """Return which entry takes a layer out of pruning, or ``None``."""
        return self._skip(layer, _LISTS_FOR_PRUNE)

    def _skip(self, layer: LayerFacts, lists: tuple[tuple[str, str], ...]) -> str | None:
        for names, types in lists:
            if layer.name in self.skip_names[names]:
                return self._entry(names, layer.name)
            for layer_type, spelling in self.skip_types[types]:
                if layer_type.matches(layer.layer_type, depthwise=layer.depthwise):
                    return self._entry(types, spelling)
        return None

    def _entry(self, list_name: str, entry: str) -> str:
        source = self.config.skip_source(list_name, entry)
        place = f" ({source})" if source.line else ""
        return f"{self.rules.skip_fields[list_name]} has {entry!r}{place}"


def look_up_names(
    config: CompressionConfig,
    facts: ModelFacts,
    rules: Rules,
    *,
    quantize: bool,
    prune: bool,
    dialect: str,
) -> Lookup:
    """Check all names and types, overrides first.

    Raises:
        ConfigError: For a name or type that the model cannot have, or that is given twice.
    """
    checker = _Checker(config, facts, rules, quantize=quantize, prune=prune, dialect=dialect)
    lookup = Lookup(
        by_name=checker.layer_overrides(),
        by_type=checker.type_overrides(),
        skip_names={name: frozenset(getattr(config, name)) for name in SKIP_FIELDS},
        config=config,
        rules=rules,
    )
    lookup.skip_types = checker.skip_lists(lookup)
    return lookup


class _Checker:
    """The checks on names; each part of the configuration has its method."""

    def __init__(
        self,
        config: CompressionConfig,
        facts: ModelFacts,
        rules: Rules,
        *,
        quantize: bool,
        prune: bool,
        dialect: str,
    ) -> None:
        self._config = config
        self._rules = rules
        self._prune_mode = facts.prune_mode
        self._makers = facts.makers
        self._layers = {layer.name: layer for layer in facts.layers}
        self._modules = {**facts.modules, **{item.name: item.layer_type for item in facts.layers}}
        self._model_types = set(self._modules.values())
        self._quantize = quantize
        self._prune = prune
        self._dialect = dialect

    def layer_overrides(self) -> dict[str, LayerOverride]:
        """Check the overrides by name."""
        found: dict[str, LayerOverride] = {}
        for override in self._config.layer_overrides:
            layer = self._layers.get(override.name)
            if override.name not in self._modules:
                message = f"the model has no layer {override.name!r}{self._matches(override.name)}"
                raise override.source.error(message)
            if reason := self._why_not_set(override, layer):
                message = f"layer {override.name!r} cannot be {reason}"
                raise override.source.error(message)
            if override.name in found:
                message = f"layer {override.name!r}"
                raise _twice(message, found[override.name], override)
            why = self._why_not_pruned(override, layer)
            if why is not None:
                message = f"layer {override.name!r} cannot be pruned: {why}"
                raise override.source.error(message)
            if not self._config.resolved:
                _warn_if_empty(override, f"layer {override.name!r}")
            found[override.name] = override
        return found

    def type_overrides(self) -> list[tuple[LayerType, TypeOverride]]:
        """Check the overrides by type."""
        found: dict[tuple[str, bool], TypeOverride] = {}
        result = []
        for override in self._config.type_overrides:
            layer_type = resolve_type(
                override.type, model_types=self._model_types, source=override.source
            )
            _note(layer_type, override)
            self._check_type_prune(layer_type, override)
            if layer_type.name not in self._rules.types and not _only_prunes(override):
                message = (
                    f"layers of type {override.type!r} cannot be set, they are not quantized"
                    f" (quantizable: {', '.join(self._rules.types)})"
                )
                raise override.source.error(message)
            if layer_type.key in found:
                first = found[layer_type.key]
                spellings = dict.fromkeys((first.type, override.type))
                message = f"type {' alias '.join(map(repr, spellings))}"
                raise _twice(message, first, override)
            found[layer_type.key] = override
            _warn_if_empty(override, f"type {override.type!r}")
            if not self._present(layer_type):
                warn(
                    f"{override.source}: the override of type {override.type!r} has no effect, "
                    "the model has no such layer"
                )
            result.append((layer_type, override))
        return result

    def skip_lists(self, lookup: Lookup) -> dict[str, list[tuple[LayerType, str]]]:
        """Check the six skip lists; return the types of three of them."""
        types = {}
        for prefix in ("", "quant_", "prune_"):
            self._skip_names(prefix, lookup)
            types[f"{prefix}skip_types"] = self._skip_types(f"{prefix}skip_types")
        return types

    def _skip_names(self, prefix: str, lookup: Lookup) -> None:
        """Check the names in one skip list."""
        seen: set[str] = set()
        list_name = f"{prefix}skip_layers"
        label = self._rules.skip_fields[list_name]
        for name in getattr(self._config, list_name):
            source = self._config.skip_source(list_name, name)
            if name not in self._modules:
                hint = self._matches(name)
                message = f"{label} has {name!r}, which is not in the model{hint}"
                raise source.error(message)
            if name in seen:
                warn(f"{source}: {label} has {name!r} more than once")
            seen.add(name)
            if reason := self._why_no_skip(prefix, name, lookup):
                warn(f"{source}: {label} has {name!r}, which has no effect: {reason}")

    def _why_no_skip(self, prefix: str, name: str, lookup: Lookup) -> str | None:
        """Return why an entry of a skip list takes nothing away; ``None``: it does."""
        layer = self._layers.get(name)
        quant_reason = self._why_not(name)
        if prefix == "quant_" or (not prefix and not self._prune):
            return quant_reason
        if not prefix and self._quantize and quant_reason is None:
            return None
        if layer is not None and layer.prunable:
            overrides = [item.prune for item in lookup.overrides(layer) if item.prune is not None]
            setting = overrides[0] if overrides else self._config.prune
            if setting is None:
                return None
            reason = layer.why_not_prunable(setting, requested=bool(overrides))
            return reason and reason + self._maker_of(name, setting)
        if layer is not None:
            return quant_reason or "it is not pruned anyway"
        return self._why_never_pruned(name, self._config.prune or FilterPruneConfig(0.5))

    def _skip_types(self, list_name: str) -> list[tuple[LayerType, str]]:
        """Check the types in one skip list."""
        result: dict[tuple[str, bool], tuple[LayerType, str]] = {}
        label = self._rules.skip_fields[list_name]
        for spelling in getattr(self._config, list_name):
            source = self._config.skip_source(list_name, spelling)
            layer_type = resolve_type(spelling, model_types=self._model_types, source=source)
            if layer_type.note:
                warn(f"{source}: {layer_type.note}")
            if layer_type.key in result:
                first = result[layer_type.key][1]
                same = f" (as {first!r})" if first != spelling else ""
                warn(f"{source}: {label} has {spelling!r} more than once{same}")
                continue
            if not self._may_be_skipped(layer_type, list_name):
                what = "pruned" if list_name.startswith("prune_") else "quantized"
                warn(
                    f"{source}: {label} has {spelling!r}, which has no effect: "
                    f"layers of this type are not {what}"
                )
            elif self._dialect == "mindspore" and not self._present(layer_type):
                warn(f"{source}: {label} has {spelling!r}, but the model has no such layer")
            result[layer_type.key] = (layer_type, spelling)
        return list(result.values())

    def _may_be_skipped(self, layer_type: LayerType, list_name: str) -> bool:
        """Whether it makes sense to skip layers of this type, in this model or in another."""
        name = layer_type.name
        if self._prune and not list_name.startswith("quant_"):
            kind = LayerFacts("", name, prune_mode=self._prune_mode)
            if kind.prunable:
                return True
        return layer_type.quantizable and (
            name in self._rules.types or name not in self._model_types
        )

    def _check_type_prune(self, layer_type: LayerType, override: TypeOverride) -> None:
        """Raise when layers of the type cannot be pruned in this way."""
        if override.prune is None:
            return
        channels = 2 if layer_type.depthwise_only else 0
        kind = LayerFacts("", layer_type.name, channels or 1, channels, prune_mode=self._prune_mode)
        if reason := kind.why_not_prunable(override.prune):
            message = f"type {override.type!r} cannot be pruned: {reason}"
            raise override.source.error(message)

    def _present(self, layer_type: LayerType) -> bool:
        """Whether the model has a layer of this type that could be quantized or pruned."""
        return any(
            (layer.eligible or (self._prune and layer.prunable))
            and layer_type.matches(layer.layer_type, depthwise=layer.depthwise)
            for layer in self._layers.values()
        )

    def _why_not_set(self, override: LayerOverride, layer: LayerFacts | None) -> str | None:
        """Return what an override cannot do and why; a float layer may still be pruned."""
        if layer is None and override.prune is not None:
            return f"pruned: {self._why_never_pruned(override.name, override.prune)}"
        if layer is None or not (_only_prunes(override) and layer.prunable):
            reason = self._why_not(override.name)
            return reason and f"set: {reason}"
        return None

    def _why_not_pruned(self, override: LayerOverride, layer: LayerFacts | None) -> str | None:
        if override.prune is None or layer is None:
            return None
        reason = layer.why_not_prunable(override.prune)
        return reason and reason + self._maker_of(override.name, override.prune)

    def _why_never_pruned(self, name: str, prune: PruneConfig) -> str:
        """Return why a module that is no layer cannot be pruned."""
        maker = self._maker_of(name, prune)
        if maker:
            return f"a {self._modules[name]} has no filters of its own{maker}"
        kind = LayerFacts("", self._modules[name], prune_mode=self._prune_mode)
        return str(kind.why_not_prunable(prune))

    def _maker_of(self, name: str, prune: PruneConfig | None) -> str:
        """Return a hint at the layer with whose channels those of a module are cut."""
        maker = self._makers.get(name)
        if maker is None or not isinstance(prune, FilterPruneConfig):
            return ""
        return f"; its channels are cut with those of {maker!r}, so name that layer"

    def _why_not(self, name: str) -> str | None:
        """Return why a module cannot be quantized; ``None``: it can."""
        if name in self._layers:
            return self._layers[name].reason
        return f"a {self._modules[name]} is not quantized"

    def _matches(self, name: str) -> str:
        """Return the close matches for a name, or what there is."""
        eligible = [layer.name for layer in self._layers.values() if layer.eligible]
        hint = did_you_mean(name, eligible) or did_you_mean(name, self._modules)
        return hint or f" (layers: {listing(eligible)})"


def _only_prunes(override: LayerOverride | TypeOverride) -> bool:
    return override.prune is not None and override.activation is None and override.weight is None


def _twice(
    what: str, first: LayerOverride | TypeOverride, second: LayerOverride | TypeOverride
) -> ConfigError:
    """Return the exception for two overrides of the same thing; it names both places."""
    places = f" ({first.source} and {second.source})" if first.source.line else ""
    return second.source.error(f"{what} is overridden twice{places}; join the two entries")


def _note(layer_type: LayerType, override: TypeOverride) -> None:
    """Warn when a spelling is unusual."""
    if layer_type.note:
        warn(f"{override.source}: {layer_type.note}")


def _warn_if_empty(override: LayerOverride | TypeOverride, what: str) -> None:
    """Warn when an override says nothing."""
    if override.activation is None and override.weight is None and override.prune is None:
        warn(f"{override.source}: the override of {what} is empty and changes nothing")
