"""The two ways in which a number of a configuration file becomes a Python float."""

from __future__ import annotations

import math
import struct

__all__ = ["float32", "shortest_float32"]


def float32(value: float) -> float:
    """Round to float32 and widen back, as protobuf does with the clips.

    Example:
        >>> float32(0.1)
        0.10000000149011612
        >>> float32(1e39)
        inf
    """
    if not math.isfinite(value):
        return value
    try:
        return float(struct.unpack("<f", struct.pack("<f", value))[0])
    except OverflowError:
        return math.copysign(math.inf, value)


def shortest_float32(value: float) -> float:
    """Return the shortest decimal that stands for the same float32, read as a double.

    A ratio of 0.35 must stay 0.35: 0.35 x 10 channels is 3.5, which rounds up, while the float32
    nearest to 0.35 is a little below and would round down.

    Example:
        >>> shortest_float32(0.3499999940395355)
        0.35
        >>> shortest_float32(1 / 3)
        0.33333334
    """
    single = float32(value)
    if not math.isfinite(single):
        return single
    candidates = (float(f"{single:.{digits}g}") for digits in range(1, 10))
    return next(decimal for decimal in candidates if float32(decimal) == single)
