"""The two dialects of ``.cfg`` files: AMCT for PyTorch and AMCT for MindSpore."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct_fx.config.layer_types import is_mindspore_spelling
from amct_fx.errors import ConfigError, did_you_mean

if TYPE_CHECKING:
    from amct_fx.config.schema import CompressionConfig

__all__ = ["DIALECTS", "check_dialect", "detect_dialect"]

DIALECTS = ("auto", "pytorch", "mindspore")


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
