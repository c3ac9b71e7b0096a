"""Checks of a choice of channels against a plan."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch

from amct_fx.errors import PruneError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

    from amct_fx.prune.plan_parts import PruneGroup

__all__ = ["as_mask", "check_choice", "unit_stays", "whole_numbers"]


def whole_numbers(values: Any, what: str) -> tuple[int, ...]:
    """Return indices in ascending order, each once.

    Args:
        values: Whole numbers, as a sequence or a tensor.
        what: What they are, for the message.

    Raises:
        PruneError: They are no whole numbers.

    Example:
        >>> whole_numbers([3, 1, 1], "units")
        (1, 3)
    """
    try:
        return tuple(sorted({operator.index(value) for value in values}))
    except TypeError as error:
        message = f"{what} must be a list of whole numbers, not {values!r}"
        raise PruneError(message) from error


def check_choice(group: PruneGroup, kept: tuple[int, ...]) -> None:
    """Raise unless a group may keep these units."""
    name = ", ".join(group.producers)
    if not kept or kept[0] < 0 or kept[-1] >= group.channels:
        message = f"group {name!r} has units 0 to {group.channels - 1}, of which at least one stays"
        raise PruneError(message)
    width = group.channels // group.balance
    counts = [0] * group.balance
    for index in kept:
        counts[index // width] += 1
    if len(set(counts)) > 1:
        message = (
            f"group {name!r} must keep equally many units in each of its {group.balance} blocks "
            f"({group.balance_source}), not {counts}"
        )
        raise PruneError(message)


def as_mask(sizes: Mapping[str, int], name: str, value: Any) -> Tensor:
    """Return which output channels of a layer stay.

    Args:
        sizes: The number of output channels of every layer that may lose some.
        name: The layer, one of them.
        value: A bool or uint8 mask, or the indices that stay, as a tensor or a sequence.

    Raises:
        PruneError: It is neither, or of another length.
    """
    try:
        value = torch.as_tensor(value)
    except (RuntimeError, TypeError, ValueError):
        value = torch.empty(0, dtype=torch.float32)
    if value.dtype in (torch.bool, torch.uint8):
        mask: Tensor = value.flatten().bool().cpu()
    elif value.dtype.is_floating_point or value.dtype.is_complex:
        message = f"layer {name!r} takes a mask of its output channels, or the indices that stay"
        raise PruneError(message)
    else:
        mask = torch.zeros(sizes[name], dtype=torch.bool)
        if value.numel() and not 0 <= int(value.min()) <= int(value.max()) < sizes[name]:
            message = f"layer {name!r} has output channels 0 to {sizes[name] - 1}"
            raise PruneError(message)
        mask[value.flatten().long().cpu()] = True
    if mask.numel() != sizes[name]:
        message = f"layer {name!r} has {sizes[name]} output channels, the mask {mask.numel()}"
        raise PruneError(message)
    return mask


def unit_stays(group: PruneGroup, unit: int, stays: Mapping[str, Tensor]) -> bool:
    """Say whether a unit stays; coupled producers must agree."""
    answers = {
        bool(stays[member.layer][position])
        for member in group.members
        if member.role == "row" and member.parameter == "weight" and member.layer in stays
        for position in member.positions[unit]
    }
    if len(answers) > 1:
        message = f"the layers {', '.join(group.producers)} share channels but keep different ones"
        raise PruneError(message)
    return answers == {True} if answers else unit in group.kept
