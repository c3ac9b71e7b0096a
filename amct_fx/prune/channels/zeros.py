"""What elementwise operations do to channels whose values are 0.

Row masks make the outputs of removed channels 0. A product of two activations needs that they are
still 0 when it reads them, and no operation may have an infinite or undefined value or slope there:
``0 * inf`` is NaN, also behind column masks. Source: spec/pruning.md section 5.1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import fx

if TYPE_CHECKING:
    from amct_fx.prune.channels.walk import Walk

__all__ = ["is_singular", "kind_of_operation", "stays_zero"]


def kind_of_operation(walk: Walk, node: fx.Node) -> str:
    """Return the plain name of what a node does: ``relu`` for ReLU, F.relu and ``relu_``."""
    if node.op == "call_module":
        return type(walk.module(node)).__name__.lower()
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return name.strip("_").lower()


def stays_zero(walk: Walk, node: fx.Node) -> bool:
    """Say whether an elementwise operation gives 0 where the channels it reads are 0."""
    kind = kind_of_operation(walk, node)
    if kind in _PRODUCTS:
        return any(_is_zero(walk, value) for value in _operands(node)) and not _divides_by_channels(
            walk, node
        )
    if kind in _SUMS:
        return all(_is_zero(walk, value) for value in _operands(node))
    if kind == "hardtanh":
        return _all_zero(walk, node) and _clamps_around_zero(walk, node)
    return _all_zero(walk, node) and (kind in _ZERO_TO_ZERO or kind.endswith("fakequantize"))


def is_singular(walk: Walk, node: fx.Node) -> bool:
    """Say whether an elementwise operation has no finite value or slope at 0."""
    kind = kind_of_operation(walk, node)
    if kind in _POWERS:
        power = _argument(node, 1, ("exponent",))
        return not isinstance(power, (int, float)) or power < 1
    if kind in _QUOTIENTS:
        divides_a_number = not isinstance(_argument(node, 0, ("input",)), fx.Node)
        return divides_a_number or _divides_by_channels(walk, node)
    return kind in _SINGULAR


def _all_zero(walk: Walk, node: fx.Node) -> bool:
    tensors = [value for value in node.all_input_nodes if walk.shape(value) is not None]
    return all(_is_zero(walk, value) for value in tensors)


def _is_zero(walk: Walk, value: Any) -> bool:
    """Say whether an operand is 0 in masked channels; a number must be 0 itself."""
    if not isinstance(value, fx.Node):
        return bool(value == 0)
    space = walk.space(value)
    return space is not None and space.zero


def _operands(node: fx.Node) -> list[Any]:
    """Return the operands of a sum or product, however they are passed."""
    options = {"alpha", "out", "rounding_mode"}
    return [*node.args, *(value for key, value in node.kwargs.items() if key not in options)]


def _argument(node: fx.Node, place: int, names: tuple[str, ...]) -> Any:
    """Return an argument that is passed by place or by one of its names."""
    if len(node.args) > place:
        return node.args[place]
    return next((node.kwargs[name] for name in names if name in node.kwargs), None)


def _divides_by_channels(walk: Walk, node: fx.Node) -> bool:
    if kind_of_operation(walk, node) not in _QUOTIENTS:
        return False
    divisor = _argument(node, 1, ("other",))
    return walk.space(divisor) is not None and divisor not in walk.of_parameters


def _clamps_around_zero(walk: Walk, node: fx.Node) -> bool:
    module: Any = walk.module(node)
    bounds = (
        (_argument(node, 1, ("min_val",)), _argument(node, 2, ("max_val",)))
        if module is None
        else (module.min_val, module.max_val)
    )
    low, high = (-1.0 if bounds[0] is None else bounds[0], 1.0 if bounds[1] is None else bounds[1])
    numbers = isinstance(low, (int, float)) and isinstance(high, (int, float))
    return numbers and low <= 0 <= high


_SUMS = {"add", "iadd", "sub", "isub", "rsub", "subtract"}
_DIVISIONS = {"div", "truediv", "itruediv", "divide", "true_divide"}
_PRODUCTS = {"mul", "imul", "multiply"} | _DIVISIONS
_REMAINDERS = {"remainder", "fmod", "mod", "imod", "floor_divide", "floordiv", "ifloordiv"}
_QUOTIENTS = _DIVISIONS | _REMAINDERS
_POWERS = {"pow", "ipow", "float_power"}
_SINGULAR = {
    *("log", "log2", "log10", "logit", "xlogy", "lgamma", "digamma"),
    *("reciprocal", "rsqrt", "sqrt", "norm", "acosh", "arccosh"),
    *("addcdiv", "atan2", "hypot"),
}
_ZERO_TO_ZERO = {
    *("relu", "relu6", "leaky_relu", "leakyrelu", "rrelu", "prelu", "gelu", "silu", "mish"),
    *("elu", "selu", "celu", "hardswish", "tanh", "softsign"),
    *("tanhshrink", "softshrink", "hardshrink"),
    *("abs", "neg", "sign", "square", "ceil", "floor", "round", "trunc", "expm1", "log1p", "erf"),
    *("sin", "tan", "asin", "atan", "sinh", "asinh", "atanh"),
    *(
        "identity",
        "dropout",
        "dropout1d",
        "dropout2d",
        "dropout3d",
        "clone",
        "detach",
        "contiguous",
    ),
    *("float", "half", "double", "bfloat16", "to", "type", "type_as"),
}
