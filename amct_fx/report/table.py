"""Tables as plain text, Markdown, a rich table or a pandas DataFrame.

rich and pandas are optional; only the functions that need them import them.
"""

from __future__ import annotations

import importlib
import math
import sys
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TextIO

from amct_fx.errors import MissingExtraError

__all__ = [
    "FiguresTable",
    "cell",
    "dataframe",
    "escaped",
    "filled",
    "markdown",
    "optional",
    "plain",
    "plain_data",
    "rich_table",
    "show",
]

Record = Mapping[str, Any]


def optional(module: str, *, needed_for: str, install: str) -> Any:
    """Import an optional library.

    Args:
        module: Its name, such as ``"matplotlib.pyplot"``.
        needed_for: What is not possible without it.
        install: What pip is asked for.

    Raises:
        MissingExtraError: It is not installed; says what to install.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as missing:
        message = (
            f"{needed_for} needs {missing.name}, which is not installed: "
            f"python -m pip install '{install}'"
        )
        raise MissingExtraError(message) from missing


def cell(value: Any) -> str:
    """Return the text of one value; ``None`` is empty.

    Example:
        >>> [cell(value) for value in (None, True, 0.123456789, [1, 2], 7, float("inf"))]
        ['', 'yes', '0.123457', '1, 2', '7', 'inf']
    """
    if value is None:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(cell, value))
    return str(value)


def one_line(text: str) -> str:
    r"""Return text with its control characters written out: names may hold any.

    Example:
        >>> print(one_line("a\tb\u202e"))
        a\tb\u202e
    """
    return "".join(
        sign.encode("unicode_escape").decode() if unicodedata.category(sign)[0] == "C" else sign
        for sign in text
    )


def shortened(text: str, length: int) -> str:
    """Return the end of a long name, which tells layers apart; from a dot on if one is near.

    Example:
        >>> shortened("model.encoder.layers.11.fc", 16)
        '…layers.11.fc'
    """
    if len(text) <= length:
        return text
    end = text[1 - length :]
    _, _, whole = end.partition(".")
    return f"…{whole if 2 * len(whole) > length else end}"


def _width(text: str) -> int:
    """Return how many columns a terminal takes: two for most East Asian signs."""
    wide = sum(unicodedata.east_asian_width(sign) in "WF" for sign in text)
    return len(text) + wide - sum(map(bool, map(unicodedata.combining, text)))


def plain(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    r"""Return the lines of an aligned table.

    Example:
        >>> print("\n".join(plain(("name", "bits"), [("conv", "8"), ("a", "")])))
        name  bits
        conv  8
        a
    """
    table = [tuple(header), *(tuple(map(one_line, row)) for row in rows)]
    widths = [max(map(_width, column)) for column in zip(*table, strict=True)]
    return [
        "  ".join(
            text + " " * (width - _width(text)) for text, width in zip(row, widths, strict=True)
        ).rstrip()
        for row in table
    ]


def markdown(records: Sequence[Record]) -> str:
    r"""Return a Markdown table with the keys of the records as header.

    Columns without any value are left out. The text can hold anything: it is escaped.

    Example:
        >>> print(markdown([{"name": "a|b", "bits": 8, "reason": None}]))
        | name | bits |
        | --- | --- |
        | a\|b | 8 |
    """
    columns = [key for key in records[0] if any(cell(row[key]) for row in records)]
    lines = [columns, ["---"] * len(columns)]
    lines += [[escaped(cell(row[key])) for key in columns] for row in records]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def escaped(text: str) -> str:
    """Return ``text`` in one line, without a meaning in Markdown."""
    for sign in ("\\", "|", "<", "*", "_", "`"):
        text = text.replace(sign, f"\\{sign}")
    return " ".join(text.split())


def dataframe(records: Sequence[Record]) -> Any:
    """Return a ``pandas.DataFrame`` with one row for each record.

    Raises:
        MissingExtraError: pandas is not installed.
    """
    pandas = optional("pandas", needed_for="a DataFrame", install="pandas")
    return pandas.DataFrame.from_records([dict(record) for record in records])


Rows = Sequence[Sequence[str]]


def filled(header: Sequence[str], rows: Rows) -> tuple[list[str], list[list[str]]]:
    """Leave out the columns without any text, but for the first.

    Example:
        >>> filled(("name", "note"), [("a", ""), ("b", "")])
        (['name'], [['a'], ['b']])
    """
    kept = [i for i in range(len(header)) if i == 0 or any(row[i] for row in rows)]
    return [header[i] for i in kept], [[row[i] for i in kept] for row in rows]


def rich_text(text: str) -> Any:
    """Return text that rich prints as it is, brackets included."""
    return optional("rich.text", needed_for="a coloured table", install="rich").Text(text)


def rich_table(header: Sequence[str], rows: Rows, *, note: str) -> Any:
    """Return a ``rich.table.Table`` without the empty columns, and ``note`` below it."""
    module = optional("rich.table", needed_for="a coloured table", install="rich")
    header, rows = filled(header, rows)
    table = module.Table(caption=rich_text(note), caption_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, overflow="fold", style="bold" if index == 0 else None)
    for row in rows:
        table.add_row(*(rich_text(one_line(text)) for text in row))
    return table


class FiguresTable:
    """A table of many figures for rich: as many columns as the terminal has room for.

    Figures are never folded, so what does not fit is left out from the right, and named below.

    Args:
        header: Titles; a title may take several lines.
        rows: Texts; the first column, of names, may be folded.
        note: What stands below.
    """

    _SHORTEST_NAME = 16

    def __init__(self, header: Sequence[str], rows: Rows, *, note: str) -> None:
        self._header, self._rows = filled(header, rows)
        self._note = note

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        """Yield the table."""
        count = self._fitting(options.max_width)
        note = self._note
        if left := self._header[count:]:
            note += f"\nnot shown, for want of room: {', '.join(left)}"
        rows = [row[:count] for row in self._rows]
        table = rich_table(self._header[:count], rows, note=note)
        used = 1 + sum(self._least(index) + 3 for index in range(count))
        for index, column in enumerate(table.columns):
            column.width = self._least(index)
        longest = max((_width(row[0]) for row in rows), default=0)
        room = max(options.max_width - used, 0)
        table.columns[0].width = max(self._least(0), min(longest, self._least(0) + room))
        yield table

    def _fitting(self, width: int) -> int:
        """Return how many columns fit; two at least."""
        used, count = 1, 0
        for index in range(len(self._header)):
            used += self._least(index) + 3
            count += used <= width or index < 2
        return count

    def _least(self, index: int) -> int:
        """Return the least width of a column."""
        cells = max((_width(row[index]) for row in self._rows), default=0)
        if index == 0:
            cells = min(cells, self._SHORTEST_NAME)
        return max([cells, *map(len, self._header[index].split())])


def show(text: object, rich_form: Any, file: TextIO | None = None) -> None:
    """Print through rich where the file is a terminal and rich is installed, plain otherwise.

    Args:
        text: What is printed plain.
        rich_form: Called without arguments, makes what rich prints.
        file: Where to; standard output by default.
    """
    target = sys.stdout if file is None else file
    if target.isatty():
        try:
            console_type = importlib.import_module("rich.console").Console
        except ModuleNotFoundError:
            pass
        else:
            console_type(file=target).print(rich_form())
            return
    print(text, file=target)


def plain_data(value: Any) -> Any:
    """Return what JSON can hold: tuples as lists, numbers that are not finite as ``None``.

    Example:
        >>> plain_data({"a": (1, float("inf"))})
        {'a': [1, None]}
    """
    if isinstance(value, Mapping):
        return {str(key): plain_data(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_data(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
