"""The two dialects of ``.cfg`` files: AMCT for PyTorch and AMCT for MindSpore."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from amct_fx.config.layer_types import is_mindspore_spelling, resolve_type
from amct_fx.config.messages import listing, warn
from amct_fx.config.schema import DataType, Source
from amct_fx.errors import ConfigError, ConfigTypeError, did_you_mean

if TYPE_CHECKING:
    from amct_fx.config.schema import CompressionConfig

__all__ = [
    "DIALECTS",
    "adopt_dialect",
    "check_dialect",
    "detect_dialect",
    "rename_layers",
    "to_pytorch",
]

DIALECTS = ("auto", "pytorch", "mindspore")
_TYPE_LISTS = ("skip_types", "quant_skip_types", "prune_skip_types")
_NAME_LISTS = ("skip_layers", "quant_skip_layers", "prune_skip_layers")

logger = logging.getLogger(__name__)


def check_dialect(dialect: str) -> None:
    """Raise ConfigError unless ``dialect`` is one of :data:`DIALECTS`."""
    if dialect not in DIALECTS:
        message = (
            f"dialect must be {', '.join(map(repr, DIALECTS))}, not {dialect!r}"
            f"{did_you_mean(str(dialect), DIALECTS)}"
        )
        raise ConfigError(message)


def detect_dialect(config: CompressionConfig) -> str:
    """Return ``"mindspore"`` when a type is spelled in MindSpore's way, else ``"pytorch"``.

    Example:
        >>> from amct_fx.config import CompressionConfig
        >>> detect_dialect(CompressionConfig(skip_types=("nn.Conv2D",)))
        'mindspore'
        >>> detect_dialect(CompressionConfig(skip_types=("Conv2d",)))
        'pytorch'
    """
    skipped = config.skip_types + config.quant_skip_types + config.prune_skip_types
    spellings = (*skipped, *(override.type for override in config.type_overrides))
    return "mindspore" if any(map(is_mindspore_spelling, spellings)) else "pytorch"


def adopt_dialect(config: CompressionConfig, dialect: str) -> None:
    """Refuse what MindSpore's grammar cannot say, or note it when the dialect was detected.

    Raises:
        ConfigError: With ``dialect="mindspore"``, at the first such setting.
    """
    extra = next(_beyond_mindspore(config), None)
    if extra is None or dialect == "pytorch":
        return
    what, source = extra
    if dialect == "mindspore":
        message = f"the MindSpore dialect has no {what}"
        raise source.error(message)
    if detect_dialect(config) == "mindspore":
        logger.info("%s: %s is read as in the PyTorch dialect", source, what)


def _beyond_mindspore(config: CompressionConfig) -> Iterator[tuple[str, Source]]:
    """Yield the settings that MindSpore's grammar lacks."""
    whole = Source(config.file)
    if config.batch_num != 1:
        yield "batch_num", whole
    if config.fakequant_precision_mode is not None:
        yield "fakequant_precision_mode", whole
    for level in (config, *config.overrides):
        if level.prune is not None:
            yield "prune_config", level.prune.source
        for half in (level.activation, level.weight):
            if half is not None and half.dst_type is not DataType.INT8:
                yield "dst_type", half.source
        if level.weight is not None and level.weight.algo == "ulq_retrain":
            yield "ulq_retrain", level.weight.source
    for name in ("prune_skip_layers", "prune_skip_types"):
        if getattr(config, name):
            yield f"regular_{name}", config.skip_source(name, getattr(config, name)[0])


def rename_layers(config: CompressionConfig, name_map: Mapping[str, str]) -> CompressionConfig:
    """Return the configuration with other layer names; nothing else is translated.

    Args:
        config: The configuration.
        name_map: New names, by the names in the configuration. One that it does not have is
            named in a warning.

    Raises:
        ConfigTypeError: When a name is not a string.

    Example:
        >>> from amct_fx.config import CompressionConfig
        >>> rename_layers(CompressionConfig(skip_layers=("a", "b")), {"a": "x"}).skip_layers
        ('x', 'b')
    """
    if not all(isinstance(name, str) for pair in name_map.items() for name in pair):
        message = "name_map maps names of layers, as strings, to names of layers"
        raise ConfigTypeError(message)
    lists: dict[str, Any] = {name: getattr(config, name) for name in _NAME_LISTS}
    used = {name for names in lists.values() for name in names}
    used |= {override.name for override in config.layer_overrides}
    unused = [name for name in name_map if name not in used]
    if unused:
        warn(f"name_map has names that the configuration does not have: {listing(unused)}")
    places = {
        (kind, name_map.get(entry, entry) if kind in lists else entry): source
        for (kind, entry), source in config.skip_sources.items()
    }
    for kind, names in lists.items():
        lists[kind] = tuple(name_map.get(name, name) for name in names)
    return replace(
        config,
        **lists,
        layer_overrides=tuple(
            replace(override, name=name_map.get(override.name, override.name))
            for override in config.layer_overrides
        ),
        skip_sources=places,
    )


def to_pytorch(config: CompressionConfig) -> CompressionConfig:
    """Return the configuration with all types spelled as torch spells them.

    Raises:
        ConfigError: For an unknown spelling.

    Example:
        >>> from amct_fx.config import CompressionConfig
        >>> to_pytorch(CompressionConfig(skip_types=("nn.Conv2D", "nn.Dense"))).skip_types
        ('Conv2d', 'Linear')
    """

    def spelled(spelling: str, source: Source) -> str:
        layer_type = resolve_type(spelling, source=source)
        return "DepthwiseConv2d" if layer_type.depthwise_only else layer_type.name

    lists: dict[str, Any] = {}
    for kind in _TYPE_LISTS:
        entries = getattr(config, kind)
        lists[kind] = tuple(spelled(entry, config.skip_source(kind, entry)) for entry in entries)
    overrides = tuple(
        replace(override, type=spelled(override.type, override.source))
        for override in config.type_overrides
    )
    return replace(config, **lists, type_overrides=overrides)
