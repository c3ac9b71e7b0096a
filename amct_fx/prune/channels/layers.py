"""Convolutions, transposed convolutions and Linear: where channels begin and end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.utils import parametrize

from amct_fx.config import M4N2PruneConfig
from amct_fx.prune.channels.atoms import Pin
from amct_fx.prune.channels.contractions import linear_letters, multiply
from amct_fx.prune.channels.parameters import is_made_of_parameters
from amct_fx.prune.channels.sites import Site, SiteKey
from amct_fx.prune.channels.space import Record, Space
from amct_fx.prune.channels.steps import Columns, Rows, SetAttribute, SetGroups, Spread
from amct_fx.prune.channels.walk import (
    LayerUse,
    Walk,
    channel_space,
    fixed_atoms,
    is_along,
    source_of,
)

if TYPE_CHECKING:
    from amct_fx.prune.channels.elementwise import Handler

__all__ = ["FUNCTIONS", "MODULES", "Call", "layer_call"]


@dataclass
class Call:
    """One call of a layer, of a module or of a function on a parameter.

    Attributes:
        node: The call.
        name: Name of the layer; of the node for a function.
        path: Name of the module whose attributes follow the channels, ``None`` for a function.
        kind: ``"conv"``, ``"deconv"`` or ``"linear"``.
        source: The input.
        weight: The weight.
        bias: The bias, or ``None``.
        groups: Groups of the convolution.
    """

    node: fx.Node
    name: str
    path: str | None
    kind: str
    source: Any
    weight: Tensor
    bias: Tensor | None
    groups: int

    @property
    def transposed(self) -> bool:
        """Whether the weight is ``[I, O/g, *]``."""
        return self.kind == "deconv"

    @property
    def inputs(self) -> int:
        """Number of input channels."""
        return self.weight.shape[0] if self.transposed else self.weight.shape[1] * self.groups

    @property
    def outputs(self) -> int:
        """Number of output channels."""
        return self.weight.shape[1] * self.groups if self.transposed else self.weight.shape[0]

    @property
    def depthwise(self) -> bool:
        """Whether every input channel is a group of its own."""
        return self.groups == self.inputs > 1

    @property
    def axis(self) -> int:
        """The channel axis of input and output."""
        return -1 if self.kind == "linear" else 1

    @property
    def row_axis(self) -> int:
        """The axis of the output channels of the weight."""
        return 1 if self.transposed else 0

    def attribute(self, short: str) -> tuple[str, str]:
        """Return module and name of the attribute that counts inputs or outputs."""
        suffix = "features" if self.kind == "linear" else "channels"
        return self.path or "", f"{short}_{suffix}" if self.path is not None else ""


def layer_call(walk: Walk, node: fx.Node, kind: str) -> Call | None:
    """Read a call; ``None`` if its weight is not a plain parameter of the model."""
    if node.op == "call_module":
        return _module_call(walk, node, kind)
    names = _DECONV if kind == "deconv" else _CONV
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    weight = walk.owned_tensor(arguments.get("weight"))
    bias_node = arguments.get("bias")
    bias = walk.owned_tensor(bias_node)
    groups: Any = arguments.get("groups", 1)
    readable = (
        weight is not None and isinstance(groups, int) and (bias_node is None) == (bias is None)
    )
    if not readable or weight is None:
        return None
    owner = walk.tensors[id(weight)].rpartition(".")[0]
    layer = walk.model.get_submodule(owner)
    # a subclass of a layer that was traced into, or a function on the weight of a layer
    path = owner if isinstance(layer, _CLASSES) and layer.weight is weight else None
    name = node.name if path is None else path
    return Call(node, name, path, kind, arguments.get("input"), weight, bias, groups)


def _module_call(walk: Walk, node: fx.Node, kind: str) -> Call | None:
    module: Any = walk.module(node)
    if parametrize.is_parametrized(module) or not isinstance(
        module._parameters.get("weight"), nn.Parameter
    ):
        return None
    name = walk.name(node)
    groups = getattr(module, "groups", 1)
    return Call(node, name, name, kind, source_of(node), module.weight, module.bias, groups)


def conv(walk: Walk, node: fx.Node) -> None:
    """Handle a convolution."""
    _layer(walk, node, "conv")


def deconv(walk: Walk, node: fx.Node) -> None:
    """Handle a transposed convolution."""
    _layer(walk, node, "deconv")


def linear(walk: Walk, node: fx.Node) -> None:
    """Handle a Linear."""
    _layer(walk, node, "linear")


def _layer(walk: Walk, node: fx.Node, kind: str) -> None:
    call = layer_call(walk, node, kind)
    shape = None if call is None else walk.shape(call.source)
    if call is None and node.target is F.linear and _is_product(walk, node):
        return
    if call is None or shape is None:
        text = "its weight is computed, or it has a bias that is no parameter"
        walk.pin_inputs(node, "functional_weight", text)
        return
    walk.calls.setdefault(call.name, node)
    if kind != "linear" and len(shape) != call.weight.dim():
        walk.pin_inputs(node, "unknown_op", "its input has no batch axis")
        return
    space = walk.space(call.source)
    if space is not None and call.path is not None:
        walk.inputs.setdefault(call.name, space.atoms.flatten())
    if space is not None and not is_along(space, call.axis):
        text = f"{call.name} contracts another axis than that of the channels"
        walk.pin(node, [call.source], "reduction_over_axis", text)
        space = None
    if call.depthwise:
        _depthwise(walk, call, space)
        return
    _consume(walk, call, space)
    _produce(walk, call, len(walk.shape(node) or shape))


def _is_product(walk: Walk, node: fx.Node) -> bool:
    """Handle ``F.linear`` on a view of a parameter as the product that it is, if it is one."""
    given = {**dict(zip(_CONV, node.args, strict=False)), **node.kwargs}
    source, weight, bias = (given.get(name) for name in _CONV[:3])
    space = walk.space(source)
    if space is None or space.axis != space.atoms.dim() - 1 or walk.space(bias) is not None:
        return False
    if not is_made_of_parameters(walk, weight):
        return False
    multiply(walk, node, (source, weight), linear_letters(walk, source, weight))
    return True


def _consume(walk: Walk, call: Call, space: Space | None) -> None:
    """Let the channels of the input end at the columns of the weight."""
    node = call.node
    if space is not None and call.transposed and not walk.options.cuts_deconv_inputs:
        text = f"{call.name} is transposed, and deconv_consumer is 'pin'"
        walk.pin(node, [call.source], "amct_barrier", text)
        walk.fixed.pop(node, None)
        space = None
    axis = 1 - call.row_axis
    groups = 1 if call.transposed else call.groups
    atoms = fixed_atoms(call.inputs) if space is None else space.atoms.flatten()
    key = walk.bind(node, Site("", "", axis, "column", atoms, groups), call.weight)
    if space is None:
        return
    if call.groups > 1:
        walk.balance(node, atoms.chunk(call.groups), f"{call.groups} groups of {call.name}")
    attribute = call.attribute("in")
    walk.steps.append(Columns(node, call.source, space, key, call.groups, attribute))


def _produce(walk: Walk, call: Call, rank: int) -> None:
    """Begin the channels of the output."""
    node = call.node
    if walk.setting(call.name) is None:
        walk.fixed[node] = _why_not_enabled(walk, call)
        atoms = fixed_atoms(call.outputs)
    else:
        known = walk.rows_of(call.weight, call.row_axis)
        atoms = walk.atoms.new(call.name, call.outputs) if known is None else known
        groups = call.groups if call.transposed else 1
        walk.producers[call.name] = call.weight, call.row_axis, groups
    sites = _bind_rows(walk, call, atoms)
    if not bool((atoms >= 0).any()):
        walk.settle(node, None)
        return
    record = Record(call.groups, call.kind == "linear", _is_matmul(call, rank))
    space = channel_space(atoms, rank, call.axis, records=(record,))
    walk.spaces[node] = space
    if call.groups > 1:
        walk.balance(node, atoms.chunk(call.groups), f"{call.groups} groups of {call.name}")
    walk.steps.append(Rows(node, space, sites, call.groups, call.attribute("out")))


def _bind_rows(walk: Walk, call: Call, atoms: Tensor) -> tuple[SiteKey, ...]:
    groups = call.groups if call.transposed else 1
    weight = Site("", "", call.row_axis, "row", atoms, groups)
    keys = [walk.bind(call.node, weight, call.weight)]
    if call.bias is not None:
        keys.append(walk.bind(call.node, Site("", "", 0, "row", atoms), call.bias))
    return tuple(keys)


def _depthwise(walk: Walk, call: Call, space: Space | None) -> None:
    """Let every channel go through, ``m`` times: its filters belong to the input channels."""
    node, times = call.node, call.outputs // call.inputs
    atoms = fixed_atoms(call.inputs) if space is None else space.atoms.flatten()
    spread = atoms.repeat_interleave(times)
    along = atoms if call.transposed else spread
    keys = [walk.bind(node, Site("", "", 0, "attached", along), call.weight)]
    rest: list[SiteKey] = []
    if call.bias is not None:
        rest.append(walk.bind(node, Site("", "", 0, "attached", spread), call.bias))
    if space is None:
        source = [call.source] if isinstance(call.source, fx.Node) else []
        walk.settle(node, None, source)
        walk.fixed.setdefault(node, walk.origin(call.source))
        return
    rank = len(walk.shape(node) or ())
    out = channel_space(
        spread, rank, 1, zero=space.zero and call.bias is None, records=space.records
    )
    walk.spaces[node] = out
    if call.transposed:
        walk.steps.append(Spread(node, call.source, out, 1, tuple(keys)))
        keys = []
    walk.steps.append(Spread(node, call.source, out, times, (*keys, *rest)))
    if call.path is not None:
        inputs = (call.path, "in_channels"), (call.path, "groups")
        walk.steps.append(SetAttribute(node, call.source, inputs))
        outputs = ((call.path, "out_channels"),)
        walk.steps.append(SetAttribute(node, call.source, outputs, times))
    if node.op == "call_function":
        position = (_DECONV if call.transposed else _CONV).index("groups")
        walk.steps.append(SetGroups(node, call.source, position))


def _is_matmul(call: Call, rank: int) -> bool:
    """Say whether AMCT sees a Linear as a matrix product without bias."""
    return call.kind == "linear" and (call.bias is None or rank >= 3)


def _why_not_enabled(walk: Walk, call: Call) -> Pin:
    if isinstance(walk.settings.get(call.name), M4N2PruneConfig):
        return Pin("kind_m4n2", call.node.name, f"{call.name} has 2:4 sparsity, not filter pruning")
    if call.path is None:
        text = f"no setting reaches the function {call.name}, which has no name in a file"
        return Pin("functional_weight", call.node.name, text)
    text = f"{call.name} is skipped, or no setting reaches it"
    return Pin("coupled_to_skipped", call.node.name, text)


def uses(walk: Walk, node: fx.Node, kind: str) -> list[LayerUse]:
    """Return what the call costs."""
    call = layer_call(walk, node, kind)
    shape = None if call is None else walk.shape(call.source)
    if call is None or shape is None:
        return []
    result = walk.shape(call.node) or shape
    if call.kind == "linear":
        positions = math.prod(shape[1:-1])
    else:
        positions = math.prod((shape if call.transposed else result)[2:])
    name = walk.tensors[id(call.weight)]
    rows = (name, 0 if call.depthwise else call.row_axis)
    columns = None if call.depthwise else (name, 1 - call.row_axis)
    weight = tuple(call.weight.shape)
    return [LayerUse(call.name, call.kind, weight, positions, call.groups, rows, columns)]


_CLASSES = (nn.modules.conv._ConvNd, nn.Linear)
_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_DECONV = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")

MODULES: dict[type[nn.Module], Handler] = {
    nn.Conv1d: conv,
    nn.Conv2d: conv,
    nn.Conv3d: conv,
    nn.ConvTranspose1d: deconv,
    nn.ConvTranspose2d: deconv,
    nn.ConvTranspose3d: deconv,
    nn.Linear: linear,
}
FUNCTIONS: dict[Any, Handler] = {
    F.conv1d: conv,
    F.conv2d: conv,
    F.conv3d: conv,
    F.conv_transpose1d: deconv,
    F.conv_transpose2d: deconv,
    F.conv_transpose3d: deconv,
    F.linear: linear,
}
