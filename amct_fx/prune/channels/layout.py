"""Views, permutations, splits, slices: the same elements in another order.

The operation itself runs on an array of numbers, once for the full tensor and once for what
remains of it, so shuffles and flattens need no rule of their own. Source: spec/pruning.md section
3.3.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.node import map_arg

from amct_fx.prune.channels.atoms import Pin
from amct_fx.prune.channels.elementwise import Handler, elementwise
from amct_fx.prune.channels.space import Space, compressed
from amct_fx.prune.channels.steps import Joined, Misfit, Reduced, Replay, Step

if TYPE_CHECKING:
    from amct_fx.prune.channels.walk import Walk

__all__ = ["FUNCTIONS", "METHODS", "MODULES"]

Shape = tuple[int, ...]
Run = Callable[[Tensor, list[Shape], "Replay | None"], list[Tensor]]


@dataclass
class Rearranged(Step):
    """An operation that moves elements; ``sizes`` says how its arguments follow the channels.

    Attributes:
        node: The operation.
        source: Its input.
        shape: Full shape of the input.
        space: Channels of the input.
        parts: The results: for each its key, its full shape and its channels (``None``: fixed).
        moved: For each result the places in the input from which its elements come.
        run: Runs the operation on a tensor, for given sizes of the results; the last argument is
            the replay, ``None`` for the full tensor.
        arguments: Returns the arguments for given sizes of the results, or ``None`` if they need
            no change.
    """

    node: fx.Node
    source: Any
    shape: Shape
    space: Space
    parts: tuple[tuple[Any, Shape, Space | None], ...]
    moved: tuple[Tensor, ...]
    run: Run
    arguments: Callable[[Replay, list[Shape]], Any]

    def replay(self, state: Replay) -> None:
        """Run the operation on the places that remain."""
        places = _expanded(state.places[self.source], self.space, self.shape)
        sizes = [self._sizes(state, shape, space) for _, shape, space in self.parts]
        numbers = torch.arange(places.numel()).reshape(places.shape)
        try:
            results = self.run(numbers, sizes, state)
        except RuntimeError as error:
            raise Misfit(self.node, self.space.atoms, "its sizes do not fit the rest") from error
        for (value, shape, space), moved, result, size in zip(
            self.parts, self.moved, results, sizes, strict=True
        ):
            if tuple(result.shape) != tuple(size):
                raise Misfit(self.node, self.space.atoms, "its sizes do not fit the rest")
            self._place(state, value, shape, space, moved, places.flatten()[result])
        changed = self.arguments(state, sizes)
        if changed is not None:
            state.arguments[self.node] = changed

    def _sizes(self, state: Replay, shape: Shape, space: Space | None) -> Shape:
        """Return the shape of a result after removal."""
        if space is None:
            return shape
        stays = state.stays(space.atoms)
        axis = space.axis
        moved = stays.movedim(axis, -1).reshape(-1, stays.shape[axis])
        counts = moved.sum(1)
        if bool((counts != counts[0]).any()):
            raise Misfit(self.node, self.space.atoms, "blocks would keep unequal numbers")
        sizes = list(shape)
        sizes[axis] = int(counts[0])
        return tuple(sizes)

    def _place(
        self,
        state: Replay,
        value: Any,
        shape: Shape,
        space: Space | None,
        moved: Tensor,
        origins: Tensor,
    ) -> None:
        inverse = torch.full((math.prod(self.shape),), -1)
        inverse[moved.flatten()] = torch.arange(moved.numel())
        full = inverse[origins]
        if bool((full < 0).any()):
            raise Misfit(self.node, self.space.atoms, "elements would move to another part")
        own = [] if space is None else list(space.axes)
        cut = -1 if space is None else space.axis
        places = torch.zeros_like(full)
        stride = 1
        for axis in reversed(range(len(shape))):
            coordinate = full // stride % shape[axis]
            stride *= shape[axis]
            if axis != cut:
                index = torch.arange(full.shape[axis]).reshape(
                    [-1 if a == axis else 1 for a in range(len(shape))]
                )
                if bool((coordinate != index).any()):
                    raise Misfit(self.node, self.space.atoms, "elements would change their places")
            if axis in own and space is not None:
                inner = math.prod(space.atoms.shape[axis + 1 :])
                places += coordinate * inner
        if space is None:
            return
        for axis in range(len(shape)):
            if axis not in own:
                first = places.narrow(axis, 0, 1)
                if bool((places != first).any()):
                    raise Misfit(self.node, self.space.atoms, "channels would be torn apart")
                places = first
        state.place(value, places.contiguous(), self.node, space)


def _expanded(places: Tensor, space: Space, shape: Shape) -> Tensor:
    """Return the places in the full tensor, along all of its axes."""
    sizes = [places.shape[a] if a in space.axes else shape[a] for a in range(len(shape))]
    full = torch.zeros(sizes, dtype=torch.long)
    outer, inner = 1, 1
    for axis in reversed(range(len(shape))):
        if axis in space.axes:
            coordinate = places // inner % space.atoms.shape[axis]
            inner *= space.atoms.shape[axis]
        else:
            coordinate = torch.arange(shape[axis]).reshape(
                [-1 if a == axis else 1 for a in range(len(shape))]
            )
        full = full + coordinate * outer
        outer *= shape[axis]
    return full


def _rearrange(
    walk: Walk,
    node: fx.Node,
    run: Run,
    arguments: Callable[[Replay, list[Shape]], Any],
    *,
    equal_parts: str = "",
) -> None:
    """Handle an operation that moves elements of its first input."""
    source = _source(node)
    space, shape = walk.space(source), walk.shape(source)
    if space is None or shape is None:
        parts = walk.spaces.get(source) if isinstance(source, fx.Node) else None
        if parts is not None or shape is None:
            walk.pin_inputs(node, "unknown_op", "it reads a list of tensors")
        else:
            walk.settle(node, None, node.all_input_nodes)
        return
    fact = walk.fact(node)
    facts = fact if isinstance(fact, tuple) else (fact,)
    if any(item is None or not hasattr(item, "shape") for item in facts):
        walk.pin_inputs(node, "data_dependent_shape", "its shape is not known")
        return
    shapes = [item.shape for item in facts]
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    try:
        moved = run(numbers, shapes, None)
    except (RuntimeError, TypeError, ValueError, IndexError):
        walk.pin_inputs(node, "unknown_op", "it cannot be followed")
        return
    if [tuple(item.shape) for item in moved] != shapes:
        walk.pin_inputs(node, "unknown_op", "it cannot be followed")
        return
    spaces = [_moved_space(walk, node, space, shape, item) for item in moved]
    keys = [(node, i) for i in range(len(shapes))] if isinstance(fact, tuple) else [node]
    walk.spaces[node] = tuple(spaces) if isinstance(fact, tuple) else spaces[0]
    if equal_parts and len(spaces) > 1 and all(s is not None for s in spaces):
        blocks = [s.atoms.flatten() for s in spaces if s is not None]
        if any(not torch.equal(blocks[0], other) for other in blocks[1:]):
            walk.balance(node, blocks, equal_parts)
    parts = tuple(zip(keys, shapes, spaces, strict=True))
    step = Rearranged(node, source, shape, space, parts, tuple(moved), run, arguments)
    walk.steps.append(step)


def _moved_space(
    walk: Walk, node: fx.Node, space: Space, shape: Shape, moved: Tensor
) -> Space | None:
    """Return where the channels lie in a result."""
    full = space.atoms.expand(shape).flatten()[moved]
    atoms = compressed(full)
    axes = [axis for axis in range(atoms.dim()) if atoms.shape[axis] > 1]
    cut = _cut_axis(space, shape, moved, axes)
    if cut is None:
        pin = Pin("unknown_op", node.name, "it leaves no axis for the channels")
        walk.atoms.pin(atoms, pin)
        walk.fixed.setdefault(node, pin)
        return None
    rows = atoms.movedim(cut, -1).reshape(-1, atoms.shape[cut])
    walk.balance(node, list(rows), f"the blocks of {node.name}")
    return Space(atoms, cut, zero=space.zero, records=space.records)


def _cut_axis(space: Space, shape: Shape, moved: Tensor, axes: list[int]) -> int | None:
    """Return the axis of a result along which channels are removed: the last one they vary on."""
    stride = math.prod(shape[space.axis + 1 :])
    coordinate = moved // stride % shape[space.axis]
    varying = [
        axis
        for axis in range(moved.dim())
        if bool((coordinate != coordinate.narrow(axis, 0, 1)).any())
    ]
    both = [axis for axis in varying if axis in axes]
    if both:
        return both[-1]
    single = shape[space.axis] == 1 and moved.dim() == len(shape)
    return space.axis if single and moved.shape[space.axis] == 1 else None


def _source(node: fx.Node) -> Any:
    return node.args[0] if node.args else node.kwargs.get("input")


def _dense(walk: Walk, value: Any) -> Any:
    """Return arguments with the numbers that nodes stand for."""
    return map_arg(value, walk.fact)


def _unchanged(state: Replay, sizes: list[Shape]) -> None:
    """Change no argument."""


def _same_call(walk: Walk, node: fx.Node) -> Run:
    """Return a function that runs the operation of ``node``, whatever the sizes."""
    rest = _dense(walk, tuple(node.args[1:]))
    kwargs = {key: _dense(walk, value) for key, value in node.kwargs.items() if key != "input"}
    module = walk.module(node)

    def run(tensor: Tensor, sizes: list[Shape], state: Replay | None) -> list[Tensor]:
        if module is not None:
            result = module(tensor)
        elif node.op == "call_method":
            result = getattr(tensor, str(node.target))(*rest, **kwargs)
        else:
            result = node.target(tensor, *rest, **kwargs)  # type: ignore[operator]
        return list(result) if isinstance(result, (tuple, list)) else [result]

    return run


def axes_only(walk: Walk, node: fx.Node) -> None:
    """Handle permutations and the like, whose arguments name axes and no sizes."""
    _rearrange(walk, node, _same_call(walk, node), _unchanged)


def attribute(walk: Walk, node: fx.Node) -> None:
    """Handle ``getattr``: transposed views and shapes; other attributes are plain values."""
    if node.args[1] in ("T", "mT"):
        _rearrange(walk, node, _same_call(walk, node), _unchanged)
    elif node.args[1] in ("data",):
        walk.spaces[node] = walk.space(node.args[0])
        space = walk.space(node.args[0])
        if space is not None:
            walk.steps.append(Joined(node, (node.args[0],), space))
    elif walk.shape(node) is not None:
        walk.pin_inputs(node, "unknown_op", f"attribute {node.args[1]!r} is not known")


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

    _rearrange(walk, node, run, arguments)


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
        shift = len(wanted) - len(given)
        given = [
            item if _is_right(walk, state, item, wanted[i + shift]) else wanted[i + shift]
            for i, item in enumerate(given)
        ]
    if key is not None:
        return node.args, {**node.kwargs, key: tuple(given)}
    return (node.args[0], tuple(given)) if packed else (node.args[0], *given), dict(node.kwargs)


def _is_packed(walk: Walk, value: Any) -> bool:
    return isinstance(value, (tuple, list)) or (
        isinstance(value, fx.Node) and isinstance(walk.fact(value), tuple)
    )


def _is_right(walk: Walk, state: Replay, item: Any, wanted: int) -> bool:
    """Say whether a size that stands in the graph gives the wanted one after removal."""
    now = state.number(state, item) if isinstance(item, fx.Node) else item
    return bool(now in (-1, wanted))


def unflatten(walk: Walk, node: fx.Node) -> None:
    """Handle ``unflatten(x, dim, sizes)``."""
    if node.op == "call_module":
        module: Any = walk.module(node)
        name = walk.name(node)
        dim, position = module.dim, None
    else:
        name, position = "", 2
        dim = _dense(walk, node.args[1] if len(node.args) > 1 else node.kwargs.get("dim"))
    rank = len(walk.shape(_source(node)) or ())
    count = len(walk.shape(node) or ()) - rank + 1
    if not isinstance(dim, int) or count < 1 or (position is not None and len(node.args) != 3):
        walk.pin_inputs(node, "unknown_op", "its sizes are not plain")
        return
    first = dim % rank

    def run(tensor: Tensor, sizes: list[Shape], state: Replay | None) -> list[Tensor]:
        return [tensor.reshape(sizes[0])]

    def arguments(state: Replay, sizes: list[Shape]) -> Any:
        wanted = tuple(sizes[0][first : first + count])
        if position is None:
            state.attributes[name, "unflattened_size"] = wanted
            return None
        return (*node.args[:2], wanted), dict(node.kwargs)

    _rearrange(walk, node, run, arguments)


def split(walk: Walk, node: fx.Node) -> None:
    """Handle split by size or sizes."""
    dim = node.kwargs.get("dim", node.args[2] if len(node.args) > 2 else 0)
    dim = _dense(walk, dim)
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
        if plain and same and _is_right(walk, state, given, lengths[0]):
            return None
        if key:
            return node.args, {**node.kwargs, key: value}
        return (node.args[0], value, *node.args[2:]), dict(node.kwargs)

    _rearrange(walk, node, run, arguments, equal_parts=_equal(walk, node, f"parts of {node.name}"))


def _equal(walk: Walk, node: fx.Node, text: str) -> str:
    """Return ``text`` if all parts have one size, else nothing."""
    fact = walk.fact(node)
    shapes = {item.shape for item in fact} if isinstance(fact, tuple) else set()
    return text if len(shapes) == 1 else ""


def chunk(walk: Walk, node: fx.Node) -> None:
    """Handle chunk and unbind: equal parts, which stay equal."""
    text = _equal(walk, node, f"parts of {node.name}")
    if not text and walk.space(_source(node)) is not None:
        walk.pin_inputs(node, "width_mismatch", "its parts are unequal")
        return
    _rearrange(walk, node, _same_call(walk, node), _unchanged, equal_parts=text)


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
    taken = None if place is None else _dense(walk, items[place])
    if taken is not None and not isinstance(taken, slice):
        walk.pin_inputs(node, "unknown_op", "it takes one channel")
        return
    start, stop, step = (taken or slice(None)).indices(shape[space.axis])
    whole = (start, stop, step) == (0, shape[space.axis], 1)
    if step != 1 or stop <= start:
        walk.pin_inputs(node, "unknown_op", "it takes some channels only, with gaps")
        return
    dense = _dense(walk, items)

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

    _rearrange(walk, node, run, arguments)
    length, size = stop - start, shape[space.axis]
    if not whole and size % length == 0 and start % length == 0 and len(space.axes) == 1:
        walk.balance(node, space.atoms.flatten().split(length), f"the parts of {source}")


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
    source = _source(node)
    space, own, shape = walk.space(source), walk.shape(source), walk.shape(node)
    if space is None:
        walk.settle(node, None, node.all_input_nodes)
        return
    shift = 0 if shape is None or own is None else len(shape) - len(own)
    if shape is None or own is None or any(own[a] != shape[a + shift] for a in space.axes):
        walk.pin_inputs(node, "width_mismatch", "it repeats channels")
        return
    out = Space(space.aligned(len(shape)), space.axis + shift, zero=space.zero)
    walk.spaces[node] = out
    walk.steps.append(Expanded(walk, node, source, shape, out))


def repeat(walk: Walk, node: fx.Node) -> None:
    """Handle repeat: its numbers are factors, so nothing is rewritten."""
    source = _source(node)
    space, own, shape = walk.space(source), walk.shape(source), walk.shape(node)
    if space is None:
        walk.settle(node, None, node.all_input_nodes)
        return
    shift = 0 if shape is None or own is None else len(shape) - len(own)
    if shape is None or own is None or any(own[a] != shape[a + shift] for a in space.axes):
        walk.pin_inputs(node, "width_mismatch", "it repeats channels")
        return
    out = Space(space.aligned(len(shape)), space.axis + shift, zero=space.zero)
    walk.spaces[node] = out
    axes = tuple(range(space.atoms.dim()))
    if shift:
        walk.steps.append(Joined(node, (source,), out))
    else:
        walk.steps.append(Reduced(node, source, node, out, axes))


def pixel_shuffle(walk: Walk, node: fx.Node) -> None:
    """Handle PixelShuffle: ``r * r`` channels in a row become one."""
    source = _source(node)
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
        _rearrange(walk, node, _same_call(walk, node), _unchanged)
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
FUNCTIONS |= {torch.reshape: view, torch.split: split, torch.chunk: chunk, torch.unbind: chunk}
FUNCTIONS |= {operator.getitem: getitem, getattr: attribute, F.pixel_shuffle: pixel_shuffle}
FUNCTIONS |= {torch.pixel_shuffle: pixel_shuffle, torch.unflatten: unflatten}
METHODS: dict[str, Handler] = {name: axes_only for name in _AXES}
METHODS |= {"view": view, "reshape": view, "split": split, "chunk": chunk, "unbind": chunk}
METHODS |= {"expand": expand, "repeat": repeat, "unflatten": unflatten, "expand_as": elementwise}
MODULES: dict[type[nn.Module], Handler] = {nn.Flatten: axes_only, nn.Unflatten: unflatten}
MODULES |= {nn.PixelShuffle: pixel_shuffle, nn.PixelUnshuffle: axes_only}
MODULES |= {nn.ChannelShuffle: axes_only}
