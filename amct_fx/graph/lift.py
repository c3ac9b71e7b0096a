"""Functional layers as modules: ``F.conv2d(x, self.w)`` becomes a call of a ``Conv2d``.

The new module is registered at the traced part under the name of the fx node and holds the very
parameters that the call reads, so everything that works for layers works for it. Source:
spec/config.md section 5, option ``functional=True``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import fx, nn

if TYPE_CHECKING:
    from amct_fx.graph.capture import Region

__all__ = ["is_functional_layer", "lift_functional_layers"]

_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (
    "input",
    "weight",
    "bias",
    "stride",
    "padding",
    "output_padding",
    "groups",
    "dilation",
)


@dataclass(frozen=True)
class _Kind:
    """A layer class and the parameters of the function that computes it, in order."""

    layer: type[nn.Module]
    parameters: tuple[str, ...]


_KINDS: dict[Any, _Kind] = {
    F.conv1d: _Kind(nn.Conv1d, _CONV),
    F.conv2d: _Kind(nn.Conv2d, _CONV),
    F.conv3d: _Kind(nn.Conv3d, _CONV),
    F.conv_transpose1d: _Kind(nn.ConvTranspose1d, _TRANSPOSED),
    F.conv_transpose2d: _Kind(nn.ConvTranspose2d, _TRANSPOSED),
    F.linear: _Kind(nn.Linear, ("input", "weight", "bias")),
}


def is_functional_layer(node: fx.Node) -> bool:
    """Say whether a node calls ``F.conv*`` or ``F.linear``."""
    return node.op == "call_function" and node.target in _KINDS


def lift_functional_layers(region: Region) -> list[str]:
    """Turn functional layers on parameters of the model into modules, in place.

    A call stays as it is when its weight is computed, or a setting is not a constant.

    Args:
        region: A traced part; its graph and its module are changed.

    Returns:
        The names of the new modules in the region's module.
    """
    names = []
    for node in list(region.graph.nodes):
        kind = _KINDS[node.target] if is_functional_layer(node) else None
        layer = None if kind is None else _layer_for(node, kind, region.module)
        if layer is None:
            continue
        name = _free_name(node.name, region.module)
        region.module.add_module(name, layer.train(region.module.training))
        with region.graph.inserting_before(node):
            call = region.graph.call_module(name, (_bound(node, kind)["input"],))
        call.meta = dict(node.meta)
        node.replace_all_uses_with(call)
        region.graph.erase_node(node)
        names.append(name)
    return names


def _bound(node: fx.Node, kind: _Kind | None) -> dict[str, Any]:
    """Bind the arguments of the call to the names of the parameters."""
    assert kind is not None
    return {**dict(zip(kind.parameters, node.args, strict=False)), **node.kwargs}


def _layer_for(node: fx.Node, kind: _Kind, root: nn.Module) -> nn.Module | None:
    """Build the layer that computes what the call computes, on the parameters it reads."""
    arguments = _bound(node, kind)
    weight = _parameter(arguments.pop("weight", None), root)
    bias_node = arguments.pop("bias", None)
    bias = _parameter(bias_node, root)
    settings = {key: value for key, value in arguments.items() if key != "input"}
    constant = not any(isinstance(part, fx.Node) for part in _flat(settings.values()))
    if weight is None or not constant or (bias is None and bias_node is not None):
        return None
    if not isinstance(arguments.get("input"), fx.Node):
        return None
    layer = kind.layer(*_sizes(kind, weight, settings), **settings, bias=False, device="meta")
    layer.register_parameter("weight", weight)
    layer.register_parameter("bias", bias)
    return layer


def _sizes(kind: _Kind, weight: nn.Parameter, settings: dict[str, Any]) -> tuple[Any, ...]:
    """Read the positional arguments of the layer off the shape of its weight."""
    if kind.layer is nn.Linear:
        return weight.shape[1], weight.shape[0]
    groups = settings.get("groups", 1)
    first, second, kernel = weight.shape[0], weight.shape[1] * groups, tuple(weight.shape[2:])
    if kind.parameters is _TRANSPOSED:
        return first, second, kernel
    return second, first, kernel


def _parameter(node: Any, root: nn.Module) -> nn.Parameter | None:
    """Return the parameter of the model that a ``get_attr`` node reads."""
    if not isinstance(node, fx.Node) or node.op != "get_attr":
        return None
    owner, _, name = str(node.target).rpartition(".")
    value = getattr(root.get_submodule(owner), name, None)
    return value if isinstance(value, nn.Parameter) else None


def _free_name(wanted: str, root: nn.Module) -> str:
    name, count = wanted, 0
    while hasattr(root, name):
        count += 1
        name = f"{wanted}_{count}"
    return name


def _flat(values: Any) -> list[Any]:
    flat: list[Any] = []
    for value in values:
        flat += _flat(value) if isinstance(value, (tuple, list)) else [value]
    return flat
