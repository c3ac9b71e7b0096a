"""Argument checks shared by the numeric functions and the modules."""

from __future__ import annotations

import inspect
import math
from typing import Any

from torch import Tensor

from amct_fx.errors import (
    ArgumentTypeError,
    ConfigError,
    ConfigTypeError,
    ModelTypeError,
    did_you_mean,
)

MIN_BITS = 2
MAX_BITS = 16


def check_num_bits(num_bits: int) -> int:
    """Return ``num_bits`` if it is an integer from 2 to 16, else raise :class:`ConfigError`.

    Example:
        >>> check_num_bits(8)
        8
        >>> check_num_bits(99)
        Traceback (most recent call last):
        ...
        amct_fx.errors.ConfigError: num_bits must be an integer from 2 to 16, got 99
    """
    if isinstance(num_bits, bool) or not isinstance(num_bits, int):
        message = f"num_bits must be an integer from 2 to 16, got {num_bits!r}"
        raise ConfigTypeError(message)
    if not MIN_BITS <= num_bits <= MAX_BITS:
        message = f"num_bits must be an integer from 2 to 16, got {num_bits}"
        raise ConfigError(message)
    return num_bits


def check_positive_int(name: str, value: int) -> int:
    """Return ``value`` if it is an integer of at least 1, else raise :class:`ConfigError`."""
    if isinstance(value, bool) or not isinstance(value, int):
        message = f"{name} must be a positive integer, got {value!r}"
        raise ConfigTypeError(message)
    if value < 1:
        message = f"{name} must be a positive integer, got {value}"
        raise ConfigError(message)
    return value


def check_clips(clip_max: float | None, clip_min: float | None) -> tuple[float, float] | None:
    """Check a pair of explicit clips; ``None`` when both are absent.

    Raises:
        ConfigError: Only one is given, one is not finite, or the signs are wrong.

    Example:
        >>> check_clips(6.0, -6)
        (6.0, -6.0)
        >>> check_clips(6.0, None)
        Traceback (most recent call last):
        ...
        amct_fx.errors.ConfigError: give clip_max and clip_min together, or neither: got clip_max=6.0, clip_min=None
    """  # noqa: E501
    if clip_max is None and clip_min is None:
        return None
    if clip_max is None or clip_min is None:
        message = (
            "give clip_max and clip_min together, or neither: "
            f"got clip_max={clip_max}, clip_min={clip_min}"
        )
        raise ConfigError(message)
    upper, lower = float(clip_max), float(clip_min)
    if not (math.isfinite(upper) and math.isfinite(lower) and upper > 0 > lower):
        message = (
            "clip_max must be finite and > 0 and clip_min finite and < 0: "
            f"got clip_max={clip_max}, clip_min={clip_min}"
        )
        raise ConfigError(message)
    return upper, lower


def check_floating(x: object, what: str) -> None:
    """Raise :class:`ModelTypeError` unless ``x`` is a tensor of a floating point dtype."""
    if not isinstance(x, Tensor):
        message = f"{what} must be a floating point tensor, got {type(x).__name__}"
        raise ModelTypeError(message)
    if not x.is_floating_point():
        message = (
            f"{what} must have a floating point dtype, got {x.dtype}; "
            "convert it first, for example with .float()"
        )
        raise ModelTypeError(message)


def check_keywords(cls: type, keywords: dict[str, Any]) -> None:
    """Raise ArgumentTypeError if ``cls(**keywords)`` would meet an unknown keyword.

    Example:
        >>> class Quantizer:
        ...     def __init__(self, *, num_bits=8): ...
        >>> check_keywords(Quantizer, {"num_bit": 4})
        Traceback (most recent call last):
        ...
        amct_fx.errors.ArgumentTypeError: Quantizer got an unexpected keyword argument \
'num_bit'; did you mean 'num_bits'?
    """
    parameters = inspect.signature(cls.__init__).parameters  # type: ignore[misc]
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return
    known = [name for name in parameters if name != "self"]
    for name in keywords:
        if name not in known:
            hint = did_you_mean(name, known) or f"; the keywords are {', '.join(known)}"
            message = f"{cls.__name__} got an unexpected keyword argument {name!r}{hint}"
            raise ArgumentTypeError(message)
