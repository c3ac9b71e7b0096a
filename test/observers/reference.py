"""A slow float64 reference of the quantizer numerics, written from the formulas alone.

No code is shared with the package. Everything is plain numpy on float64, one formula a line.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

EPS = 1.192092896e-7
Array = NDArray[np.float64]


@dataclass(frozen=True)
class ULQReference:
    """Forward and backward of one ULQ call.

    ``grad_magnitude`` is Σ|g|, the size that the clip gradients cancel from; ``tie_magnitude`` is
    how far they may move when near-ties of u round the other way.
    """

    clip_max: float
    clip_min: float
    scale: float
    offset: float
    exact_offset: float
    y: Array
    exact_codes: Array
    grad_x: Array
    grad_max: float
    grad_min: float
    grad_magnitude: float
    tie_magnitude: float


def effective_clips(
    clip_max: float, clip_min: float, fixed_min: bool, previous: tuple[float, float] | None
) -> tuple[float, float]:
    """fixed_min, then the guard, first match only."""
    if fixed_min:
        clip_min = 0.0
    if previous is not None:
        if clip_max - clip_min == 0:
            return previous
        if clip_max < 0:
            return previous[0], clip_min
        if clip_min > 0:
            return clip_max, previous[1]
    return clip_max, clip_min


def qparams(clip_max: float, clip_min: float, num_bits: int) -> tuple[float, float, float]:
    """Scale, offset and the offset before rounding."""
    half, steps = 2 ** (num_bits - 1), 2**num_bits - 1
    upper, lower = max(clip_max, 0.0), min(clip_min, 0.0)
    scale = (upper - lower) / steps
    if scale < EPS:
        return 1.0, float(-half), float(-half)
    exact = -half - lower / scale
    return scale, float(np.rint(exact)), exact


def ulq(
    x: Array,
    g: Array,
    clip_max: float,
    clip_min: float,
    *,
    num_bits: int,
    fixed_min: bool = False,
    previous: tuple[float, float] | None = None,
    scale_offset: tuple[float, float] | None = None,
) -> ULQReference:
    """One call; ``scale_offset`` replaces the reference's own, to isolate the rounding of x."""
    half, steps = 2 ** (num_bits - 1), 2**num_bits - 1
    upper, lower = effective_clips(clip_max, clip_min, fixed_min, previous)
    s, o, exact_offset = qparams(upper, lower, num_bits)
    if scale_offset is not None:
        s, o = scale_offset
    exact_codes = x / s + o
    y = (np.clip(np.rint(exact_codes), -half, half - 1) - o) * s
    above, below = x > s * (half - 1 - o), x < s * (-half - o)
    u = np.where(above, upper, np.where(below, lower, x)) / s
    e = (np.rint(u) - u) / steps
    return ULQReference(
        clip_max=upper,
        clip_min=lower,
        scale=s,
        offset=o,
        exact_offset=exact_offset,
        y=y,
        exact_codes=exact_codes,
        grad_x=np.where(above | below, 0.0, g),
        grad_max=float((g * (e + above)).sum()),
        grad_min=float((g * (below - e)).sum()),
        grad_magnitude=float(np.abs(g).sum()),
        tie_magnitude=float(np.abs(g)[near_tie(u, 1e-5 + 2.0**num_bits * 2.0**-22)].sum()) / steps,
    )


def arq_scale(rows: Array, num_bits: int) -> Array:
    """ARQ scale of each row of a matrix."""
    half = 2 ** (num_bits - 1)
    scales = []
    for row in rows:
        a, z = abs(row.max()), abs(row.min())
        s = max(a, z) / (half if a < z else half - 1)
        scales.append(1.0 if s < EPS else s)
    return np.array(scales)


def output_rows(weight: Array, transposed: bool, groups: int) -> Array:
    """One row per physical output channel, by indexing."""
    if not transposed:
        return weight.reshape(len(weight), -1)
    inputs, outputs = weight.shape[0] // groups, weight.shape[1]
    rows = [
        weight[j * inputs : (j + 1) * inputs, c].reshape(-1)
        for j in range(groups)
        for c in range(outputs)
    ]
    return np.stack(rows)


def weight_ulq_grad(rows: Array, grads: Array, scales: Array, num_bits: int) -> Array:
    """Gradient of the scale of each row."""
    half = 2 ** (num_bits - 1)
    result = []
    for row, grad, s in zip(rows, grads, scales, strict=True):
        v = row / s
        d = np.rint(v) - v
        d[row > s * (half - 1)] = half - 1
        d[row < -s * half] = -half
        result.append((d * grad).sum() / np.sqrt(len(row) * (half - 1)))
    return np.array(result)


def ifmr(data: Array, num_bits: int) -> dict[str, Any]:
    """Symmetric search; all losses, and the winner."""
    half, n = 2 ** (num_bits - 1), data.size
    k = n - int(0.999999 * n)
    ordered = np.sort(data.reshape(-1))
    top, bottom = max(0.0, float(ordered[-k])), min(0.0, float(ordered[k - 1]))
    limits = (0.7 + 0.01 * np.arange(61)) * max(top, -bottom)
    scales = limits / (half if top < -bottom else half - 1)
    scales[scales < EPS] = 1.0
    losses = np.array(
        [
            ((np.rint(np.clip(data, -c, c) / s) * s - data) ** 2).mean()
            for c, s in zip(limits, scales, strict=True)
        ]
    )
    return {"scales": scales, "losses": losses, "index": int(losses.argmin())}


def near_tie(exact_codes: Array, tolerance: float = 1e-5) -> NDArray[np.bool_]:
    """Where rounding may legally go either way."""
    return np.abs(np.abs(exact_codes - np.floor(exact_codes)) - 0.5) < tolerance
