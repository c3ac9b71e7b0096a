"""IFMR: find the start of an activation range by searching 61 candidates.

The search runs once per quantizer, over the elements of all calibration batches. Batches are
visited in chunks, so the peak memory beside the data is a buffer of a few MB. Where only the winner
is asked for, a histogram rules out most candidates first, see :mod:`._ifmr_bounds`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from amct_fx.errors import CalibrationError
from amct_fx.observers._checks import check_floating, check_num_bits
from amct_fx.observers._ifmr_bounds import SAFE_RANGE, Candidates, survivors
from amct_fx.observers._reduce import flatten_in_memory_order
from amct_fx.observers._scale import EPS

_PERCENTILE = 0.999999
_CANDIDATES = 61
_CPU_CHUNK = 1 << 17  # elements of an error buffer, small enough for a cache
_DEVICE_CHUNK = 1 << 24
_ROW = 4096


@dataclass(frozen=True)
class IFMRResult:
    """What the search found.

    Attributes:
        clip_max: Upper clip, float32 ``(1,)``.
        clip_min: Lower clip, float32 ``(1,)``.
        scale: Winning scale, float32 ``(1,)``.
        offset: Winning offset, int32 ``(1,)``; 0 in the symmetric search.
        index: Index of the winner.
        candidates: Scale of each candidate, float32 ``(61,)``.
        losses: Mean squared error of each candidate, float64 ``(61,)``; infinite where it was
            ruled out without being computed, never so in :func:`ifmr_search`.
    """

    clip_max: Tensor
    clip_min: Tensor
    scale: Tensor
    offset: Tensor
    index: int
    candidates: Tensor
    losses: Tensor


def finite_extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return float32 ``(max, min)`` of shape ``(1,)``.

    Raises:
        CalibrationError: ``x`` holds NaN or infinity (also after conversion to float32).
    """
    smallest, largest = (t.to(torch.float32).reshape(1) for t in torch.aminmax(x.detach()))
    if not bool(torch.isfinite(largest) & torch.isfinite(smallest)):
        message = "NaN or infinity in the calibration data; look at the layers in front of it"
        raise CalibrationError(message)
    return largest, smallest


def _ratios() -> Tensor:
    """Return the 61 float32 ratios 0.7, 0.71, … 1.3.

    They are rounded as in AMCT, whose vectorized ``arange`` rounds the first 48 in groups of eight;
    eleven of them differ in the last bit from ``float32(0.7 + 0.01 * i)``. Spelled out here, since
    today's ``torch.arange`` may group otherwise.
    """
    steps = 0.01 * torch.arange(_CANDIDATES, dtype=torch.float64)
    starts = (0.7 + steps[:48:8]).to(torch.float32).to(torch.float64)
    grouped = starts[:, None] + steps[:8]
    return torch.cat([grouped.flatten(), 0.7 + steps[48:]]).to(torch.float32)


def _extreme_elements(batch: Tensor, k: int, *, largest: bool) -> Tensor:
    """Return the ``k`` largest (or smallest) elements of a vector, in order.

    They lie in the k rows of :data:`_ROW` elements whose own extremes are largest, so only those
    are sorted.
    """
    whole = batch.numel() // _ROW
    if k == 1:
        return (batch.amax() if largest else batch.amin()).reshape(1)
    if whole > 2 * k:
        rows = batch[: whole * _ROW].view(whole, _ROW)
        heads = rows.amax(1) if largest else rows.amin(1)
        chosen = rows[heads.topk(k, largest=largest).indices]
        batch = torch.cat([chosen.flatten(), batch[whole * _ROW :]])
    return batch.topk(min(k, batch.numel()), largest=largest).values


def _extremes(batches: Sequence[Tensor], k: int, *, largest: bool) -> Tensor:
    """Return the ``k`` largest (or smallest) elements of all batches in order, float32."""
    found = [_extreme_elements(batch, k, largest=largest) for batch in batches]
    return torch.cat(found).to(torch.float32).topk(k, largest=largest).values


def _losses(
    batches: Sequence[Tensor], candidates: Candidates, chosen: Iterable[int], largest: float
) -> Tensor:
    """Return the mean squared error of the chosen candidates, float64; infinity for the others.

    The errors are float32, their sums float64. When the data is so large that squares would
    overflow, they are scaled by a power of two, which changes no bit.
    """
    scales = candidates.scales
    size = _CPU_CHUNK if scales.device.type == "cpu" else _DEVICE_CHUNK
    shrink = 2.0 ** -math.frexp(largest)[1] if largest > SAFE_RANGE else 1.0
    index = torch.tensor(list(chosen), device=scales.device)
    total = torch.zeros(len(index), dtype=torch.float64, device=scales.device)
    for part in (part for batch in batches for part in batch.split(size)):
        values = part.to(torch.float32)
        group = max(1, size // len(values))
        sums = [_squares(values, candidates.select(some), shrink) for some in index.split(group)]
        total += torch.cat(sums)
    losses = torch.full_like(scales, math.inf, dtype=torch.float64)
    count = sum(batch.numel() for batch in batches)
    losses[index] = total / (count * shrink * shrink)
    return losses


def _squares(values: Tensor, candidates: Candidates, shrink: float) -> Tensor:
    """Return the sum of squared errors of each candidate, float64."""
    error = candidates.errors(values)
    if shrink != 1.0:
        error.mul_(shrink)
    return error.mul_(error).sum(1, dtype=torch.float64)


def ifmr_search(
    x: Tensor | Sequence[Tensor], *, num_bits: int = 8, symmetric: bool = True
) -> IFMRResult:
    """Search the range with the least mean squared quantization error.

    1. ``k = n - int(0.999999 n)``; ``M0 = max(0, k-th largest)``, ``m0 = min(0, k-th smallest)``
       over all n elements.
    2. Symmetric: ``A = max(|M0|, |m0|)``, candidates ``c_i = (0.7 + 0.01 i)·A`` for i = 0 … 60,
       scale ``c_i / h`` if ``|M0| < |m0|`` else ``c_i / (h - 1)``. Asymmetric: ``c_i`` from M0
       alone, scale ``(c_i - m0) / Q``. A scale below :data:`EPS` becomes 1.
    3. The first candidate with the least ``mean((fake_quantize(x) - x)²)`` wins.

    Args:
        x: A tensor, or the list of calibration batches; any shapes and floating dtypes, all on
            one device. Empty batches are skipped.
        num_bits: Width of the integer codes, 2 to 16.
        symmetric: QAT always uses the symmetric search.

    Returns:
        The winner and the losses of all candidates.

    Raises:
        CalibrationError: No elements, or NaN or infinity among them.

    Example:
        >>> x = torch.tensor([0.1, 0.5, -0.3, 0.9, 2, -1.5, 0.7, 0.05, -0.01, 1.1])
        >>> found = ifmr_search(x)
        >>> print(found.index, f"{found.scale.item():.9g} {found.clip_max.item():.9g}")
        36 0.0166929122 2.11999989
    """
    batches = _flat_batches(x, num_bits)
    for batch in batches:
        finite_extremes(batch)
    with torch.no_grad():
        return _search(batches, num_bits, symmetric, every_loss=True)


def _flat_batches(x: Tensor | Sequence[Tensor], num_bits: int) -> list[Tensor]:
    """Check the arguments of a search; return the non-empty batches as vectors."""
    check_num_bits(num_bits)
    tensors = [x] if isinstance(x, Tensor) else list(x)
    for tensor in tensors:
        check_floating(tensor, "calibration data")
    batches = [flatten_in_memory_order(t.detach()) for t in tensors if t.numel()]
    if not batches:
        message = "no calibration data: every batch is empty"
        raise CalibrationError(message)
    return batches


def _search(
    batches: Sequence[Tensor], num_bits: int, symmetric: bool, *, every_loss: bool
) -> IFMRResult:
    """Run the search on flat, finite, non-empty batches.

    Without ``every_loss`` the losses of candidates that cannot win are infinite.
    """
    half = 2 ** (num_bits - 1)
    count = sum(batch.numel() for batch in batches)
    k = count - int(_PERCENTILE * count)
    upper, lower = (_extremes(batches, k, largest=largest) for largest in (True, False))
    top, bottom = upper[-1].clamp(min=0), lower[-1].clamp(max=0)
    ratios = _ratios().to(top.device)
    if symmetric:
        limits = ratios * torch.maximum(top, bottom.abs())
        steps = torch.full_like(limits, half - 1).masked_fill_(top < bottom.abs(), half)
        scales = limits / steps
        scales.masked_fill_(scales < EPS, 1.0)
        offsets = torch.zeros_like(scales)
        highest = (limits / scales).round_()
        lowest = -highest
    else:
        scales = (ratios * top - bottom) / torch.full_like(ratios, 2 * half - 1)
        scales.masked_fill_(scales < EPS, 1.0)
        offsets = -(bottom / scales).round_() - half
        lowest, highest = -half - offsets, half - 1 - offsets
    candidates = Candidates(scales, lowest, highest)
    chosen: Iterable[int] = range(_CANDIDATES)
    if not every_loss:
        chosen = survivors(batches, candidates, upper, lower)
    largest = max(top.item(), -bottom.item())
    losses = _losses(batches, candidates, chosen, largest)
    index = losses.tolist().index(min(losses.tolist()))
    scale, offset = scales[index].reshape(1), offsets[index].reshape(1)
    return IFMRResult(
        clip_max=(half - 1 - offset) * scale,
        clip_min=-(half + offset) * scale,
        scale=scale,
        offset=offset.to(torch.int32),
        index=index,
        candidates=scales,
        losses=losses,
    )


def ifmr_range(
    x: Tensor | Sequence[Tensor], *, num_bits: int = 8, symmetric: bool = True
) -> tuple[Tensor, Tensor]:
    """Return the clips an activation quantizer starts with, see :func:`ifmr_search`.

    Args:
        x: A tensor, or the list of calibration batches; any shapes and floating dtypes.
        num_bits: Width of the integer codes, 2 to 16.
        symmetric: QAT always uses the symmetric search.

    Returns:
        ``(clip_max, clip_min)``, float32 of shape ``(1,)`` on the device of the data; symmetric:
        ``((h - 1)·s, -h·s)``.

    Raises:
        CalibrationError: No elements, or NaN or infinity among them.

    Example:
        >>> clip_max, clip_min = ifmr_range(torch.full((4,), 3.3))
        >>> print(f"{clip_max.item():.9g} {clip_min.item():.9g}")
        3.29999995 -3.32598424
        >>> ifmr_range([torch.zeros(3), torch.zeros(2, 2)])
        (tensor([127.]), tensor([-128.]))
    """
    batches = _flat_batches(x, num_bits)
    for batch in batches:
        finite_extremes(batch)
    with torch.no_grad():
        found = _search(batches, num_bits, symmetric, every_loss=False)
    return found.clip_max, found.clip_min


class BatchCollector:
    """Gathers the calibration batches of one quantizer and searches when all are there.

    Batches stay on their device and are dropped as soon as the search is done.

    Args:
        num_bits: Width of the integer codes.
        batch_num: Number of batches to gather.
        symmetric: Kind of search, see :func:`ifmr_search`.
    """

    def __init__(self, num_bits: int, batch_num: int, symmetric: bool = True) -> None:
        self.num_bits = num_bits
        self.batch_num = batch_num
        self.symmetric = symmetric
        self.batches: list[Tensor] = []

    def add(self, x: Tensor) -> IFMRResult | None:
        """Take one finite, non-empty batch; return the result when it was the last one.

        The last batch is searched where it is; the others are copied, since the model may change
        them in place.
        """
        if len(self.batches) + 1 < self.batch_num:
            # Under inference_mode a plain clone would be an inference tensor.
            with torch.inference_mode(False), torch.no_grad():
                self.batches.append(x.detach().clone())
            return None
        batches = _flat_batches([*self.batches, x], self.num_bits)
        with torch.no_grad():
            found = _search(batches, self.num_bits, self.symmetric, every_loss=False)
        self.batches.clear()
        return found
