"""Taps: copies of the values that enter and leave the groups, taken while the whole model runs.

Hooks on modules would miss functions, and run once per module and not once per place. A tap is a
node of its own, right before the first reader of an input and right behind the last node of the
group, so that what others change in place later is not seen.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_map_only

from amct_fx.distillation.cuts import is_quantizer
from amct_fx.graph import install_graph

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct_fx.distillation.cuts import Cut
    from amct_fx.graph.runtime_guard import Guard

__all__ = ["GroupValues", "TappedModel"]

_OUTPUT = -1


@dataclass(frozen=True)
class GroupValues:
    """What entered and left a group in one call.

    Args:
        inputs: Values of its boundary inputs: tensors, or whatever the graph hands on.
        output: Its output.
    """

    inputs: tuple[Any, ...]
    output: Any = None


class _Enough(BaseException):
    """Ends a forward whose remaining values nobody needs; no ``except Exception`` stops it."""


class _Taps(nn.Module):
    """Collects the values of one forward; ``wanted`` says of which groups."""

    def __init__(self, cuts: Sequence[Cut], last_slots: Sequence[int]) -> None:
        super().__init__()
        self.cuts = cuts
        self.last_slots = last_slots
        self.wanted: frozenset[int] = frozenset()
        self.stop_early = False
        self.values: dict[tuple[int, int], list[Any]] = {}
        self._copies: dict[int, tuple[weakref.ref[Tensor], int, Tensor]] = {}

    def forward(self, group: int, slot: int, value: Any) -> None:
        """Keep a copy of ``value``."""
        if group not in self.wanted:
            return
        copied = tree_map_only(Tensor, self._copy, value)
        self.values.setdefault((group, slot), []).append(copied)
        if self.stop_early and slot == self.last_slots[group]:
            raise _Enough

    def _copy(self, tensor: Tensor) -> Tensor:
        """Copy a tensor once, although it may leave one group and enter the next."""
        known = self._copies.get(id(tensor))
        if known is not None and known[0]() is tensor and known[1] == tensor._version:
            return known[2]
        copied = tensor.detach().clone()
        self._copies[id(tensor)] = weakref.ref(tensor), tensor._version, copied
        return copied

    def take(self, group: int) -> list[GroupValues]:
        """Return what one group gave: one item for each call of its region."""
        count = len(self.cuts[group].inputs)
        inputs = [self.values.get((group, slot), []) for slot in range(count)]
        outputs = self.values.get((group, _OUTPUT))
        if count == 0:
            return [GroupValues((), output) for output in outputs or ()]
        calls = list(zip(*inputs, strict=True))
        outputs = outputs if outputs is not None else [None] * len(calls)
        return [GroupValues(*pair) for pair in zip(calls, outputs, strict=True)]

    def clear(self) -> None:
        """Forget the last forward."""
        self.values = {}
        self._copies = {}


class TappedModel:
    """A model that hands out what enters and leaves its groups.

    Args:
        model: A shadow of the model, in eval mode; its traced parts get taps.
        graphs: The graph of each of its traced parts, by name; changed.
        cuts: The groups.
        guards: What each graph relies on, by name; where that does not hold, code runs that has
            no taps.
        with_outputs: Also take what leaves a group.
    """

    def __init__(
        self,
        model: nn.Module,
        graphs: Mapping[str, fx.Graph],
        cuts: Sequence[Cut],
        guards: Mapping[str, Guard],
        *,
        with_outputs: bool,
    ) -> None:
        self.model = model
        self.cuts = cuts
        last = [_OUTPUT] * len(cuts)
        places: dict[str, list[tuple[fx.Node, int, int, fx.Node]]] = {name: [] for name in graphs}
        for index, cut in enumerate(cuts):
            found = _input_taps(graphs[cut.region], cut, model.get_submodule(cut.region))
            places[cut.region] += [(place, index, slot, value) for place, slot, value in found]
            if not with_outputs and found:
                last[index] = max(found, key=lambda item: item[0])[1]
            if with_outputs or not found:
                node = next(n for n in graphs[cut.region].nodes if n.name == cut.output)
                places[cut.region].append((node.next, index, _OUTPUT, node))
        self._taps = _Taps(cuts, last)
        for name, graph in graphs.items():
            root = model.get_submodule(name)
            root.add_module("_amct_taps", self._taps)
            for place, index, slot, value in places[name]:
                with graph.inserting_before(_behind_placeholders(place)):
                    graph.call_module("_amct_taps", (index, slot, value))
            install_graph(root, graph, guards[name])

    @torch.no_grad()
    def values_of_all(self, inputs: Sequence[Any]) -> tuple[list[list[GroupValues]], Any]:
        """Run the model once.

        Returns:
            Per group one item for each call of its region, and the output of the model.
        """
        output = self._run(inputs, range(len(self.cuts)), stop_early=False)
        found = [self._taps.take(index) for index in range(len(self.cuts))]
        self._taps.clear()
        return found, output

    @torch.no_grad()
    def values_of(self, index: int, inputs: Sequence[Any]) -> list[GroupValues]:
        """Run the model as far as one group needs it."""
        self._run(inputs, [index], stop_early=self.cuts[index].region == "")
        found = self._taps.take(index)
        self._taps.clear()
        return found

    def _run(self, inputs: Sequence[Any], wanted: Sequence[int], *, stop_early: bool) -> Any:
        self._taps.clear()
        self._taps.wanted = frozenset(wanted)
        self._taps.stop_early = stop_early
        try:
            return self.model(*inputs)
        except _Enough:
            return None
        except BaseException:
            self._taps.clear()
            raise
        finally:
            self._taps.wanted = frozenset()


def _input_taps(graph: fx.Graph, cut: Cut, root: nn.Module) -> list[tuple[fx.Node, int, fx.Node]]:
    """Return where to tap each boundary input: the place, its number, and the node."""
    members = set(cut.nodes)
    found = []
    for slot, name in enumerate(cut.inputs):
        node = next(n for n in graph.nodes if n.name == name)
        readers = [
            user
            for user in node.users
            if user.name in members
            or (is_quantizer(user, root) and any(reader.name in members for reader in user.users))
        ]
        found.append((min(readers), slot, node))
    return found


def _behind_placeholders(place: fx.Node) -> fx.Node:
    while place.op == "placeholder":
        place = place.next
    return place
