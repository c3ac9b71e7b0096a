"""Normalisations and other layers with one parameter for each channel."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from amct_fx.prune.channels import elementwise
from amct_fx.prune.channels.atoms import Pin
from amct_fx.prune.channels.sites import Site, SiteKey
from amct_fx.prune.channels.space import Space
from amct_fx.prune.channels.statistics import count_kept, count_kept_in_groups, is_mask_aware
from amct_fx.prune.channels.steps import Attach, Joined, SetGroups
from amct_fx.prune.channels.walk import Walk, fixed_atoms, is_along, source_of

if TYPE_CHECKING:
    from amct_fx.prune.channels.elementwise import Handler

__all__ = ["BY_NAME", "FUNCTIONS", "METHODS", "MODULES"]


def attach(
    walk: Walk,
    node: fx.Node,
    space: Space | None,
    tensors: list[Tensor],
    attributes: tuple[tuple[str, str], ...] = (),
    block: int = 1,
) -> None:
    """Let tensors with one entry for each channel of the first input follow that input."""
    source = source_of(node)
    keys: list[SiteKey] = []
    own = None if space is None else space.atoms.flatten()  # one for all: it is known by identity
    for tensor in tensors:
        atoms = fixed_atoms(tensor.shape[0]) if own is None else own
        keys.append(walk.bind(node, Site("", "", 0, "attached", atoms), tensor))
    shape = walk.shape(source)
    if node.op == "call_module" and shape is not None and len(shape) > 1:
        walk.tie(node, fixed_atoms(shape[1]) if own is None else own)
    if space is None:
        walk.settle(node, None, node.all_input_nodes)
        walk.fixed.setdefault(node, walk.origin(source))
        return
    out = Space(space.atoms, space.axis, zero=False, records=space.records)
    walk.spaces[node] = out
    walk.steps.append(Attach(node, source, space, tuple(keys), attributes, block))
    walk.steps.append(Joined(node, (source,), out))


def batch_norm(walk: Walk, node: fx.Node) -> None:
    """Attach weight, bias and statistics of a batch norm or instance norm."""
    module: Any = walk.module(node)
    rank = len(walk.shape(node) or ())
    unbatched = isinstance(module, nn.modules.instancenorm._InstanceNorm) and rank == _least_rank(
        module
    )
    space = _input_space(walk, node)
    if parametrize.is_parametrized(module) or unbatched or _elsewhere(space):
        walk.pin_inputs(
            node, "norm_statistics", "the channels do not lie on the axis it normalises"
        )
        return
    owned = (module.weight, module.bias, module.running_mean, module.running_var)
    tensors = [tensor for tensor in owned if tensor is not None]
    attach(walk, node, space, tensors, ((walk.name(node), "num_features"),))


def and_activation(normalise: Handler) -> Handler:
    """Return the handler of a norm whose children are functions of one element."""

    def handle(walk: Walk, node: fx.Node) -> None:
        module: Any = walk.module(node)
        others = [child for child in module.children() if type(child) not in elementwise.MODULES]
        if others:
            text = f"it runs a {type(others[0]).__name__}, which is not known"
            walk.pin_inputs(node, "unknown_op", text)
            return
        normalise(walk, node)

    return handle


def _least_rank(module: nn.Module) -> int:
    """Return the rank of an unbatched input of an instance norm."""
    return {"InstanceNorm1d": 2, "InstanceNorm2d": 3, "InstanceNorm3d": 4}.get(
        type(module).__name__, 0
    )


def functional_batch_norm(walk: Walk, node: fx.Node) -> None:
    """Attach the tensors of ``F.batch_norm`` or ``F.instance_norm``."""
    names = ("input", "running_mean", "running_var", "weight", "bias")
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    tensors = _owned(walk, [arguments.get(name) for name in names[1:]])
    space = _input_space(walk, node)
    if tensors is None or _elsewhere(space):
        walk.pin_inputs(node, "norm_statistics", "its parameters are computed")
        return
    attach(walk, node, space, tensors)


def group_norm(walk: Walk, node: fx.Node) -> None:
    """Keep or remove whole groups of a group norm."""
    module: Any = walk.module(node)
    space = _input_space(walk, node)
    if parametrize.is_parametrized(module) or _elsewhere(space):
        walk.pin_inputs(
            node, "norm_statistics", "the channels do not lie on the axis it normalises"
        )
        return
    tensors = [tensor for tensor in (module.weight, module.bias) if tensor is not None]
    block = module.num_channels // module.num_groups
    if block > 1 and space is not None and is_mask_aware(walk, space):
        count_kept_in_groups(walk, node, space, module.num_groups, tensors)
        return
    _join_groups(walk, node, space, module.num_groups)
    name = walk.name(node)
    attach(walk, node, space, tensors, ((name, "num_channels"),))
    if space is not None:
        groups = ((name, "num_groups"),)
        walk.steps.append(Attach(node, source_of(node), space, (), groups, block))


def _join_groups(walk: Walk, node: fx.Node, space: Space | None, groups: int) -> None:
    """Let the channels of each group live together."""
    if space is not None:
        rows = space.atoms.reshape(groups, -1)
        pin = Pin("norm_statistics", node.name, "its groups are normalised together")
        for column in range(1, rows.shape[1]):
            walk.atoms.join(rows[:, 0], rows[:, column], pin)


def functional_group_norm(walk: Walk, node: fx.Node) -> None:
    """Do the same for ``F.group_norm``, whose number of groups stands in the graph."""
    names = ("input", "num_groups", "weight", "bias")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    groups, space = walk.fact(given.get("num_groups")), _input_space(walk, node)
    tensors = _owned(walk, [given.get("weight"), given.get("bias")])
    if tensors is None or not isinstance(groups, int) or _elsewhere(space):
        walk.pin_inputs(node, "norm_statistics", "its parameters are computed")
        return
    if space is not None and space.atoms.numel() > groups and is_mask_aware(walk, space):
        count_kept_in_groups(walk, node, space, groups, tensors)
        return
    _join_groups(walk, node, space, groups)
    attach(walk, node, space, tensors)
    if space is not None:
        block = space.atoms.numel() // groups
        walk.steps.append(SetGroups(node, given["input"], 1, "num_groups", block))


def _owned(walk: Walk, values: list[Any]) -> list[Tensor] | None:
    """Return the parameters that are given, ``None`` if one of them is computed."""
    tensors = [walk.owned_tensor(value) for value in values if value is not None]
    return None if None in tensors else [tensor for tensor in tensors if tensor is not None]


def layer_norm(walk: Walk, node: fx.Node) -> None:
    """Pass where the normalised axes hold no channels."""
    module: Any = walk.module(node)
    given = (module.weight, getattr(module, "bias", None))
    tensors = [tensor for tensor in given if tensor is not None]
    computed = parametrize.is_parametrized(module)
    _over_last_axes(walk, node, module.normalized_shape, None if computed else tensors)


def layer_norm_2d(walk: Walk, node: fx.Node) -> None:
    """Handle a layer norm over axis 1."""
    module: Any = walk.module(node)
    space = _input_space(walk, node)
    if space is None:
        _tie_whole(walk, node, module.normalized_shape)
        walk.settle(node, None, node.all_input_nodes)
        return
    tensors = [tensor for tensor in (module.weight, module.bias) if tensor is not None]
    if 1 in space.axes and is_along(space, 1) and is_mask_aware(walk, space):
        count_kept(walk, node, space, module.normalized_shape, 0, tensors)
    elif 1 in space.axes:
        _pin_statistics(walk, node)
    else:
        _tie_whole(walk, node, module.normalized_shape)
        _pass(walk, node, space)


def functional_layer_norm(walk: Walk, node: fx.Node) -> None:
    """Do the same for ``F.layer_norm`` and ``F.rms_norm``."""
    shape = node.args[1] if len(node.args) > 1 else node.kwargs.get("normalized_shape")
    fact = walk.fact(shape) if isinstance(shape, fx.Node) else shape
    if not isinstance(fact, (tuple, list)):
        walk.pin_inputs(node, "norm_statistics", "the normalised axes are not known")
        return
    names = ("input", "normalized_shape", "weight", "bias")
    given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    bias = None if node.target in _WITHOUT_BIAS else given.get("bias")
    tensors = _owned(walk, [given.get("weight"), bias])
    _over_last_axes(walk, node, [walk.fact(size) for size in fact], tensors)


def _over_last_axes(
    walk: Walk, node: fx.Node, shape: Sequence[int], tensors: list[Tensor] | None
) -> None:
    source = source_of(node)
    space = walk.space(source)
    if space is None:
        _tie_whole(walk, node, shape)
        walk.settle(node, None, node.all_input_nodes)
        walk.fixed.setdefault(node, walk.origin(source))
        return
    first = space.atoms.dim() - len(shape)
    if all(axis < first for axis in space.axes):
        _tie_whole(walk, node, shape)
        _pass(walk, node, space)
    elif tensors is not None and is_mask_aware(walk, space):
        count_kept(walk, node, space, shape, space.axis - first, tensors)
    else:
        _pin_statistics(walk, node)


def _tie_whole(walk: Walk, node: fx.Node, shape: Sequence[int]) -> None:
    """Note that a module normalises what has no channels; other calls of it must keep theirs."""
    if node.op == "call_module":
        walk.tie(node, fixed_atoms(math.prod(shape)))


def _pin_statistics(walk: Walk, node: fx.Node) -> None:
    text = "its statistics run over the channels; norm_axis='mask_aware' prunes them"
    walk.pin_inputs(node, "norm_statistics", text)


def _pass(walk: Walk, node: fx.Node, space: Space) -> None:
    source = source_of(node)
    out = Space(space.atoms, space.axis, zero=False, records=space.records)
    walk.spaces[node] = out
    walk.steps.append(Joined(node, (source,), out))


def prelu(walk: Walk, node: fx.Node) -> None:
    """Attach the slopes of a PReLU; one slope for all passes."""
    module: Any = walk.module(node)
    if parametrize.is_parametrized(module):
        walk.pin_inputs(node, "norm_statistics", "its slopes are computed")
        return
    _slopes(walk, node, module.weight, ((walk.name(node), "num_parameters"),))


def functional_prelu(walk: Walk, node: fx.Node) -> None:
    """Do the same for ``F.prelu``."""
    given = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    weight = walk.owned_tensor(given)
    if weight is None:
        walk.pin_inputs(node, "norm_statistics", "its slopes are computed")
        return
    _slopes(walk, node, weight)


def _slopes(
    walk: Walk, node: fx.Node, weight: Tensor, attributes: tuple[tuple[str, str], ...] = ()
) -> None:
    source = source_of(node)
    space = walk.space(source)
    if weight.numel() == 1:
        if space is None:
            walk.settle(node, None, node.all_input_nodes)
            walk.fixed.setdefault(node, walk.origin(source))
            return
        walk.spaces[node] = space
        walk.steps.append(Joined(node, (source,), space))
        return
    along = _input_space(walk, node)
    if _elsewhere(along):
        walk.pin_inputs(node, "norm_statistics", "its slopes lie on another axis than the channels")
        return
    attach(walk, node, along, [weight], attributes)
    if along is not None:
        walk.spaces[node] = along  # 0 stays 0


def _input_space(walk: Walk, node: fx.Node) -> Space | None:
    return walk.space(source_of(node))


def _elsewhere(space: Space | None) -> bool:
    """Say whether there are channels that do not lie along axis 1."""
    return space is not None and not is_along(space, 1)


BY_NAME: dict[str, Handler] = {
    "timm.layers.norm.GroupNorm": group_norm,
    "timm.layers.norm.GroupNorm1": group_norm,
    "timm.layers.norm.LayerNorm": layer_norm,
    "timm.layers.norm.LayerNorm2d": layer_norm_2d,
    "timm.layers.norm_act.BatchNormAct2d": and_activation(batch_norm),
    "timm.layers.norm_act.GroupNormAct": and_activation(group_norm),
}
"""Subclasses of other libraries whose own forward computes the same norm, and then a function."""
MODULES: dict[type[nn.Module], Handler] = {
    nn.BatchNorm1d: batch_norm,
    nn.BatchNorm2d: batch_norm,
    nn.BatchNorm3d: batch_norm,
    nn.SyncBatchNorm: batch_norm,
    nn.InstanceNorm1d: batch_norm,
    nn.InstanceNorm2d: batch_norm,
    nn.InstanceNorm3d: batch_norm,
    nn.GroupNorm: group_norm,
    nn.LayerNorm: layer_norm,
    nn.PReLU: prelu,
}
if hasattr(nn, "RMSNorm"):
    MODULES[nn.RMSNorm] = layer_norm
_WITHOUT_BIAS = {getattr(F, "rms_norm", None), getattr(torch, "rms_norm", None)}
FUNCTIONS: dict[Any, Handler] = {
    F.batch_norm: functional_batch_norm,
    F.instance_norm: functional_batch_norm,
    F.layer_norm: functional_layer_norm,
    torch.layer_norm: functional_layer_norm,
    F.group_norm: functional_group_norm,
    torch.group_norm: functional_group_norm,
    F.prelu: functional_prelu,
    torch.prelu: functional_prelu,
}
if hasattr(F, "rms_norm"):
    FUNCTIONS |= {F.rms_norm: functional_layer_norm, torch.rms_norm: functional_layer_norm}
METHODS: dict[str, Handler] = {"prelu": functional_prelu}
