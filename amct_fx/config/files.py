"""Read a configuration file; write any file so that a crash never leaves half of it."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from amct_fx.errors import (
    AmctIsADirectoryError,
    AmctNotADirectoryError,
    ConfigError,
    ConfigFileNotFoundError,
    ConfigTypeError,
    did_you_mean,
)

__all__ = ["MAX_BYTES", "make_folder", "read_source", "read_text", "replacing", "write_text"]

#: Larger files are refused at once; 4 MiB hold the settings of more than 10,000 layers.
MAX_BYTES = 4 * 1024 * 1024
_FILE_MODE = 0o640
_FOLDER_MODE = 0o750
_BOM = "\ufeff"
_START = re.compile(r"\s*(\w*)\s*([^\w.\\/]|\b\w|)")
_AFTER_A_FIELD = frozenset(":{<")
_LIKE_A_FIELD = re.compile(r"\s*[A-Za-z_]{2,}\s*(?:[{<]|:\s*[\"'\[{<0-9]|:\s+\w)")


def read_text(path: str | os.PathLike[str]) -> str:
    """Return the content of a text file.

    Raises:
        ConfigFileNotFoundError: When there is no such file.
        ConfigError: When it is a folder, too large, not readable, or not UTF-8 text.
    """
    name = os.fspath(path)
    try:
        return _decode(_read_bytes(Path(name)), name)
    except FileNotFoundError:
        hint = _similar_files(Path(name))
        raise ConfigFileNotFoundError(
            errno.ENOENT, f"there is no such configuration file{hint}", name
        ) from None
    except OSError as error:
        message = f"the file cannot be read: {error.strerror}"
        raise ConfigError(message, file=name) from error


def read_source(source: object, fields: Collection[str]) -> tuple[str, str | None]:
    """Return a text and the file that it came from; ``None`` when the source is the text itself.

    Args:
        source: A path, or a text: a string that holds a line break or begins with a field; or one
            that begins like a misspelt field, or holds ``{`` or ``#``, and is not the path of a
            file.
        fields: The fields that a text may begin with.
    """
    if isinstance(source, str):
        if not source.strip():
            message = "the configuration is an empty string; pass None for the defaults"
            raise ConfigError(message)
        if _is_text(source, fields):
            check_size(len(source), None)
            return source, None
    path = os.fspath(source) if isinstance(source, os.PathLike) else source
    if not isinstance(path, str):
        kind = type(source).__name__
        message = f"a configuration is a path, a text, a dict or None, not a {kind}"
        raise ConfigTypeError(message)
    return read_text(path), path


def _is_text(source: str, fields: Collection[str]) -> bool:
    """Return whether a string is a text; a misspelt one is, so that its error names the field."""
    if "\n" in source:
        return True
    word, after = _START.match(source).groups()  # type: ignore[union-attr]  # it matches anything
    if word in fields and after in _AFTER_A_FIELD:
        return True
    if os.path.exists(source):  # noqa: PTH110  no OSError
        return False
    misspelt = bool(after) and after in ":{" and bool(did_you_mean(word, fields))
    wrong_sign = bool(after) and word in fields  # such as batch_num = 2
    return misspelt or wrong_sign or bool(_LIKE_A_FIELD.match(source)) or bool({*"{#"} & {*source})


def _read_bytes(path: Path) -> bytes:
    """Return the content, after a look at what kind of file it is."""
    name = str(path)
    if "\0" in name:
        message = f"not a file name: {name!r}"
        raise ConfigError(message)
    size = path.stat().st_size
    if not path.is_file():
        kind = "a folder" if path.is_dir() else "not a regular file"
        message = f"this is {kind}; give the path of a .cfg or .json file"
        raise ConfigError(message, file=name)
    check_size(size, name)
    return path.read_bytes()


def check_size(size: int, file: str | None) -> None:
    """Raise ConfigError when a configuration is too large to be one."""
    if size > MAX_BYTES:
        message = f"{size} bytes are too many for a configuration (at most {MAX_BYTES})"
        raise ConfigError(message, file=file)


def _decode(content: bytes, name: str) -> str:
    """Return the content as text."""
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        message = "the file is not UTF-8 text"
        raise ConfigError(message, file=name, line=line) from None
    if text.startswith(_BOM):
        message = "the file begins with a byte-order mark; save it as UTF-8 without one"
        raise ConfigError(message, file=name, line=1, column=1)
    if "\0" in text:
        message = "this is a binary file; give the path of a .cfg or .json file"
        raise ConfigError(message, file=name)
    return text


def _similar_files(path: Path) -> str:
    """Return a hint at files with a similar name in the same folder."""
    try:
        return did_you_mean(path.name, [item.name for item in path.parent.iterdir()])
    except OSError:
        return ""


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a text file as UTF-8, as :func:`replacing` does."""
    with replacing(path) as file:
        file.write(text.encode("utf-8"))


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Yield a binary file that takes the name ``path`` at the end, so that no half file is seen.

    Missing folders are made (mode 0750). The content goes into a temporary file beside ``path``,
    reaches the disk, and then replaces an old file (mode 0640). After an error the old file is
    still there, and the temporary one is not.

    Args:
        path: The file to write.

    Raises:
        AmctIsADirectoryError: It is a folder.

    Example:
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with replacing(f"{folder}/new/file") as file:
        ...         _ = file.write(b"content")
        ...     Path(folder, "new", "file").read_bytes()
        b'content'
    """
    target = Path(path)
    if target.is_dir():
        message = "this is a folder; name a file in it"
        raise AmctIsADirectoryError(errno.EISDIR, message, str(target))
    make_folder(target.parent)
    descriptor, temporary = tempfile.mkstemp(dir=target.parent, prefix=".amct-fx-")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(_FILE_MODE)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def make_folder(folder: Path) -> None:
    """Make a folder and its parents, each with the same mode.

    Raises:
        AmctNotADirectoryError: One of them is a file; names it.
    """
    if folder.exists():
        if not folder.is_dir():
            message = "this is a file, not a folder"
            raise AmctNotADirectoryError(errno.ENOTDIR, message, str(folder))
        return
    make_folder(folder.parent)
    folder.mkdir(mode=_FOLDER_MODE, exist_ok=True)
