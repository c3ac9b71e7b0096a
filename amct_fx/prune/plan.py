"""The prune plan: what is cut, what stays and why. Plain data, for people and for files.

Source: spec/pruning.md section 7.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from amct_fx.errors import LayerNameError, PruneError, did_you_mean
from amct_fx.prune.choices import as_mask, check_choice, unit_stays, whole_numbers
from amct_fx.prune.levels import Level, check_levels
from amct_fx.prune.plan_costs import cost_after, parameters_gone, remaining_sizes
from amct_fx.prune.plan_parts import LayerCost, Member, NormMask, PinnedLayer, PruneGroup, add_mask

if TYPE_CHECKING:
    from amct_fx.graph.shapes import ShapeFacts
    from amct_fx.prune.options import PruneOptions

__all__ = ["PrunePlan"]


@dataclass(frozen=True)
class PrunePlan:
    """What pruning does to a model: the result of the analysis alone.

    ``print`` it, keep it as JSON, compare two, or choose other channels with :meth:`with_kept`.

    Attributes:
        groups: Channels that are chosen together.
        pinned: Every layer that the configuration wants to prune and that stays, with the reason.
        costs: Every call of a layer.
        parameters: Number of parameters before.
        parameters_after: The same after.
        options: The options of the analysis.
        settings: The setting of each enabled layer, by name.
        inputs: Shape and dtype of the example inputs.
        levels: Blocks that must keep equal counts although several groups make them.
        facts: Shapes of the values in the graphs, for the removal; not in the JSON.
    """

    groups: tuple[PruneGroup, ...]
    pinned: tuple[PinnedLayer, ...]
    costs: tuple[LayerCost, ...]
    parameters: int
    parameters_after: int
    options: PruneOptions
    settings: Mapping[str, Any] = field(repr=False)
    inputs: tuple[tuple[tuple[int, ...], str], ...] = ()
    levels: tuple[Level, ...] = ()
    facts: ShapeFacts | None = field(default=None, repr=False, compare=False)

    def __deepcopy__(self, memo: dict[int, Any]) -> PrunePlan:
        """Return the plan itself: it never changes, and has many numbers."""
        return self

    # Numbers

    @property
    def macs(self) -> int:
        """Multiply-accumulates before, for one example."""
        return sum(cost.macs for cost in self.costs)

    @property
    def macs_after(self) -> int:
        """Multiply-accumulates after, for one example."""
        return sum(cost.macs_after for cost in self.costs)

    def __getitem__(self, producer: str) -> PruneGroup:
        """Return the first group of a producer.

        Raises:
            LayerNameError: If none of its channels may go.
        """
        for group in self.groups:
            if producer in group.producers:
                return group
        names = [name for group in self.groups for name in group.producers]
        message = f"no channel of {producer!r} may go{did_you_mean(producer, names)}"
        raise LayerNameError(message)

    # Masks

    def kept_rows(self) -> dict[str, Tensor]:
        """Return the output channels that stay, of every layer that loses some.

        Returns:
            int64 indices by name of the layer, in ascending order.
        """
        return self._kept("row", lambda member: member.layer)

    def row_sizes(self) -> dict[str, int]:
        """Return the number of output channels of every layer that may lose some, by name."""
        return {
            member.layer: member.length
            for _, member in self._members("row")
            if member.parameter == "weight"
        }

    def kept_inputs(self) -> dict[str, Tensor]:
        """Return the input channels that stay, of every layer whose input loses some.

        Returns:
            int64 indices along axis 1 (of a Linear: the last axis) by name of the layer.
        """
        return self._kept("input", lambda member: member.layer)

    def column_masks(self) -> dict[str, Tensor]:
        """Return the masks that make the full model compute what the pruned one does.

        Returns:
            bool tensors, true where a weight stays, by name of the parameter; they broadcast to it.
            Besides the columns of consumers the rows and biases of producers whose channels end in
            a product without a weight. Source: spec/pruning.md section 5.1.
        """
        masks: dict[str, Tensor] = {}
        for group in self.groups:
            for member in group.members:
                wanted = member.role == "column" or (member.role == "row" and group.contracted)
                if wanted and group.cut:
                    add_mask(masks, member, group.cut)
        return masks

    def row_masks(self) -> dict[str, Tensor]:
        """Return the masks of the producers' rows and biases that are safe to train with.

        Returns:
            As :meth:`column_masks`; empty with ``row_masks=False``.
        """
        masks: dict[str, Tensor] = {}
        for group in self.groups if self.options.row_masks else ():
            for member in group.members:
                if member.role == "row" and group.cut and group.rows_maskable:
                    add_mask(masks, member, group.cut)
        return masks

    def norm_masks(self) -> list[NormMask]:
        """Return what norms count whose statistics run over channels that go.

        See ``norm_axis="mask_aware"``.
        """
        masks: dict[str, Tensor] = {}
        names: dict[str, tuple[str, str]] = {}
        for group, member in self._members("norm"):
            if group.cut:
                add_mask(masks, member, group.cut)
                names[member.key] = member.layer, member.parameter
        return [NormMask(*names[key], mask) for key, mask in masks.items()]

    def _kept(self, role: str, name: Any) -> dict[str, Tensor]:
        gone: dict[str, set[int]] = defaultdict(set)
        sizes: dict[str, int] = {}
        for group in self.groups:
            cut = group.cut
            for member in group.members:
                if member.role != role or (role == "row" and member.parameter != "weight"):
                    continue
                sizes[name(member)] = member.length
                gone[name(member)].update(chain.from_iterable(member.positions[u] for u in cut))
        return {
            key: torch.tensor(sorted(set(range(sizes[key])) - cut), dtype=torch.long)
            for key, cut in gone.items()
            if cut
        }

    def _members(self, role: str) -> Iterator[tuple[PruneGroup, Member]]:
        for group in self.groups:
            for member in group.members:
                if member.role == role:
                    yield group, member

    # Other choices

    def with_kept(self, group: int | str, kept: Sequence[int]) -> PrunePlan:
        """Return a plan in which a group keeps other units.

        Args:
            group: Number of the group, or the name of a producer.
            kept: Indices of the units that stay.

        Raises:
            PruneError: If there is no such group, the indices are not units of it, none is left,
                or blocks would keep unequal counts.
        """
        found = self._group(group)
        chosen = whole_numbers(kept, f"the units that group {group!r} keeps")
        check_choice(found, chosen)
        groups = tuple(
            replace(other, kept=chosen) if other is found else other for other in self.groups
        )
        return replace(self, groups=groups).with_costs()

    def with_rows(self, rows: Mapping[str, Tensor]) -> PrunePlan:
        """Return a plan that keeps given output channels.

        Args:
            rows: By name of the layer either a bool or uint8 mask over its output channels, or the
                indices that stay. Groups without a layer in it keep their choice.

        Raises:
            PruneError: If the channels do not fit: a layer has none that may go, coupled layers
                keep different ones, blocks would keep unequal counts.
        """
        sizes = self.row_sizes()
        for name in rows:
            if name not in sizes:
                raise self._unknown(name, sizes)
        stays = {name: as_mask(sizes, name, value) for name, value in rows.items()}
        plan = self
        for group in self.groups:
            chosen = [unit for unit in range(group.channels) if unit_stays(group, unit, stays)]
            if any(name in stays for name in group.producers):
                plan = plan.with_kept(group.id, chosen)
        kept = plan.kept_rows()
        for name, mask in stays.items():
            left = kept.get(name, torch.arange(mask.numel()))
            if not torch.equal(left, mask.nonzero().flatten()):
                message = f"layer {name!r} has channels among those to cut that must stay"
                raise PruneError(message)
        plan.check()
        return plan

    def _group(self, group: int | str) -> PruneGroup:
        """Return a group by its number, or by a producer."""
        named = [g for g in self.groups if group == g.id or group in g.producers]
        if named:
            return named[0]
        if isinstance(group, str):
            raise self._unknown(group, [name for g in self.groups for name in g.producers])
        message = f"the plan has {len(self.groups)} groups, numbered from 0, and none is {group!r}"
        raise PruneError(message)

    def _unknown(self, name: str, known: Iterable[str]) -> PruneError:
        """Return the error for a layer that loses no channels."""
        pinned = next((layer for layer in self.pinned if layer.name == name), None)
        why = f": {pinned.code}: {pinned.text}" if pinned else did_you_mean(name, known)
        return PruneError(f"layer {name!r} has no output channels that may be cut{why}")

    def check(self) -> None:
        """Raise unless the groups keep units of theirs, in counts that fit each other.

        Prepare, removal and :meth:`with_rows` check it; :meth:`with_kept` cannot, as it changes one
        group after the other.

        Raises:
            PruneError: Names the operation that needs equal counts, the groups, and their counts;
                or a group whose kept units do not exist.
        """
        for group in self.groups:
            check_choice(group, tuple(sorted(group.kept)))
        kept = {group.id: len(group.kept) for group in self.groups}
        check_levels(self.levels, kept, {group.id: group.producers[0] for group in self.groups})

    def with_costs(self) -> PrunePlan:
        """Return the plan with costs that fit its choice."""
        sizes = remaining_sizes(self)
        costs = tuple(cost_after(cost, sizes) for cost in self.costs)
        gone = parameters_gone(self, sizes)
        return replace(self, costs=costs, parameters_after=self.parameters - gone)

    # Text

    def __str__(self) -> str:
        """Return the groups, the layers that stay with their reasons, and the totals."""
        lines = [str(group) for group in self.groups]
        lines += [f"stays {layer}" for layer in self.pinned]
        lines += [
            f"2:4 {cost.name}: {cost.density:.3g} of the weights"
            for cost in self.costs
            if cost.density < 1
        ]
        lines.append(
            f"parameters {self.parameters:,} -> {self.parameters_after:,}, "
            f"MACs {self.macs:,} -> {self.macs_after:,}"
        )
        return "\n".join(lines)

    def diff(self, other: PrunePlan) -> str:
        """Say what ``other`` does otherwise, one line each; empty if nothing.

        Args:
            other: A plan for the same model.
        """
        lines = []
        mine, theirs = (
            {(g.producers, g.members[0].positions): g for g in plan.groups}
            for plan in (self, other)
        )
        for key in dict.fromkeys([*mine, *theirs]):
            left, right = mine.get(key), theirs.get(key)
            if left is None or right is None:
                lines.append(f"{'+' if left is None else '-'} {right or left}")
            elif left.kept != right.kept:
                name = ", ".join(left.producers)
                lines.append(f"~ {name}: keeps {list(left.kept)} -> {list(right.kept)}")
        before, after = ({str(layer) for layer in plan.pinned} for plan in (self, other))
        lines += [f"- stays {layer}" for layer in sorted(before - after)]
        lines += [f"+ stays {layer}" for layer in sorted(after - before)]
        return "\n".join(lines)

    def to_json(self, *, indent: int | None = None) -> str:
        """Return the plan as JSON; :meth:`from_json` reads it back."""
        from amct_fx.prune.plan_json import plan_to_json

        return plan_to_json(self, indent=indent)

    @classmethod
    def from_json(cls, text: str) -> PrunePlan:
        """Read a plan that :meth:`to_json` wrote.

        Raises:
            PruneError: If the text is no such plan.
        """
        from amct_fx.prune.plan_json import plan_from_json

        return plan_from_json(text)
