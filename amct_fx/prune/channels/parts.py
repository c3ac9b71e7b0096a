"""Parts of tensors: split, chunk, unbind and slices, whose bounds follow the channels."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from amct_fx.graph.ranks import expect_parts
from amct_fx.prune.channels.rearrange import (
    Shape,
    axes_only,
    dense_arguments,
    is_right,
    rearrange,
    same_call,
    unchanged,
)
from amct_fx.prune.channels.space import Space
from amct_fx.prune.channels.steps import Reduced, Replay, Step
from amct_fx.prune.channels.walk import source_of

if TYPE_CHECKING:
    from amct_fx.prune.channels.elementwise import Handler
    from amct_fx.prune.channels.walk import Walk

__all__ = ["FUNCTIONS", "METHODS", "take_parts"]


def split(walk: Walk, node: fx.Node) -> None:
    """Handle split by size or sizes."""
    dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
    dim = dense_arguments(walk, dim)
    key = next((k for k in ("split_size_or_sections", "split_size") if k in node.kwargs), None)
    if not isinstance(dim, int):
        walk.pin_inputs(node, "unknown_op", "its axis is not plain")
        return

    def run(tensor: Tensor, sizes: list[Shape], state: Replay | None) -> list[Tensor]:
        return list(torch.split(tensor, [size[dim] for size in sizes], dim))

    def arguments(state: Replay, sizes: list[Shape]) -> Any:
        lengths = [size[dim] for size in sizes]
        same = all(length == lengths[0] for length in lengths)
        given = node.kwargs[key] if key else node.args[1]
        plain = isinstance(given, (int, fx.Node)) and not isinstance(walk.fact(given), tuple)
        value: Any = lengths[0] if plain and same else lengths
        if plain and same and is_right(walk, state, given, lengths[0]):
            return None
        if isinstance(given, (tuple, list)) and len(given) == len(lengths):
            value = [
                item if is_right(walk, state, item, length) else length
                for item, length in zip(given, lengths, strict=True)
            ]
        if key:
            return node.args, {**node.kwargs, key: value}
        return (node.args[0], value, *node.args[2:]), dict(node.kwargs)

    text = _equal(walk, node, f"parts of {node.name}")
    rearrange(walk, node, run, arguments, equal_parts=text, sized=True)


def _equal(walk: Walk, node: fx.Node, text: str) -> str:
    """Return ``text`` if all parts have one size, else nothing."""
    fact = walk.fact(node)
    shapes = {item.shape for item in fact} if isinstance(fact, tuple) else set()
    return text if len(shapes) == 1 else ""


def unbind(walk: Walk, node: fx.Node) -> None:
    """Handle unbind: every index of an axis without channels."""
    text = _equal(walk, node, f"parts of {node.name}")
    rearrange(walk, node, same_call(walk, node), unchanged, equal_parts=text)


def chunk(walk: Walk, node: fx.Node) -> None:
    """Handle chunk: equal parts stay equal; others become those of a split if they must."""

    def plain(total: int, given: Any) -> list[int]:
        return [len(part) for part in torch.arange(total).chunk(given)]

    def arguments(node: fx.Node, state: Replay, lengths: list[int], axis: int) -> Any:
        state.targets[node] = "split" if node.op == "call_method" else torch.split
        return (source_of(node), lengths, axis), {}

    _divide(walk, node, ("chunks",), plain, arguments)


def tensor_split(walk: Walk, node: fx.Node) -> None:
    """Handle tensor_split, by a number of parts or by the places of the cuts."""

    def plain(total: int, given: Any) -> list[int]:
        return [len(part) for part in torch.arange(total).tensor_split(given)]

    def arguments(node: fx.Node, state: Replay, lengths: list[int], axis: int) -> Any:
        places = tuple(accumulate(lengths[:-1]))
        return (source_of(node), places, axis), {}

    _divide(walk, node, ("indices_or_sections", "indices", "sections"), plain, arguments)


def _divide(
    walk: Walk,
    node: fx.Node,
    names: tuple[str, ...],
    plain: Callable[[int, Any], list[int]],
    changed: Callable[[fx.Node, Replay, list[int], int], Any],
) -> None:
    """Handle an operation that divides an axis as its first argument says.

    Args:
        walk: The analysis.
        node: The operation.
        names: Names of the argument that says how.
        plain: Returns the lengths that the operation makes of an axis.
        changed: Returns arguments for other lengths.
    """
    given = node.args[1] if len(node.args) > 1 else None
    given = dense_arguments(walk, next((node.kwargs[n] for n in names if n in node.kwargs), given))
    dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
    dim, rank = dense_arguments(walk, dim), len(walk.shape(source_of(node)) or ())
    listed = isinstance(given, (tuple, list)) and all(isinstance(i, int) for i in given)
    if not isinstance(dim, int) or not (isinstance(given, int) or listed) or not rank:
        walk.pin_inputs(node, "unknown_op", "its parts are not plain")
        return
    axis = dim % rank

    def run(tensor: Tensor, sizes: list[Shape], state: Replay | None) -> list[Tensor]:
        return list(torch.split(tensor, [size[axis] for size in sizes], axis))

    def arguments(state: Replay, sizes: list[Shape]) -> Any:
        lengths = [size[axis] for size in sizes]
        if plain(sum(lengths), given) == lengths:
            return None
        return changed(node, state, lengths, axis)

    text = _equal(walk, node, f"parts of {node.name}")
    rearrange(walk, node, run, arguments, equal_parts=text, sized=True)


def getitem(walk: Walk, node: fx.Node) -> None:
    """Handle ``value[index]``: a part of several results, or a slice."""
    source, index = node.args
    value = walk.spaces.get(source) if isinstance(source, fx.Node) else None
    if isinstance(value, tuple) and isinstance(index, (int, slice)):
        take_parts(walk, node, value, index)
        return
    if isinstance(walk.fact(source), tuple) or walk.space(source) is None:
        known = [source] if isinstance(source, fx.Node) else []
        if isinstance(value, tuple):
            walk.pin_inputs(node, "unknown_op", "it takes several parts")
        else:
            walk.settle(node, None, known)
        return
    items = list(index) if isinstance(index, tuple) else [index]
    if any(_is_array(walk, item) for item in items):
        _take(walk, node, items)
        return

    def arguments(place: int, first: int, last: int) -> Any:
        changed = list(items)
        changed[place] = slice(first, last)
        return (source, tuple(changed)), {}

    _slice(walk, node, items, arguments)


def narrow(walk: Walk, node: fx.Node) -> None:
    """Handle ``narrow(x, dim, start, length)`` as the slice that it is."""
    names = ("dim", "start", "length")
    given = {**dict(zip(names, node.args[1:], strict=False)), **node.kwargs}
    dim, start, length = (dense_arguments(walk, given.get(name)) for name in names)
    source, rank = source_of(node), len(walk.shape(source_of(node)) or ())
    if walk.space(source) is None or not all(isinstance(i, int) for i in (dim, start, length)):
        walk.pin_inputs(node, "unknown_op", "its bounds are not plain")
        return
    stop = None if start + length == 0 else start + length  # the last ones
    items = [slice(None)] * (dim % rank) + [slice(start, stop)]

    def arguments(place: int, first: int, last: int) -> Any:
        if place != dim % rank:
            return None
        return (source, place, first, last - first), {}

    _slice(walk, node, items, arguments)


def take_parts(walk: Walk, node: fx.Node, value: tuple[Any, ...], index: int | slice) -> None:
    """Handle one result, or a slice, of a node with several."""
    source: Any = node.args[0]
    places = range(len(value))[index]
    taken = value[index]
    walk.settle(node, taken, [source])
    keys = [(node, i) for i in range(len(places))] if isinstance(places, range) else [node]
    numbers = places if isinstance(places, range) else [places]
    for key, number in zip(keys, numbers, strict=True):
        part = value[number]
        if part is not None:
            axes = tuple(range(part.atoms.dim()))
            walk.steps.append(Reduced(node, (source, number), key, part, axes))


def _is_array(walk: Walk, item: Any) -> bool:
    return isinstance(item, (list, tuple)) or walk.shape(item) is not None


def _take(walk: Walk, node: fx.Node, items: list[Any]) -> None:
    """Handle an index that takes places of one axis, named by a list or tensor."""
    source = node.args[0]
    space, own, shape = walk.space(source), walk.shape(source), walk.shape(node)
    assert space is not None
    assert own is not None
    places = [i for i, item in enumerate(items) if _is_array(walk, item)]
    taken = [item for i, item in enumerate(items) if i not in places]
    rest = len(own) - sum(item is not Ellipsis for item in items)
    axis = places[0] + (rest - 1 if Ellipsis in taken[: places[0]] else 0)
    whole = all(item is Ellipsis or item == slice(None) for item in taken)
    index = _index_shape(walk, items[places[0]])
    wanted = (*own[:axis], *index, *own[axis + 1 :])
    if len(places) > 1 or not whole or axis in space.axes or shape != wanted:
        walk.pin_inputs(node, "data_dependent_shape", "a tensor or list says which it takes")
        return
    more = len(index) - 1
    axes = tuple(a if a < axis else a + more for a in range(len(own)))
    sizes = [1] * len(wanted)
    for a in space.axes:
        sizes[axes[a]] = space.atoms.shape[a]
    out = Space(space.atoms.reshape(sizes), axes[space.axis], zero=space.zero)
    walk.spaces[node] = out
    walk.steps.append(Taken(node, source, out, axes))


def _index_shape(walk: Walk, item: Any) -> Shape:
    return (len(item),) if isinstance(item, (tuple, list)) else (walk.shape(item) or ())


@dataclass
class Taken(Step):
    """``axes`` has the new place of each axis of the source; none of the new ones has channels."""

    node: fx.Node
    source: Any
    space: Space
    axes: tuple[int, ...]

    def replay(self, state: Replay) -> None:
        """Keep the places on their new axes."""
        places = state.places[self.source]
        sizes = [1] * self.space.atoms.dim()
        for axis, length in zip(self.axes, places.shape, strict=True):
            sizes[axis] = length
        state.place(self.node, places.reshape(sizes), self.node, self.space)


def _slice(
    walk: Walk, node: fx.Node, items: list[Any], changed: Callable[[int, int, int], Any]
) -> None:
    """Handle an index of slices, numbers, ``None`` and ``...``.

    Args:
        walk: The analysis.
        node: The operation.
        items: The index.
        changed: Returns the arguments for other bounds: of which item, first, and last.
    """
    source = source_of(node)
    space, shape = walk.space(source), walk.shape(source)
    assert space is not None
    assert shape is not None
    axis, place = 0, None
    skipped = len(shape) - sum(item is not None and item is not Ellipsis for item in items)
    for i, item in enumerate(items):
        if item is Ellipsis:
            axis += skipped
        elif item is not None:
            if axis == space.axis:
                place = i
            axis += 1
    taken = None if place is None else dense_arguments(walk, items[place])
    if taken is not None and not isinstance(taken, slice):
        walk.pin_inputs(node, "unknown_op", "it takes one channel")
        return
    start, stop, step = (taken or slice(None)).indices(shape[space.axis])
    whole = (start, stop, step) == (0, shape[space.axis], 1)
    if step != 1 or stop <= start:
        walk.pin_inputs(node, "unknown_op", "it takes some channels only, with gaps")
        return
    dense = dense_arguments(walk, items)

    def index(first: int, last: int) -> tuple[Any, ...]:
        return tuple(
            slice(first, last) if i == place and not whole else item for i, item in enumerate(dense)
        )

    def run(tensor: Tensor, sizes: list[Shape], state: Replay | None) -> list[Tensor]:
        return [tensor[index(*(bounds(state) if state else (start, stop)))]]

    def bounds(state: Replay) -> tuple[int, int]:
        row = state.stays(space.atoms).movedim(space.axis, -1).reshape(-1, shape[space.axis])[0]
        return int(row[:start].sum()), int(row[:stop].sum())

    def arguments(state: Replay, sizes: list[Shape]) -> Any:
        if place is None or (whole and node.target is operator.getitem):
            return None
        return changed(place, *bounds(state))

    rearrange(walk, node, run, arguments)
    length, size = stop - start, shape[space.axis]
    if not whole and size % length == 0 and start % length == 0 and len(space.axes) == 1:
        walk.balance(node, space.atoms.flatten().split(length), f"the parts of {source}")


FUNCTIONS: dict[Any, Handler] = {
    torch.split: split,
    torch.chunk: chunk,
    torch.unbind: unbind,
    torch.tensor_split: tensor_split,
    torch.narrow: narrow,
    torch.select: axes_only,
    operator.getitem: getitem,
    expect_parts: lambda walk, node: None,
}
METHODS: dict[str, Handler] = {
    "split": split,
    "chunk": chunk,
    "unbind": unbind,
    "tensor_split": tensor_split,
    "narrow": narrow,
    "select": axes_only,
}
