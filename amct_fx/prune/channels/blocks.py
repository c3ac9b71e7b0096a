"""Blocks of channels: laid over each other, repeated, or gated by each other.

A view may spread channels over several axes: the branches of a split attention, the heads of
another. What works along such an axis and leaves the axis of the channels alone mixes the blocks
place by place, so what is at one place of all blocks lives together.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from amct_fx.prune.channels.atoms import Pin
from amct_fx.prune.channels.space import Space
from amct_fx.prune.channels.steps import Misfit, Replay, Step

if TYPE_CHECKING:
    from torch import Tensor, fx

    from amct_fx.prune.channels.walk import Walk

__all__ = ["gate_halves", "lay_over", "repeat_each"]

Sizes = tuple[int, ...]


def _coordinates(places: Tensor, sizes: Sizes) -> list[Tensor]:
    """Return the place along each axis of an array of ``sizes``."""
    found, inner = [], 1
    for size in reversed(sizes):
        found.append(places // inner % size)
        inner *= size
    return found[::-1]


def _places(coordinates: list[Tensor], sizes: Sizes) -> Tensor:
    """Return places in an array of ``sizes``; axes of size 1 count for nothing."""
    places, inner = torch.zeros_like(coordinates[0]), 1
    for coordinate, size in zip(reversed(coordinates), reversed(sizes), strict=True):
        if size > 1:
            places = places + coordinate * inner
        inner *= size
    return places


@dataclass
class Overlaid(Step):
    """The blocks along an axis have the same channels from here on.

    Attributes:
        node: The operation.
        source: What it reads.
        value: The same with one block for all.
        before: Its channels.
        space: The channels that are left, of the same rank.
        axis: The axis of the blocks.
    """

    node: fx.Node
    source: Any
    value: Any
    before: Space
    space: Space
    axis: int

    def replay(self, state: Replay) -> None:
        """Check that all blocks keep the same places."""
        coordinates = _coordinates(state.places[self.source], tuple(self.before.atoms.shape))
        cut = coordinates[self.space.axis]
        if bool((cut != cut.narrow(self.axis, 0, 1)).any()):
            raise Misfit(self.node, self.before.atoms, "blocks would keep different channels")
        first = [coordinate.narrow(self.axis, 0, 1) for coordinate in coordinates]
        places = _places(first, tuple(self.space.atoms.shape))
        state.place(self.value, places, self.node, self.space)


def lay_over(
    walk: Walk, node: fx.Node, source: Any, space: Space, axes: Iterable[int]
) -> tuple[Any, Space]:
    """Let the blocks along ``axes``, not that of the channels, live together.

    Returns:
        The source with one block for all, as a key of places, and its channels.
    """
    pin = Pin("width_mismatch", node.name, "it mixes blocks of the channels")
    for axis in sorted(axes):
        blocks = space.atoms.movedim(axis, 0)
        for block in blocks[1:]:
            walk.atoms.join(blocks[0], block, pin)
        first = space.atoms.narrow(axis, 0, 1)
        one = Space(first, space.axis, zero=space.zero, records=space.records)
        walk.steps.append(Overlaid(node, source, (node, "blocks", axis), space, one, axis))
        source, space = (node, "blocks", axis), one
    return source, space


@dataclass
class Repeated(Step):
    """Every place along an axis comes ``times`` times in a row."""

    node: fx.Node
    source: Any
    value: Any
    sizes: Sizes
    space: Space
    axis: int
    times: int

    def replay(self, state: Replay) -> None:
        """Number the copies."""
        coordinates = _coordinates(state.places[self.source], self.sizes)
        copies = [c.repeat_interleave(self.times, self.axis) for c in coordinates]
        length = coordinates[0].shape[self.axis]
        number = torch.arange(self.times).repeat(length)
        shape = [-1 if a == self.axis else 1 for a in range(len(self.sizes))]
        copies[self.axis] = copies[self.axis] * self.times + number.reshape(shape)
        places = _places(copies, tuple(self.space.atoms.shape))
        state.place(self.value, places, self.node, self.space)


def repeat_each(
    walk: Walk, node: fx.Node, source: Any, axis: int, times: int, value: Any = None
) -> None:
    """Give a value the channels of ``source``, each place along ``axis`` ``times`` times in a row.

    Args:
        walk: The analysis.
        node: The operation.
        source: What it reads; it has channels.
        axis: An axis along which they lie.
        times: How often.
        value: What gets the channels; the result of ``node`` if ``None``.
    """
    space = walk.space(source)
    assert space is not None
    atoms = space.atoms.repeat_interleave(times, axis)
    out = Space(atoms, space.axis, zero=space.zero, records=space.records)
    value = node if value is None else value
    walk.spaces[value] = out
    sizes = tuple(space.atoms.shape)
    walk.steps.append(Repeated(node, source, value, sizes, out, axis, times))


@dataclass
class Gated(Step):
    """The second half of the channels gates the first."""

    node: fx.Node
    source: Any
    space: Space

    def replay(self, state: Replay) -> None:
        """Check that both halves keep the same places."""
        places = state.places[self.source]
        first, second = places.flatten().tensor_split(2)
        if not torch.equal(first, second - self.space.atoms.numel()):
            raise Misfit(self.node, self.space.atoms, "its halves would keep different channels")
        shape = [-1 if a == self.space.axis else 1 for a in range(places.dim())]
        state.place(self.node, first.reshape(shape), self.node, self.space)


def gate_halves(walk: Walk, node: fx.Node, source: Any, space: Space) -> None:
    """Join the halves of channels along one axis, as a gated linear unit does."""
    first, second = space.atoms.chunk(2, space.axis)
    walk.atoms.join(first, second, Pin("width_mismatch", node.name, "it joins its halves"))
    out = Space(first, space.axis, zero=space.zero)
    walk.spaces[node] = out
    walk.steps.append(Gated(node, source, out))
