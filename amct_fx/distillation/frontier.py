"""What enters a group in the student, without running the student anew for each group.

Groups are distilled in the order of the graph, so what lies before the current one no longer
changes. For each batch the values that are still needed there (the *frontier*) are kept, and moved
on by the nodes up to the next group: over a whole distillation each batch runs through the student
once. AMCT runs the student from its input for every group and step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_map_only

from amct_fx.distillation.cuts import extract, own_nodes
from amct_fx.graph import fx_graph_of
from amct_fx.graph.attributes import resolved, unchanged
from amct_fx.graph.region import guard_of

if TYPE_CHECKING:
    from torch import fx

    from amct_fx.distillation.cuts import Cut
    from amct_fx.graph import GraphForward

__all__ = ["Frontier", "FrontierModel"]


@dataclass
class Frontier:
    """The live values of one batch.

    Args:
        group: The group that they stand before; ``None``: the model has not started.
        values: The values; at first the inputs of the model.
    """

    group: int | None
    values: tuple[Any, ...]


class FrontierModel:
    """Moves frontiers through the graph of a model.

    Args:
        root: The traced model.
        cuts: The groups in its own graph, by their number, in the order of the graph.
    """

    def __init__(self, root: GraphForward, cuts: dict[int, Cut]) -> None:
        self._root = root
        self._nodes: list[fx.Node] = list(fx_graph_of(root).nodes)
        position = {node.name: index for index, node in enumerate(self._nodes)}
        self._at = {node: index for index, node in enumerate(self._nodes)}
        self._start = {
            number: min(self._at[node] for node in own_nodes(root, cut))
            for number, cut in cuts.items()
        }
        self._inputs = {
            number: [self._nodes[position[name]] for name in cut.inputs]
            for number, cut in cuts.items()
        }
        self._segments: dict[tuple[int | None, int], fx.GraphModule | None] = {}

    def leaves(self, arguments: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the values of the placeholders; ``None`` for a call the graph does not serve."""
        guard = guard_of(self._root)
        if not unchanged(resolved(self._root, guard.watched)):
            return None
        if guard.form is None:
            return arguments
        found = guard.form.leaves(arguments, {})
        return None if found is None else tuple(found)

    @torch.no_grad()
    def inputs(self, frontier: Frontier, group: int) -> tuple[Any, ...]:
        """Return what enters a group, and move the frontier there.

        Args:
            frontier: Stands before this or an earlier group; changed.
            group: Number of the group.
        """
        if frontier.group != group:
            values = frontier.values if frontier.group is not None else _copied(frontier.values)
            frontier.values = self._segment(frontier.group, group)(*values)
            frontier.group = group
        ahead = self._ahead(group)
        if ahead is not None:
            return tuple(ahead(*_copied(frontier.values)))
        live = dict(zip(self._live(group), frontier.values, strict=True))
        return tuple(live[node] for node in self._inputs[group])

    def _segment(self, start: int | None, end: int) -> fx.GraphModule:
        """Return what moves a frontier; all nodes between run: they may change values in place."""
        key = start, end
        segment = self._segments.get(key)
        if segment is None:
            first = 0 if start is None else self._start[start]
            between = [node for node in self._nodes[first : self._start[end]] if _computes(node)]
            segment = extract(self._root, self._live(start), between, self._live(end))
            self._segments[key] = segment
        return segment

    def _ahead(self, group: int) -> fx.GraphModule | None:
        """Return what computes the inputs of a group that are made behind its first node."""
        key = group, group
        if key not in self._segments:
            live, outputs = self._live(group), self._inputs[group]
            needed: set[fx.Node] = set()
            waiting = [node for node in outputs if node not in live]
            while waiting:
                node = waiting.pop()
                if node not in needed and node not in live and _computes(node):
                    needed.add(node)
                    waiting += node.all_input_nodes
            ordered = sorted(needed, key=self._at.__getitem__)
            self._segments[key] = extract(self._root, live, ordered, outputs) if needed else None
        return self._segments[key]

    def _live(self, group: int | None) -> list[fx.Node]:
        """Return the nodes before a group whose values it or something behind it reads."""
        if group is None:
            return [node for node in self._nodes if node.op == "placeholder"]
        start = self._start[group]
        later = {
            node for number, nodes in self._inputs.items() if number >= group for node in nodes
        }
        return [
            node
            for node in self._nodes[:start]
            if node.op != "get_attr"
            and (node in later or any(self._at[user] >= start for user in node.users))
        ]


def _computes(node: fx.Node) -> bool:
    return node.op not in ("placeholder", "get_attr", "output")


def _copied(values: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copy tensors that a segment may change in place and that are needed once more."""
    copied: tuple[Any, ...] = tree_map_only(torch.Tensor, torch.clone, values)
    return copied
