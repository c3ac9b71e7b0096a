"""Facts about a traced graph: who produces a tensor, who changes it in place, what follows a layer.

These functions read a graph and never change it. They know nothing of quantization numerics.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import fx, nn

__all__ = [
    "FixedMinRule",
    "batch_norm_after",
    "initial_hidden_state",
    "is_nonnegative",
    "is_nonnegative_input",
    "kind_of",
    "layer_calls",
    "layer_input",
    "module_of",
    "mutates",
    "tensor_version",
    "weight_readers",
]

FixedMinRule = Literal["relu", "nonnegative"]
"""``"relu"``: the direct producer is a ReLU. ``"nonnegative"``: every value is provably >= 0."""

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_RELU: set[Any] = {nn.ReLU, F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_"}
_PASS: set[Any] = {nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.Identity}
_PASS |= {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, torch.dropout}
_POSITIVE: set[Any] = {nn.ReLU6, nn.Sigmoid, nn.Softmax, nn.Softmax2d, nn.Hardsigmoid, nn.Softplus}
_POSITIVE |= {F.relu6, F.sigmoid, F.softmax, F.hardsigmoid, F.softplus}
_POSITIVE |= {torch.sigmoid, torch.softmax, torch.abs, torch.exp, torch.square}
_POSITIVE |= {"sigmoid", "softmax", "abs", "exp", "square"}
_KEEPS_SIGN: set[Any] = {
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
}
_KEEPS_SIGN |= {nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d}
_KEEPS_SIGN |= {nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d}
_KEEPS_SIGN |= {nn.Flatten, nn.Unflatten, nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d}
_KEEPS_SIGN |= {F.max_pool1d, F.max_pool2d, F.max_pool3d, F.avg_pool1d, F.avg_pool2d, F.avg_pool3d}
_KEEPS_SIGN |= {F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d}
_KEEPS_SIGN |= {F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d}
_KEEPS_SIGN |= {torch.flatten, torch.mean, torch.amax, torch.reshape, torch.transpose}
_KEEPS_SIGN |= {torch.permute, torch.squeeze, torch.unsqueeze, "flatten", "mean", "amax"}
_KEEPS_SIGN |= {"reshape", "view", "transpose", "permute", "squeeze", "unsqueeze", "contiguous"}
_VIEWS = frozenset(
    [
        "view",
        "view_as",
        "reshape",
        "reshape_as",
        "flatten",
        "Flatten",
        "unflatten",
        "Unflatten",
        "ravel",
        "squeeze",
        "unsqueeze",
        "transpose",
        "swapaxes",
        "swapdims",
        "permute",
        "movedim",
        "moveaxis",
        "t",
        "expand",
        "expand_as",
        "broadcast_to",
        "narrow",
        "select",
        "chunk",
        "split",
        "tensor_split",
        "unbind",
        "diagonal",
        "unfold",
        "detach",
        "contiguous",
        "to",
        "type",
        "float",
        "as_strided",
        "hsplit",
        "vsplit",
        "dsplit",
        "atleast_1d",
        "atleast_2d",
        "atleast_3d",
        "type_as",
        "cpu",
        "cuda",
        "getitem",
        "getattr",
    ]
)
"""Names of methods, functions and modules whose result may be a view."""
_JOINS: set[Any] = {torch.cat, torch.add, operator.add, operator.iadd, "add", "add_", torch.mul}
_JOINS |= {operator.mul, operator.imul, "mul", "mul_", torch.concat}


def module_of(node: fx.Node, root: nn.Module) -> nn.Module | None:
    """Return the module that a ``call_module`` node calls, else ``None``."""
    return submodule(root, str(node.target)) if node.op == "call_module" else None


def submodule(root: nn.Module, path: str) -> nn.Module:
    """Return ``root.get_submodule(path)``, which asks for every part of the path three times."""
    module: Any = root
    for name in path.split("."):
        table = vars(module).get("_modules")
        module = table.get(name) if type(table) is dict else None
        if module is None:
            return root.get_submodule(path)
    found: nn.Module = module
    return found


def layer_calls(graph: fx.Graph, root: nn.Module) -> dict[nn.Module, list[fx.Node]]:
    """Map each module of ``root`` that the graph calls to its calls, in execution order."""
    calls: dict[nn.Module, list[fx.Node]] = {}
    for node in graph.nodes:
        module = module_of(node, root)
        if module is not None:
            calls.setdefault(module, []).append(node)
    return calls


def weight_readers(graph: fx.Graph, root: nn.Module) -> dict[int, fx.Node]:
    """Map the ``id`` of each parameter that a graph reads to the first node that computes with it.

    Args:
        graph: A traced graph.
        root: The module that the graph belongs to.
    """
    found: dict[int, fx.Node] = {}
    for node in graph.nodes:
        owner, _, name = str(node.target).rpartition(".")
        if node.op == "get_attr" and node.users:
            value = getattr(root.get_submodule(owner), name, None)
            if isinstance(value, nn.Parameter):
                found.setdefault(id(value), min(node.users))
    return found


def layer_input(node: fx.Node) -> fx.Node | None:
    """Return the node that makes the first argument of a layer call, ``None`` for a constant."""
    value = node.args[0] if node.args else node.kwargs.get("input")
    return value if isinstance(value, fx.Node) else None


def initial_hidden_state(node: fx.Node) -> fx.Node | None:
    """Return the node that makes h0 in a call of an LSTM or GRU.

    ``None`` when h0 is missing, which means zeros; the state of an LSTM may also be one node that
    makes the pair ``(h0, c0)``, and is returned as it is.
    """
    state = node.args[1] if len(node.args) > 1 else node.kwargs.get("hx")
    if isinstance(state, (tuple, list)):
        state = state[0]
    return state if isinstance(state, fx.Node) else None


def tensor_version(tensor: fx.Node, consumer: fx.Node, root: nn.Module) -> fx.Node | None:
    """Return the last node that changed ``tensor`` in place before ``consumer`` reads it.

    Two consumers read the same values only if they see the same version; ``None`` means that
    ``tensor`` is as its producer made it. A change through a view of the same memory counts.
    """
    changes = [
        user
        for alias in _aliases(tensor, root)
        for user in alias.users
        if user is not consumer and tensor < user < consumer and mutates(user, alias, root)
    ]
    return max(changes, default=None)


def is_nonnegative_input(node: fx.Node, root: nn.Module, rule: FixedMinRule = "relu") -> bool:
    """Say whether the input of a layer call is known to be >= 0.

    Args:
        node: The call of the layer.
        root: The module that the graph belongs to.
        rule: AMCT's ``"relu"`` looks only for a ReLU, through Dropout and Identity.

    Returns:
        ``False`` when nothing is known. Source: spec/config.md section 6.
    """
    return is_nonnegative(layer_input(node), node, root, rule)


def is_nonnegative(
    tensor: fx.Node | None,
    reader: fx.Node,
    root: nn.Module,
    rule: FixedMinRule = "relu",
    known: Callable[[fx.Node], bool] | None = None,
) -> bool:
    """Say whether ``tensor`` is known to be >= 0 when ``reader`` reads it; ``None`` is unknown.

    Args:
        tensor: What is read.
        reader: The call that reads it.
        root: The module that the graph belongs to.
        rule: See :func:`is_nonnegative_input`.
        known: Says which nodes count; default all.
    """
    if tensor is None:
        return False
    return _reads_nonnegative(tensor, reader, _Facts(root, rule, known or (lambda node: True)))


def batch_norm_after(node: fx.Node, root: nn.Module) -> fx.Node | None:
    """Return the batch norm call that is the only consumer of ``node``, else ``None``.

    Knows ``BatchNorm1d/2d/3d``, ``SyncBatchNorm`` (exact classes) and ``F.batch_norm`` on tensors
    that the model owns. Source: spec/quantization.md section 4.
    """
    if len(node.users) != 1:
        return None
    user = next(iter(node.users))
    if layer_input(user) is not node or node in user.args[1:]:
        return None
    if user.op == "call_function" and user.target is F.batch_norm:
        tensors = [*user.args[1:5], *user.kwargs.values()]
        owned = all(value.op == "get_attr" for value in tensors if isinstance(value, fx.Node))
        return user if owned else None
    return user if type(module_of(user, root)) in _BATCH_NORMS else None


@dataclass(frozen=True)
class _Facts:
    """What the search for values below 0 needs everywhere."""

    root: nn.Module
    rule: FixedMinRule
    known: Callable[[fx.Node], bool]


def _is_nonnegative(node: fx.Node, facts: _Facts) -> bool:
    if not facts.known(node):
        return False
    kind = kind_of(node, facts.root)
    if kind in _RELU:
        return True
    if kind in _PASS:
        return _sources_nonnegative(node, facts)
    if facts.rule == "relu":
        return False
    if kind in _POSITIVE or _is_clamp_at_zero(node, facts.root):
        return True
    if kind in _JOINS or kind in _KEEPS_SIGN or _is_zero_pad(node):
        return _sources_nonnegative(node, facts)
    return False


def _sources_nonnegative(node: fx.Node, facts: _Facts) -> bool:
    """Check every tensor that ``node`` reads; numbers among the arguments count by their sign."""
    sources = list(_operands(node))
    return bool(sources) and all(
        value >= 0 if isinstance(value, (int, float)) else _reads_nonnegative(value, node, facts)
        for value in sources
    )


def _reads_nonnegative(source: fx.Node, reader: fx.Node, facts: _Facts) -> bool:
    change = tensor_version(source, reader, facts.root)
    if change is None:
        return _is_nonnegative(source, facts)
    # a change through a view may leave the other values as they were
    return layer_input(change) is source and _is_nonnegative(change, facts)


def _operands(node: fx.Node) -> Iterator[fx.Node | int | float]:
    joins = node.target in _JOINS
    concat = node.target in (torch.cat, torch.concat)
    if joins and not set(node.kwargs) <= ({"dim"} if concat else set()):
        return  # operands or factors by keyword: nothing is claimed
    first = node.args[:2] if joins and not concat else node.args[:1]
    for value in first or (node.kwargs.get("input"),):
        if isinstance(value, (list, tuple)):
            yield from (item for item in value if isinstance(item, fx.Node))
        elif isinstance(value, fx.Node) or (joins and isinstance(value, (int, float))):
            yield value


def kind_of(node: fx.Node, root: nn.Module) -> Any:
    """Return what a node does: the class of a module, a function, or the name of a method."""
    if node.op == "call_module":
        return type(module_of(node, root))
    return node.target if node.op in ("call_function", "call_method") else None


def _is_clamp_at_zero(node: fx.Node, root: nn.Module) -> bool:
    if kind_of(node, root) is nn.Hardtanh:
        hardtanh = module_of(node, root)
        return isinstance(hardtanh, nn.Hardtanh) and hardtanh.min_val >= 0
    clamps = (torch.clamp, torch.clamp_, torch.clip, "clamp", "clamp_", "clip", "clip_", F.hardtanh)
    if node.target not in clamps:
        return False
    default = -1.0 if node.target is F.hardtanh else None
    low = node.args[1] if len(node.args) > 1 else node.kwargs.get("min", default)
    low = node.kwargs.get("min_val", low)
    return isinstance(low, (int, float)) and low >= 0


def _is_zero_pad(node: fx.Node) -> bool:
    if node.target is not F.pad:
        return False
    mode = node.kwargs.get("mode", node.args[2] if len(node.args) > 2 else "constant")
    value = node.kwargs.get("value", node.args[3] if len(node.args) > 3 else 0)
    return mode != "constant" or value is None or (isinstance(value, (int, float)) and value >= 0)


def _aliases(tensor: fx.Node, root: nn.Module) -> set[fx.Node]:
    """Return all nodes that may be views of the memory of ``tensor``, itself included."""
    base = tensor
    while _is_view(base, root) and layer_input(base) is not None:
        base = layer_input(base) or base
    found: set[fx.Node] = set()
    waiting = [base]
    while waiting:
        node = waiting.pop()
        if node in found:
            continue
        found.add(node)
        waiting += [
            user for user in node.users if layer_input(user) is node and _is_view(user, root)
        ]
    return found


def _is_view(node: fx.Node, root: nn.Module) -> bool:
    """Say whether the result of ``node`` may share the memory of its first argument."""
    source = layer_input(node)
    if source is None:
        return False
    kind = kind_of(node, root)
    name = kind if isinstance(kind, str) else getattr(kind, "__name__", "")
    return kind in _PASS or name in _VIEWS or mutates(node, source, root)


def mutates(user: fx.Node, tensor: fx.Node, root: nn.Module) -> bool:
    """Say whether ``user`` may write into ``tensor``."""
    if user.kwargs.get("out") is tensor:
        return True
    if user.op == "call_module" and _is_unknown_code(module_of(user, root)):
        return True
    first = user.args[0] if user.args else None
    listed = isinstance(first, (list, tuple)) and tensor in first
    if layer_input(user) is not tensor and not listed:
        return False
    if user.op == "call_module":
        return bool(getattr(module_of(user, root), "inplace", False))
    if user.kwargs.get("inplace") is True:
        return True
    if user.op == "call_method":
        return _is_inplace_name(str(user.target))
    if user.op == "call_function":
        return _is_inplace_function(user)
    return False


def _is_unknown_code(module: nn.Module | None) -> bool:
    """Say whether a module is Python code of the user's, which may do anything to its inputs."""
    return not type(module).__module__.startswith(("torch.", "amct_fx."))


def _is_inplace_name(name: str) -> bool:
    return name.endswith("_") and not name.endswith("__")


_INPLACE_OPERATORS: frozenset[Callable[..., Any]] = frozenset(
    getattr(operator, name)
    for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "ipow", "imod", "setitem")
)


def _is_inplace_function(user: fx.Node) -> bool:
    function = user.target
    if function in _INPLACE_OPERATORS:
        return True
    if _is_inplace_name(getattr(function, "__name__", "")):
        return True
    # F.relu(x, True): inplace given by position
    names = getattr(getattr(function, "__code__", None), "co_varnames", ())
    if "inplace" not in names:
        return False
    position = names.index("inplace")
    return len(user.args) > position and user.args[position] is True
