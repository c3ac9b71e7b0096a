"""The table of rules: which handler knows which kind of node."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.ao.quantization import FakeQuantizeBase

from amct_fx.prune.channels import (
    concat,
    contractions,
    elementwise,
    layers,
    layout,
    norms,
    parts,
    products,
    spatial,
)
from amct_fx.prune.channels.barriers import amct_barrier
from amct_fx.prune.channels.parameters import note_if_made_of_parameters
from amct_fx.prune.channels.walk import LayerUse, Walk, float_class

if TYPE_CHECKING:
    from torch import fx, nn

    from amct_fx.prune.channels.elementwise import Handler

__all__ = [
    "handle",
    "is_elementwise",
    "known_class",
    "moves_elements",
    "reads_axis_1",
    "visit",
]

MODULES: dict[type[nn.Module], Handler] = {
    **elementwise.MODULES,
    **spatial.MODULES,
    **norms.MODULES,
    **layout.MODULES,
    **layers.MODULES,
}
FUNCTIONS: dict[Any, Handler] = {
    **elementwise.FUNCTIONS,
    **spatial.FUNCTIONS,
    **norms.FUNCTIONS,
    **layout.FUNCTIONS,
    **parts.FUNCTIONS,
    **concat.FUNCTIONS,
    **contractions.FUNCTIONS,
    **products.FUNCTIONS,
    **layers.FUNCTIONS,
}
METHODS: dict[str, Handler] = {
    **elementwise.METHODS,
    **spatial.METHODS,
    **norms.METHODS,
    **layout.METHODS,
    **parts.METHODS,
    **products.METHODS,
}


def visit(walk: Walk, node: fx.Node) -> None:
    """Let the rule for a node decide about the channels of its inputs."""
    walk.seen[node] = len(walk.seen)
    note_if_made_of_parameters(walk, node, layer=_handler(walk, node) in _LAYERS)
    if node.op == "call_module":
        walk.calls.setdefault(walk.name(node), node)
    if node.op == "output":
        name = walk.region(node).name
        what = f"the traced part {name!r}" if name else "the model"
        walk.pin(node, node.all_input_nodes, "graph_output", f"it is an output of {what}")
        return
    if node.op in ("placeholder", "get_attr"):
        return
    handler = _handler(walk, node)
    if handler is None:
        _refuse(walk, node)
        return
    if handler in _COUNTED:
        walk.uses += _COUNTED[handler](walk, node)
    if walk.options.mode == "amct":
        barrier = amct_barrier(walk, node)
        if barrier is not None and barrier.whole:
            walk.pin_inputs(node, barrier.code, barrier.text)
            return
        if barrier is not None:
            walk.pin(node, node.all_input_nodes, barrier.code, barrier.text)
            walk.fixed.pop(node, None)
    handler(walk, node)


def handle(walk: Walk, node: fx.Node) -> None:
    """Follow channels through a node once more, which had none before."""
    handler = _handler(walk, node)
    if handler is None:
        _refuse(walk, node)
    else:
        handler(walk, node)


def moves_elements(walk: Walk, node: fx.Node) -> bool:
    """Say whether a node only moves the elements of its first input."""
    handler = _handler(walk, node)
    return handler in _MOVING and handler is not elementwise.elementwise


def is_elementwise(walk: Walk, node: fx.Node) -> bool:
    """Say whether a node acts on every element alone."""
    return _handler(walk, node) in (elementwise.elementwise, elementwise.first_only)


def reads_axis_1(walk: Walk, node: fx.Node) -> bool:
    """Say whether the channels that a node reads lie along axis 1."""
    return _handler(walk, node) in _OVER_AXIS_1


_OVER_AXIS_1 = (
    *(layers.conv, layers.deconv, norms.batch_norm, norms.functional_batch_norm),
    *(norms.group_norm, norms.functional_group_norm),
)
_LAYERS = (layers.conv, layers.deconv, layers.linear)
_MOVING = frozenset(
    handler
    for table in (layout.FUNCTIONS, layout.METHODS, layout.MODULES, parts.FUNCTIONS, parts.METHODS)
    for handler in table.values()
)
_COUNTED: dict[Handler, Callable[[Walk, fx.Node], list[LayerUse]]] = {
    layers.conv: partial(layers.uses, kind="conv"),
    layers.deconv: partial(layers.uses, kind="deconv"),
    layers.linear: partial(layers.uses, kind="linear"),
    products.matmul: products.matmul_uses,
    contractions.einsum: contractions.einsum_uses,
    products.attention: products.attention_uses,
}


def known_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class in the table whose forward a module runs.

    A quantization-aware class counts as the one it was made from.
    """
    cls = float_class(module)
    if cls in MODULES:
        return cls
    base = next((base for base in cls.__mro__ if base in MODULES), None)
    own = ("forward", "_conv_forward", "_check_input_dim")
    if base is None or any(getattr(cls, n, None) is not getattr(base, n, None) for n in own):
        return None
    return base


_BY_NAME: dict[str, Handler] = {
    **norms.BY_NAME,
    "torchvision.ops.stochastic_depth.stochastic_depth": elementwise.first_only,
    "torchvision.ops.stochastic_depth.StochasticDepth": elementwise.first_only,
    "timm.layers.drop.DropPath": elementwise.first_only,
}
"""Norms of other libraries, and what they drop for whole examples, whatever their channels."""


def _handler(walk: Walk, node: fx.Node) -> Handler | None:
    if node not in walk.handlers:
        walk.handlers[node] = _found_handler(walk, node)
    known: Handler | None = walk.handlers[node]
    return known


def _found_handler(walk: Walk, node: fx.Node) -> Handler | None:
    if node.op == "call_method":
        return METHODS.get(str(node.target))
    if node.op == "call_function":
        return FUNCTIONS.get(node.target) or _BY_NAME.get(_full_name(node.target))
    if node.op != "call_module":
        return None
    module = walk.module(node)
    if isinstance(module, FakeQuantizeBase):
        return elementwise.first_only
    if module is None or "forward" in vars(module):
        return None
    cls = known_class(module)
    return _BY_NAME.get(_full_name(type(module))) if cls is None else MODULES[cls]


def _full_name(value: Any) -> str:
    name = getattr(value, "__qualname__", getattr(value, "__name__", ""))
    return f"{getattr(value, '__module__', '')}.{name}"


_OF_NO_CHANNELS = {
    *("size", "dim", "ndimension", "is_floating_point", "element_size", "get_device"),
    *("new_zeros", "new_ones", "new_full"),
}
"""Methods whose result says nothing of the channels, or follows them."""


def _refuse(walk: Walk, node: fx.Node) -> None:
    """Pin what a node without a rule reads."""
    if node.op == "call_method" and node.target in _OF_NO_CHANNELS:
        return
    module = walk.module(node)
    if module is None:
        name = getattr(node.target, "__name__", node.target)
        walk.pin_inputs(node, "unknown_op", f"{name} is not known")
        return
    plain = next((base for base in type(module).__mro__ if base in MODULES), None)
    code = "unknown_op" if plain is None else "own_forward"
    walk.pin_inputs(node, code, f"{type(module).__name__} runs its own code")
