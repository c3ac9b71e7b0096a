"""What stands for the base class of a framework that is not installed."""

from __future__ import annotations

from typing import Any

from amct_fx.errors import MissingExtraError

__all__ = ["stand_in"]


def stand_in(missing: ModuleNotFoundError, extra: str) -> Any:
    """Return a class that cannot be made, and says what to install.

    Args:
        missing: The error of the import.
        extra: The extra of amct_fx that has the framework.

    Example:
        >>> stand_in(ModuleNotFoundError(name="lightning"), "lightning")()
        Traceback (most recent call last):
        amct_fx.errors.MissingExtraError: the callback needs lightning, which is not installed: \
python -m pip install 'amct-fx[lightning]'
    """
    message = (
        f"the callback needs {missing.name}, which is not installed: "
        f"python -m pip install 'amct-fx[{extra}]'"
    )

    class Missing:
        def __init__(self) -> None:
            raise MissingExtraError(message)

    return Missing
