"""Operations that act on every element alone: channels pass, or are joined."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import fx, nn

from amct_fx.prune.channels.atoms import Pin
from amct_fx.prune.channels.parameters import follow, is_made_of_parameters, join_blocks
from amct_fx.prune.channels.space import Space
from amct_fx.prune.channels.steps import Joined
from amct_fx.prune.channels.walk import Walk, source_of
from amct_fx.prune.channels.zeros import is_singular, stays_zero

__all__ = ["FUNCTIONS", "METHODS", "MODULES", "elementwise", "first_only"]

Handler: TypeAlias = Callable[[Walk, fx.Node], None]


def elementwise(walk: Walk, node: fx.Node) -> None:
    """Join the channels of all tensors that meet; fixed tensors pin what they meet."""
    walk.joining.add(node)
    shape = walk.shape(node)
    operands = [value for value in node.all_input_nodes if walk.shape(value) is not None]
    tracked = [value for value in operands if walk.space(value) is not None]
    if any(_has_parts(walk, value) for value in node.all_input_nodes):
        walk.pin_inputs(node, "unknown_op", "it reads a list of tensors")
        return
    if not tracked:
        walk.settle(node, None, operands)
        return
    if shape is None:
        walk.pin_inputs(node, "data_dependent_shape", "its shape is not known")
        return
    main = _widest(walk, tracked)
    space = _space(walk, main)
    if space.atoms.dim() > len(shape) or not _covers(space, walk.shape(main), shape):
        walk.pin_inputs(node, "width_mismatch", "the channels are repeated along their own axis")
        return
    axes = {axis + len(shape) - space.atoms.dim() for axis in space.axes}
    joined = [
        value
        for value in operands
        if value is main or _meet(walk, node, value, main, axes, len(shape))
    ]
    aligned = space.aligned(len(shape))
    out = Space(
        aligned,
        space.axis + len(shape) - space.atoms.dim(),
        zero=stays_zero(walk, node),
        records=space.records,
    )
    walk.spaces[node] = out
    walk.steps.append(Joined(node, tuple(joined), out))
    masked = [v for v in joined if is_made_of_parameters(walk, v) and _space(walk, v).zero]
    if masked and (is_singular(walk, node) or not is_made_of_parameters(walk, node)):
        text = f"masked entries of {masked[0].name} would not be harmless here"
        walk.pin(node, [main], "functional_weight", text)
    elif is_singular(walk, node) and not is_made_of_parameters(walk, node):
        walk.atoms.forbid_row_masks(out.atoms)
    if not out.zero and _in_place(walk, node):
        walk.taint(node)


def _in_place(walk: Walk, node: fx.Node) -> bool:
    """Say whether an operation may write its result over its input."""
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    written = name.endswith("_") or (node.op == "call_function" and name.startswith("i"))
    options = (getattr(walk.module(node), "inplace", False), node.kwargs.get("inplace"))
    return written or any(option is True for option in options) or True in node.args


def first_only(walk: Walk, node: fx.Node) -> None:
    """Handle a cast: only the elements of the first input matter."""
    source = source_of(node)
    space = walk.space(source)
    if space is None:
        walk.settle(node, None, node.all_input_nodes)
        return
    walk.spaces[node] = space
    walk.steps.append(Joined(node, (source,), space))


def _space(walk: Walk, value: fx.Node) -> Space:
    space = walk.space(value)
    assert space is not None
    return space


def _has_parts(walk: Walk, value: fx.Node) -> bool:
    return isinstance(walk.spaces.get(value), tuple)


def _widest(walk: Walk, tracked: list[fx.Node]) -> fx.Node:
    """Return the first operand with the most channels; a gate of one channel follows it."""
    return max(
        tracked, key=lambda value: (_space(walk, value).atoms.numel(), -tracked.index(value))
    )


def _covers(space: Space, own: Any, shape: tuple[int, ...]) -> bool:
    """Say whether the axes of the channels have their full size in the result."""
    shift = len(shape) - space.atoms.dim()
    return all(own[axis] == shape[axis + shift] for axis in space.axes)


def _meet(
    walk: Walk, node: fx.Node, value: fx.Node, main: fx.Node, axes: set[int], rank: int
) -> bool:
    """Let an operand meet the channels of ``main``; say whether it has the same channels."""
    own = walk.shape(value) or ()
    sizes = (1,) * (rank - len(own)) + tuple(own)
    space, other = _space(walk, main), walk.space(value)
    of_parameters = is_made_of_parameters(walk, value)
    place = space.axis - space.atoms.dim() + len(own)
    if other is not None:
        theirs = {axis + rank - other.atoms.dim() for axis in other.axes}
        if theirs == axes and other.atoms.numel() == space.atoms.numel():
            return _join(walk, node, main, value)
        wide = other.axes == (place,) and other.atoms.numel() == space.atoms.shape[space.axis]
        if wide and not of_parameters:
            join_blocks(walk, node, main, value, "it is the same for all blocks")
            return False
        if of_parameters and follow(walk, node, main, value, place):
            return False
        text = f"{value.name} meets other channels than its own"
        walk.pin(node, [value], "width_mismatch", text)
        walk.fixed.pop(node, None)
    aligned = space.aligned(rank)
    cut = space.axis + rank - space.atoms.dim()
    if sizes[cut] == 1 and aligned.shape[cut] > 1:
        return False
    if other is None and of_parameters and follow(walk, node, main, value, place):
        return False
    origin = walk.origin(value)
    walk.pin(node, [main], origin.code, f"it meets {value.name}, which stays: {origin.text}")
    walk.fixed.pop(node, None)
    return False


def _join(walk: Walk, node: fx.Node, main: fx.Node, value: fx.Node) -> bool:
    """Join two operands with the same channels, in the order of the arguments."""
    order = node.all_input_nodes
    first, second = sorted((main, value), key=order.index)
    pin = Pin("coupled_to_skipped", node.name, "it joins them with channels that stay")
    a, b = _space(walk, first), _space(walk, second)
    walk.atoms.join(a.atoms, b.atoms, pin)
    for one, other in zip(a.records, b.records, strict=False):
        one.absorb(other)
    return True


_UNARY_NAMES = [
    "abs",
    "absolute",
    "acos",
    "acosh",
    "arccos",
    "arccosh",
    "arcsin",
    "arcsinh",
    "arctan",
    "arctanh",
    "asin",
    "asinh",
    "atan",
    "atanh",
    "ceil",
    "celu",
    "clamp",
    "clamp_max",
    "clamp_min",
    "clip",
    "clone",
    "contiguous",
    "cos",
    "cosh",
    "deg2rad",
    "detach",
    "elu",
    "erf",
    "erfc",
    "erfinv",
    "exp",
    "exp2",
    "expm1",
    "fix",
    "floor",
    "frac",
    "gelu",
    "hardshrink",
    "hardsigmoid",
    "hardswish",
    "hardtanh",
    "leaky_relu",
    "lgamma",
    "log",
    "log10",
    "log1p",
    "log2",
    "logit",
    "logsigmoid",
    "mish",
    "nan_to_num",
    "neg",
    "negative",
    "positive",
    "rad2deg",
    "reciprocal",
    "relu",
    "relu6",
    "round",
    "rrelu",
    "rsqrt",
    "selu",
    "sgn",
    "sigmoid",
    "sign",
    "silu",
    "sin",
    "sinc",
    "sinh",
    "softplus",
    "softshrink",
    "softsign",
    "sqrt",
    "square",
    "tan",
    "tanh",
    "tanhshrink",
    "threshold",
    "trunc",
    "digamma",
    "xlogy",
    "zeros_like",
    "ones_like",
    "full_like",
]
_BINARY_NAMES = [
    "add",
    "sub",
    "subtract",
    "rsub",
    "mul",
    "multiply",
    "div",
    "divide",
    "true_divide",
    "floor_divide",
    "remainder",
    "fmod",
    "pow",
    "float_power",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "where",
    "atan2",
    "hypot",
    "lerp",
    "addcmul",
    "addcdiv",
    "logical_and",
    "logical_or",
    "logical_not",
    "logical_xor",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
    "ge",
    "masked_fill",
    "heaviside",
    "copysign",
]
_CASTS = [
    "float",
    "half",
    "double",
    "bfloat16",
    "int",
    "long",
    "bool",
    "to",
    "type",
    "type_as",
    "cpu",
    "cuda",
]
_DROPOUTS = [
    "dropout",
    "dropout1d",
    "dropout2d",
    "dropout3d",
    "alpha_dropout",
    "feature_alpha_dropout",
]


_OPERATORS = [
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs", "invert"),
    *("iadd", "isub", "imul", "itruediv", "ipow", "and_", "or_", "xor"),
    *("eq", "ne", "lt", "le", "gt", "ge"),
]


def _functions() -> dict[Any, Handler]:
    found: dict[Any, Handler] = {}
    for name in (*_UNARY_NAMES, *_BINARY_NAMES, *_DROPOUTS):
        for scope in (torch, F):
            for spelling in (name, f"{name}_"):
                function = getattr(scope, spelling, None)
                if callable(function):
                    found[function] = elementwise
    for name in _OPERATORS:
        found[getattr(operator, name)] = elementwise
    found[torch.special.expit] = elementwise
    found |= {getattr(F, f"max_unpool{count}d"): elementwise for count in (1, 2, 3)}
    return found


FUNCTIONS: dict[Any, Handler] = _functions()
_ELEMENTWISE: Handler = elementwise
METHODS: dict[str, Handler] = {
    spelling: _ELEMENTWISE
    for name in (*_UNARY_NAMES, *_BINARY_NAMES, *_CASTS)
    for spelling in (name, f"{name}_")
}
METHODS |= {"type_as": first_only, "to": first_only}
MODULES: dict[type[nn.Module], Handler] = {
    module: elementwise
    for module in (
        nn.ReLU,
        nn.ReLU6,
        nn.LeakyReLU,
        nn.Hardtanh,
        nn.Identity,
        nn.Dropout,
        nn.Dropout1d,
        nn.Dropout2d,
        nn.Dropout3d,
        nn.AlphaDropout,
        nn.FeatureAlphaDropout,
        nn.Sigmoid,
        nn.Tanh,
        nn.SiLU,
        nn.GELU,
        nn.ELU,
        nn.SELU,
        nn.CELU,
        nn.Softplus,
        nn.Mish,
        nn.Hardswish,
        nn.Hardsigmoid,
        nn.Hardshrink,
        nn.Softshrink,
        nn.Softsign,
        nn.Tanhshrink,
        nn.LogSigmoid,
        nn.RReLU,
        nn.Threshold,
        nn.MaxUnpool1d,
        nn.MaxUnpool2d,
        nn.MaxUnpool3d,
    )
}
