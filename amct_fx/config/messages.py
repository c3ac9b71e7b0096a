"""How to tell the user about a configuration: warnings at the user's own line, lists of names."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable

from amct_fx.errors import AmctWarning

__all__ = ["counted", "listing", "warn"]

_PACKAGE = __name__.partition(".")[0]


def warn(message: str) -> None:
    """Issue an AmctWarning that points at the first caller outside of this package."""
    level, frame = 1, sys._getframe()
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, AmctWarning, stacklevel=level)


def listing(names: Iterable[str], *, limit: int = 20) -> str:
    """Return the names as one readable line, cut after ``limit``.

    Example:
        >>> listing(["c1", "c2"])
        "'c1', 'c2'"
        >>> listing(["a", "b", "c"], limit=2)
        "'a', 'b' and 1 more"
    """
    quoted = [repr(name) for name in names]
    shown = ", ".join(quoted[:limit])
    rest = len(quoted) - limit
    return f"{shown} and {rest} more" if rest > 0 else shown


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, which takes an "s" in the plural.

    Example:
        >>> counted(1, "part"), counted(2, "part")
        ('1 part', '2 parts')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"
