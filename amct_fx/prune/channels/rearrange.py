"""Operations that only move elements, run on arrays of places.

The operation itself runs on an array of numbers, once for the full tensor and once for what
remains of it, so shuffles and flattens need no rule of their own. Source: spec/pruning.md section
3.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx
from torch.fx.node import map_arg

from amct_fx.prune.channels.atoms import Pin
from amct_fx.prune.channels.space import Space, compressed
from amct_fx.prune.channels.steps import Misfit, Replay, Step
from amct_fx.prune.channels.walk import source_of

if TYPE_CHECKING:
    from amct_fx.prune.channels.walk import Walk

__all__ = [
    "Rearranged",
    "Run",
    "Shape",
    "axes_only",
    "dense_arguments",
    "is_right",
    "rearrange",
    "same_call",
    "unchanged",
]

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
        sized: The arguments name sizes of the result, which follow the channels; the numbers in
            those of other operations keep their values.
    """

    node: fx.Node
    source: Any
    shape: Shape
    space: Space
    parts: tuple[tuple[Any, Shape, Space | None], ...]
    moved: tuple[Tensor, ...]
    run: Run
    arguments: Callable[[Replay, list[Shape]], Any]
    sized: bool = False

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


def rearrange(
    walk: Walk,
    node: fx.Node,
    run: Run,
    arguments: Callable[[Replay, list[Shape]], Any],
    *,
    equal_parts: str = "",
    sized: bool = False,
) -> None:
    """Handle an operation that moves elements of its first input."""
    source = source_of(node)
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
    if any(item.numel() == 0 for item in moved):
        walk.pin_inputs(node, "width_mismatch", "one of its results is empty")
        return
    spaces = [_moved_space(walk, node, space, shape, item) for item in moved]
    keys = [(node, i) for i in range(len(shapes))] if isinstance(fact, tuple) else [node]
    walk.spaces[node] = tuple(spaces) if isinstance(fact, tuple) else spaces[0]
    if equal_parts and len(spaces) > 1 and all(s is not None for s in spaces):
        blocks = [s.atoms.flatten() for s in spaces if s is not None]
        if any(not torch.equal(blocks[0], other) for other in blocks[1:]):
            walk.balance(node, blocks, equal_parts)
    parts = tuple(zip(keys, shapes, spaces, strict=True))
    step = Rearranged(node, source, shape, space, parts, tuple(moved), run, arguments, sized)
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


def axes_only(walk: Walk, node: fx.Node) -> None:
    """Handle permutations and the like, whose arguments name axes and no sizes."""
    rearrange(walk, node, same_call(walk, node), unchanged)


def dense_arguments(walk: Walk, value: Any) -> Any:
    """Return arguments with the numbers that nodes stand for."""
    return map_arg(value, walk.fact)


def unchanged(state: Replay, sizes: list[Shape]) -> None:
    """Change no argument."""


def same_call(walk: Walk, node: fx.Node) -> Run:
    """Return a function that runs the operation of ``node``, whatever the sizes."""
    rest = dense_arguments(walk, tuple(node.args[1:]))
    kwargs = {
        key: dense_arguments(walk, value)
        for key, value in node.kwargs.items()
        if node.args or value is not source_of(node)
    }
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


def is_right(walk: Walk, state: Replay, item: Any, wanted: int) -> bool:
    """Say whether a size that stands in the graph gives the wanted one after removal."""
    now = state.number(state, item) if isinstance(item, fx.Node) else item
    return bool(now in (-1, wanted))
