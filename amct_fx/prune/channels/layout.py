"""Views, permutations, shuffles and repetitions: the same elements in another order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from amct_fx.prune.channels.ahead import united_ahead
from amct_fx.prune.channels.atoms import Pin
from amct_fx.prune.channels.elementwise import Handler, elementwise
from amct_fx.prune.channels.parts import take_parts
from amct_fx.prune.channels.rearrange import (
    Run,
    Shape,
    axes_only,
    dense_arguments,
    is_right,
    rearrange,
    same_call,
    unchanged,
)
from amct_fx.prune.channels.space import Space
from amct_fx.prune.channels.steps import Joined, Reduced, Replay, Step
from amct_fx.prune.channels.walk import fixed_atoms, source_of

if TYPE_CHECKING:
    from amct_fx.prune.channels.walk import Walk

__all__ = ["FUNCTIONS", "METHODS", "MODULES", "Expanded"]


def attribute(walk: Walk, node: fx.Node) -> None:
    """Handle ``getattr``: transposed views and shapes; other attributes are plain values."""
    source: Any = node.args[0]
    if node.args[1] in ("T", "mT"):
        rearrange(walk, node, same_call(walk, node), unchanged)
    elif node.args[1] in ("data",):
        walk.spaces[node] = walk.space(node.args[0])
        space = walk.space(node.args[0])
        if space is not None:
            walk.steps.append(Joined(node, (node.args[0],), space))
    elif node.args[1] in _RESULTS and isinstance(walk.spaces.get(source), tuple):
        take_parts(walk, node, walk.spaces[source], _RESULTS.index(str(node.args[1])))
    elif walk.shape(node) is not None or node.args[1] not in _OF_NO_CHANNELS:
        walk.pin_inputs(node, "unknown_op", f"attribute {node.args[1]!r} is not known")


_RESULTS = ("values", "indices")
_OF_NO_CHANNELS = {"shape", "ndim", "dtype", "device", "layout", "requires_grad", "is_cuda"}
"""Attributes of tensors that say nothing of the channels, or follow them."""


def view(walk: Walk, node: fx.Node) -> None:
    """Handle view and reshape, whose sizes follow the channels."""
    given = [item for value in (*node.args[1:], *node.kwargs.values()) for item in _items(value)]
    if not all(isinstance(item, (int, fx.Node)) for item in given):
        walk.pin_inputs(node, "unknown_op", "it changes the type of the elements")
        return

    def run(tensor: Tensor, sizes: list[Shape], state: Replay | None) -> list[Tensor]:
        return [tensor.reshape(sizes[0])]

    def arguments(state: Replay, sizes: list[Shape]) -> Any:
        return _with_sizes(walk, node, state, sizes[0])

    _rearrange_for_next(walk, node, run, arguments)


def _rearrange_for_next(walk: Walk, node: fx.Node, run: Run, arguments: Any) -> None:
    """Handle a view, whose channels are those of the layer that reads it."""
    source = source_of(node)
    own, united = walk.space(source), united_ahead(walk, node, run)
    if united is not None:
        walk.spaces[source] = united
    rearrange(walk, node, run, arguments, sized=True)
    if united is not None:
        walk.spaces[source] = own


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (tuple, list)) else [value]


def _with_sizes(walk: Walk, node: fx.Node, state: Replay, wanted: Shape) -> Any:
    """Return the arguments of a view with ``wanted`` sizes; what is right as it stands stays."""
    packed = len(node.args) > 1 and _is_packed(walk, node.args[1])
    key = next((k for k in ("shape", "size") if k in node.kwargs), None)
    if key is not None:
        given: Any = node.kwargs[key]
    else:
        given = node.args[1] if packed else node.args[1:]
    if isinstance(given, fx.Node):  # x.view(y.shape)
        now = state.number(state, given)
        if tuple(now) == tuple(wanted):
            return None
        given = list(wanted)
    else:
        given = _right_sizes(walk, state, given, wanted[len(wanted) - len(given) :])
    if key is not None:
        return node.args, {**node.kwargs, key: tuple(given)}
    return (node.args[0], tuple(given)) if packed else (node.args[0], *given), dict(node.kwargs)


def _right_sizes(walk: Walk, state: Replay, given: Sequence[Any], wanted: Shape) -> Shape:
    """Return ``wanted`` sizes; where what is given comes to the same, that."""
    return tuple(
        item if is_right(walk, state, item, size) else size
        for item, size in zip(given, wanted, strict=True)
    )


def _is_packed(walk: Walk, value: Any) -> bool:
    return isinstance(value, (tuple, list)) or (
        isinstance(value, fx.Node) and isinstance(walk.fact(value), tuple)
    )


def unflatten(walk: Walk, node: fx.Node) -> None:
    """Handle ``unflatten(x, dim, sizes)``."""
    module: Any = walk.module(node)
    named = {**dict(zip(("dim", "sizes"), node.args[1:], strict=False)), **node.kwargs}
    if module is not None:
        named = {"dim": module.dim, "sizes": module.unflattened_size}
    dim = dense_arguments(walk, named.get("dim"))
    rank = len(walk.shape(source_of(node)) or ())
    count = len(walk.shape(node) or ()) - rank + 1
    if not isinstance(dim, int) or count < 1 or "sizes" not in named:
        walk.pin_inputs(node, "unknown_op", "its sizes are not plain")
        return
    first = dim % rank
    space, shape = walk.space(source_of(node)), walk.shape(source_of(node)) or ()
    if module is not None:  # all calls of the module read one attribute
        alone = space is not None and space.axes == (first,)
        walk.tie(node, space.atoms.flatten() if space and alone else fixed_atoms(shape[first]))

    def run(tensor: Tensor, sizes: list[Shape], state: Replay | None) -> list[Tensor]:
        return [tensor.reshape(sizes[0])]

    def arguments(state: Replay, sizes: list[Shape]) -> Any:
        wanted = sizes[0][first : first + count]
        given = _items(named["sizes"])
        if len(given) == count:  # a size that is right follows the inputs
            wanted = _right_sizes(walk, state, given, wanted)
        if module is not None:
            state.attributes[walk.name(node), "unflattened_size"] = wanted
            return None
        return (source_of(node), named["dim"], wanted), {}

    _rearrange_for_next(walk, node, run, arguments)


@dataclass
class Expanded(Step):
    """Axes of size 1 are repeated; none of them holds channels."""

    walk: Walk
    node: fx.Node
    source: Any
    shape: Shape
    space: Space

    def replay(self, state: Replay) -> None:
        """Give the places their new rank, and the sizes of the channels their new value."""
        places = state.places[self.source]
        rank = self.space.atoms.dim()
        places = places.reshape((1,) * (rank - places.dim()) + tuple(places.shape))
        state.place(self.node, places, self.node, self.space)
        wanted = list(self.shape)
        wanted[self.space.axis] = places.shape[self.space.axis]
        changed = _with_sizes(self.walk, self.node, state, tuple(wanted))
        if changed is not None:
            state.arguments[self.node] = changed


def expand(walk: Walk, node: fx.Node) -> None:
    """Handle expand: the axes of the channels stay as they are."""
    space, shape = _stretched(walk, node), walk.shape(node)
    if space is not None and shape is not None:
        walk.steps.append(Expanded(walk, node, source_of(node), shape, space))


def repeat(walk: Walk, node: fx.Node) -> None:
    """Handle repeat: its numbers are factors, so nothing is rewritten."""
    source = source_of(node)
    before, out = walk.space(source), _stretched(walk, node)
    if before is None or out is None:
        return
    if out.axis != before.axis:
        walk.steps.append(Joined(node, (source,), out))
    else:
        axes = tuple(range(before.atoms.dim()))
        walk.steps.append(Reduced(node, source, node, out, axes))


def _stretched(walk: Walk, node: fx.Node) -> Space | None:
    """Give the result of expand or repeat its channels; ``None`` without any, or if it pins."""
    source = source_of(node)
    space, own, shape = walk.space(source), walk.shape(source), walk.shape(node)
    if space is None:
        walk.settle(node, None, node.all_input_nodes)
        return None
    shift = 0 if shape is None or own is None else len(shape) - len(own)
    if shape is None or own is None or any(own[a] != shape[a + shift] for a in space.axes):
        walk.pin_inputs(node, "width_mismatch", "it repeats channels")
        return None
    out = Space(space.aligned(len(shape)), space.axis + shift, zero=space.zero)
    walk.spaces[node] = out
    return out


def pixel_shuffle(walk: Walk, node: fx.Node) -> None:
    """Handle PixelShuffle: ``r * r`` channels in a row become one."""
    source = source_of(node)
    space, shape, out = walk.space(source), walk.shape(source), walk.shape(node)
    if (
        space is not None
        and shape is not None
        and out is not None
        and space.axes == (len(shape) - 3,)
    ):
        rows = space.atoms.reshape(out[-3], -1)
        pin = Pin("width_mismatch", node.name, "it spreads these channels over one")
        for column in range(1, rows.shape[1]):
            walk.atoms.join(rows[:, 0], rows[:, column], pin)
        first = rows[:, :1].expand(rows.shape).reshape(space.atoms.shape)
        united = Space(first, space.axis, zero=space.zero)
        walk.spaces[source] = united
        rearrange(walk, node, same_call(walk, node), unchanged)
        walk.spaces[source] = space
        return
    axes_only(walk, node)


_AXES = [
    "permute",
    "transpose",
    "swapaxes",
    "swapdims",
    "movedim",
    "moveaxis",
    "t",
    "squeeze",
    "unsqueeze",
    "flatten",
    "ravel",
    "flip",
    "channel_shuffle",
    "native_channel_shuffle",
    "pixel_unshuffle",
    "adjoint",
    "fliplr",
    "flipud",
    "roll",
]
FUNCTIONS: dict[Any, Handler] = {
    getattr(scope, name): axes_only
    for name in _AXES
    for scope in (torch, F)
    if hasattr(scope, name)
}
FUNCTIONS |= {torch.reshape: view}
FUNCTIONS |= {getattr: attribute, F.pixel_shuffle: pixel_shuffle}
FUNCTIONS |= {torch.pixel_shuffle: pixel_shuffle, torch.unflatten: unflatten}
METHODS: dict[str, Handler] = {name: axes_only for name in _AXES}
METHODS |= {"view": view, "reshape": view}
METHODS |= {"expand": expand, "repeat": repeat, "unflatten": unflatten, "expand_as": elementwise}
MODULES: dict[type[nn.Module], Handler] = {nn.Flatten: axes_only, nn.Unflatten: unflatten}
MODULES |= {nn.PixelShuffle: pixel_shuffle, nn.PixelUnshuffle: axes_only}
MODULES |= {nn.ChannelShuffle: axes_only}
