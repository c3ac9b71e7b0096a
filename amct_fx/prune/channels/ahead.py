"""Looking ahead from a view to the layer that reads it, which says what one channel is.

``Linear -> view(n, c, h, w) -> Conv``: the view spreads the outputs of the Linear over three axes,
and any of them could lose entries. The convolution needs whole channels to go, so all outputs that
reach one of its channels live together. Without such a layer ahead blocks lose equally many, as the
heads of an attention do. Source: spec/pruning.md section 3.3.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx

from amct_fx.prune.channels.atoms import Pin
from amct_fx.prune.channels.rearrange import Run, same_call
from amct_fx.prune.channels.space import Space
from amct_fx.prune.channels.walk import source_of

if TYPE_CHECKING:
    from amct_fx.prune.channels.walk import Walk

__all__ = ["united_ahead"]


def united_ahead(walk: Walk, node: fx.Node, run: Run) -> Space | None:
    """Let all that one channel of the next layer reads live together.

    Args:
        walk: The analysis.
        node: A view of a tensor whose channels lie along one axis.
        run: Runs the view.

    Returns:
        The channels of the source of the view, one number for all that go together; ``None`` if
        nothing had to be joined.
    """
    source, shape = source_of(node), walk.shape(node)
    space, before = walk.space(source), walk.shape(source)
    if space is None or before is None or shape is None or len(space.axes) != 1:
        return None
    if shape.count(1) >= len(shape) - 1 or math.prod(shape) != math.prod(before):
        return None
    try:
        moved = run(torch.arange(math.prod(before)).reshape(before), [shape], None)[0]
    except RuntimeError:
        return None
    arriving = _arriving(walk, node, space.atoms.expand(before).flatten()[moved])
    if arriving is None:
        return None
    parts = torch.unique(arriving.movedim(1, 0).reshape(arriving.shape[1], -1), dim=1)
    if parts.shape[1] == 1 or bool((parts == parts[:, :1]).all()):
        return None
    pin = Pin("width_mismatch", node.name, "the next layer reads these as one channel")
    first = torch.arange(walk.atoms.total + 1)  # the last one is that of fixed channels
    for column in range(1, parts.shape[1]):
        walk.atoms.join(parts[:, 0], parts[:, column], pin)
        first[parts[:, column]] = parts[:, 0]
    first[-1] = -1
    return Space(first[space.atoms], space.axis, zero=space.zero, records=space.records)


def _arriving(walk: Walk, node: fx.Node, atoms: Tensor) -> Tensor | None:
    """Return the atoms as they arrive at the next layer over axis 1, ``None`` if there is none."""
    from amct_fx.prune.channels.rules import is_elementwise, moves_elements, reads_axis_1

    while True:
        users = [user for user in node.users if walk.makes_tensors(user)]
        if not users:
            return None
        user = users[0]
        if reads_axis_1(walk, user):
            return atoms if atoms.dim() > 2 else None
        following: Any = None
        if moves_elements(walk, user) and source_of(user) is node:
            numbers = torch.arange(atoms.numel()).reshape(atoms.shape)
            try:
                following = same_call(walk, user)(numbers, [], None)
            except (RuntimeError, TypeError, ValueError, IndexError):
                return None
            if len(following) != 1:
                return None
            atoms = atoms.flatten()[following[0]]
        elif not is_elementwise(walk, user):
            return None
        if tuple(atoms.shape) != walk.shape(user):
            return None
        node = user
