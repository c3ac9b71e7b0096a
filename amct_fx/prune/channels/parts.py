"""Parts of tensors: split, chunk, unbind and slices, whose bounds follow the channels."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from amct_fx.prune.channels.rearrange import (
    Shape,
    dense_arguments,
    is_right,
    rearrange,
    same_call,
    source_of,
    unchanged,
)
from amct_fx.prune.channels.steps import Reduced, Replay

if TYPE_CHECKING:
    from amct_fx.prune.channels.elementwise import Handler
    from amct_fx.prune.channels.walk import Walk

__all__ = ["FUNCTIONS", "METHODS"]


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


def chunk(walk: Walk, node: fx.Node) -> None:
    """Handle chunk and unbind: equal parts, which stay equal."""
    text = _equal(walk, node, f"parts of {node.name}")
    if not text and walk.space(source_of(node)) is not None:
        walk.pin_inputs(node, "width_mismatch", "its parts are unequal")
        return
    rearrange(walk, node, same_call(walk, node), unchanged, equal_parts=text)


def getitem(walk: Walk, node: fx.Node) -> None:
    """Handle ``value[index]``: a part of several results, or a slice."""
    source, index = node.args
    value = walk.spaces.get(source) if isinstance(source, fx.Node) else None
    if isinstance(value, tuple) and isinstance(index, (int, slice)):
        _take_parts(walk, node, value, index)
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
        walk.pin_inputs(node, "data_dependent_shape", "it is indexed by a tensor or list")
        return
    _slice(walk, node, items)


def _take_parts(walk: Walk, node: fx.Node, value: tuple[Any, ...], index: int | slice) -> None:
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


def _slice(walk: Walk, node: fx.Node, items: list[Any]) -> None:
    """Handle an index of slices, numbers, ``None`` and ``...``."""
    source = node.args[0]
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
        if whole:
            return None
        changed = list(items)
        first, last = bounds(state)
        assert place is not None
        changed[place] = slice(first, last)
        return (source, tuple(changed)), {}

    rearrange(walk, node, run, arguments)
    length, size = stop - start, shape[space.axis]
    if not whole and size % length == 0 and start % length == 0 and len(space.axes) == 1:
        walk.balance(node, space.atoms.flatten().split(length), f"the parts of {source}")


FUNCTIONS: dict[Any, Handler] = {
    torch.split: split,
    torch.chunk: chunk,
    torch.unbind: chunk,
    operator.getitem: getitem,
}
METHODS: dict[str, Handler] = {"split": split, "chunk": chunk, "unbind": chunk}
