"""Units and groups: which channels are chosen together, in blocks of which size.

Source: spec/pruning.md sections 3.3 and 4.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from amct_fx.prune.channels.atoms import NOBODY, Pin
from amct_fx.prune.functional import (
    combine_scores,
    filter_scores,
    keep_highest,
    normalize_scores,
    remaining_channels,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amct_fx.prune.channels.atoms import Indices
    from amct_fx.prune.channels.walk import Walk

__all__ = ["Group", "block_of", "choose", "find_groups", "kept_atoms", "places_of"]


@dataclass
class Group:
    """Units, classes of atoms that go together, with the same producers: ranked with each other.

    Attributes:
        producers: Names of the layers, in order.
        roots: The atoms that stand for the units, in the order of the rows of the first producer.
        rows: By name of the producer the unit of each of its rows, and the rows; units ascend, and
            the rows of one are in the order of joining.
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
    roots: Indices
    rows: dict[str, tuple[Indices, Indices]]
    ratio: float
    ascend_optimized: bool
    balance: int = 1
    source: str = ""
    scores: Tensor = field(default_factory=lambda: torch.empty(0))
    keep: int = 0
    kept: list[int] = field(default_factory=list)
    note: str = ""

    @property
    def size(self) -> int:
        """Number of units."""
        return len(self.roots)

    @property
    def gone(self) -> NDArray[np.bool_]:
        """Which units go."""
        gone = np.ones(self.size, bool)
        gone[self.kept] = False
        return gone


def find_groups(walk: Walk) -> list[Group]:
    """Return the units that may go, in groups, with what the settings ask of them."""
    found: dict[tuple[str, ...], list[_Alike]] = {}
    for alike in _alike(walk):
        every = dict.fromkeys(walk.atoms.layer(int(number)) for number in alike.layers)
        if names := tuple(name for name in every if name != NOBODY):
            found.setdefault(names, []).append(alike)
    groups = []
    in_order = sorted(found.items(), key=lambda item: min(part.roots[0] for part in item[1]))
    for producers, parts in in_order:
        settings = [setting for name in producers if (setting := walk.setting(name))]
        ratio = min(setting.prune_ratio for setting in settings)
        aligned = any(setting.ascend_optimized for setting in settings)
        roots, rows = _in_order(walk, producers, parts)
        groups.append(Group(producers, roots, rows, ratio, aligned))
    return groups


@dataclass
class _Alike:
    """Classes whose output channels are of the same layers in the same order.

    ``roots`` ascend; ``layers`` has the number of the layer of each output channel, ``rows`` the
    rows, ``[len(roots), len(layers)]``.
    """

    roots: Indices
    layers: Indices
    rows: Indices


def _alike(walk: Walk) -> Iterator[_Alike]:
    """Sort the classes that may be removed by their layers."""
    free = walk.atoms.free_classes()
    sizes = walk.atoms.sizes(free)
    for size in np.unique(sizes).tolist():
        roots = free[sizes == size]
        layers, rows = walk.atoms.rows(roots, size)
        kinds, kind = np.unique(layers, axis=0, return_inverse=True)
        for number in range(len(kinds)):
            own = kind.reshape(-1) == number
            yield _Alike(roots[own], kinds[number], rows[own])


def _in_order(
    walk: Walk, producers: tuple[str, ...], parts: list[_Alike]
) -> tuple[Indices, dict[str, tuple[Indices, Indices]]]:
    """Put units in the order of the rows of the first producer; return them and their rows."""
    names = [np.array([walk.atoms.layer(int(number)) for number in p.layers]) for p in parts]
    first = [part.rows[:, n == producers[0]].min(1) for part, n in zip(parts, names, strict=True)]
    roots = np.concatenate([part.roots for part in parts])
    order = np.lexsort((roots, np.concatenate(first)))
    unit = np.argsort(order)
    ends = np.cumsum([len(part.roots) for part in parts])
    units = np.split(unit, ends[:-1])
    rows = {}
    for name in producers:
        own = [part.rows[:, n == name] for part, n in zip(parts, names, strict=True)]
        numbers = [np.repeat(u, o.shape[1]) for u, o in zip(units, own, strict=True)]
        number = np.concatenate(numbers)
        sort = np.argsort(number, kind="stable")
        rows[name] = number[sort], np.concatenate([o.reshape(-1) for o in own])[sort]
    return roots[order], rows


def choose(walk: Walk, groups: list[Group]) -> bool:
    """Decide how many units of each group stay, and which; blocks come out equal.

    Returns:
        ``False`` if blocks that cannot keep equal counts were pinned: the groups must then be found
        again.
    """
    _set_balances(walk, groups)
    _set_scores(walk, groups)
    for group in groups:
        count = group.size
        group.keep = _remaining(group)
        group.note = _note(group, count)
    if not _meet_balances(walk, groups):
        return False
    for group in groups:
        group.kept = keep_highest(group.scores, group.keep, groups=group.balance).tolist()
    return True


def _remaining(group: Group) -> int:
    keep = remaining_channels(
        group.size,
        group.ratio,
        groups=group.balance,
        ascend_optimized=group.ascend_optimized,
    )
    # what is left over in a block stays
    cut = max(0, (group.size - keep) // group.balance) * group.balance
    return group.size - cut


def _note(group: Group, count: int) -> str:
    if group.keep == count:
        plain = remaining_channels(count, group.ratio, groups=group.balance, ascend_optimized=False)
        return "aligned_away" if group.ascend_optimized and plain < count else "nothing_to_cut"
    return "alignment_lost" if group.ascend_optimized and group.keep % 16 else ""


def _set_balances(walk: Walk, groups: list[Group]) -> None:
    """Find the largest block size at whose multiples all blocks of every group begin and end."""
    group_of, unit_of = places_of(walk, groups)
    steps = [group.size for group in groups]
    sources: list[list[str]] = [[] for _ in groups]
    for balance in walk.balances:
        for block in balance.blocks:
            roots = walk.atoms.free(block)
            for g in np.unique(group_of[roots]).tolist():
                if g < 0:
                    continue
                inside = np.zeros(groups[g].size, bool)
                inside[unit_of[roots[group_of[roots] == g]]] = True
                edges = np.flatnonzero(inside[1:] != inside[:-1]) + 1
                if len(edges):
                    steps[g] = math.gcd(steps[g], int(np.gcd.reduce(edges)))
                    sources[g].append(balance.reason)
    for group, step, reasons in zip(groups, steps, sources, strict=True):
        group.balance = group.size // step
        group.source = "; ".join(dict.fromkeys(reasons))


def places_of(walk: Walk, groups: Sequence[Group]) -> tuple[Indices, Indices]:
    """Return the group and the unit of every root; -1 of other atoms.

    The last entry, -1, is that of fixed channels.
    """
    group_of = np.full(walk.atoms.total + 1, -1)
    unit_of = np.full(walk.atoms.total + 1, -1)
    for number, group in enumerate(groups):
        group_of[group.roots] = number
        unit_of[group.roots] = np.arange(group.size)
    return group_of, unit_of


def _set_scores(walk: Walk, groups: list[Group]) -> None:
    """Score the units of each group by the producers' rows."""
    layers = dict.fromkeys(name for group in groups for name in group.producers)
    scores = {name: _layer_scores(walk, name) for name in layers}
    for group in groups:
        listed = []
        for name in group.producers:
            values, index = scores[name]
            units, rows = group.rows[name]
            first = rows[np.searchsorted(units, np.arange(group.size))]
            listed.append(values[torch.from_numpy(index[first])])
        group.scores = combine_scores(listed, walk.options.importance)


def _layer_scores(walk: Walk, name: str) -> tuple[Tensor, Indices]:
    """Return the scores of the units of one layer, and the unit of each row."""
    weight, axis, groups = walk.producer_weight(name)
    filters = _filters(weight.detach(), axis, groups)
    atoms = walk.rows_of(weight, axis)
    assert atoms is not None
    index, count = _numbered(walk.atoms.classes(atoms.flatten().numpy()))
    if count == len(index):
        return filter_scores(filters).cpu(), index
    squares = filters.flatten(1).pow(2).sum(1)
    place = torch.from_numpy(index).to(squares.device)
    total = squares.new_zeros(count).index_add(0, place, squares)
    rows = squares.new_zeros(count).index_add(0, place, torch.ones_like(squares))
    elements = rows * (filters.numel() // filters.shape[0])
    return normalize_scores(total.sqrt() / elements).cpu(), index


def _numbered(values: Indices) -> tuple[Indices, int]:
    """Number values in the order in which they appear; return the numbers and how many."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[inverse], len(first)


def _filters(weight: Tensor, axis: int, groups: int) -> Tensor:
    """Return a weight with its filters along axis 0."""
    if axis == 0:
        return weight
    split = weight.unflatten(0, (groups, -1)).transpose(1, 2)
    filters: Tensor = split.flatten(0, 1)
    return filters


def _meet_balances(walk: Walk, groups: list[Group]) -> bool:
    """Raise the counts of groups until all blocks that must be equal are equal, if they can be."""
    group_of, _ = places_of(walk, groups)
    blocks = [
        [block_of(groups, group_of[walk.atoms.free(block)]) for block in balance.blocks]
        for balance in walk.balances
    ]
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
        return self.fixed + sum(inside * group.keep // group.size for group, inside in self.parts)

    def raise_to(self, target: int) -> None:
        """Let more units of the groups stay, until ``target`` channels do."""
        for group, _ in self.parts:
            while self.count() < target and group.keep < group.size:
                group.keep += group.balance


def block_of(groups: Sequence[Group], numbers: Indices) -> _Block:
    """Count the channels of a block, given the group of each, by group as they first appear."""
    found, first, counts = np.unique(numbers, return_index=True, return_counts=True)
    parts = [(groups[found[i]], int(counts[i])) for i in np.argsort(first) if found[i] >= 0]
    return _Block(int(counts[found < 0].sum()), parts)


def _keep_all(walk: Walk, node: str, reason: str, blocks: Iterable[_Block]) -> None:
    """Give up the groups of blocks that cannot be made equal."""
    pin = Pin("balance_conflict", node, f"{reason} must keep equal counts, which is not possible")
    for block in blocks:
        for group, _ in block.parts:
            group.keep = group.size
            group.note = "nothing_to_cut"
            walk.atoms.pin(torch.from_numpy(group.roots), pin)


def kept_atoms(walk: Walk, groups: Sequence[Group]) -> Tensor:
    """Return for every atom whether it stays; the last entry is for fixed channels."""
    stays = np.ones(walk.atoms.total + 1, bool)
    for group in groups:
        stays[group.roots[group.gone]] = False
    stays[:-1] = stays[walk.atoms.classes(np.arange(walk.atoms.total))]
    return torch.from_numpy(stays)
