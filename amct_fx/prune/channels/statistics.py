"""Norms whose statistics run over the channels: ``norm_axis="mask_aware"``.

Removing channels changes such statistics, so the channels stay, unless the norm counts only those
that stay while training (:mod:`amct_fx.prune.masked_norms`). Then its entries follow the channels
as those of a batch norm do. Source: spec/pruning.md sections 3.1 and 5.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from amct_fx.prune.channels.sites import Site
from amct_fx.prune.channels.space import Space
from amct_fx.prune.channels.steps import Attach, Joined, Misfit, Replay, Step, along_axis
from amct_fx.prune.channels.walk import source_of

if TYPE_CHECKING:
    from amct_fx.prune.channels.walk import Walk

__all__ = ["NormShape", "NormUse", "count_kept", "count_kept_in_groups", "is_mask_aware"]


@dataclass(frozen=True)
class NormUse:
    """A norm that must count only the channels that stay.

    Attributes:
        layer: Name of the module; of the traced part for a function.
        call: Name of the node of a function, else empty.
        shape: The normalised shape; of a group norm the number of channels.
        axis: The axis of the channels in it.
        atoms: The channels.
    """

    layer: str
    call: str
    shape: tuple[int, ...]
    axis: int
    atoms: Tensor


@dataclass
class NormShape(Step):
    """The normalised shape follows the channels: an attribute, or an argument of a function."""

    node: fx.Node
    source: Any
    shape: tuple[int, ...]
    axis: int
    path: str | None

    def replay(self, state: Replay) -> None:
        """Write the shape."""
        shape = list(self.shape)
        shape[self.axis] = state.places[self.source].numel()
        if self.path is not None:
            state.attributes[self.path, "normalized_shape"] = tuple(shape)
        if self.node.op == "call_module":
            return
        args, kwargs = state.arguments.get(self.node, (self.node.args, self.node.kwargs))
        if "normalized_shape" in kwargs:
            kwargs = {**kwargs, "normalized_shape": tuple(shape)}
        else:
            args = (*args[:1], tuple(shape), *args[2:])
        state.arguments[self.node] = args, dict(kwargs)


@dataclass
class InGroups(Step):
    """Channels stay in their groups, equally many in each."""

    node: fx.Node
    source: Any
    space: Space
    groups: int

    def replay(self, state: Replay) -> None:
        """Check the places of what stays."""
        places = along_axis(state.places[self.source], self.space, self.node)
        each = places.numel() // self.groups
        group = places // (self.space.atoms.numel() // self.groups)
        if not torch.equal(group, torch.arange(self.groups).repeat_interleave(each)):
            raise Misfit(self.node, self.space.atoms, "its groups would keep unequal numbers")


def is_mask_aware(walk: Walk, space: Space) -> bool:
    """Say whether a norm may count only the channels of a tensor that stay."""
    options = walk.options
    return options.norm_axis == "mask_aware" and options.mode == "native" and len(space.axes) == 1


def count_kept(
    walk: Walk,
    node: fx.Node,
    space: Space,
    shape: Sequence[int],
    axis: int,
    tensors: Sequence[Tensor],
) -> None:
    """Let a layer norm or root mean square norm count only the channels that stay.

    Args:
        walk: The analysis.
        node: The norm.
        space: The channels of its input.
        shape: Its normalised shape.
        axis: The axis of the channels in that shape.
        tensors: Its weight and bias, of that shape.
    """
    path = _path(walk, node, tensors)
    _attach(walk, node, space, tuple(shape), axis, tensors)
    walk.steps.append(NormShape(node, source_of(node), tuple(shape), axis, path))


def count_kept_in_groups(
    walk: Walk, node: fx.Node, space: Space, groups: int, tensors: Sequence[Tensor]
) -> None:
    """Let a group norm count only the channels of each group that stay, equally many."""
    count = space.atoms.numel()
    walk.balance(node, space.atoms.flatten().chunk(groups), f"{groups} groups of {node.name}")
    walk.steps.append(InGroups(node, source_of(node), space, groups))
    _attach(walk, node, space, (count,), 0, tensors)
    if node.op == "call_module":
        attributes = ((walk.name(node), "num_channels"),)
        walk.steps.append(Attach(node, source_of(node), space, (), attributes))


def _attach(
    walk: Walk,
    node: fx.Node,
    space: Space,
    shape: tuple[int, ...],
    axis: int,
    tensors: Sequence[Tensor],
) -> None:
    atoms, source = space.atoms.flatten(), source_of(node)
    keys = tuple(walk.bind(node, Site("", "", axis, "attached", atoms), t) for t in tensors)
    out = Space(space.atoms, space.axis, zero=False)
    walk.spaces[node] = out
    walk.steps.append(Attach(node, source, space, keys))
    walk.steps.append(Joined(node, (source,), out))
    called = node.op == "call_module"
    if called:
        walk.tie(node, atoms)
    layer = walk.name(node) if called else walk.region(node).name
    walk.norms.append(NormUse(layer, "" if called else node.name, shape, axis, atoms))


def _path(walk: Walk, node: fx.Node, tensors: Sequence[Tensor]) -> str | None:
    """Return the name of the norm whose attribute follows, also if a function reads its weight."""
    if node.op == "call_module":
        return walk.name(node)
    for tensor in tensors[:1]:
        path = walk.tensors[id(tensor)].rpartition(".")[0]
        if hasattr(walk.model.get_submodule(path), "normalized_shape"):
            return path
    return None
