"""From anything a user may have to a :class:`CompressionConfig`: path, text, mapping or object."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amct_fx.config.dialect import adopt_dialect, check_dialect, rename_layers
from amct_fx.config.files import read_source
from amct_fx.config.json_config import parse_json_config
from amct_fx.config.json_object import load_json
from amct_fx.config.parser import ROOT_FIELDS, parse_cfg
from amct_fx.config.schema import CompressionConfig
from amct_fx.config.writer import fields_to_text
from amct_fx.errors import ConfigError

if TYPE_CHECKING:
    import os

__all__ = ["load_config"]


def load_config(
    source: str | os.PathLike[str] | Mapping[str, Any] | CompressionConfig | None,
    *,
    dialect: str = "auto",
    name_map: Mapping[str, str] | None = None,
    quant_only: bool = False,
) -> CompressionConfig:
    """Read a configuration.

    Args:
        source: One of

            * the path of a ``.cfg`` or a JSON file, or the text of one. A string is text when it
              holds a line break or begins with a field; or when it begins like a misspelt field,
              or holds ``{`` or ``#``, and is not the path of a file; otherwise it is a path;
            * a dict with the keys of the JSON file, or with the fields of a ``.cfg`` file;
            * a :class:`CompressionConfig`, which is returned;
            * ``None`` for the defaults.
        dialect: ``"auto"``, ``"pytorch"`` or ``"mindspore"``; the last one refuses the fields that
            the MindSpore grammar lacks.
        name_map: New names of layers, by the names in the file.
        quant_only: Refuse settings of pruning; an empty ``prune_config`` is ignored.

    Raises:
        ConfigFileNotFoundError: When there is no such file.
        ConfigError: When it cannot be read; the message says where and what to write instead.

    Example:
        >>> load_config("batch_num: 2").batch_num
        2
        >>> load_config('skip_layers: "conv1"', name_map={"conv1": "stem"}).skip_layers
        ('stem',)
        >>> load_config(None) == CompressionConfig()
        True
    """
    check_dialect(dialect)
    config = _read(source, dialect, quant_only=quant_only)
    adopt_dialect(config, dialect)
    if quant_only:
        _refuse_pruning(config)
    return config if name_map is None else rename_layers(config, name_map)


def _read(source: object, dialect: str, *, quant_only: bool) -> CompressionConfig:
    """Read any kind of source."""
    if source is None:
        return CompressionConfig()
    if isinstance(source, CompressionConfig):
        return source
    if isinstance(source, Mapping):
        return _from_mapping(source, dialect)
    text, file = read_source(source, ROOT_FIELDS)
    return _from_text(text, file, dialect, quant_only=quant_only)


def _from_text(text: str, file: str | None, dialect: str, *, quant_only: bool) -> CompressionConfig:
    """Read the content of a ``.cfg`` or JSON file; nothing in a ``.cfg`` begins with ``{``."""
    if text.lstrip().startswith("{") or (file and Path(file).suffix.lower() == ".json"):
        return _from_mapping(load_json(text, file=file), dialect, text=text, file=file)
    return parse_cfg(text, file=file, dialect=dialect, ignore_empty_prune=quant_only)


def _from_mapping(
    value: Mapping[str, Any], dialect: str, *, text: str = "", file: str | None = None
) -> CompressionConfig:
    """Read a dict: that of a JSON file, or one with the fields of a ``.cfg`` file."""
    empty_file = file is not None and not value  # AMCT's JSON that lists no layer
    if "version" in value or empty_file or not set(value) <= set(ROOT_FIELDS):
        return parse_json_config(value, text=text, file=file)
    try:
        return parse_cfg(fields_to_text(value), file=file, dialect=dialect, keep_places=False)
    except ConfigError as error:
        # The line is that of a text that the user has never seen.
        raise type(error)(error.message, file=file) from None
    except RecursionError:
        message = "the dict is nested too deeply"
        raise ConfigError(message, file=file) from None


def _refuse_pruning(config: CompressionConfig) -> None:
    """Raise ConfigError at the first setting of pruning."""
    found = [
        ("prune_config", level.prune.source)
        for level in (config, *config.overrides)
        if level.prune is not None
    ]
    for name in ("prune_skip_layers", "prune_skip_types"):
        entries = getattr(config, name)
        found += [(f"regular_{name}", config.skip_source(name, entry)) for entry in entries]
    if found:
        what, source = found[0]
        message = f"{what}: this call only quantizes; use prepare_qat_amct to prune as well"
        raise source.error(message)
