"""Products of activations: attention and other contractions without a weight."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from amct_fx.prune.channels.atoms import Pin
from amct_fx.prune.channels.blocks import repeat_each
from amct_fx.prune.channels.contractions import multiply, product_letters
from amct_fx.prune.channels.parameters import is_made_of_parameters
from amct_fx.prune.channels.space import Space
from amct_fx.prune.channels.steps import Misfit, Replay, Step
from amct_fx.prune.channels.walk import LayerUse, Walk

if TYPE_CHECKING:
    from amct_fx.prune.channels.elementwise import Handler

__all__ = ["FUNCTIONS", "METHODS"]


@dataclass
class Contracted(Step):
    """Two tensors meet along the axis of their channels, which ends there."""

    node: fx.Node
    left: Any
    right: Any
    spaces: tuple[Space, Space]
    scale: float | None = None

    def replay(self, state: Replay) -> None:
        """Check the order of both; keep a scale that was derived from the full width."""
        pairs = zip((self.left, self.right), self.spaces, strict=True)
        a, b = (_rows(state.places[value], space) for value, space in pairs)
        if not torch.equal(_index(a, self.spaces[0]), _index(b, self.spaces[1])):
            atoms = torch.cat([space.atoms.flatten() for space in self.spaces])
            raise Misfit(self.node, atoms, "its inputs would keep channels in unequal order")
        if self.scale is not None:
            state.arguments[self.node] = (self.node.args, {**self.node.kwargs, "scale": self.scale})


@dataclass
class Carried(Step):
    """The channels of an operand that are not contracted."""

    node: fx.Node
    source: Any
    space: Space

    def replay(self, state: Replay) -> None:
        """Give the places the rank of the result."""
        places = state.places[self.source]
        shape = (1,) * (self.space.atoms.dim() - places.dim()) + tuple(places.shape)
        state.place(self.node, places.reshape(shape), self.node, self.space)


def _rows(array: Tensor, space: Space) -> Tensor:
    """Return an array over the axes of a space, the one that is cut last."""
    moved = array.movedim(space.axis, -1)
    return moved.reshape(-1, moved.shape[-1])


def _index(places: Tensor, space: Space) -> Tensor:
    """Return the index along the axis that is cut."""
    inner = math.prod(space.atoms.shape[space.axis + 1 :])
    return places // inner % space.atoms.shape[space.axis]


def matmul(walk: Walk, node: fx.Node) -> None:
    """Handle a matrix product of two activations."""
    operands = [*node.args, *node.kwargs.values()]
    if len(operands) != 2 or not all(isinstance(value, fx.Node) for value in operands):
        walk.pin_inputs(node, "unknown_op", "its operands are not plain")
        return
    left: Any = operands[0]
    right: Any = operands[1]
    if any(is_made_of_parameters(walk, value) for value in operands):
        multiply(walk, node, (left, right), product_letters(walk, left, right))
        return
    shapes = [walk.shape(left), walk.shape(right)]
    if all(walk.space(value) is None for value in operands):
        walk.settle(node, None, node.all_input_nodes)
        return
    if None in shapes or any(len(shape or ()) < 2 for shape in shapes):
        walk.pin_inputs(node, "unknown_op", "it multiplies with a vector")
        return
    _product(walk, node, left, right)


def _product(walk: Walk, node: fx.Node, left: fx.Node, right: fx.Node) -> None:
    """Contract the last axis of ``left`` with the last but one of ``right``."""
    a, b = walk.space(left), walk.space(right)
    ends_a = a is not None and a.axis == a.atoms.dim() - 1
    ends_b = b is not None and b.axis == b.atoms.dim() - 2
    if ends_a or ends_b:
        if a is None or b is None or not (ends_a and ends_b):
            walk.pin_inputs(node, "unknown_op", "it contracts channels with something that stays")
        elif _contract(walk, node, left, right):
            walk.settle(node, None, ())
            pin = Pin("unknown_op", node.name, "it is a product of activations")
            walk.fixed.setdefault(node, pin)
        return
    free = [value for value in (left, right) if walk.space(value) is not None]
    _carry(walk, node, free, is_left=free[:1] == [left])


def _carry(walk: Walk, node: fx.Node, free: list[Any], *, is_left: bool) -> None:
    """Let the channels along a free axis of one operand pass."""
    shape = walk.shape(node)
    space = walk.space(free[0]) if len(free) == 1 else None
    if shape is None or space is None:
        walk.pin_inputs(node, "unknown_op", "both operands bring channels")
        return
    rank = space.atoms.dim()
    own, forbidden = (rank - 2, rank - 1) if is_left else (rank - 1, rank - 2)
    if space.axis != own or forbidden in space.axes:
        walk.pin_inputs(node, "reduction_over_axis", "it contracts or batches the channels")
        return
    aligned = space.aligned(len(shape))
    out = Space(aligned, space.axis + len(shape) - rank, zero=space.zero)
    walk.spaces[node] = out
    walk.steps.append(Carried(node, free[0], out))


def _contract(
    walk: Walk, node: fx.Node, left: fx.Node, right: fx.Node, scale: float | None = None
) -> bool:
    """Join the channels of both operands; say whether that was possible."""
    a, b = walk.space(left), walk.space(right)
    assert a is not None
    assert b is not None
    rows = _rows(a.atoms, a), _rows(b.atoms, b)
    if rows[0].shape != rows[1].shape:
        walk.pin_inputs(node, "width_mismatch", "its operands have unequal channels")
        return False
    if not (walk.keeps_zeros(a, node) and walk.keeps_zeros(b, node)):
        walk.pin_inputs(node, "unknown_op", "a masked channel would not be 0 in this product")
        return False
    pin = Pin("coupled_to_skipped", node.name, "it joins them with channels that stay")
    walk.atoms.join(rows[0], rows[1], pin)
    walk.contracted.append(rows[0].flatten())
    walk.steps.append(Contracted(node, left, right, (a, b), scale))
    return True


def attention(walk: Walk, node: fx.Node) -> None:
    """Handle ``F.scaled_dot_product_attention``."""
    names = ("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    query: Any = given.get("query")
    key: Any = given.get("key")
    value: Any = given.get("value")
    tensors = [query, key, value]
    if all(walk.space(item) is None for item in node.all_input_nodes):
        walk.settle(node, None, node.all_input_nodes)
        return
    plain = all(isinstance(item, fx.Node) and walk.shape(item) for item in tensors)
    if not plain or walk.space(given.get("attn_mask")) is not None:
        walk.pin_inputs(node, "unknown_op", "its operands are not plain")
        return
    if given.get("enable_gqa"):
        key, value = (_for_each_query(walk, node, query, item) for item in (key, value))
    a, b = walk.space(query), walk.space(key)
    if a is not None and b is not None and _ends(a) and _ends(b):
        shape = walk.shape(query) or (1,)
        scale = given.get("scale") or shape[-1] ** -0.5
        if not _contract(walk, node, query, key, scale if isinstance(scale, float) else None):
            return
    elif a is not None or b is not None:
        walk.pin_inputs(node, "unknown_op", "query and key have unequal channels")
        return
    if walk.space(value) is None:
        walk.settle(node, None, [value])
        return
    _carry(walk, node, [value], is_left=False)


def _for_each_query(walk: Walk, node: fx.Node, query: fx.Node, value: fx.Node) -> Any:
    """Return a key or value with its heads repeated, for each head of the query."""
    space, heads = walk.space(value), len(walk.shape(value) or ()) - 3
    times = (walk.shape(query) or ())[heads] // (walk.shape(value) or ())[heads]
    if space is None or times == 1 or heads not in space.axes:
        return value
    repeat_each(walk, node, value, heads, times, (node, value))
    return node, value


def _ends(space: Space) -> bool:
    return space.axis == space.atoms.dim() - 1


def matmul_uses(walk: Walk, node: fx.Node) -> list[LayerUse]:
    """Return the cost of a product of two tensors."""
    operands = [*node.args, *node.kwargs.values()]
    if len(operands) != 2 or any(len(walk.shape(value) or ()) < 2 for value in operands):
        return []
    return [_use(walk, node, (operands[1], -1), (operands[0], -1), operands[0])]


def attention_uses(walk: Walk, node: fx.Node) -> list[LayerUse]:
    """Return the costs of both products of an attention."""
    names = ("query", "key", "value")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    tensors = [given.get(name) for name in names]
    if any(len(walk.shape(value) or ()) < 2 for value in tensors):
        return []
    query, key, value = tensors
    first = _use(walk, node, (key, -2), (query, -1), query)
    second = _use(walk, node, (value, -1), (key, -2), query)
    return [first, replace(second, part=1)]


def _use(
    walk: Walk, node: fx.Node, columns: tuple[Any, int], inner: tuple[Any, int], rows: Any
) -> LayerUse:
    sizes = [(walk.shape(value) or ())[axis] for value, axis in (columns, inner)]
    positions = math.prod((walk.shape(rows) or ())[1:-1])
    return LayerUse(node.name, "matmul", tuple(sizes), positions, sizes=(columns, inner))


FUNCTIONS: dict[Any, Handler] = {
    torch.matmul: matmul,
    torch.bmm: matmul,
    torch.mm: matmul,
    torch.mv: matmul,
    operator.matmul: matmul,
    F.scaled_dot_product_attention: attention,
}
METHODS: dict[str, Handler] = {"matmul": matmul, "bmm": matmul, "__matmul__": matmul}
METHODS |= {"mm": matmul, "mv": matmul}
