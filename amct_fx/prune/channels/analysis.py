"""The analysis of a model: walk, units, and the replay of a choice.

Source: spec/pruning.md section 3.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx
from torch.fx.node import map_arg

from amct_fx.graph.shapes import TensorFact
from amct_fx.prune.channels.atoms import Pin
from amct_fx.prune.channels.layout import Expanded
from amct_fx.prune.channels.padding import Padded
from amct_fx.prune.channels.parameters import pin_other_reads
from amct_fx.prune.channels.rearrange import Rearranged
from amct_fx.prune.channels.rules import visit
from amct_fx.prune.channels.statistics import NormShape
from amct_fx.prune.channels.steps import Misfit, Replay
from amct_fx.prune.channels.units import Group, choose, find_groups, kept_atoms
from amct_fx.prune.channels.walk import Walk
from amct_fx.prune.channels.zeros import kind_of_operation

if TYPE_CHECKING:
    from torch import Tensor, nn

    from amct_fx.config import PruneConfig
    from amct_fx.graph.capture import Region
    from amct_fx.graph.shapes import ShapeFacts
    from amct_fx.prune.channels.space import Space
    from amct_fx.prune.options import PruneOptions

__all__ = ["analyze", "replay", "settle_groups"]


def analyze(
    model: nn.Module,
    regions: Sequence[Region],
    settings: Mapping[str, PruneConfig],
    options: PruneOptions,
    facts: ShapeFacts,
) -> Walk:
    """Find out which channels of a model live together.

    Args:
        model: The model; it is not changed.
        regions: Its traced parts.
        settings: Pruning of each enabled layer, by name.
        options: The mode and its details.
        facts: Shapes of the values in the graphs.
    """
    walk = Walk(model, regions, settings, options, facts)
    for region in regions:
        if region.name not in facts.values:
            continue  # the example did not reach it: its layers are pinned as such
        for node in region.graph.nodes:
            visit(walk, node)
    pin_other_reads(walk)
    walk.finish()
    return walk


def settle_groups(walk: Walk) -> tuple[list[Group], Replay]:
    """Choose channels; what the graph cannot follow is pinned and chosen anew."""
    while True:
        groups = find_groups(walk)
        if not choose(walk, groups):
            continue
        try:
            return groups, replay(walk, kept_atoms(walk, groups))
        except Misfit as misfit:
            pin = Pin("balance_conflict", misfit.node.name, f"{misfit.node.name}: {misfit.text}")
            if not bool((walk.atoms.roots(misfit.atoms) >= 0).any()):
                raise
            walk.atoms.pin(misfit.atoms, pin)


def replay(walk: Walk, kept: Tensor) -> Replay:
    """Carry a choice of channels through the graphs.

    Raises:
        Misfit: If some operation cannot keep what remains apart.
    """
    state = Replay(kept, lambda state, node: _number(walk, state, node))
    for step in walk.steps:
        step.replay(state)
    _freeze_numbers(walk, state)
    return state


def _number(walk: Walk, state: Replay, node: fx.Node) -> Any:
    """Return what a node that is no tensor gives after removal."""
    fact = walk.fact(node)
    source = node.args[0] if node.args else None
    shape = remaining_shape(walk, state, source)
    if shape is not None and isinstance(source, fx.Node):
        if node.target == "size":
            dim = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
            return shape if dim is None else shape[int(dim)]  # type: ignore[arg-type]
        return shape if node.target is getattr and node.args[1] == "shape" else fact
    if node.op not in ("call_function", "call_method") or any(
        isinstance(walk.fact(value), TensorFact) for value in node.all_input_nodes
    ):
        return fact
    args, kwargs = map_arg((node.args, node.kwargs), lambda value: _number(walk, state, value))
    try:
        if isinstance(node.target, str):
            return getattr(_as_size(args[0]), node.target)(*args[1:], **kwargs)
        return node.target(*args, **kwargs)
    except Exception:  # any function of the user's
        return fact


def _as_size(value: Any) -> Any:
    """Give a shape the methods that the graph calls, such as ``numel``."""
    return torch.Size(value) if isinstance(value, tuple) else value


def remaining_shape(walk: Walk, state: Replay, value: Any) -> tuple[int, ...] | None:
    """Return the shape of a tensor after removal."""
    shape = walk.shape(value)
    space = walk.space(value) if isinstance(value, fx.Node) else None
    if shape is None or space is None or value not in state.places:
        return shape
    places = state.places[value]
    return tuple(places.shape[a] if a in space.axes else shape[a] for a in range(len(shape)))


def _freeze_numbers(walk: Walk, state: Replay) -> None:
    """Keep numbers that were computed from a size and are used as values.

    Sizes of views follow the channels; a divisor or a scale keeps its old value.
    """
    sized = {
        step.node
        for step in walk.steps
        if isinstance(step, (Expanded, NormShape, Padded))
        or (isinstance(step, Rearranged) and step.sized)
    }
    for region in walk.regions:
        for node in region.graph.nodes:
            if node in sized or kind_of_operation(walk, node) in _WITHOUT_CHANNELS:
                continue
            if node.op != "output" and not walk.makes_tensors(node):
                continue
            changed = {
                value: walk.fact(value)
                for value in node.all_input_nodes
                if not walk.makes_tensors(value)
                and walk.fact(value) is not None
                and _number(walk, state, value) != walk.fact(value)
            }
            if not changed:
                continue
            for value, fact in changed.items():
                if isinstance(fact, tuple) or _follows_inputs(walk, value):
                    text = "a size that also depends on the inputs is used as data"
                    raise Misfit(node, _ancestor_atoms(walk, value), text)
            args, kwargs = state.arguments.get(node, (node.args, node.kwargs))
            state.arguments[node] = _replaced(args, changed), _replaced(kwargs, changed)


_WITHOUT_CHANNELS = {
    *("affine_grid", "max_unpool1d", "max_unpool2d", "max_unpool3d"),
    *("maxunpool1d", "maxunpool2d", "maxunpool3d"),
}
"""Operations that heed only the other axes of a size that they are given."""


def _follows_inputs(walk: Walk, node: fx.Node) -> bool:
    """Say whether a number is made of more than counts of channels, so that none can be kept."""
    if node.op in ("placeholder", "call_module"):
        return True
    source = node.args[0] if node.args else None
    index = node.args[1] if len(node.args) > 1 else node.kwargs.get("dim")
    if node.target is operator.getitem and isinstance(source, fx.Node) and _is_shape(walk, source):
        source = source.args[0]
    elif not isinstance(walk.fact(source), TensorFact):
        return any(_follows_inputs(walk, value) for value in node.all_input_nodes)
    space = walk.space(source)
    if space is None or not isinstance(index, int):
        return True
    return index % space.atoms.dim() not in space.axes


def _is_shape(walk: Walk, node: fx.Node) -> bool:
    """Say whether a node gives the whole shape of a tensor."""
    plain = node.target == "size" or (node.target is getattr and node.args[1] == "shape")
    return plain and isinstance(walk.fact(node), tuple)


def _replaced(arguments: Any, values: Mapping[fx.Node, Any]) -> Any:
    """Put values in place of nodes."""
    return map_arg(arguments, lambda node: values.get(node, node))


def _ancestor_atoms(walk: Walk, node: fx.Node) -> Tensor:
    """Return the channels of the tensor whose shape a node reads."""
    space: Space | None = walk.space(node)
    waiting = list(node.all_input_nodes)
    while space is None and waiting:
        current = waiting.pop()
        space = walk.space(current)
        waiting += current.all_input_nodes
    assert space is not None, "a changed number comes from a tensor that was cut"
    return space.atoms
