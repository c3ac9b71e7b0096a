"""What removing channels does to a traced part, as a list of small steps.

The analysis writes one step for each node that channels pass. :class:`Replay` runs the steps for a
choice of kept channels. Each tensor then has the *places* of its remaining elements in the full
tensor, so every selection, every reordering and every size in the graph follows from the
operations themselves; what does not fit raises :class:`Misfit`. Source: spec/pruning.md section
3.3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

if TYPE_CHECKING:
    from amct_fx.prune.channels.sites import SiteKey
    from amct_fx.prune.channels.space import Space

__all__ = [
    "Attach",
    "Columns",
    "Joined",
    "Misfit",
    "Reduced",
    "Replay",
    "Rows",
    "SetAttribute",
    "SetGroups",
    "Spread",
    "Step",
]


class Misfit(Exception):  # noqa: N818  not an error of the user's
    """A choice of channels that one operation cannot keep apart; its atoms must stay together."""

    def __init__(self, node: fx.Node, atoms: Tensor, text: str) -> None:
        super().__init__(f"{node.name}: {text}")
        self.node, self.atoms, self.text = node, atoms, text


@dataclass
class Replay:
    """One run of the steps.

    Attributes:
        kept: Which atoms stay, by number; fixed channels always do.
        places: Of each node, or part of a node: the places of the remaining elements in the full
            tensor, over the axes of its atoms.
        selections: For each axis of a parameter the indices that stay, in order.
        attributes: New values of attributes, by name of the module and of the attribute.
        arguments: Replaced arguments of nodes.
        targets: Other functions or methods that nodes call.
        number: Returns the new value of a node that is no tensor.
    """

    kept: Tensor
    number: Callable[[Replay, fx.Node], Any]
    places: dict[Any, Tensor] = field(default_factory=dict)
    selections: dict[SiteKey, Tensor] = field(default_factory=dict)
    attributes: dict[tuple[str, str], Any] = field(default_factory=dict)
    arguments: dict[fx.Node, tuple[tuple[Any, ...], dict[str, Any]]] = field(default_factory=dict)
    targets: dict[fx.Node, Any] = field(default_factory=dict)

    def stays(self, atoms: Tensor) -> Tensor:
        """Say which of ``atoms`` stay: bool of the same shape."""
        # fixed channels index the last entry, which is true
        return self.kept[atoms]

    def place(self, value: Any, places: Tensor, node: fx.Node, space: Space) -> None:
        """Note which elements of a value remain."""
        if places.numel() == 0:
            raise Misfit(node, space.atoms, "no channel would remain")
        self.places[value] = places

    def select(self, key: SiteKey, indices: Tensor, node: fx.Node, atoms: Tensor) -> None:
        """Note which indices of a parameter remain."""
        known = self.selections.setdefault(key, indices)
        if not torch.equal(known, indices):
            raise Misfit(node, atoms, "a shared parameter would be cut in two ways")


class Step:
    """One node of the graph."""

    node: fx.Node

    def replay(self, state: Replay) -> None:
        """Carry the remaining channels over the node."""
        raise NotImplementedError


@dataclass
class Rows(Step):
    """A layer makes new channels; its rows and its bias are cut."""

    node: fx.Node
    space: Space
    sites: tuple[SiteKey, ...]
    groups: int
    attribute: tuple[str, str]

    def replay(self, state: Replay) -> None:
        """Keep the rows in their order, equally many in each group of the convolution."""
        stays = state.stays(self.space.atoms.flatten())
        counts = stays.reshape(self.groups, -1).sum(1)
        if bool((counts != counts[0]).any()):
            raise Misfit(self.node, self.space.atoms, "its groups would keep unequal numbers")
        rows = stays.nonzero().flatten()
        for site in self.sites:
            state.select(site, rows, self.node, self.space.atoms)
        shape = [1] * self.space.atoms.dim()
        shape[self.space.axis] = -1
        state.place(self.node, rows.reshape(shape), self.node, self.space)
        state.attributes[self.attribute] = rows.numel()


@dataclass
class Columns(Step):
    """A layer reads channels along the axis that its weight contracts."""

    node: fx.Node
    source: Any
    space: Space
    site: SiteKey
    groups: int
    attribute: tuple[str, str]

    def replay(self, state: Replay) -> None:
        """Cut the columns in the order of the channels that arrive."""
        places = state.places[self.source].flatten()
        width = self.space.atoms.numel() // self.groups
        blocks = places // width
        if places.numel() % self.groups or not torch.equal(
            blocks,
            blocks.new_tensor(range(self.groups)).repeat_interleave(places.numel() // self.groups),
        ):
            raise Misfit(self.node, self.space.atoms, "its groups would read unequal numbers")
        state.select(self.site, places, self.node, self.space.atoms)
        state.attributes[self.attribute] = places.numel()


@dataclass
class Attach(Step):
    """A parameter has one entry for each channel."""

    node: fx.Node
    source: Any
    space: Space
    sites: tuple[SiteKey, ...]
    attributes: tuple[tuple[str, str], ...] = ()
    block: int = 1

    def replay(self, state: Replay) -> None:
        """Cut the entries in the order of the channels."""
        places = along_axis(state.places[self.source], self.space, self.node)
        for site in self.sites:
            state.select(site, places, self.node, self.space.atoms)
        for attribute in self.attributes:
            state.attributes[attribute] = places.numel() // self.block


@dataclass
class Spread(Step):
    """A depthwise convolution makes ``times`` channels of each."""

    node: fx.Node
    source: Any
    space: Space
    times: int
    sites: tuple[SiteKey, ...]

    def replay(self, state: Replay) -> None:
        """Keep all channels made of a kept one."""
        places = state.places[self.source].flatten()
        spread = (places.unsqueeze(1) * self.times + torch.arange(self.times)).flatten()
        for site in self.sites:
            state.select(site, spread, self.node, self.space.atoms)
        shape = [1] * self.space.atoms.dim()
        shape[self.space.axis] = -1
        state.place(self.node, spread.reshape(shape), self.node, self.space)


@dataclass
class SetAttribute(Step):
    """Attributes that follow the number of channels of a value."""

    node: fx.Node
    source: Any
    attributes: tuple[tuple[str, str], ...]
    times: int = 1

    def replay(self, state: Replay) -> None:
        """Set the attributes."""
        count = state.places[self.source].numel() * self.times
        for attribute in self.attributes:
            state.attributes[attribute] = count


@dataclass
class SetGroups(Step):
    """The number of groups in a call of a function; each has ``block`` channels."""

    node: fx.Node
    source: Any
    position: int
    name: str = "groups"
    block: int = 1

    def replay(self, state: Replay) -> None:
        """Set the argument."""
        count = state.places[self.source].numel() // self.block
        args, kwargs = state.arguments.get(self.node, (self.node.args, self.node.kwargs))
        if self.name in kwargs:
            state.arguments[self.node] = args, {**kwargs, self.name: count}
        else:
            rest = args[self.position + 1 :]
            state.arguments[self.node] = (*args[: self.position], count, *rest), dict(kwargs)


@dataclass
class Joined(Step):
    """The inputs, and the output if it has a space, have the same channels in one order."""

    node: fx.Node
    sources: tuple[Any, ...]
    space: Space | None

    def replay(self, state: Replay) -> None:
        """Check that all inputs keep the same places."""
        places = [state.places[source].squeeze() for source in self.sources]
        for other in places[1:]:
            if not torch.equal(places[0], other):
                atoms = torch.empty(0) if self.space is None else self.space.atoms
                raise Misfit(self.node, atoms, "its inputs would keep channels in unequal order")
        if self.space is not None:
            kept = state.places[self.sources[0]]
            shape = (1,) * (self.space.atoms.dim() - kept.dim()) + tuple(kept.shape)
            state.place(self.node, kept.reshape(shape), self.node, self.space)


def along_axis(places: Tensor, space: Space, node: fx.Node) -> Tensor:
    """Return the places along the axis that is cut, which must not depend on the other axes."""
    size = space.atoms.shape[space.axis]
    if space.atoms.numel() == size:
        return places.flatten()
    inner = 1
    for axis in range(space.axis + 1, space.atoms.dim()):
        inner *= space.atoms.shape[axis]
    index = places // inner % size
    moved = index.movedim(space.axis, -1).reshape(-1, index.shape[space.axis])
    if bool((moved != moved[0]).any()):
        raise Misfit(node, space.atoms, "blocks would keep different channels")
    return moved[0]


@dataclass
class Reduced(Step):
    """A value with the channels of the source, on some of its axes."""

    node: fx.Node
    source: Any
    value: Any
    space: Space
    axes: tuple[int, ...]

    def replay(self, state: Replay) -> None:
        """Keep the places on the axes that remain."""
        places = state.places[self.source]
        sizes = [places.shape[axis] for axis in self.axes]
        state.place(self.value, places.reshape(sizes), self.node, self.space)
