"""What many quantizers compute from their clips and weights, computed for all of them at once.

The results are good for one forward of the model that owns the quantizers. A quantizer that is
called otherwise, or whose clips or weight were changed since, computes for itself, with the same
result.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from amct_fx.observers._arq import arq_extremes
from amct_fx.observers._scale import symmetric_scale
from amct_fx.observers._ulq import ulq_effective_clips, ulq_scale_offset
from amct_fx.observers._ulq_settings import (
    Ahead,
    HostNumbers,
    Settings,
    gradient_mix,
    host_numbers,
    may_read,
)
from amct_fx.observers.arq import WeightAhead

if TYPE_CHECKING:
    from collections.abc import Hashable

    from amct_fx.observers.arq import ARQFakeQuantize
    from amct_fx.observers.ulq import ULQFakeQuantize

__all__ = ["compute_ahead", "forget_ahead", "quantize_ahead", "write_back"]


def compute_ahead(quantizers: Iterable[ULQFakeQuantize]) -> None:
    """Give each quantizer that will quantize what its next forward computes with."""
    groups: dict[Hashable, list[ULQFakeQuantize]] = {}
    for quantizer in quantizers:
        if quantizer.quantizes and _is_plain(quantizer):
            device = quantizer._parameters["clip_max"].device  # type: ignore[union-attr]
            key = (quantizer.num_bits, quantizer.symmetric, device)
            groups.setdefault(key, []).append(quantizer)
    learns = torch.is_grad_enabled()
    for members in groups.values():
        members.sort(key=lambda quantizer: not quantizer.fixed_min)
        for quantizer, settings in zip(members, _settings(members, learns), strict=True):
            quantizer.ahead.value = Ahead(settings, quantizer.clip_versions)


@torch.no_grad()
def quantize_ahead(weights: Iterable[tuple[Tensor, ARQFakeQuantize]]) -> None:
    """Give each weight quantizer the values that it will hand out in the next forward.

    Args:
        weights: Weights and their quantizers, which will all be called.
    """
    groups: dict[Hashable, list[tuple[Tensor, ARQFakeQuantize]]] = {}
    for weight, quantizer in dict.fromkeys(weights):  # tied layers share both
        if not quantizer.is_plain:
            continue
        if (known := quantizer.known(weight)) is not None:
            quantizer.ahead.value = WeightAhead(weight, weight._version, *known)
        else:
            groups.setdefault((quantizer.num_bits, weight.device), []).append((weight, quantizer))
    for members in groups.values():
        extremes = [arq_extremes(weight, q.ch_axis, q.groups) for weight, q in members]
        largest, smallest = (torch.cat(column) for column in zip(*extremes, strict=True))
        scales = symmetric_scale(largest, smallest, members[0][1].num_bits)
        parts = scales.split([len(column) for column, _ in extremes])
        for (weight, quantizer), scale in zip(members, parts, strict=True):
            quantizer.check_scale(scale, weight)
            made = quantizer.quantized(weight, scale)
            quantizer.ahead.value = WeightAhead(weight, weight._version, *made)


@torch.no_grad()
def write_back(
    quantizers: Iterable[ULQFakeQuantize], weight_quantizers: Iterable[ARQFakeQuantize]
) -> None:
    """Store what forwards in training used: clips and scales; forget everything else."""
    targets: list[Tensor] = []
    values: list[Tensor] = []
    for quantizer in quantizers:
        ahead = quantizer.ahead.take()
        if ahead is not None and ahead.used and quantizer.training:
            targets += quantizer.written
            values += ahead.settings.written
    for of_weight in weight_quantizers:
        made = of_weight.ahead.take()
        if made is not None and made.used and of_weight.training and of_weight.scale is not None:
            targets.append(of_weight.scale)
            values.append(made.scale)
    if targets:
        torch._foreach_copy_(targets, values)


def forget_ahead(
    quantizers: Iterable[ULQFakeQuantize], weight_quantizers: Iterable[ARQFakeQuantize]
) -> None:
    """Let all compute for themselves."""
    for quantizer in quantizers:
        quantizer.ahead.value = None
    for of_weight in weight_quantizers:
        of_weight.ahead.value = None


def _is_plain(quantizer: ULQFakeQuantize) -> bool:
    """Say whether the clips are ordinary parameters: not sharded, wrapped or cast."""
    clips = quantizer._parameters.values()
    return all(
        type(clip) is nn.Parameter and clip.shape == (1,) and clip.dtype == torch.float32
        for clip in clips
    )


@torch.no_grad()
def _settings(members: list[ULQFakeQuantize], learns: bool) -> list[Settings]:
    """Return the settings of quantizers of one kind, those with ``fixed_min`` first.

    Args:
        members: The quantizers.
        learns: Whether backward will need its constants.
    """
    first = members[0]
    stored = zip(*(quantizer.written[:4] for quantizer in members), strict=True)
    upper, lower, *previous = (torch.cat(column) for column in stored)
    lower[: sum(bool(quantizer.fixed_min) for quantizer in members)] = 0
    effective = ulq_effective_clips(upper, lower, previous=(previous[0], previous[1]))
    qparams = ulq_scale_offset(*effective, first.num_bits, first.symmetric)
    columns = [column.split(1) for column in (*effective, *qparams)]
    mixes: Sequence[Tensor | None] = [None] * len(members)
    on_host: Sequence[HostNumbers | None] = [None] * len(members)
    if learns and may_read(upper):
        on_host = host_numbers(effective, qparams, first.num_bits)
    elif learns:
        mixes = gradient_mix(effective, qparams, first.num_bits).unbind()
    return [
        Settings((a, z), (s, o), first.num_bits, mix, numbers)
        for a, z, s, o, mix, numbers in zip(*columns, mixes, on_host, strict=True)
    ]
