"""The groups of modules that are trained together: found in the graph, or chosen by the user.

A *unit* is a layer with the batch norm and the activation behind it. Units that follow one another
are joined to groups of a given size. What a user chose comes first and is never taken apart.
Source: spec/distillation.md sections 6 to 8.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from amct_fx.config.messages import listing
from amct_fx.config.schema import NOWHERE, Source
from amct_fx.distillation.calls import Call, Calls
from amct_fx.distillation.spans import between, is_crossed, paths_between
from amct_fx.errors import ModelError

if TYPE_CHECKING:
    from amct_fx.config import ModelFacts
    from amct_fx.config.distill import DistillGroup
    from amct_fx.graph import Capture, Region

__all__ = ["Group", "find_groups", "groups_of_names"]

_ACTIVATIONS = (nn.ReLU, nn.LeakyReLU, nn.Sigmoid, nn.Tanh, nn.Softmax)
_FUNCTIONS: frozenset[Any] = frozenset(
    {
        *(F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"),
        *(F.leaky_relu, F.leaky_relu_),
        *(F.sigmoid, torch.sigmoid, torch.sigmoid_, "sigmoid", "sigmoid_"),
        *(F.tanh, torch.tanh, torch.tanh_, "tanh", "tanh_"),
        *(F.softmax, torch.softmax, "softmax"),
    }
)


@dataclass(frozen=True)
class Group:
    """Modules that are trained together.

    Args:
        names: Names of the modules in the order of the graph, without Dropout and Identity.
        region: The traced part of the model that calls them.
        nodes: All nodes from the first to the last one, functions included.
    """

    names: tuple[str, ...]
    region: Region
    nodes: tuple[fx.Node, ...]


def find_groups(
    model: nn.Module,
    captured: Capture,
    facts: ModelFacts,
    *,
    user_groups: Sequence[DistillGroup] = (),
    group_size: int = 1,
    allow_branches: bool = False,
) -> list[Group]:
    """Return the groups of a model, in the order of its graph.

    Args:
        model: The traced model.
        captured: What tracing found.
        facts: Facts about the layers; each eligible one gets into a group.
        user_groups: Groups chosen by the user. The others avoid all of their modules.
        group_size: Most units in one group; it does not limit the groups of the user.
        allow_branches: Let more than one way lead through a group of the user, if all of them stay
            inside.

    Raises:
        ConfigError: When a group of the user does not fit the model.
        ModelError: When there is no group at all.

    Example:
        >>> from amct_fx.backend_config import is_layer
        >>> from amct_fx.distillation import distill_facts
        >>> from amct_fx.graph import capture
        >>> model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
        >>> captured = capture(model, is_layer)
        >>> groups = find_groups(model, captured, distill_facts(model, captured))
        >>> [group.names for group in groups]
        [('0', '1'), ('2',)]
    """
    calls = Calls(model, captured)
    groups = [_user_group(calls, item, allow_branches=allow_branches) for item in user_groups]
    labels = [f"{item.start!r} … {item.end!r}" for item in user_groups]
    _refuse_common_nodes(calls, groups, labels, [item.source for item in user_groups])
    owned = {node for group in groups for node in group.nodes}
    eligible = {layer.name for layer in facts.layers if layer.eligible}
    units = [
        _unit(calls, Call(region, node), owned)
        for region in calls.regions
        for node in region.graph.nodes
        if node not in owned and calls.name(Call(region, node)) in eligible
    ]
    groups += _join(calls, units, group_size, owned)
    if not groups:
        message = "the model has no group of layers that could be distilled"
        raise ModelError(message)
    return sorted(groups, key=lambda group: calls.position(group.nodes[0]))


def _unit(calls: Calls, layer: Call, owned: set[fx.Node]) -> list[Call]:
    """Return a layer with the batch norm and the activation behind it."""
    unit = [layer]
    after = _free(calls, layer, owned)
    if after is not None and type(norm := calls.module(after)) is nn.BatchNorm2d:
        if len(calls.of_module(norm)) > 1:
            return unit
        unit.append(after)
        after = _free(calls, after, owned)
    if after is not None and _is_activation(calls, after):
        unit.append(after)
    return unit


def _free(calls: Calls, call: Call, owned: set[fx.Node]) -> Call | None:
    """Return the only consumer, unless the way to it belongs to a group of the user."""
    after = calls.following(call)
    if after is None or not owned.isdisjoint(between(call.node, after.node)):
        return None
    return after


def _is_activation(calls: Calls, call: Call) -> bool:
    return type(calls.module(call)) in _ACTIVATIONS or _is_function(call.node)


def _is_function(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method") and node.target in _FUNCTIONS


def _join(calls: Calls, units: list[list[Call]], size: int, owned: set[fx.Node]) -> list[Group]:
    """Join units that follow one another without a branch between them."""
    left = {unit[0].node: unit for unit in units}
    groups = []
    for head in [unit[0].node for unit in units]:
        if head not in left:
            continue
        chain = list(left.pop(head))
        for _ in range(size - 1):
            after = _free(calls, chain[-1], owned)
            if after is None or after.node not in left:
                break
            chain += left.pop(after.node)
        names = tuple(name for call in chain if (name := calls.name(call)) is not None)
        nodes = between(chain[0].node, chain[-1].node)
        groups.append(Group(names, chain[0].region, nodes))
    return groups


def _user_group(calls: Calls, item: DistillGroup, *, allow_branches: bool) -> Group:
    """Return the group that a user chose by its first and its last module."""
    starts = calls.of_name(item.start, item.source)
    ends = calls.of_name(item.end, item.source)
    _refuse_reused(starts, f"module {item.start!r}", item.source)
    start = starts[0]
    nodes = _region_to(calls, start, ends, item, allow_branches=allow_branches)
    group = _group(calls, start.region, nodes)
    _refuse_reused_norms(calls, group, item.source)
    return group


def _region_to(
    calls: Calls, start: Call, ends: Sequence[Call], item: DistillGroup, *, allow_branches: bool
) -> tuple[fx.Node, ...]:
    """Return the nodes from the start to the end.

    An end that is called several times, as the only ReLU of a residual block is, means the last
    call to which the start leads in one way, so that the group holds the whole block.
    """
    problem = f"no way leads from {item.start!r} to {item.end!r}{_backwards(calls, start, ends)}"
    for end in sorted(ends, key=lambda call: -calls.position(call.node)):
        count = _ways(calls, start, end)
        if count == 0:
            continue
        nodes = between(start.node, end.node)
        leak = _leak(calls, start.region, nodes) if allow_branches else None
        if count == 1 or (allow_branches and leak is None):
            return nodes
        reason = f", and {str(leak)!r} is also read outside" if leak else ""
        problem = (
            f"{count} ways lead from {item.start!r} to {item.end!r}{reason}; a group needs exactly "
            "one" + ("" if allow_branches else ", or allow_branches=True if all stay inside")
        )
    raise item.source.error(problem)


def _ways(calls: Calls, start: Call, end: Call) -> int:
    if start.region is not end.region:
        return 0
    return paths_between(start.node, end.node, calls.readers(start.region))


def _backwards(calls: Calls, start: Call, ends: Iterable[Call]) -> str:
    """Return a hint when start and end are the wrong way round."""
    swapped = any(_ways(calls, end, start) for end in ends)
    return ", only the other way round; swap start and end" if swapped else ""


def _leak(calls: Calls, region: Region, nodes: Sequence[fx.Node]) -> fx.Node | None:
    """Return an inner node whose value is also read outside, if there is one."""
    inside = {*nodes, *calls.readers(region)}
    return next((node for node in nodes[:-1] if not inside.issuperset(node.users)), None)


def _group(calls: Calls, region: Region, nodes: tuple[fx.Node, ...]) -> Group:
    """Return the group of these nodes; Dropout and Identity are named at its ends only."""
    names = []
    for node in nodes:
        name = calls.name(Call(region, node))
        at_end = node in (nodes[0], nodes[-1])
        if name is not None and (at_end or not is_crossed(node, region.module)):
            names.append(name)
    return Group(tuple(names), region, nodes)


def _refuse_reused_norms(calls: Calls, group: Group, source: Source) -> None:
    for node in group.nodes:
        module = calls.module(Call(group.region, node))
        if isinstance(module, _BatchNorm):
            name = calls.name(Call(group.region, node))
            _refuse_reused(calls.of_module(module), f"batch norm {name!r}", source)


def _refuse_reused(calls: Sequence[Call], what: str, source: Source) -> None:
    """Raise when a module that must be called once is called more often."""
    if len(calls) > 1:
        message = f"{what} is called {len(calls)} times in one forward, so it fits no group"
        raise source.error(message)


def _refuse_common_nodes(
    calls: Calls, groups: list[Group], labels: Sequence[str], sources: Sequence[Source]
) -> None:
    """Raise when two groups have a module in common; each call of a module counts for itself."""
    owners: dict[fx.Node, str] = {}
    for group, label, source in zip(groups, labels, sources, strict=True):
        for node in group.nodes:
            if node in owners:
                name = calls.name(Call(group.region, node)) or str(node)
                message = f"the groups {owners[node]} and {label} have {name!r} in common"
                raise source.error(message)
        owners.update(dict.fromkeys(group.nodes, label))


def groups_of_names(
    model: nn.Module,
    captured: Capture,
    names: Iterable[Sequence[str]],
    *,
    source: Source = NOWHERE,
) -> list[Group]:
    """Return the groups that a JSON file lists.

    A function such as ``torch.relu`` behind the last module has no name that could be listed; it
    belongs to the group. Modules between the first and the last one that hold no parameters, such
    as a Dropout, may be left out of the list.

    Args:
        model: The traced model.
        captured: What tracing found.
        names: Module names of each group.
        source: The file, for messages.

    Raises:
        ConfigError: For an unknown module, a wrong order, modules that are not connected, a layer
            between them that is not listed, or a module in two groups.
    """
    calls = Calls(model, captured)
    groups: list[Group] = []
    labels = []
    for item in names:
        taken = {node for group in groups for node in group.nodes}
        groups.append(_listed_group(calls, item, taken, source))
        labels.append(repr(list(item)))
    _refuse_common_nodes(calls, groups, labels, [source] * len(groups))
    return groups


def _left_out(
    calls: Calls, region: Region, nodes: Sequence[fx.Node], listed: set[fx.Node]
) -> list[str]:
    """Return the modules of a span that a list leaves out although the group would train them."""
    found = [Call(region, node) for node in nodes if node not in listed]
    return [
        calls.name(call) or ""
        for call in found
        if (module := calls.module(call)) is not None and _holds_tensors(module)
    ]


def _holds_tensors(module: nn.Module) -> bool:
    return any(True for _ in module.parameters()) or any(True for _ in module.buffers())


def _listed_group(calls: Calls, names: Sequence[str], taken: set[fx.Node], source: Source) -> Group:
    """Return one group; of a module that is called several times, the call that fits."""
    by_name = [calls.of_name(name, source) for name in names]
    problem = ""
    # A call that no other group has comes first, so that a reused module finds its place.
    for start in sorted(by_name[0], key=lambda call: call.node in taken):
        found = _follow(calls, start, names, by_name)
        if not isinstance(found, str):
            return Group(tuple(names), start.region, found)
        problem = problem or found
    message = f"the group {list(names)!r}: {problem}"
    raise source.error(message)


def _follow(
    calls: Calls, start: Call, names: Sequence[str], by_name: list[list[Call]]
) -> tuple[fx.Node, ...] | str:
    """Return the nodes from the first module to the last one, or what is wrong with the list."""
    chosen = [start]
    for name, candidates in zip(names[1:], by_name[1:], strict=True):
        last = calls.position(chosen[-1].node)
        reached = [call for call in candidates if _ways(calls, start, call)]
        later = [call for call in reached if calls.position(call.node) > last]
        if not later:
            backwards = reached or any(_ways(calls, call, start) for call in candidates)
            return f"{name!r} is {'listed in the wrong order' if backwards else 'not connected'}"
        chosen.append(later[0])
    end = chosen[-1]
    nodes = between(start.node, end.node)
    for name, call in zip(names, chosen, strict=True):
        if call.node not in nodes:
            return f"{name!r} is not connected to {names[-1]!r}"
    left_out = _left_out(calls, start.region, nodes, {call.node for call in chosen})
    if left_out:
        return (
            f"{listing(left_out)} lies between its modules and is not listed; list all that have "
            "parameters, or make two groups"
        )
    after = calls.following(end)
    return (*nodes, after.node) if after is not None and _is_function(after.node) else nodes
