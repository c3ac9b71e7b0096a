"""Mode ``"amct"``: where AMCT's walk stops, and what it lets through.

Only what stops is decided here; what passes is followed by the same handlers as in native mode.
Source: spec/pruning.md section 3.1, column ``amct``.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn
from torch.ao.quantization import FakeQuantizeBase

from amct_fx.prune.channels.walk import Walk, float_class, source_of
from amct_fx.prune.channels.zeros import kind_of_operation

if TYPE_CHECKING:
    from amct_fx.prune.channels.space import Record, Space

__all__ = ["Barrier", "amct_barrier"]

_PASSES = frozenset(
    [
        "relu",
        "relu6",
        "clamp",
        "clip",
        "clamp_min",
        "clamp_max",
        "hardtanh",
        "leakyrelu",
        "leaky_relu",
        "abs",
        "absolute",
        "ceil",
        "round",
        "cos",
        "cosh",
        "acos",
        "acosh",
        "arccos",
        "arccosh",
        "asin",
        "asinh",
        "arcsin",
        "arcsinh",
        "atan",
        "atanh",
        "arctan",
        "arctanh",
        "celu",
        "float",
        "half",
        "double",
        "bfloat16",
        "to",
        "type",
        "type_as",
        "contiguous",
        "clone",
        "detach",
        "identity",
        "dropout",
        "dropout2d",
        "maxpool1d",
        "maxpool2d",
        "maxpool3d",
        "avgpool1d",
        "avgpool2d",
        "avgpool3d",
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "pad",
        "zeropad1d",
        "zeropad2d",
        "zeropad3d",
        "constantpad1d",
        "constantpad2d",
        "constantpad3d",
        "reflectionpad1d",
        "reflectionpad2d",
        "reflectionpad3d",
        "replicationpad1d",
        "replicationpad2d",
        "replicationpad3d",
        "circularpad1d",
        "circularpad2d",
        "circularpad3d",
    ]
)
_GLOBAL_POOLS: tuple[str, ...] = ("adaptiveavgpool1d", "adaptiveavgpool2d", "adaptiveavgpool3d")
_GLOBAL_POOLS += ("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d")
_RESIZES = ("interpolate", "upsample", "upsamplingnearest2d", "upsamplingbilinear2d")
_ADDS = ("add", "iadd")
_CONCATS = (torch.cat, torch.concat, getattr(torch, "concatenate", torch.cat))
_HEADS = ("flatten", "reshape", "view")
_LAYERS = (nn.modules.conv._ConvNd, nn.Linear, nn.modules.batchnorm._BatchNorm)


@dataclass(frozen=True)
class Barrier:
    """Where the walk stops: a code, a sentence, and whether no new channels begin there."""

    code: str
    text: str
    whole: bool = True


def amct_barrier(walk: Walk, node: fx.Node) -> Barrier | None:
    """Return why AMCT's walk stops at ``node``; ``None``: channels go on.

    Args:
        walk: The analysis; records of the inputs may change their balance.
        node: A node that has a rule.
    """
    module = walk.module(node)
    if isinstance(module, FakeQuantizeBase) or not walk.makes_tensors(node):
        return None
    if module is not None and (calls := _sharing(walk, node, module)):
        return Barrier(*calls)
    reason = _reason(walk, node, module)
    if reason is None:
        return None
    code = _code(walk, node)
    begins = module is not None and float_class(module) is nn.Conv2d
    depthwise = begins and getattr(module, "groups", 1) == getattr(module, "in_channels", 0)
    return Barrier(code, reason, whole=not begins or depthwise)


def _code(walk: Walk, node: fx.Node) -> str:
    """Return the code of a barrier: that of an operand that a layer keeps whole, if any."""
    fixed = [walk.fixed[value] for value in node.all_input_nodes if value in walk.fixed]
    codes = [pin.code for pin in fixed if pin.code in ("coupled_to_skipped", "kind_m4n2")]
    return codes[0] if codes and kind_of_operation(walk, node) in _ADDS else "amct_barrier"


def _reason(walk: Walk, node: fx.Node, module: nn.Module | None) -> str | None:
    kind = kind_of_operation(walk, node)
    if module is not None and any(True for _ in module.parameters()):
        return _layer_barrier(walk, node, module)
    if kind in _PASSES or _passes_on_conditions(walk, node, kind):
        return None
    if kind in _ADDS:
        return _add_barrier(walk, node)
    if node.target in _CONCATS:
        return _concat_barrier(walk, node)
    return f"AMCT stops at {kind or node.name}"


def _sharing(walk: Walk, node: fx.Node, module: nn.Module) -> tuple[str, str] | None:
    """Say whether a module with parameters is called again, or shares one."""
    parameters = list(module.parameters())
    name = walk.name(node)
    calls = sum(
        other.op == "call_module" and walk.module(other) is module for other in node.graph.nodes
    )
    if parameters and calls > 1:
        return "shared_module", f"{name} is called {calls} times"
    if any(len(walk.owners.get(id(parameter), ())) > 1 for parameter in parameters):
        return "tied_parameter", f"{name} shares a parameter with another module"
    return None


def _layer_barrier(walk: Walk, node: fx.Node, module: nn.Module) -> str | None:
    cls = float_class(module)
    space = walk.space(node.args[0]) if node.args else None
    if cls is nn.Linear:
        return None
    if cls is nn.Conv2d:
        return _conv_barrier(module, space)
    if cls is nn.ConvTranspose2d:
        return None
    if cls in (nn.BatchNorm1d, nn.BatchNorm2d):
        records = [] if space is None else [record.root for record in space.records]
        matmul = bool(records) and all(record.matmul for record in records)
        if cls is nn.BatchNorm1d and matmul:
            return "AMCT stops at a BatchNorm1d behind a Linear that it sees as a MatMul"
        return None
    return f"AMCT stops at {type(module).__name__}"


def _conv_barrier(module: Any, space: Space | None) -> str | None:
    """Decide about a Conv2d that may have groups; raise the balance of its input."""
    groups, inputs = module.groups, module.in_channels
    if groups == 1 or (groups == inputs and module.out_channels == inputs):
        return None
    if groups == inputs:
        return "AMCT cannot follow a depthwise convolution with a multiplier"
    if space is None:
        return None
    if len(space.records) != 1:
        return "AMCT cannot prune the input of a grouped convolution behind a concatenation"
    record = space.records[0].root
    if record.balance % groups and groups % record.balance:
        return "its groups and those of its producer do not divide each other"
    record.balance = max(record.balance, groups)
    return None


def _passes_on_conditions(walk: Walk, node: fx.Node, kind: str) -> bool:
    """Say whether one of the operations that depend on their arguments passes."""
    if kind in _GLOBAL_POOLS:
        return _size_one(walk, node)
    if kind in _RESIZES:
        return _by_scale(walk, node)
    if kind in ("pow", "ipow"):
        exponent = node.args[1] if len(node.args) > 1 else node.kwargs.get("exponent")
        return isinstance(exponent, (int, float))
    if kind in _HEADS:
        return _is_head(walk, node)
    if kind in ("permute", "transpose"):
        return any(_is_inverse_pair(walk, a, b) for a, b in _neighbours(node))
    if node.target is operator.getitem:
        return _is_whole_slice(node)
    return False


def _size_one(walk: Walk, node: fx.Node) -> bool:
    module = walk.module(node)
    size = module.output_size if module is not None else _second(node, "output_size")
    return all(item == 1 for item in (size if isinstance(size, (tuple, list)) else (size,)))


def _second(node: fx.Node, name: str) -> Any:
    return node.args[1] if len(node.args) > 1 else node.kwargs.get(name)


def _by_scale(walk: Walk, node: fx.Node) -> bool:
    module: Any = walk.module(node)
    if module is not None:
        return module.size is None and module.scale_factor is not None
    scale = node.args[2] if len(node.args) > 2 else node.kwargs.get("scale_factor")
    numbers = scale if isinstance(scale, (tuple, list)) else (scale,)
    return _second(node, "size") is None and all(isinstance(n, (int, float)) for n in numbers)


def _is_head(walk: Walk, node: fx.Node) -> bool:
    """Say whether ``node`` flattens the result of a global pool that nothing else reads."""
    pool = source_of(node)
    if not isinstance(pool, fx.Node) or kind_of_operation(walk, pool) not in _GLOBAL_POOLS:
        return False
    if not _size_one(walk, pool) or len(pool.users) != 1:
        return False
    if kind_of_operation(walk, node) == "flatten":
        module: Any = walk.module(node)
        start = module.start_dim if module is not None else _second(node, "start_dim")
        return bool(start == 1)
    packed = isinstance(node.args[1], (tuple, list))
    sizes: Any = node.args[1] if packed else node.args[1:]
    return bool(
        kind_of_operation(walk, node) == "reshape"
        and len(sizes) == 2
        and sizes[1] == -1
        and _is_batch_of(sizes[0], pool.args[0])
    )


def _is_batch_of(value: Any, tensor: Any) -> bool:
    """Say whether ``value`` is ``tensor.shape[0]`` or ``tensor.size(0)``."""
    if not isinstance(value, fx.Node):
        return False
    if value.target == "size":
        return value.args == (tensor, 0)
    shape = value.args[0] if value.target is operator.getitem and value.args[1] == 0 else None
    return isinstance(shape, fx.Node) and (
        (shape.target is getattr and shape.args == (tensor, "shape"))
        or (shape.target == "size" and shape.args == (tensor,))
    )


def _neighbours(node: fx.Node) -> list[tuple[Any, Any]]:
    users = list(node.users)
    return [(node.args[0], node), *((node, users[0]) for _ in users[:1] if len(users) == 1)]


def _is_inverse_pair(walk: Walk, first: Any, second: Any) -> bool:
    if not all(isinstance(node, fx.Node) for node in (first, second)) or len(first.users) != 1:
        return False
    orders = [_permutation(walk, node) for node in (first, second)]
    if None in orders or second.args[0] is not first:
        return False
    a, b = (order or [] for order in orders)
    return len(a) == len(b) and [a[i] for i in b] == list(range(len(a)))


def _permutation(walk: Walk, node: fx.Node) -> list[int] | None:
    rank = len(walk.shape(node) or ())
    packed = len(node.args) > 1 and isinstance(node.args[1], (tuple, list))
    values: Any = node.args[1] if packed else node.args[1:]
    if not all(isinstance(value, int) for value in values):
        return None
    axes = [value % rank for value in values] if rank else []
    if node.target in (torch.permute, "permute"):
        return axes
    if node.target in (torch.transpose, "transpose") and len(axes) == 2:
        order = list(range(rank))
        order[axes[0]], order[axes[1]] = axes[1], axes[0]
        return order
    return None


def _is_whole_slice(node: fx.Node) -> bool:
    index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
    return all(item == slice(None) or item is Ellipsis for item in index)


def live_records(walk: Walk, value: Any) -> list[Record]:
    """Return the records of a tensor whose channels may still go."""
    space = walk.space(value)
    if space is None or not bool((walk.atoms.roots(space.atoms) >= 0).any()):
        return []
    return [record.root for record in space.records]


def _add_barrier(walk: Walk, node: fx.Node) -> str | None:
    operands = [*node.args, *(node.kwargs[k] for k in ("input", "other") if k in node.kwargs)]
    if len(operands) != 2 or not all(isinstance(value, fx.Node) for value in operands):
        return "AMCT stops at an addition of a constant"
    if operands[0] is operands[1]:
        return None
    records = [live_records(walk, value) for value in operands]
    if any(len(found) != 1 for found in records):
        return "AMCT adds only tensors of one layer each"
    spaces = [walk.space(value) for value in operands]
    widths = {space.atoms.numel() for space in spaces if space is not None}
    shapes = {walk.shape(value) for value in operands}
    if records[0][0].linear != records[1][0].linear or len(widths) > 1 or len(shapes) > 1:
        return "AMCT adds only tensors with equal channels"
    return None


def _concat_barrier(walk: Walk, node: fx.Node) -> str | None:
    tensors = source_of(node)
    dim = _second(node, "dim")
    if dim != 1 or not isinstance(tensors, (tuple, list)):
        return "AMCT follows a concatenation only along dim=1"
    for tensor in tensors:
        records = live_records(walk, tensor)
        if any(record.linear for record in records):
            return "AMCT does not concatenate what a Linear makes"
        if not records and not _ends_in_layer(walk, tensor):
            return f"AMCT does not know the channels of {tensor}"
    return None


def _ends_in_layer(walk: Walk, tensor: Any) -> bool:
    """Say whether the last operation that does not just pass is a layer."""
    while isinstance(tensor, fx.Node):
        if isinstance(walk.module(tensor), _LAYERS):
            return True
        kind = kind_of_operation(walk, tensor)
        passes = kind in _PASSES or kind.endswith("fakequantize")
        if not passes and not _passes_on_conditions(walk, tensor, kind):
            return False
        tensor = tensor.args[0] if tensor.args else None
    return False
