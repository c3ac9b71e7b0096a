"""Padding along the channels: places of one constant, which follow what they meet.

A shortcut without a weight (``F.pad(x, (0, 0, 0, 0, 8, 8))``) has channels that no layer makes.
They may go with those that they are added to; then less is padded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from amct_fx.prune.channels.atoms import NOBODY
from amct_fx.prune.channels.rearrange import is_right
from amct_fx.prune.channels.steps import Replay, Step
from amct_fx.prune.channels.walk import channel_space

if TYPE_CHECKING:
    from torch import Tensor, fx

    from amct_fx.prune.channels.space import Space
    from amct_fx.prune.channels.walk import Walk

__all__ = ["Padded", "pad_channels"]


@dataclass
class Padded(Step):
    """Constant channels before and after those of the source; fewer where some of them go."""

    walk: Walk
    node: fx.Node
    source: Any
    parts: tuple[Tensor, Tensor, Tensor]
    space: Space
    amounts: Sequence[Any]

    def replay(self, state: Replay) -> None:
        """Put the places side by side, and change the amounts."""
        before, own, after = self.parts
        first, last = (state.stays(atoms).nonzero().flatten() for atoms in (before, after))
        start = before.numel()
        middle = state.places[self.source].flatten() + start
        places = torch.cat([first, middle, last + start + own.numel()])
        shape = [1] * self.space.atoms.dim()
        shape[self.space.axis] = -1
        state.place(self.node, places.reshape(shape), self.node, self.space)
        pair = 2 * (self.space.atoms.dim() - 1 - self.space.axis)
        changed = list(self.amounts)
        for index, count in ((pair, first.numel()), (pair + 1, last.numel())):
            if not is_right(self.walk, state, changed[index], count):
                changed[index] = count
        if changed == list(self.amounts):
            return
        args, kwargs = self.node.args, dict(self.node.kwargs)
        if "pad" in kwargs:
            kwargs["pad"] = tuple(changed)
        else:
            args = (args[0], tuple(changed), *args[2:])
        state.arguments[self.node] = args, kwargs


def pad_channels(walk: Walk, node: fx.Node, source: Any, amounts: Any, *, zero: bool) -> bool:
    """Follow channels through padding along their own axis; say whether that was possible.

    Args:
        walk: The analysis.
        node: The padding, with a constant.
        source: What it reads.
        amounts: As for ``F.pad``, a sequence of numbers or nodes.
        zero: The constant is 0.
    """
    space, shape = walk.space(source), walk.shape(node)
    if space is None or shape is None or len(space.axes) != 1:
        return False
    pair = 2 * (len(shape) - 1 - space.axis)
    before, after = (walk.fact(amount) for amount in amounts[pair : pair + 2])
    if not all(isinstance(count, int) and count >= 0 for count in (before, after)):
        return False
    own = space.atoms.flatten()
    parts = walk.atoms.new(NOBODY, before), own, walk.atoms.new(NOBODY, after)
    out = channel_space(torch.cat(parts), len(shape), space.axis, zero=space.zero and zero)
    walk.spaces[node] = out
    walk.steps.append(Padded(walk, node, source, parts, out, amounts))
    return True
