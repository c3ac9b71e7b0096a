"""What a prune plan is made of: groups and their members, layers that stay, costs, masks of norms.

Plain data, for people and for files. Source: spec/pruning.md section 7.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = ["LayerCost", "Member", "NormMask", "PinnedLayer", "PruneGroup", "add_mask"]


@dataclass(frozen=True)
class Member:
    """One axis of a parameter or buffer that belongs to the channels of a group.

    Attributes:
        layer: Name of the module.
        parameter: Name of the tensor in the module; empty for the channels of an input.
        axis: The axis.
        role: ``"row"`` of a producer, ``"column"`` of a consumer, ``"attached"`` to channels,
            ``"input"`` of a layer, ``"size"`` of a product of activations, ``"norm"`` for what a
            norm over channels counts (``parameter`` then names the node of a function).
        shape: Full shape of the tensor.
        positions: For each unit of the group its indices along the axis. Where the weight of a
            grouped convolution has indices of its own for every group, those of all groups follow
            each other.
        groups: Groups of such a convolution, else 1.
        buffer: The tensor is a buffer, which counts as no parameter.
    """

    layer: str
    parameter: str
    axis: int
    role: str
    shape: tuple[int, ...]
    positions: tuple[tuple[int, ...], ...]
    groups: int = 1
    buffer: bool = False

    @property
    def key(self) -> str:
        """Name of the tensor in the model."""
        return f"{self.layer}.{self.parameter}" if self.layer else self.parameter

    @property
    def length(self) -> int:
        """Number of indices of the axis, over all groups of a convolution."""
        return self.shape[self.axis] * self.groups


@dataclass(frozen=True)
class PruneGroup:
    """Channels that are ranked against each other and cut together.

    Attributes:
        id: Number in the plan.
        producers: The layers that make the channels, in order.
        consumers: The layers that lose input channels.
        members: Every axis of a tensor that follows.
        channels: Number of units.
        ratio: Share to remove.
        ascend_optimized: Keep a multiple of 16 units.
        balance: Blocks that keep equal counts.
        balance_source: What asks for them.
        scores: Importance of each unit.
        kept: Indices of the units that stay.
        note: ``"aligned_away"``: alignment keeps all; ``"alignment_lost"``: blocks break it;
            ``"nothing_to_cut"``; or empty.
        rows_maskable: Zero rows give finite values and slopes on the way to the consumers.
        contracted: The channels end in a product without a weight, which needs zero rows.
    """

    id: int
    producers: tuple[str, ...]
    consumers: tuple[str, ...]
    members: tuple[Member, ...] = field(repr=False)
    channels: int
    ratio: float
    ascend_optimized: bool
    balance: int
    balance_source: str
    scores: tuple[float, ...] = field(repr=False)
    kept: tuple[int, ...]
    note: str = ""
    rows_maskable: bool = True
    contracted: bool = False
    kind: str = "filter"

    @property
    def cut(self) -> tuple[int, ...]:
        """Indices of the units that go."""
        return tuple(sorted(set(range(self.channels)) - set(self.kept)))

    def __str__(self) -> str:
        """Return producers, counts, consumers and the note."""
        blocks = f" in {self.balance} blocks" if self.balance > 1 else ""
        note = f" ({self.note})" if self.note else ""
        users = ", ".join(self.consumers)
        makers = ", ".join(self.producers)
        return f"{makers}: {len(self.kept)} of {self.channels}{blocks}{note} -> {users}"


@dataclass(frozen=True)
class PinnedLayer:
    """A layer that the configuration wants to prune and that keeps its channels.

    Attributes:
        name: Name of the layer.
        node: The node of the graph that forbids it.
        code: The reason in one word, such as ``"graph_output"``.
        text: The reason in a sentence.
    """

    name: str
    node: str
    code: str
    text: str

    def __str__(self) -> str:
        """Return name, code and sentence."""
        return f"{self.name}: {self.code}: {self.text}"


@dataclass(frozen=True)
class LayerCost:
    """Multiply-accumulates and parameters of one call of a layer, before and after.

    Attributes:
        name: Name of the layer, or of the node of a product of activations.
        kind: ``"conv"``, ``"deconv"``, ``"linear"`` or ``"matmul"``.
        shape: Shape of the weight before.
        positions: Places at which the weight is used, for one example.
        macs: Multiply-accumulates before, for one example.
        macs_after: The same after.
        density: Share of the weights that 2:4 sparsity keeps.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    positions: int
    macs: int
    macs_after: int
    density: float = 1.0
    tensor: str = ""


@dataclass(frozen=True)
class NormMask:
    """What a norm counts.

    Attributes:
        layer: Name of the module; of the traced part for a function.
        call: Name of the node of a function, else empty.
        kept: bool, true where a channel stays; broadcastable to the normalised shape.
    """

    layer: str
    call: str
    kept: Tensor


def add_mask(masks: dict[str, Tensor], member: Member, cut: Sequence[int]) -> None:
    """Write the zeros of a member into the mask of its tensor."""
    flat = torch.ones(member.length, dtype=torch.bool)
    flat[[position for unit in cut for position in member.positions[unit]]] = False
    shape = [1] * len(member.shape)
    if member.groups == 1:
        shape[member.axis] = -1
        mask = flat.reshape(shape)
    else:  # [g * n0, n1, 1, ...]: the rows of a group have their own columns
        rows = flat.reshape(member.groups, -1)
        shape[0], shape[1] = member.shape[0], member.shape[1]
        mask = rows.repeat_interleave(member.shape[0] // member.groups, 0).reshape(shape)
    masks[member.key] = masks[member.key] & mask if member.key in masks else mask
