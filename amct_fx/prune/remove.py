"""Physical removal: parameters, buffers, attributes and the numbers in the graphs.

Source: spec/pruning.md section 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn

from amct_fx.errors import PruneError
from amct_fx.graph.capture import Region
from amct_fx.graph.region import GraphForward, fx_graph_of, guard_of, install_graph, regions
from amct_fx.graph.shapes import propagate_shapes
from amct_fx.prune.channels.analysis import analyze, replay
from amct_fx.prune.channels.steps import Misfit, Replay
from amct_fx.prune.channels.units import find_groups, kept_atoms
from amct_fx.prune.inputs import inputs_of

if TYPE_CHECKING:
    from amct_fx.graph.attributes import Watched
    from amct_fx.prune.channels.units import Group
    from amct_fx.prune.channels.walk import Walk
    from amct_fx.prune.plan import PrunePlan
    from amct_fx.prune.planning import Analysis

__all__ = ["KeptIndices", "check_fit", "kept_values", "remove_channels", "run_graphs"]

KeptIndices = dict[str, dict[int, Tensor]]
"""By name of the tensor and axis, the int64 indices that stayed, in their new order."""


def remove_channels(
    model: nn.Module,
    plan: PrunePlan,
    traced: Sequence[Region] | None = None,
    *,
    install: bool = True,
    analysis: Analysis | None = None,
) -> KeptIndices:
    """Take the channels that a plan cuts out of a model, in place.

    Weights, biases, statistics, attributes such as ``out_channels`` and sizes in the graph change
    together; nothing has changed if an error is raised. Weights must be plain parameters: fold
    masks first.

    Args:
        model: The model that the plan was made for, float or prepared.
        plan: What to cut.
        traced: The traced parts of a model that does not run its graphs yet.
        install: Let the parts run their graphs, which know of the new sizes.
        analysis: What the plan comes from, if neither it nor the model has changed since.

    Returns:
        What stayed, to slice the state of an optimizer.

    Raises:
        PruneError: If the plan does not fit the model.

    Example:
        >>> import torch
        >>> from amct_fx import prune_plan
        >>> cfg = '''prune_config { filter_pruner {
        ...     balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }'''
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))
        >>> plan = prune_plan(model, cfg, torch.ones(1, 3, 8, 8))
        >>> kept = remove_channels(model, plan, install=False)
        >>> model[0].out_channels, model[2].in_channels, sorted(kept)
        (4, 4, ['0.bias', '0.weight', '2.weight'])
    """
    if analysis is None:
        _check_tensors(model, plan)
    parts = list(traced) if traced is not None else _regions(model, plan)
    known = (None, None) if analysis is None else (analysis.walk, analysis.replay)
    walk = known[0] or _analysis(model, plan, parts)
    state = known[1] or _replayed(walk, _groups_as_planned(walk, plan))
    kept = _changed_selections(walk, state)
    _apply(walk, state, kept)
    for node, (args, kwargs) in state.arguments.items():
        node.args, node.kwargs = args, kwargs
        node.target = state.targets.get(node, node.target)
    for region in parts:
        watched = _with_new_values(region, state)
        if kept:
            region.guard = replace(region.guard, exclusive=True, watched=watched)
        # the user's Python code may ask a layer for sizes that are others now
        if install and (kept or isinstance(region.module, GraphForward)):
            install_graph(region.module, region.graph, region.guard)
    return kept


def check_fit(model: nn.Module, plan: PrunePlan, traced: Sequence[Region]) -> None:
    """Raise unless the channels that a plan cuts can be taken out of a model; nothing changes.

    Args:
        model: The full float model.
        plan: A plan that was edited, read or searched.
        traced: The traced parts.

    Raises:
        PruneError: The plan does not fit the model.
    """
    plan.check()
    _check_tensors(model, plan)
    walk = _analysis(model, plan, traced)
    _replayed(walk, _groups_as_planned(walk, plan))


def _check_tensors(model: nn.Module, plan: PrunePlan) -> None:
    """Refuse a plan that was made for another model.

    Raises:
        PruneError: Names the first tensor that the model lacks, or that has another shape.
    """
    tensors: dict[str, Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    members = [m for group in plan.groups for m in group.members if m.role in _OF_TENSORS]
    for member in members:
        found = tensors.get(member.key)
        if found is not None and tuple(found.shape) == member.shape:
            continue
        if any(name.startswith(f"{member.layer}.parametrizations.") for name in tensors):
            message = (
                f"{member.key} is masked or computed, so nothing can be taken out of it; "
                "convert_amct removes the channels of a prepared model"
            )
            raise PruneError(message)
        what = "no such tensor" if found is None else f"shape {tuple(found.shape)} there"
        message = (
            f"the plan was made for another model: {member.key} of shape {member.shape}, "
            f"but the model has {what}"
        )
        raise PruneError(message)


_OF_TENSORS = ("row", "column", "attached")
"""Roles of members that are axes of a tensor."""


def _with_new_values(region: Region, state: Replay) -> Watched:
    """Return what a graph relies on, with the attributes that follow the channels."""
    return tuple(
        (path, name, state.attributes.get((region.full_name(path).strip("."), name), value))
        for path, name, value in region.guard.watched
    )


def kept_values(model: nn.Module, plan: PrunePlan) -> Iterator[tuple[nn.Module, Tensor, int]]:
    """Say what stays of the tensors that single modules read, such as quantizers of results.

    Args:
        model: A prepared model that runs its graphs, its weights not masked yet.
        plan: What to cut.

    Yields:
        For each module that a traced part calls on one tensor that loses channels along one axis:
        the module, a uint8 mask over the channels, and the axis.

    Raises:
        PruneError: If the plan does not fit the model.
    """
    parts = _regions(model, plan)
    walk = _analysis(model, plan, parts)
    state = _replayed(walk, _groups_as_planned(walk, plan))
    for node in (node for region in parts for node in region.graph.nodes):
        source = node.args[0] if len(node.args) == 1 else None
        module, space = walk.module(node), walk.space(source)
        if module is None or space is None or len(space.axes) != 1:
            continue
        kept = torch.zeros(space.atoms.numel(), dtype=torch.uint8)
        kept[state.places[source].flatten()] = 1
        if not bool(kept.all()):
            yield module, kept, space.axis


def run_graphs(model: nn.Module, plan: PrunePlan) -> None:
    """Let the traced parts of a model run their graphs.

    Args:
        model: The model that the plan was made for; changed in place.
        plan: It tells the form of the call.
    """
    for region in _regions(model, plan):
        install_graph(region.module, region.graph, region.guard)


def _regions(model: nn.Module, plan: PrunePlan) -> list[Region]:
    found = [
        Region(name, module, fx_graph_of(module), guard_of(module))
        for name, module in regions(model)
    ]
    if found:
        return found
    from amct_fx.backend_config import is_layer
    from amct_fx.graph.capture import capture

    example = inputs_of(plan.inputs) if plan.inputs else None
    return capture(model, is_layer, example_inputs=_on_device(model, example)).regions


def _on_device(model: nn.Module, example: tuple[Tensor, ...] | None) -> tuple[Tensor, ...] | None:
    device = next((parameter.device for parameter in model.parameters()), None)
    return None if example is None else tuple(item.to(device) for item in example)


def _analysis(model: nn.Module, plan: PrunePlan, parts: Sequence[Region]) -> Walk:
    facts = plan.facts
    if facts is None:
        if not plan.inputs:
            message = "the plan holds no shapes of inputs; make it anew with example_inputs"
            raise PruneError(message)
        example = _on_device(model, inputs_of(plan.inputs))
        facts = propagate_shapes(model, parts, example)
    return analyze(model, parts, plan.settings, plan.options, facts)


def _groups_as_planned(walk: Walk, plan: PrunePlan) -> list[Group]:
    """Return the groups of the model with the choice of the plan."""
    rows = plan.kept_rows()
    groups = find_groups(walk)
    for group in groups:
        votes = np.zeros(group.size, np.int64)
        most = np.zeros(group.size, np.int64)
        for name, (units, numbers) in group.rows.items():
            stays = np.isin(numbers, rows[name].numpy()) if name in rows else True
            votes += np.bincount(units, np.broadcast_to(stays, units.shape), group.size).astype(int)
            most += np.bincount(units, minlength=group.size)
        if bool(((votes > 0) & (votes < most)).any()):
            message = (
                f"the plan does not fit the model: {', '.join(group.producers)} share channels "
                "but would keep different ones"
            )
            raise PruneError(message)
        group.kept = np.flatnonzero(votes).tolist()
    _check_all_cut(walk, rows, groups)
    return groups


def _check_all_cut(walk: Walk, rows: dict[str, Tensor], groups: Sequence[Group]) -> None:
    """Raise if the plan cuts channels that the model cannot lose."""
    gone: dict[str, int] = {}
    for group in groups:
        for name, (units, _) in group.rows.items():
            gone[name] = gone.get(name, 0) + int(group.gone[units].sum())
    for name, kept in rows.items():
        known = walk.producers.get(name)
        atoms = None if known is None else walk.rows_of(known[0], known[1])
        if atoms is None or atoms.numel() - kept.numel() != gone.get(name, 0):
            message = f"the plan cuts channels of {name!r} that the model cannot lose"
            raise PruneError(message)


def _replayed(walk: Walk, groups: Sequence[Group]) -> Replay:
    try:
        return replay(walk, kept_atoms(walk, groups))
    except Misfit as misfit:
        message = f"the plan does not fit the model: {misfit}"
        raise PruneError(message) from misfit


def _changed_selections(walk: Walk, state: Replay) -> KeptIndices:
    kept: KeptIndices = {}
    for (name, axis), indices in state.selections.items():
        full = torch.arange(walk.sites[name, axis].atoms.numel())
        if not torch.equal(indices, full):
            kept.setdefault(name, {})[axis] = indices
    return kept


def _apply(walk: Walk, state: Replay, kept: KeptIndices) -> None:
    modules = dict(walk.model.named_modules(remove_duplicate=False))
    with torch.no_grad():
        for name, axes in kept.items():
            path, _, key = name.rpartition(".")
            owner = modules[path]
            tensor = getattr(owner, key)
            groups = max(walk.sites[name, axis].groups for axis in axes)
            _shrink(tensor, axes, groups)
            if key == "weight":
                _shrink_quantizer(walk, owner, name, axes)
    for (path, attribute), value in state.attributes.items():
        if attribute:
            setattr(modules[path], attribute, value)


def _shrink(tensor: Tensor, axes: dict[int, Tensor], groups: int) -> None:
    """Cut a tensor in place, so that everything that holds it sees the new one."""
    data = tensor.detach()
    channels_last = (
        data.dim() == 4
        and not data.is_contiguous()
        and data.is_contiguous(memory_format=torch.channels_last)
    )
    data = cut_tensor(data, axes, groups)
    if channels_last:
        data = data.contiguous(memory_format=torch.channels_last)
    tensor.grad = None
    tensor.data = data


def cut_tensor(tensor: Tensor, axes: Mapping[int, Tensor], groups: int = 1) -> Tensor:
    """Return what stays of a tensor.

    Args:
        tensor: Of the full shape of a parameter.
        axes: The indices that stay, by axis.
        groups: Groups of the convolution that it is the weight of, where they have indices of
            their own.
    """
    if groups > 1:
        return _select_in_groups(tensor, axes, groups)
    for axis, indices in axes.items():
        tensor = tensor.index_select(axis, indices.to(tensor.device))
    return tensor


def _select_in_groups(data: Tensor, axes: Mapping[int, Tensor], groups: int) -> Tensor:
    """Cut a grouped weight: every block of axis 0 has its own indices of axis 1."""
    width = data.shape[1]
    first = axes.get(0, torch.arange(data.shape[0])).reshape(groups, -1)
    second = axes.get(1, torch.arange(width * groups)).reshape(groups, -1) % width
    blocks = [
        data.index_select(0, rows.to(data.device)).index_select(1, columns.to(data.device))
        for rows, columns in zip(first, second, strict=True)
    ]
    return torch.cat(blocks)


def _shrink_quantizer(walk: Walk, layer: nn.Module, name: str, axes: dict[int, Tensor]) -> None:
    """Cut what a fake-quantizer of the weight holds for each output channel."""
    rows = [(a, i) for a, i in axes.items() if walk.sites[name, a].role != "column"]
    quantizer = getattr(layer, "weight_fake_quant", None)
    if not rows or not isinstance(quantizer, nn.Module):
        return
    axis, indices = rows[0]
    full = walk.sites[name, axis].atoms.numel()
    for tensor in _tensors(quantizer):
        if full > 1 and tensor.dim() == 1 and tensor.shape[0] == full:
            _shrink(tensor, {0: indices}, 1)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()
