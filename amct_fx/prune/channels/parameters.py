"""Values made of parameters and buffers alone that meet channels: their entries follow.

A parameter has no channels of its own. Where a value computed from parameters meets channels, the
axis of each of these parameters that lies along them is looked for backwards. The parameter then
has those channels, and all that was computed from it is followed again, by the rules for every
other tensor: views, scalings and their sizes need nothing of their own. The search only proposes;
what it proposes is checked by those rules and by the replay. Source: spec/pruning.md section 3.1.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from amct_fx.prune.channels.atoms import Pin
from amct_fx.prune.channels.sites import Role, Site, SiteKey
from amct_fx.prune.channels.steps import Misfit, Replay, Step, along_axis
from amct_fx.prune.channels.walk import Walk, channel_space, source_of

if TYPE_CHECKING:
    from amct_fx.prune.channels.space import Space

__all__ = [
    "follow",
    "is_made_of_parameters",
    "join_blocks",
    "note_if_made_of_parameters",
    "pin_other_reads",
]


@dataclass
class Laid(Step):
    """A parameter has one entry for each channel of a value, and is cut in their order.

    Attributes:
        node: The node that reads the parameter.
        source: The value that it meets.
        met: Channels of that value.
        space: The same channels, along the axis of the parameter.
        site: That axis.
    """

    node: fx.Node
    source: Any
    met: Space
    space: Space
    site: SiteKey

    def replay(self, state: Replay) -> None:
        """Keep the entries of the channels that stay."""
        kept = along_axis(state.places[self.source], self.met, self.node)
        state.select(self.site, kept, self.node, self.space.atoms)
        shape = [1] * self.space.atoms.dim()
        shape[self.space.axis] = -1
        state.place(self.node, kept.reshape(shape), self.node, self.space)


@dataclass
class Alike(Step):
    """Two values have the same channels along an axis, whatever the other axes."""

    node: fx.Node
    values: tuple[Any, Any]
    spaces: tuple[Space, Space]

    def replay(self, state: Replay) -> None:
        """Check that they keep the same places."""
        pairs = zip(self.values, self.spaces, strict=True)
        first, second = (along_axis(state.places[v], space, self.node) for v, space in pairs)
        if not torch.equal(first, second):
            text = "a parameter would keep other channels than it meets"
            raise Misfit(self.node, self.spaces[0].atoms, text)


def is_made_of_parameters(walk: Walk, value: Any) -> bool:
    """Say whether a value is computed from parameters and buffers of the model, and sizes."""
    return isinstance(value, fx.Node) and value in walk.of_parameters


def note_if_made_of_parameters(walk: Walk, node: fx.Node, *, layer: bool) -> None:
    """Note that of a node, whose inputs were noted before; a layer makes channels of its own."""
    tensors = _tensors(walk, node)
    computed = node.op.startswith("call") and bool(tensors) and not layer
    alone = all(is_made_of_parameters(walk, item) for item in tensors)
    if walk.owned_tensor(node) is not None or (computed and alone):
        walk.of_parameters.add(node)


def _tensors(walk: Walk, node: fx.Node) -> list[fx.Node]:
    """Return the inputs of a node that are tensors or lists of them."""
    return [value for value in node.all_input_nodes if walk.makes_tensors(value)]


def follow(
    walk: Walk, node: fx.Node, main: fx.Node, value: fx.Node, axis: int, *, summed: bool = False
) -> bool:
    """Let a value made of parameters have the channels that it meets.

    Args:
        walk: The analysis.
        node: Where they meet.
        main: A value with channels.
        value: The value made of parameters.
        axis: Its axis along which the channels of ``main`` are removed.
        summed: The channels end there, so the entries of those that go must be masked.

    Returns:
        Whether it has them now; if not, ``main`` must be pinned.
    """
    space = walk.space(main)
    assert space is not None
    rows = space.atoms.movedim(space.axis, -1).reshape(-1, space.atoms.shape[space.axis])
    if walk.space(value) is None and not _lay(
        walk, node, main, value, axis, rows[0], "column" if summed else "attached"
    ):
        return False
    own = walk.space(value)
    if own is None or own.axes != (axis,) or own.atoms.numel() != rows.shape[1]:
        return False
    join_blocks(walk, node, main, value, f"{value.name} is the same for all blocks")
    return True


def join_blocks(walk: Walk, node: fx.Node, main: fx.Node, value: fx.Node, text: str) -> None:
    """Join each block of the channels of ``main`` with those of a value that has one block."""
    space, own = walk.space(main), walk.space(value)
    assert space is not None
    assert own is not None
    pin = Pin("tied_parameter", node.name, text)
    for row in space.atoms.movedim(space.axis, -1).reshape(-1, space.atoms.shape[space.axis]):
        walk.atoms.join(row, own.atoms.flatten(), pin)
    walk.steps.append(Alike(node, (main, value), (space, own)))


def _lay(
    walk: Walk,
    node: fx.Node,
    main: fx.Node,
    value: fx.Node,
    axis: int,
    atoms: Tensor,
    role: Role,
) -> bool:
    """Give the parameters that a value is made of the channels, and follow them to it again."""
    from amct_fx.prune.channels.rules import handle

    space = walk.space(main)
    assert space is not None
    found = _parameters(walk, value, axis, torch.arange(atoms.numel()))
    if not found:
        return False
    later = _seen_after(walk, [leaf.node for leaf in found])
    if any(not is_made_of_parameters(walk, other) for other in later if other is not node):
        return False  # it was read before as a value without channels
    for leaf in found:
        tensor = walk.owned_tensor(leaf.node)
        assert tensor is not None
        key = walk.bind(leaf.node, Site("", "", leaf.axis, role, atoms), tensor)
        laid = channel_space(atoms, tensor.dim(), leaf.axis, zero=role == "column")
        walk.spaces[leaf.node] = laid
        walk.steps.append(Laid(leaf.node, main, space, laid, key))
    for other in later:
        if other is not node and walk.space(other) is None:
            walk.fixed.pop(other, None)
            handle(walk, other)
    return True


@dataclass(frozen=True)
class _Leaf:
    """An axis of a parameter with one entry for each channel, in their order."""

    node: fx.Node
    axis: int


def _parameters(walk: Walk, node: fx.Node, axis: int, entries: Tensor) -> list[_Leaf]:
    """Return the parameters along whose axes the channels lie; nothing if that is not plain.

    Args:
        walk: The analysis.
        node: A value made of parameters.
        axis: The axis of the channels.
        entries: For each channel its place along the axis.
    """
    from amct_fx.prune.channels.rules import moves_elements

    shape = walk.shape(node)
    if shape is None or axis < 0:
        return []
    if walk.owned_tensor(node) is not None:
        in_order = torch.equal(entries, torch.arange(shape[axis]))
        return [_Leaf(node, axis)] if in_order and walk.space(node) is None else []
    if moves_elements(walk, node):
        before = _before(walk, node, axis)
        if before is None:
            return []
        source, place, moved = before
        return _parameters(walk, source, place, moved[entries])
    found: list[_Leaf] = []
    for operand in _tensors(walk, node):
        own = walk.shape(operand) or ()
        place = axis - (len(shape) - len(own))
        if place < 0 or own[place] == 1 < shape[axis]:
            continue
        if own[place] != shape[axis]:
            return []  # it is put together of several, or repeats one
        leaves = _parameters(walk, operand, place, entries)
        if not leaves:
            return []
        found += [leaf for leaf in leaves if all(leaf.node is not other.node for other in found)]
    return found


def _before(walk: Walk, node: fx.Node, axis: int) -> tuple[fx.Node, int, Tensor] | None:
    """Return where an axis of a moved tensor comes from: source, axis, and place by place."""
    from amct_fx.prune.channels.rearrange import same_call

    source, shape = source_of(node), walk.shape(source_of(node))
    if shape is None or not isinstance(source, fx.Node):
        return None
    numbers = torch.arange(math.prod(shape)).reshape(shape)
    try:
        moved = same_call(walk, node)(numbers, [], None)
    except (RuntimeError, TypeError, ValueError, IndexError):
        return None
    if len(moved) != 1 or moved[0].shape != walk.shape(node):
        return None
    rows = moved[0].movedim(axis, -1).reshape(-1, moved[0].shape[axis])
    found = []
    for other in range(len(shape)):
        places = rows // math.prod(shape[other + 1 :]) % shape[other]
        if bool((places == places[:, :1]).all()):
            continue  # the axis does not move along this one
        if bool((places != places[:1]).any()):
            return None  # nor along this one alone
        found.append((other, places[0]))
    return (source, *found[0]) if len(found) == 1 else None


def _seen_after(walk: Walk, nodes: list[fx.Node]) -> list[fx.Node]:
    """Return the tensors computed from nodes that the walk has seen, in its order."""
    found: set[fx.Node] = set()
    waiting = list(nodes)
    while waiting:
        for user in waiting.pop().users:
            if user in walk.seen and user not in found and walk.makes_tensors(user):
                found.add(user)
                waiting.append(user)
    return sorted(found, key=walk.seen.__getitem__)


def pin_other_reads(walk: Walk) -> None:
    """Pin parameters that something reads whose rule does not know of their channels."""
    for node in (node for region in walk.regions for node in region.graph.nodes):
        tensor = walk.owned_tensor(node)
        keys = [] if tensor is None else walk.sites_of(tensor)
        if not keys or tensor is None:
            continue
        laid = walk.space(node)
        strangers = [user for user in node.users if not _knows(walk, node, user, tensor)]
        if node not in walk.seen:  # in a traced part that the example did not reach
            strangers.append(node)
        if laid is not None and any(axis != laid.axis for _, axis in keys):
            strangers.append(node)
        for user in strangers[:1]:
            pin = Pin("tied_parameter", user.name, f"{user.name} reads all of {keys[0][0]}")
            for key in keys:
                walk.atoms.pin(walk.sites[key].atoms, pin)
    for node in walk.seen:
        space = walk.space(node)
        if space is not None and is_made_of_parameters(walk, node):
            for user in node.users:
                if not _knows(walk, node, user, None):
                    text = f"{user.name} reads all of what {node.name} makes of parameters"
                    walk.atoms.pin(space.atoms, Pin("tied_parameter", user.name, text))


def _knows(walk: Walk, node: fx.Node, user: fx.Node, tensor: Tensor | None) -> bool:
    """Say whether the rule for ``user`` follows the channels of the parameter that it reads."""
    if not walk.makes_tensors(user) and user.op != "output":
        return True  # a size
    if tensor is not None and user in walk.readers.get(id(tensor), ()):
        return True
    followed = is_made_of_parameters(walk, user) and any(True for _ in walk.spaces_of(user))
    return walk.space(node) is not None and (followed or user in walk.joining)
