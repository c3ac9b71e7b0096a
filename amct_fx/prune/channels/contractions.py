"""Products with parameters: ``x @ w``, ``w @ x`` and ``einsum``, by the letters of their axes.

Channels end where their letter is summed; the entries of the parameter are then masked and cut as
the columns of a layer are. Where their letter goes on they pass, and a parameter that has the
letter, too, follows them. Source: spec/pruning.md section 3.1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from amct_fx.prune.channels.atoms import Pin
from amct_fx.prune.channels.parameters import follow, is_made_of_parameters
from amct_fx.prune.channels.space import Space
from amct_fx.prune.channels.steps import Replay, Step
from amct_fx.prune.channels.walk import LayerUse

if TYPE_CHECKING:
    from amct_fx.prune.channels.elementwise import Handler
    from amct_fx.prune.channels.walk import Walk

__all__ = ["FUNCTIONS", "einsum", "einsum_uses", "linear_letters", "multiply", "product_letters"]

Letters = tuple[Sequence[str], ...]
"""For each operand, and last for the result, the names of its axes."""


@dataclass
class Lettered(Step):
    """A value has the channels of a source, on other axes; ``axes`` has the new one of each."""

    node: fx.Node
    source: Any
    space: Space
    axes: tuple[int | None, ...]

    def replay(self, state: Replay) -> None:
        """Keep the places on their new axes."""
        places = state.places[self.source]
        sizes = [1] * self.space.atoms.dim()
        for axis, length in zip(self.axes, places.shape, strict=True):
            if axis is not None:
                sizes[axis] = length
        state.place(self.node, places.reshape(sizes), self.node, self.space)


def multiply(walk: Walk, node: fx.Node, operands: Sequence[Any], letters: Letters | None) -> None:
    """Follow the channels of one operand through a product with values made of parameters.

    Args:
        walk: The analysis.
        node: The product.
        operands: What it multiplies.
        letters: The axes of the operands and of the result; ``None`` if they are not known.
    """
    walk.joining.add(node)
    live = [i for i, value in enumerate(operands) if walk.space(value) is not None]
    mains = [i for i in live if not is_made_of_parameters(walk, operands[i])]
    if not live:
        walk.settle(node, None, node.all_input_nodes)
        return
    if letters is None or len(mains) != 1:
        text = "its axes are not known" if letters is None else "both operands bring channels"
        walk.pin_inputs(node, "unknown_op", text)
        return
    main = operands[mains[0]]
    space = walk.space(main)
    assert space is not None
    own, out = letters[mains[0]], letters[-1]
    letter = own[space.axis]
    if any(own[axis] not in out for axis in space.axes if axis != space.axis):
        walk.pin_inputs(node, "reduction_over_axis", "it sums over blocks of the channels")
        return
    others = [(v, k) for v, k in zip(operands, letters, strict=False) if v is not main]
    if not _meet(walk, node, main, letter, others, summed=letter not in out):
        return
    if letter not in out:
        walk.settle(node, None)
        pin = Pin("functional_weight", node.name, "it is a product with a parameter of no layer")
        walk.fixed.setdefault(node, pin)
        return
    axes = tuple(list(out).index(name) if name in out else None for name in own)
    sizes = [1] * len(out)
    for axis in space.axes:
        sizes[axes[axis] or 0] = space.atoms.shape[axis]
    kept_order = [axis for axis in axes if axis is not None]
    if kept_order != sorted(kept_order) and len(space.axes) > 1:
        walk.pin_inputs(node, "unknown_op", "it changes the order of blocks of the channels")
        return
    result = Space(space.atoms.reshape(sizes), axes[space.axis] or 0, zero=space.zero)
    walk.spaces[node] = result
    walk.steps.append(Lettered(node, main, result, axes))


def _meet(
    walk: Walk,
    node: fx.Node,
    main: fx.Node,
    letter: str,
    others: Sequence[tuple[Any, Sequence[str]]],
    *,
    summed: bool,
) -> bool:
    """Let the other operands have the channels along ``letter``; say whether that was possible."""
    having = [(value, list(names).index(letter)) for value, names in others if letter in names]
    if summed and not having:
        walk.pin_inputs(node, "reduction_over_axis", "it sums over the channels")
        return False
    space = walk.space(main)
    for value, axis in having:
        followed = is_made_of_parameters(walk, value) and follow(
            walk, node, main, value, axis, summed=summed
        )
        theirs = walk.space(value)
        if not followed or theirs is None or (summed and not theirs.zero):
            text = f"{value} does not follow the channels, or is not 0 where they are masked"
            walk.pin_inputs(node, "functional_weight", text)
            return False
    strangers = [value for value, names in others if letter not in names and walk.space(value)]
    if strangers or (summed and space is not None and len(space.axes) > 1):
        walk.pin_inputs(node, "unknown_op", "it multiplies channels with other channels")
        return False
    return True


def product_letters(walk: Walk, left: Any, right: Any) -> Letters | None:
    """Return the letters of ``left @ right``."""
    a, b = walk.shape(left), walk.shape(right)
    if not a or not b:
        return None
    batch = "ABCDEFGH"
    rows = (len(a) - 2, "n") if len(a) > 1 else (0, "")
    columns = (len(b) - 2, "m") if len(b) > 1 else (0, "")
    if max(rows[0], columns[0]) > len(batch):
        return None
    before = [
        [batch[i - count] if shape[i] > 1 else f"{batch[i - count]}{side}" for i in range(count)]
        for side, shape, count in ((0, a, rows[0]), (1, b, columns[0]))
    ]
    deepest = max(rows[0], columns[0])
    out = []
    for i in range(-deepest, 0):
        names = [names[i] for names in before if -i <= len(names)]
        out.append(next((name for name in names if name in batch), names[0]))
    return (
        [*before[0], *rows[1], "k"],
        [*before[1], "k", *columns[1]],
        [*out, *rows[1], *columns[1]],
    )


def linear_letters(walk: Walk, source: Any, weight: Any) -> Letters | None:
    """Return the letters of ``F.linear(source, weight)``."""
    shape = walk.shape(source)
    if not shape or len(walk.shape(weight) or ()) != 2 or len(shape) > 8:
        return None
    before = list("ABCDEFGH"[: len(shape) - 1])
    return [*before, "k"], ["m", "k"], [*before, "m"]


def einsum(walk: Walk, node: fx.Node) -> None:
    """Handle torch.einsum with an equation."""
    multiply(walk, node, *_einsum_arguments(walk, node))


def _einsum_arguments(walk: Walk, node: fx.Node) -> tuple[list[Any], Letters | None]:
    equation, operands = node.args[0] if node.args else None, list(node.args[1:])
    if len(operands) == 1 and isinstance(operands[0], (tuple, list)):
        operands = list(operands[0])
    plain = isinstance(equation, str) and all(isinstance(v, fx.Node) for v in operands)
    return operands, _einsum_letters(walk, str(equation), operands) if plain else None


def einsum_uses(walk: Walk, node: fx.Node) -> list[LayerUse]:
    """Return the cost of a product of two tensors: the sizes of all letters, for one example."""
    operands, letters = _einsum_arguments(walk, node)
    if letters is None or len(operands) != 2:
        return []
    a, b, out = letters
    summed = [name for name in a if name in b and name not in out]
    columns = [name for name in b if name not in a]
    if not summed or not columns:
        return []
    inner, column = summed[-1], columns[-1]
    batch = (b if is_made_of_parameters(walk, operands[0]) else a)[0]
    sizes = dict(zip(a, walk.shape(operands[0]) or (), strict=True))
    sizes |= dict(zip(b, walk.shape(operands[1]) or (), strict=True))
    rest = [size for name, size in sizes.items() if name not in (inner, column, batch)]
    axes = (operands[1], list(b).index(column)), (operands[0], list(a).index(inner))
    weight = sizes[column], sizes[inner]
    return [LayerUse(node.name, "matmul", weight, math.prod(rest), sizes=axes)]


def _einsum_letters(walk: Walk, equation: str, operands: Sequence[Any]) -> Letters | None:
    """Return the letters of an equation, with names for the axes of an ellipsis."""
    given, arrow, result = equation.replace(" ", "").partition("->")
    parts, shapes = given.split(","), [walk.shape(value) for value in operands]
    if len(parts) != len(shapes) or None in shapes:
        return None
    sizes: dict[str, int] = {}
    found: list[list[str]] = []
    for part, shape in zip(parts, shapes, strict=True):
        names = _named(part, len(shape or ()))
        if names is None or len(names) != len(shape or ()) or len(set(names)) < len(names):
            return None
        for name, size in zip(names, shape or (), strict=True):
            if sizes.setdefault(name, size) != size:
                return None  # an axis of size 1 is repeated
        found.append(names)
    if not arrow:
        every = [name for names in found for name in names]
        unnamed = max(([n for n in names if len(n) > 1] for names in found), key=len)
        once = sorted(n for n in set(every) if len(n) == 1 and every.count(n) == 1)
        return (*found, [*unnamed, *once])
    names = _named(result, len(walk.shape(operands[0]) or ()), sizes)
    return None if names is None else (*found, names)


def _named(part: str, rank: int, sizes: dict[str, int] | None = None) -> list[str] | None:
    """Return the names of the axes of one part; those of ``...`` count from the last."""
    before, dots, after = part.partition("...")
    if not (before + after).isalpha() and before + after:
        return None
    count = rank - len(before) - len(after)
    if sizes is not None:
        count = sum(len(name) > 1 for name in sizes)
    unnamed = [f"...{i}" for i in range(count, 0, -1)] if dots else []
    return [*before, *unnamed, *after]


FUNCTIONS: dict[Any, Handler] = {torch.einsum: einsum}
