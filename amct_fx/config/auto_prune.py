"""The configuration of the search for prune ratios: its ``.cfg`` grammar and typed form.

Source: spec/pruning.md section 11.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amct_fx.config.files import read_source
from amct_fx.config.floats import shortest_float32
from amct_fx.config.load import load_config
from amct_fx.config.schema import CompressionConfig, FilterPruneConfig
from amct_fx.config.textproto import read_message
from amct_fx.config.writer import fields_to_text
from amct_fx.errors import ConfigError, ConfigTypeError

if TYPE_CHECKING:
    import os

__all__ = ["AutoPruneConfig", "load_auto_prune_config"]

_FIELDS = (
    "compress_ratio",
    "ascend_optimized",
    "max_prune_ratio",
    "test_iteration",
    "override_prune_cfg",
)


@dataclass(frozen=True)
class AutoPruneConfig:
    """What a search is asked for.

    Args:
        compress_ratio: Cost before over cost after, above 1.
        ascend_optimized: Keep multiples of 16 channels.
        max_prune_ratio: Largest share of the channels that a layer may lose, above 0, at most 1.
        test_iteration: Samples over which the sensitivity is averaged.
        overrides: Skip lists and filter pruning of single layers, which stay as they are.
        file: Where it was read.

    Example:
        >>> AutoPruneConfig(2.0).max_prune_ratio
        1.0
        >>> AutoPruneConfig(0.5)
        Traceback (most recent call last):
        amct_fx.errors.ConfigError: compress_ratio must be above 1, not 0.5
    """

    compress_ratio: float
    ascend_optimized: bool = True
    max_prune_ratio: float = 1.0
    test_iteration: int = 1
    overrides: CompressionConfig = field(default_factory=CompressionConfig)
    file: str | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        """Check types and ranges; ratios count as their shortest decimal."""
        for name in ("compress_ratio", "max_prune_ratio"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                message = f"{name} must be a number, not {value!r}"
                raise ConfigTypeError(message, file=self.file)
            object.__setattr__(self, name, shortest_float32(value))
        if not 1 < self.compress_ratio < float("inf"):
            message = f"compress_ratio must be above 1, not {self.compress_ratio:g}"
            raise ConfigError(message, file=self.file)
        if not 0 < self.max_prune_ratio <= 1:
            message = f"max_prune_ratio must be above 0 and at most 1, not {self.max_prune_ratio:g}"
            raise ConfigError(message, file=self.file)
        if isinstance(self.test_iteration, bool) or not isinstance(self.test_iteration, int):
            message = f"test_iteration must be a whole number, not {self.test_iteration!r}"
            raise ConfigTypeError(message, file=self.file)
        if self.test_iteration < 1:
            message = f"test_iteration must be at least 1, not {self.test_iteration}"
            raise ConfigError(message, file=self.file)
        _check_overrides(self.overrides)


def load_auto_prune_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | AutoPruneConfig,
) -> AutoPruneConfig:
    """Read the configuration of a search.

    Args:
        source: Path or text of a ``.cfg`` file of AMCT's ``AutoChannelPruneConfig``, a dict with
            its fields, or an :class:`AutoPruneConfig`, which is returned.

    Raises:
        ConfigFileNotFoundError: There is no such file, or none that ``override_prune_cfg`` names.
        ConfigError: It cannot be read, is empty, or a value is out of range.

    Example:
        >>> load_auto_prune_config("compress_ratio: 1.5 ascend_optimized: false").compress_ratio
        1.5
    """
    if isinstance(source, AutoPruneConfig):
        return source
    if isinstance(source, Mapping):
        return _parse(fields_to_text(source), None)
    return _parse(*read_source(source, _FIELDS))


def _parse(text: str, file: str | None) -> AutoPruneConfig:
    from amct_fx.config import auto_prune_pb2

    root = read_message(text, auto_prune_pb2.AutoChannelPruneConfig(), file=file)
    given = {name: root.scalar(name) for name in _FIELDS}
    if given["compress_ratio"] is None:
        message = "compress_ratio is missing; write how many times cheaper the model should be"
        raise root.error(message)
    path = given.pop("override_prune_cfg")
    if path:
        beside = Path(file).parent / path if file and not Path(path).is_absolute() else Path(path)
        given["overrides"] = load_config(beside if beside.exists() else Path(path))
    values = {name: value for name, value in given.items() if value is not None}
    try:
        return AutoPruneConfig(**values, file=file)
    except ConfigError as error:
        if error.line is not None or (path and error.file != file):
            raise
        raise root.error(error.message, field=error.message.partition(" ")[0]) from None


def _check_overrides(config: CompressionConfig) -> None:
    """Refuse more than skip lists and filter pruning of single layers and types."""
    allowed = all(
        override.activation is None
        and override.weight is None
        and isinstance(override.prune, FilterPruneConfig)
        for override in config.overrides
    )
    whole = (config.activation, config.weight, config.prune, config.fakequant_precision_mode)
    if not allowed or any(part is not None for part in whole) or config.batch_num != 1:
        message = (
            "the file of override_prune_cfg may hold skip lists, and filter pruning of single "
            "layers and types; nothing else"
        )
        raise ConfigError(message, file=config.file)
