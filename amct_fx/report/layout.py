"""Places for the nodes of a directed acyclic graph, in rows from top to bottom.

The usual four steps (Sugiyama, Tagawa and Toda 1981), small: rows by the longest path, an invisible
node wherever a line crosses a row, an order in each row that follows the neighbours, and places.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

__all__ = ["Layout", "lay_out"]

Point = tuple[float, float]

_UPRIGHT = 0.85


@dataclass(frozen=True)
class Layout:
    """Where everything stands.

    Attributes:
        nodes: Centre and row of each node.
        edges: The places that each line runs through.
        width: Nodes side by side.
        height: Number of rows.
    """

    nodes: tuple[Point, ...]
    edges: tuple[tuple[Point, ...], ...]
    width: float
    height: float


def lay_out(count: int, links: Sequence[tuple[int, int]]) -> Layout:
    """Lay out a graph.

    Args:
        count: Number of nodes; each comes after those it is linked from.
        links: From which node to which.

    Example:
        >>> layout = lay_out(4, [(0, 1), (0, 2), (1, 3), (2, 3), (0, 3)])
        >>> [y for _, y in layout.nodes], len(layout.edges[4])
        ([0.0, 1.0, 1.0, 2.0], 3)
    """
    if not count:
        return Layout((), (), 1.0, 0.0)
    rows = _rows(count, links)
    chains = _chains(rows, links)
    before: list[list[int]] = [[] for _ in rows]
    after: list[list[int]] = [[] for _ in rows]
    for chain in chains:
        for source, target in itertools.pairwise(chain):
            before[target].append(source)
            after[source].append(target)
    order: list[list[int]] = [[] for _ in range(max(rows) + 1)]
    for node, row in enumerate(rows):
        order[row].append(node)
    _sort_rows(order, before, after)
    places = _places(order, before, after, count)
    low = min(places)
    points = [(x - low, float(row)) for x, row in zip(places, rows, strict=True)]
    width = max(x for x, _ in points) + 1
    lines = tuple(tuple(points[node] for node in chain) for chain in chains)
    return Layout(tuple(points[:count]), lines, width, float(len(order)))


def _rows(count: int, links: Sequence[tuple[int, int]]) -> list[int]:
    rows = [0] * count
    for source, target in sorted(links, key=lambda link: link[1]):
        rows[target] = max(rows[target], rows[source] + 1)
    return rows


def _chains(rows: list[int], links: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Return the nodes of each line; adds the rows of the invisible ones to ``rows``."""
    chains = []
    for source, target in links:
        chain = [source]
        for row in range(rows[source] + 1, rows[target]):
            chain.append(len(rows))
            rows.append(row)
        chains.append([*chain, target])
    return chains


def _sort_rows(order: list[list[int]], before: list[list[int]], after: list[list[int]]) -> None:
    """Order each row by the mean position of the neighbours, down and up a few times."""
    for sweep in range(6):
        down = sweep % 2 == 0
        rows = order[1:] if down else order[-2::-1]
        neighbours = before if down else after
        position = {node: float(i) for row in order for i, node in enumerate(row)}
        for row in rows:
            row.sort(key=_mean_of(neighbours, position))
            position.update((node, float(index)) for index, node in enumerate(row))


def _mean_of(neighbours: list[list[int]], position: dict[int, float]) -> Callable[[int], float]:
    def mean(node: int) -> float:
        found = neighbours[node]
        return sum(position[n] for n in found) / len(found) if found else position[node]

    return mean


def _places(
    order: list[list[int]], before: list[list[int]], after: list[list[int]], count: int
) -> list[float]:
    """Give each node a place near its neighbours, without overlap.

    A little pull to the middle keeps long graphs upright: neighbours alone also agree on a slope.
    """
    places = {node: index - (len(row) - 1) / 2 for row in order for index, node in enumerate(row)}
    for sweep in range(12):
        down = sweep % 2 == 0
        wish = _mean_of(before if down else after, places)
        for row in order if down else order[::-1]:
            _spread(row, [_UPRIGHT * wish(node) for node in row], places, count)
    return [places[node] for node in range(len(places))]


def _spread(row: list[int], wishes: list[float], places: dict[int, float], count: int) -> None:
    """Place a row at its wishes as far as the widths allow, without a drift to one side."""
    found: list[float] = []
    for index, wish in enumerate(wishes):
        least = wish
        if index:
            both = row[index - 1] < count and row[index] < count
            least = found[-1] + (1.0 if both else 0.6)
        found.append(max(wish, least))
    drift = sum(f - w for f, w in zip(found, wishes, strict=True)) / len(row)
    for node, place in zip(row, found, strict=True):
        places[node] = place - drift
