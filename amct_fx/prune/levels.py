"""Counts of channels that depend on each other across groups.

A channel shuffle needs as many channels from the branch as from the shortcut, though other layers
make them. Each group can be chosen by itself only as far as such blocks stay equal.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct_fx.errors import PruneError
from amct_fx.prune.channels.units import block_of, places_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from amct_fx.prune.channels.units import Group
    from amct_fx.prune.channels.walk import Walk

__all__ = ["Block", "Level", "check_levels", "levels_of"]


@dataclass(frozen=True)
class Block:
    """Channels of one block.

    Attributes:
        fixed: How many of them always stay.
        parts: For each group that has units here its number, the channels that they are, and the
            units of the whole group.
    """

    fixed: int
    parts: tuple[tuple[int, int, int], ...]

    def count(self, kept: Mapping[int, int]) -> int:
        """Return how many channels stay, for the units that each group keeps."""
        return self.fixed + sum(inside * kept[group] // size for group, inside, size in self.parts)


@dataclass(frozen=True)
class Level:
    """Blocks of several groups that must keep equally many channels.

    Attributes:
        node: The operation that needs it.
        reason: What it is, for messages.
        blocks: The blocks.

    Example:
        >>> level = Level("view", "a shuffle", (Block(0, ((0, 16, 32),)), Block(0, ((1, 16, 16),))))
        >>> level.counts({0: 24, 1: 12}), level.counts({0: 24, 1: 10})
        ([12, 12], [12, 10])
    """

    node: str
    reason: str
    blocks: tuple[Block, ...]

    def has(self, group: int) -> bool:
        """Say whether a group has units in a block."""
        return any(number == group for block in self.blocks for number, _, _ in block.parts)

    def counts(self, kept: Mapping[int, int]) -> list[int]:
        """Return how many channels stay in each block, for the units that each group keeps."""
        return [block.count(kept) for block in self.blocks]


def levels_of(walk: Walk, groups: Sequence[Group]) -> tuple[Level, ...]:
    """Return the blocks of an analysis that are equal for some choices only."""
    group_of, _ = places_of(walk, groups)
    number = {id(group): place for place, group in enumerate(groups)}
    found = []
    for balance in walk.balances:
        blocks = []
        for atoms in balance.blocks:
            block = block_of(groups, group_of[walk.atoms.free(atoms)])
            parts = sorted((number[id(group)], n, group.size) for group, n in block.parts)
            blocks.append(Block(block.fixed, tuple(parts)))
        if any(block != blocks[0] for block in blocks):
            found.append(Level(balance.node, balance.reason, tuple(dict.fromkeys(blocks))))
    return tuple(dict.fromkeys(found))


def check_levels(
    levels: Iterable[Level], kept: Mapping[int, int], names: Mapping[int, str]
) -> None:
    """Raise unless all blocks that must be equal are.

    Args:
        levels: Those of the plan.
        kept: How many units each group keeps, by its number.
        names: What a group is called in the message.

    Raises:
        PruneError: Names the groups and their counts.
    """
    for level in levels:
        counts = level.counts(kept)
        if len(set(counts)) == 1:
            continue
        blocks = [
            f"{count} of {' and '.join(repr(names[g]) for g, _, _ in block.parts) or 'fixed ones'}"
            for count, block in zip(counts, level.blocks, strict=True)
        ]
        message = (
            f"{level.node!r} needs equally many channels in each of its blocks ({level.reason}), "
            f"but they would keep {', '.join(blocks)}; choose these groups together"
        )
        raise PruneError(message)
