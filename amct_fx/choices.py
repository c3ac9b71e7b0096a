"""Options that have a fixed set of values."""

from __future__ import annotations

from amct_fx.errors import ConfigError, did_you_mean

__all__ = ["check_choices"]


def check_choices(**options: tuple[object, tuple[object, ...]]) -> None:
    """Refuse values of options that have a fixed set.

    Args:
        options: By name the value and the values there are.

    Raises:
        ConfigError: Names the option, the value, and what is allowed.

    Example:
        >>> check_choices(reused=("quantise", ("float", "quantize")))
        Traceback (most recent call last):
        amct_fx.errors.ConfigError: reused must be 'float' or 'quantize', not 'quantise'; did you \
mean 'quantize'?
    """
    for name, (value, choices) in options.items():
        if value not in choices:
            close = did_you_mean(str(value), [str(choice) for choice in choices])
            allowed = " or ".join(map(repr, choices))
            message = f"{name} must be {allowed}, not {value!r}{close}"
            raise ConfigError(message)
