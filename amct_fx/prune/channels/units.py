"""Units and groups: which channels are chosen together, in blocks of which size.

Source: spec/pruning.md sections 3.3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from amct_fx.prune.channels.atoms import Pin
from amct_fx.prune.functional import (
    combine_scores,
    filter_scores,
    keep_highest,
    normalize_scores,
    remaining_channels,
)

if TYPE_CHECKING:
    from amct_fx.prune.channels.walk import Walk

__all__ = ["Group", "Unit", "choose", "find_groups", "kept_atoms"]


@dataclass
class Unit:
    """Channels that go together: a class of atoms.

    Attributes:
        root: The atom that stands for the class.
        rows: The rows of each producer, in the order of the producers.
    """

    root: int
    rows: dict[str, list[int]]


@dataclass
class Group:
    """Units with the same producers, ranked against each other.

    Attributes:
        producers: Names of the layers, in order.
        units: In the order of the rows of the first producer.
        ratio: Share to remove: the least of the producers.
        ascend_optimized: Whether any producer asks for multiples of 16.
        balance: Blocks that keep equal counts.
        source: What asks for the blocks.
        scores: One for each unit.
        keep: How many units stay.
        kept: Indices of the units that stay.
        note: ``aligned_away``, ``alignment_lost``, ``nothing_to_cut`` or nothing.
    """

    producers: tuple[str, ...]
    units: list[Unit]
    ratio: float
    ascend_optimized: bool
    balance: int = 1
    source: str = ""
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    keep: int = 0
    kept: list[int] = field(default_factory=list)
    note: str = ""

    @property
    def roots(self) -> list[int]:
        """The atoms that stand for the units."""
        return [unit.root for unit in self.units]


def find_groups(walk: Walk) -> list[Group]:
    """Return the units that may go, in groups, with what the settings ask of them."""
    found: dict[tuple[str, ...], list[Unit]] = {}
    for root in walk.atoms.free_classes():
        rows: dict[str, list[int]] = {}
        for layer, row in walk.atoms.rows(root):
            rows.setdefault(layer, []).append(row)
        found.setdefault(tuple(rows), []).append(Unit(root, rows))
    groups = []
    for producers, units in found.items():
        units.sort(key=lambda unit: min(unit.rows[producers[0]]))
        settings = [setting for name in producers if (setting := walk.setting(name))]
        ratio = min(setting.prune_ratio for setting in settings)
        aligned = any(setting.ascend_optimized for setting in settings)
        groups.append(Group(producers, units, ratio, aligned))
    return groups


def choose(walk: Walk, groups: list[Group]) -> bool:
    """Decide how many units of each group stay, and which; blocks come out equal.

    Returns:
        ``False`` if blocks that cannot keep equal counts were pinned: the groups must then be found
        again.
    """
    _set_balances(walk, groups)
    _set_scores(walk, groups)
    for group in groups:
        count = len(group.units)
        group.keep = _remaining(group)
        group.note = _note(group, count)
    if not _meet_balances(walk, groups):
        return False
    for group in groups:
        kept = keep_highest(group.scores, group.keep, groups=group.balance)
        group.kept = [int(index) for index in kept]
    return True


def _remaining(group: Group) -> int:
    keep = remaining_channels(
        len(group.units),
        group.ratio,
        groups=group.balance,
        ascend_optimized=group.ascend_optimized,
    )
    # what is left over in a block stays
    cut = max(0, (len(group.units) - keep) // group.balance) * group.balance
    return len(group.units) - cut


def _note(group: Group, count: int) -> str:
    if group.keep == count:
        plain = remaining_channels(count, group.ratio, groups=group.balance, ascend_optimized=False)
        return "aligned_away" if group.ascend_optimized and plain < count else "nothing_to_cut"
    return "alignment_lost" if group.ascend_optimized and group.keep % 16 else ""


def _set_balances(walk: Walk, groups: list[Group]) -> None:
    """Find the largest block size at whose multiples all blocks of every group begin and end."""
    where = {root: (g, i) for g, group in enumerate(groups) for i, root in enumerate(group.roots)}
    steps = [len(group.units) for group in groups]
    sources: list[list[str]] = [[] for _ in groups]
    for balance in walk.balances:
        for block in balance.blocks:
            inside: dict[int, set[int]] = {}
            for root in walk.atoms.roots(block).tolist():
                if root in where:
                    g, i = where[root]
                    inside.setdefault(g, set()).add(i)
            for g, indices in inside.items():
                edges = [
                    i
                    for i in range(1, len(groups[g].units))
                    if (i in indices) != (i - 1 in indices)
                ]
                if edges:
                    steps[g] = math.gcd(steps[g], *edges)
                    sources[g].append(balance.reason)
    for group, step, reasons in zip(groups, steps, sources, strict=True):
        group.balance = len(group.units) // step
        group.source = "; ".join(dict.fromkeys(reasons))


def _set_scores(walk: Walk, groups: list[Group]) -> None:
    """Score the units of each group by the producers' rows."""
    layers = dict.fromkeys(name for group in groups for name in group.producers)
    scores = {name: _layer_scores(walk, name) for name in layers}
    for group in groups:
        listed = []
        for name in group.producers:
            values, index = scores[name]
            rows = [index[unit.rows[name][0]] for unit in group.units]
            listed.append(values[torch.tensor(rows)])
        group.scores = combine_scores(listed, walk.options.importance)


def _layer_scores(walk: Walk, name: str) -> tuple[Tensor, list[int]]:
    """Return the scores of the units of one layer, and the unit of each row."""
    weight, axis, groups = walk.producer_weight(name)
    filters = _filters(weight.detach(), axis, groups)
    atoms = walk.rows_of(weight, axis)
    assert atoms is not None
    roots = [walk.atoms.root(int(atom)) for atom in atoms]
    units = {root: i for i, root in enumerate(dict.fromkeys(roots))}
    index = [units[root] for root in roots]
    if len(units) == len(roots):
        return filter_scores(filters).cpu(), index
    squares = filters.flatten(1).pow(2).sum(1)
    place = torch.tensor(index, device=squares.device)
    total = squares.new_zeros(len(units)).index_add(0, place, squares)
    count = squares.new_zeros(len(units)).index_add(0, place, torch.ones_like(squares))
    elements = count * (filters.numel() // filters.shape[0])
    return normalize_scores(total.sqrt() / elements).cpu(), index


def _filters(weight: Tensor, axis: int, groups: int) -> Tensor:
    """Return a weight with its filters along axis 0."""
    if axis == 0:
        return weight
    split = weight.unflatten(0, (groups, -1)).transpose(1, 2)
    filters: Tensor = split.flatten(0, 1)
    return filters


def _meet_balances(walk: Walk, groups: list[Group]) -> bool:
    """Raise the counts of groups until all blocks that must be equal are equal, if they can be."""
    where = {root: group for group in groups for root in group.roots}
    blocks = [[_block(walk, block, where) for block in balance.blocks] for balance in walk.balances]
    pending = True
    while pending:
        pending = False
        for balance, listed in zip(walk.balances, blocks, strict=True):
            counts = [block.count() for block in listed]
            target = max(counts)
            for block, count in zip(listed, counts, strict=True):
                if count < target:
                    block.raise_to(target)
                    pending = True
                    if block.count() != target:
                        _keep_all(walk, balance.node, balance.reason, listed)
                        return False
    return True


@dataclass
class _Block:
    """One block: its fixed channels, and for each group how many of its units lie inside.

    ``parts`` holds the group and the number of channels that each unit of it, in sum, has here.
    """

    fixed: int
    parts: list[tuple[Group, int]]

    def count(self) -> int:
        """Return how many channels stay."""
        return self.fixed + sum(
            inside * group.keep // len(group.units) for group, inside in self.parts
        )

    def raise_to(self, target: int) -> None:
        """Let more units of the groups stay, until ``target`` channels do."""
        for group, _ in self.parts:
            while self.count() < target and group.keep < len(group.units):
                group.keep += group.balance


def _block(walk: Walk, atoms: Tensor, where: dict[int, Group]) -> _Block:
    parts: dict[int, tuple[Group, int]] = {}
    fixed = 0
    roots = walk.atoms.roots(atoms).flatten().tolist()
    for root in roots:
        group = where.get(root)
        if group is None:
            fixed += 1
        else:
            parts[id(group)] = group, parts.get(id(group), (group, 0))[1] + 1
    return _Block(fixed, list(parts.values()))


def _keep_all(walk: Walk, node: str, reason: str, blocks: Iterable[_Block]) -> None:
    """Give up the groups of blocks that cannot be made equal."""
    pin = Pin("balance_conflict", node, f"{reason} must keep equal counts, which is not possible")
    for block in blocks:
        for group, _ in block.parts:
            group.keep = len(group.units)
            group.note = "nothing_to_cut"
            walk.atoms.pin(torch.tensor(group.roots), pin)


def kept_atoms(walk: Walk, groups: Sequence[Group]) -> Tensor:
    """Return for every atom whether it stays; the last entry is for fixed channels."""
    removed = {
        group.units[i].root
        for group in groups
        for i in set(range(len(group.units))) - set(group.kept)
    }
    total = walk.atoms.total
    stays = [walk.atoms.root(atom) not in removed for atom in range(total)]
    return torch.tensor([*stays, True])
