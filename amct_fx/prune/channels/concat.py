"""Concatenation: channels side by side, or the same channels along another axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amct_fx.prune.channels.atoms import Pin
from amct_fx.prune.channels.parameters import follow, is_made_of_parameters
from amct_fx.prune.channels.space import Space
from amct_fx.prune.channels.steps import Joined, Misfit, Replay, Step
from amct_fx.prune.channels.walk import Walk, fixed_atoms, source_of

if TYPE_CHECKING:
    from amct_fx.prune.channels.elementwise import Handler

__all__ = ["FUNCTIONS"]


@dataclass
class Concatenated(Step):
    """Tensors side by side along their channels; ``offsets`` in the full tensor."""

    node: fx.Node
    sources: tuple[Any, ...]
    widths: tuple[int, ...]
    space: Space

    def replay(self, state: Replay) -> None:
        """Put the places side by side."""
        parts, offset = [], 0
        for source, width in zip(self.sources, self.widths, strict=True):
            known = state.places.get(source)
            own = torch.arange(width) if known is None else known.flatten()
            if known is not None and own.numel() and int(own.max()) >= width:
                raise Misfit(self.node, self.space.atoms, "a part is wider than it was")
            parts.append(own + offset)
            offset += width
        shape = [1] * self.space.atoms.dim()
        shape[self.space.axis] = -1
        state.place(self.node, torch.cat(parts).reshape(shape), self.node, self.space)


def concat(walk: Walk, node: fx.Node) -> None:
    """Handle torch.cat."""
    walk.joining.add(node)
    tensors, dim = _arguments(node)
    dim = walk.fact(dim)
    _concat(walk, node, tensors, dim)


def stack(walk: Walk, node: fx.Node) -> None:
    """Handle torch.stack: all tensors have the same channels."""
    walk.joining.add(node)
    tensors, dim = _arguments(node)
    shape, dim = walk.shape(node), walk.fact(dim)
    keys, spaces, _ = _listed(walk, tensors)
    if spaces is None or shape is None or not isinstance(dim, int):
        walk.pin_inputs(node, "unknown_op", "its list of tensors is not plain")
        return
    live = [space for space in spaces if space is not None]
    if not live:
        walk.settle(node, None, node.all_input_nodes)
        return
    if not _join_all(walk, node, keys, spaces):
        return
    new = dim % len(shape)
    atoms = live[0].atoms.unsqueeze(new)
    axis = live[0].axis + (live[0].axis >= new)
    out = Space(atoms, axis, zero=_all_zero(spaces))
    walk.spaces[node] = out
    joined = Space(live[0].atoms, live[0].axis)
    walk.steps.append(Joined(node, tuple(keys), joined))
    walk.steps.append(_Unsqueezed(node, new, out))


@dataclass
class _Unsqueezed(Step):
    """The places of a value get a new axis."""

    node: fx.Node
    axis: int
    space: Space

    def replay(self, state: Replay) -> None:
        """Insert the axis."""
        places = state.places[self.node].unsqueeze(self.axis)
        state.place(self.node, places, self.node, self.space)


def _arguments(node: fx.Node) -> tuple[Any, Any]:
    dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim", node.kwargs.get("axis", 0))
    return source_of(node), dim


def _listed(walk: Walk, tensors: Any) -> tuple[list[Any], list[Space | None] | None, list[Any]]:
    """Return key, channels and shape of each tensor of a list, or of a node with several results.

    The channels are ``None`` if it is not a plain list.
    """
    if isinstance(tensors, fx.Node) and isinstance(walk.spaces.get(tensors), tuple):
        parts = walk.spaces[tensors]
        keys: list[Any] = [(tensors, i) for i in range(len(parts))]
        return keys, list(parts), [item.shape for item in walk.fact(tensors)]
    keys = list(tensors) if isinstance(tensors, (tuple, list)) else []
    shapes = [walk.shape(tensor) for tensor in keys]
    plain = isinstance(tensors, (tuple, list)) and None not in shapes
    return keys, [walk.space(tensor) for tensor in keys] if plain else None, shapes


def _concat(walk: Walk, node: fx.Node, tensors: Any, dim: Any) -> None:
    shape = walk.shape(node)
    keys, spaces, shapes = _listed(walk, tensors)
    if spaces is None or shape is None or not isinstance(dim, int):
        walk.pin_inputs(node, "unknown_op", "its list of tensors is not plain")
        return
    if all(space is None for space in spaces):
        walk.settle(node, None, node.all_input_nodes)
        return
    axis = dim % len(shape)
    if all(space is None or space.axes == (axis,) for space in spaces):
        _side_by_side(walk, node, keys, shapes, spaces, axis)
        return
    live = [space for space in spaces if space is not None]
    if any(axis in space.axes for space in live):
        walk.pin_inputs(node, "unknown_op", "it joins tensors along an axis with other channels")
        return
    if _join_all(walk, node, keys, spaces):
        out = Space(live[0].atoms, live[0].axis, zero=_all_zero(spaces))
        walk.spaces[node] = out
        walk.steps.append(Joined(node, tuple(keys), out))


def _side_by_side(
    walk: Walk,
    node: fx.Node,
    keys: list[Any],
    shapes: list[Any],
    spaces: list[Space | None],
    axis: int,
) -> None:
    widths = [shape[axis] for shape in shapes]
    atoms = torch.cat(
        [
            fixed_atoms(width) if space is None else space.atoms.flatten()
            for width, space in zip(widths, spaces, strict=True)
        ]
    )
    shape = [1] * len(shapes[0])
    shape[axis] = -1
    live = [space for space in spaces if space is not None]
    records = tuple(record for space in live for record in space.records)
    out = Space(atoms.reshape(shape), axis, zero=all(s.zero for s in live), records=records)
    walk.spaces[node] = out
    walk.steps.append(Concatenated(node, tuple(keys), tuple(widths), out))


def _all_zero(spaces: list[Space | None]) -> bool:
    """Say whether masked channels are 0 in all tensors."""
    return all(space is not None and space.zero for space in spaces)


def _join_all(
    walk: Walk, node: fx.Node, tensors: Sequence[Any], spaces: list[Space | None]
) -> bool:
    """Let all tensors have the same channels; pin them where that is not possible."""
    main = next(i for i, space in enumerate(spaces) if space is not None)
    axis = (spaces[main] or Space(torch.empty(0), 0)).axis
    for i, tensor in enumerate(tensors):
        if spaces[i] is None and is_made_of_parameters(walk, tensor):
            follow(walk, node, tensors[main], tensor, axis)
            spaces[i] = walk.space(tensor)
    live = [space for space in spaces if space is not None]
    first = live[0]
    same = all(s.atoms.shape == first.atoms.shape and s.axis == first.axis for s in live)
    if len(live) < len(spaces) or not same:
        walk.pin_inputs(node, "width_mismatch", "its tensors have unequal channels")
        return False
    pin = Pin("coupled_to_skipped", node.name, "it joins them with channels that stay")
    for other in live[1:]:
        walk.atoms.join(first.atoms, other.atoms, pin)
    return True


FUNCTIONS: dict[Any, Handler] = {torch.cat: concat, torch.stack: stack}
FUNCTIONS |= {getattr(torch, name): concat for name in ("concat", "concatenate")}
