"""Turn a configuration file into one of another kind: ``.cfg``, JSON, MindSpore, PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from amct_fx.config.dialect import to_pytorch
from amct_fx.config.files import write_text
from amct_fx.config.json_config import resolution_to_dict, resolved_to_dict
from amct_fx.config.json_object import dump_json
from amct_fx.config.load import load_config
from amct_fx.config.resolve import resolve
from amct_fx.errors import ConfigError

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

    from amct_fx.config.schema import CompressionConfig
    from amct_fx.config.specs import ModelFacts

__all__ = ["convert_text", "rewrite_config"]


def rewrite_config(
    source: str | os.PathLike[str] | CompressionConfig,
    target: str | os.PathLike[str],
    *,
    facts: ModelFacts | None = None,
    dialect: str = "auto",
    name_map: Mapping[str, str] | None = None,
) -> None:
    """Read a configuration file and write it as another kind; nothing is written on failure.

    Args:
        source: A ``.cfg`` or JSON file, or what was read from one.
        target: The new file. ``.json`` gives the JSON form, anything else a ``.cfg`` file of the
            PyTorch dialect.
        facts: Facts about the model; a ``.cfg`` needs them to become JSON, which lists its layers.
        dialect: Dialect of the source.
        name_map: New names of layers, by the names in the source.

    Raises:
        ConfigError: When the source cannot be read, or not be said in the other kind.
    """
    to_json = Path(target).suffix.lower() == ".json"
    text = convert_text(source, to_json=to_json, facts=facts, dialect=dialect, name_map=name_map)
    write_text(target, text)


def convert_text(
    source: str | os.PathLike[str] | CompressionConfig,
    *,
    to_json: bool,
    facts: ModelFacts | None = None,
    dialect: str = "auto",
    name_map: Mapping[str, str] | None = None,
) -> str:
    """Return what :func:`rewrite_config` writes.

    Example:
        >>> print(convert_text("skip_layer_types: 'nn.Dense'", to_json=False))
        # Types of layers that are neither quantized nor pruned.
        skip_layer_types: "Linear"
        <BLANKLINE>
    """
    config = load_config(source, dialect=dialect, name_map=name_map)
    if not to_json:
        return to_pytorch(config).to_cfg()
    if facts is not None:
        return dump_json(resolution_to_dict(resolve(config, facts, dialect=dialect)))
    if config.resolved:
        return dump_json(resolved_to_dict(config))
    message = "the JSON form lists the layers of a model; say which model this file is for"
    raise ConfigError(message, file=config.file)
