"""The numbers of pruning as plain functions: which channels stay, which weights of four.

Source: spec/pruning.md sections 4 and 8.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from amct_fx.config.floats import shortest_float32
from amct_fx.config.messages import warn
from amct_fx.errors import ConfigError, ModelError, ModelTypeError

__all__ = [
    "Reduction",
    "balanced_l2_keep",
    "combine_scores",
    "filter_scores",
    "keep_highest",
    "m4n2_mask",
    "normalize_scores",
    "remaining_channels",
]

Reduction: TypeAlias = Literal["mean", "first"]
"""How the scores of coupled producers become one: their mean, or those of the first producer."""

_ALIGNMENT = 16


def m4n2_mask(weight: Tensor, *, axis: int = 1) -> Tensor:
    """Keep the two largest magnitudes of every four neighbours along an axis.

    The rest of an axis that is no multiple of four is filled up with places that are cut before any
    weight. Among equal magnitudes the lower index is cut. NaN counts as large. An axis of at most
    two stays whole. No value is read on the host.

    Args:
        weight: Any floating point weight, ``[O, I/g, *]`` of a convolution or Linear.
        axis: Axis of the input channels; 0 for a transposed convolution, ``[I, O/g, *]``.

    Returns:
        bool of the same shape, true where the weight is kept.

    Raises:
        ModelTypeError: ``weight`` is no floating point tensor.
        ConfigError: It has no such axis.

    Source: spec/pruning.md section 8.1.

    Example:
        >>> m4n2_mask(torch.tensor([[0.1, -0.4, 0.3, 0.2, 0.5, -0.6]])).int().tolist()
        [[0, 1, 1, 0, 1, 1]]
        >>> m4n2_mask(torch.tensor([[2.0, 1, 1, 1, 1, 1, 1]])).int().tolist()  # ties
        [[1, 0, 0, 1, 0, 1, 1]]
    """
    _check_weight(weight)
    axis = _checked_axis(weight, axis)
    length = weight.shape[axis]
    if length <= 2:
        return torch.ones_like(weight, dtype=torch.bool)
    size = _magnitudes(weight.detach())
    if length % 4:
        shape = [*size.shape[:axis], -length % 4, *size.shape[axis + 1 :]]
        size = torch.cat([size, size.new_full(shape, -1)], dim=axis)
    a, b, c, d = size.unflatten(axis, (-1, 4)).unbind(axis + 1)
    kept = torch.stack(_two_of_four(a, b, c, d), dim=axis + 1).flatten(axis, axis + 1)
    return kept.narrow(axis, 0, length).contiguous()


def balanced_l2_keep(
    weights: Tensor | Sequence[Tensor],
    prune_ratio: float,
    *,
    groups: int = 1,
    ascend_optimized: bool = True,
    reduction: Reduction = "mean",
) -> Tensor:
    """Choose the output channels with the largest balanced L2 norm.

    Args:
        weights: The weight of a producer, channels along axis 0 (``weight.movedim(1, 0)`` of a
            transposed convolution), or the weights of producers that lose the same channels.
        prune_ratio: Share to remove, between 0 and 1, both excluded; counts as the shortest
            decimal of its float32 value, as in a file.
        groups: Blocks of neighbouring channels that keep equal counts.
        ascend_optimized: Keep a multiple of 16 channels.
        reduction: ``"mean"`` of the producers' normalised scores, or those of the ``"first"``.

    Returns:
        int64, the kept channels in ascending order.

    Raises:
        ConfigError: The ratio is out of range, or the channels do not fit into the groups.
        ModelError: The producers have different numbers of channels.
        ModelTypeError: A weight is no floating point tensor.

    Source: spec/pruning.md section 4.

    Example:
        >>> weight = torch.tensor([3.0, 1.0, 2.0, 4.0]).view(4, 1, 1, 1)
        >>> balanced_l2_keep(weight, 0.5, ascend_optimized=False).tolist()
        [0, 3]
        >>> balanced_l2_keep(weight, 0.5, groups=2, ascend_optimized=False).tolist()
        [0, 3]
        >>> balanced_l2_keep([weight, 5 - weight], 0.25, ascend_optimized=False).tolist()
        [1, 2, 3]
    """
    producers = [weights] if isinstance(weights, Tensor) else list(weights)
    if not producers:
        message = "balanced_l2_keep needs at least one weight"
        raise ConfigError(message)
    scores = combine_scores([filter_scores(weight) for weight in producers], reduction)
    keep = remaining_channels(
        len(scores), prune_ratio, groups=groups, ascend_optimized=ascend_optimized
    )
    return keep_highest(scores, keep, groups=groups)


def remaining_channels(
    channels: int, prune_ratio: float, *, groups: int = 1, ascend_optimized: bool = True
) -> int:
    """Return how many of the channels (or coupled units) remain.

    Args:
        channels: Channels there are.
        prune_ratio: Share to remove, between 0 and 1, both excluded.
        groups: Blocks that keep equal counts.
        ascend_optimized: Keep a multiple of 16.

    Raises:
        ConfigError: The ratio is out of range, or the channels do not fit into the groups.

    Source: spec/pruning.md section 4.1.

    Example:
        >>> remaining_channels(10, 0.35, ascend_optimized=False)
        6
        >>> remaining_channels(10, 0.5), remaining_channels(40, 0.5)
        (10, 32)
        >>> remaining_channels(48, 0.5, groups=3)  # the groups come last: no multiple of 16
        30
    """
    ratio = shortest_float32(prune_ratio)
    if not 0 < ratio < 1:
        message = f"prune_ratio must be between 0 and 1, both excluded, not {prune_ratio}"
        raise ConfigError(message)
    if groups < 1 or channels < groups or channels % groups:
        message = f"{channels} channels cannot be split into {groups} equal groups"
        raise ConfigError(message)
    keep = channels - round(channels * ratio)
    if ascend_optimized:
        keep = max(-(-keep // _ALIGNMENT), 1) * _ALIGNMENT
    keep = keep // groups * groups or groups
    cut_per_group = max((channels - keep) // groups, 0)
    return channels - groups * cut_per_group


def filter_scores(weight: Tensor, *, axis: int = 0) -> Tensor:
    """Score each filter: its L2 norm per element, normalised to 0 … 1 over the layer.

    Args:
        weight: Floating point weight of a layer.
        axis: Axis of the filters.

    Returns:
        One score for each filter, in the dtype and on the device of ``weight``.

    Raises:
        ModelTypeError: ``weight`` is no floating point tensor.

    Source: spec/pruning.md section 4.2.

    Example:
        >>> filter_scores(torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 2.5]])).tolist()
        [1.0, 0.0, 0.5]
    """
    _check_weight(weight)
    filters = weight.detach().movedim(_checked_axis(weight, axis), 0).flatten(1)
    return normalize_scores(torch.linalg.vector_norm(filters, dim=1) / max(filters.shape[1], 1))


def normalize_scores(norms: Tensor) -> Tensor:
    """Stretch scores to 0 … 1; equal scores become 0, and so do all if one is NaN.

    Example:
        >>> normalize_scores(torch.tensor([2.0, 4.0, 3.0])).tolist()
        [0.0, 1.0, 0.5]
        >>> normalize_scores(torch.tensor([2.0, 2.0])).tolist()
        [0.0, 0.0]
    """
    if norms.numel() == 0:
        return norms
    low, high = norms.min(), norms.max()
    if not bool(torch.isfinite(high)):
        warn("a weight to be pruned holds NaN or infinity: its channels count as equal")
        return torch.zeros_like(norms)
    return torch.zeros_like(norms) if bool(low == high) else (norms - low) / (high - low)


def combine_scores(scores: Sequence[Tensor], reduction: Reduction = "mean") -> Tensor:
    """Join the scores of coupled producers.

    Args:
        scores: One vector for each producer, all of one length.
        reduction: ``"mean"``, or ``"first"``.

    Raises:
        ModelError: The lengths differ.
        ConfigError: There is no such reduction.

    Source: spec/pruning.md section 4.3.

    Example:
        >>> combine_scores([torch.tensor([1.0, 0.0]), torch.tensor([0.0, 1.0])]).tolist()
        [0.5, 0.5]
    """
    if reduction not in ("mean", "first"):
        message = f"reduction must be 'mean' or 'first', not {reduction!r}"
        raise ConfigError(message)
    lengths = [len(score) for score in scores]
    if len(set(lengths)) > 1:
        message = f"coupled producers must have equally many channels, not {lengths}"
        raise ModelError(message)
    if reduction == "first" or len(scores) == 1:
        return scores[0]
    return torch.stack([score.to(scores[0]) for score in scores]).mean(dim=0)


def keep_highest(scores: Tensor, keep: int, *, groups: int = 1) -> Tensor:
    """Return the ``keep`` highest scores, equally many in each block; of equals the later ones.

    Args:
        scores: One score for each channel, or unit.
        keep: How many stay, a multiple of ``groups``.
        groups: Number of blocks of neighbouring channels.

    Returns:
        int64, the kept indices in ascending order.

    Example:
        >>> keep_highest(torch.tensor([0.5, 0.1, 0.5, 0.9]), 2).tolist()
        [2, 3]
    """
    blocks = scores.reshape(groups, -1)
    order = blocks.argsort(dim=1, stable=True)[:, blocks.shape[1] - keep // groups :]
    start = torch.arange(groups, device=scores.device).unsqueeze(1) * blocks.shape[1]
    return (order + start).flatten().sort().values


def _magnitudes(weight: Tensor) -> Tensor:
    """Return integers that are ordered as the magnitudes, NaN last: the bits without the sign."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.element_size()]
    return weight.view(bits) & torch.iinfo(bits).max


def _two_of_four(a: Tensor, b: Tensor, c: Tensor, d: Tensor) -> tuple[Tensor, ...]:
    """Say which are among the two largest of four; of equals the later ones.

    Two pairs play, then the better of one against the worse of the other: ``first`` and ``second``
    say which pair stays whole. If none does, the better of each stays.
    """
    b_wins, d_wins = b >= a, d >= c
    second = torch.minimum(c, d) >= torch.maximum(a, b)
    first = torch.minimum(a, b) > torch.maximum(c, d)
    neither = ~(first | second)
    b_alone, d_alone = b_wins & neither, d_wins & neither
    return (
        first | (b_alone ^ neither),
        first | b_alone,
        second | (d_alone ^ neither),
        second | d_alone,
    )


def _check_weight(weight: object) -> None:
    if not (isinstance(weight, Tensor) and weight.is_floating_point()):
        what = weight.dtype if isinstance(weight, Tensor) else type(weight).__name__
        message = f"a weight to be pruned must be a floating point tensor, not {what}"
        raise ModelTypeError(message)


def _checked_axis(weight: Tensor, axis: int) -> int:
    """Return the axis, counted from the front."""
    if not -weight.dim() <= axis < weight.dim():
        message = f"a weight of shape {list(weight.shape)} has no axis {axis}"
        raise ConfigError(message)
    return axis % weight.dim()
