"""From anything a user may have to a :class:`CompressionConfig`: path, text, mapping or object."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from amct_fx.config.dialect import check_dialect
from amct_fx.config.files import check_size, read_text
from amct_fx.config.parser import ROOT_FIELDS, parse_cfg
from amct_fx.config.schema import CompressionConfig
from amct_fx.errors import ConfigError, ConfigTypeError

__all__ = ["load_config"]

_STARTS_LIKE_CFG = re.compile(rf"\s*({'|'.join(ROOT_FIELDS)})\s*[:{{<]")


def load_config(
    source: str | os.PathLike[str] | Mapping[str, object] | CompressionConfig | None,
    *,
    dialect: str = "auto",
) -> CompressionConfig:
    """Read a configuration.

    Args:
        source: The path of a ``.cfg`` file, or its text; or a configuration, which is returned; or
            ``None`` for the defaults. A string is text when it holds a line break, ``{`` or ``#``,
            or begins with a field; otherwise it is a path.
        dialect: ``"auto"``, ``"pytorch"`` or ``"mindspore"``; the last one refuses the fields that
            the MindSpore grammar lacks.

    Raises:
        ConfigFileNotFoundError: When there is no such file.
        ConfigError: When it cannot be read; the message says where and what to write instead.

    Example:
        >>> load_config("batch_num: 2").batch_num
        2
        >>> load_config(None) == CompressionConfig()
        True
    """
    check_dialect(dialect)
    if source is None:
        return CompressionConfig()
    if isinstance(source, CompressionConfig):
        return source
    if isinstance(source, str):
        if not source.strip():
            message = "the configuration is an empty string; pass None for the defaults"
            raise ConfigError(message)
        if is_cfg_text(source):
            check_size(len(source), None)
            return parse_cfg(source, dialect=dialect)
    elif not isinstance(source, os.PathLike):
        message = f"a configuration is a path, a text or None, not a {type(source).__name__}"
        raise ConfigTypeError(message)
    path = os.fspath(source)
    return parse_cfg(read_text(path), file=path, dialect=dialect)


def is_cfg_text(source: str) -> bool:
    """Tell whether a string is the text of a ``.cfg`` file and not the path of one.

    Example:
        >>> is_cfg_text("batch_num: 2"), is_cfg_text("batch_num.cfg")
        (True, False)
    """
    return any(mark in source for mark in "\n{#") or bool(_STARTS_LIKE_CFG.match(source))
