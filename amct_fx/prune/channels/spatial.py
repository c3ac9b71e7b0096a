"""Pooling, padding and resizing, reductions, and softmax: what works along certain axes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from amct_fx.prune.channels.blocks import gate_halves, lay_over, repeat_each
from amct_fx.prune.channels.elementwise import Handler, elementwise
from amct_fx.prune.channels.padding import pad_channels
from amct_fx.prune.channels.space import Space
from amct_fx.prune.channels.steps import Joined, Reduced, Spread
from amct_fx.prune.channels.walk import channel_space, source_of

if TYPE_CHECKING:
    from amct_fx.prune.channels.walk import Walk

__all__ = ["FUNCTIONS", "METHODS", "MODULES"]


def over_last(count: int | None, *, zero: bool = True) -> Handler:
    """Return the handler of an operation over the last ``count`` axes; ``None``: all but two."""

    def handle(walk: Walk, node: fx.Node) -> None:
        rank = len(walk.shape(source_of(node)) or ())
        axes = range(rank - (rank - 2 if count is None else count), rank)
        _same_axes(walk, node, set(axes), zero=zero)

    return handle


def pad(walk: Walk, node: fx.Node) -> None:
    """Handle ``F.pad``: it changes the axes whose amounts are not 0."""
    amounts = node.args[1] if len(node.args) > 1 else node.kwargs.get("pad")
    fact = walk.fact(amounts) if isinstance(amounts, fx.Node) else amounts
    rank = len(walk.shape(source_of(node)) or ())
    if not isinstance(fact, (tuple, list)):
        walk.pin_inputs(node, "unknown_op", "the amounts of padding are not known")
        return
    numbers = [walk.fact(item) for item in fact]
    axes = {rank - 1 - i // 2 for i, amount in enumerate(numbers) if amount != 0}
    mode = node.kwargs.get("mode", node.args[2] if len(node.args) > 2 else "constant")
    value = node.kwargs.get("value", node.args[3] if len(node.args) > 3 else 0)
    source = source_of(node)
    space = walk.space(source)
    plain = walk.options.mode == "native" and mode == "constant" and fact is amounts
    along_channels = space is not None and space.axis in axes
    if along_channels and plain and pad_channels(walk, node, source, amounts, zero=not value):
        return
    _same_axes(walk, node, axes, zero=mode != "constant" or not value)


def along(position: int, *names: str, default: Any = None) -> Handler:
    """Return the handler of an operation over the axis ``dim``, such as softmax."""

    def handle(walk: Walk, node: fx.Node) -> None:
        dim = _argument(walk, node, position, ("dim", *names), default)
        rank = len(walk.shape(source_of(node)) or ())
        axes = set(range(rank)) if not isinstance(dim, int) else {dim % rank}
        _same_axes(walk, node, axes, zero=False)

    return handle


def _same_axes(walk: Walk, node: fx.Node, axes: set[int], *, zero: bool) -> None:
    """Let the channels pass an operation over ``axes`` that hold none of them."""
    source = source_of(node)
    space = walk.space(source)
    results = walk.fact(node)
    if space is None:
        walk.settle(node, None, node.all_input_nodes)
        return
    if space.axis in axes:
        walk.pin_inputs(node, "reduction_over_axis", "it works along the axis of the channels")
        return
    others = [v for v in node.all_input_nodes if v is not source and walk.space(v) is not None]
    if others:
        walk.pin_inputs(node, "unknown_op", "it reads several tensors with channels")
        return
    source, space = lay_over(walk, node, source, space, axes & set(space.axes))
    out = Space(space.atoms, space.axis, zero=space.zero and zero, records=space.records)
    if not isinstance(results, tuple):
        walk.spaces[node] = out
        walk.steps.append(Joined(node, (source,), out))
        return
    if any(not _keeps_axes(walk, source_of(node), item, space) for item in results):
        walk.pin_inputs(node, "unknown_op", "it has several results")
        return
    walk.spaces[node] = tuple(out for _ in results)
    every = tuple(range(space.atoms.dim()))
    for index in range(len(results)):
        walk.steps.append(Reduced(node, source, (node, index), out, every))


def _keeps_axes(walk: Walk, source: Any, result: Any, space: Space) -> bool:
    """Say whether one of several results has the channels of the source on the same axes."""
    before, after = walk.shape(source) or (), getattr(result, "shape", ())
    return len(before) == len(after) and all(before[a] == after[a] for a in space.axes)


def glu(walk: Walk, node: fx.Node) -> None:
    """Handle a gated linear unit, whose second half gates the first."""
    source = source_of(node)
    space, dim = walk.space(source), _argument(walk, node, 1, ("dim",), -1)
    if space is not None and isinstance(dim, int) and space.axes == (dim % space.atoms.dim(),):
        gate_halves(walk, node, source, space)
    else:
        along(1, default=-1)(walk, node)


def repeat_interleave(walk: Walk, node: fx.Node) -> None:
    """Handle ``repeat_interleave`` by one number along one axis."""
    source = source_of(node)
    space, times = walk.space(source), _argument(walk, node, 1, ("repeats",), None)
    dim = _argument(walk, node, 2, ("dim",), None)
    if space is None:
        walk.settle(node, None, node.all_input_nodes)
    elif not isinstance(times, int) or not isinstance(dim, int) or "output_size" in node.kwargs:
        walk.pin_inputs(node, "unknown_op", "it repeats in a way that is not plain")
    elif dim % space.atoms.dim() in space.axes:
        repeat_each(walk, node, source, dim % space.atoms.dim(), times)
    else:
        _same_axes(walk, node, set(), zero=True)


def unfold(walk: Walk, node: fx.Node) -> None:
    """Handle the patches of a map: the places of a window, channel by channel."""
    source = source_of(node)
    space, before, after = walk.space(source), walk.shape(source), walk.shape(node)
    if space is None:
        walk.settle(node, None, node.all_input_nodes)
    elif space.axes != (1,) or before is None or after is None or len(before) != 4:
        walk.pin_inputs(node, "unknown_op", "its channels do not lie along axis 1")
    else:
        times = after[1] // before[1]
        atoms = space.atoms.flatten().repeat_interleave(times)
        out = channel_space(atoms, 3, 1, zero=space.zero)
        walk.spaces[node] = out
        walk.steps.append(Spread(node, source, out, times, ()))


def reduce(walk: Walk, node: fx.Node) -> None:
    """Handle a reduction over given axes; the others keep their channels."""
    source = source_of(node)
    space = walk.space(source)
    if any(walk.shape(value) is not None for value in node.all_input_nodes if value is not source):
        elementwise(walk, node)  # torch.max of two tensors
        return
    if space is None:
        walk.settle(node, None, node.all_input_nodes)
        return
    rank = space.atoms.dim()
    position = 2 if getattr(node.target, "__name__", node.target) in ("norm",) else 1
    dim = _argument(walk, node, position, ("dim", "axis"), None)
    dims = set(range(rank)) if dim is None else {d % rank for d in _ints(dim)}
    if not dims or space.axis in dims:
        walk.pin_inputs(node, "reduction_over_axis", "it reduces the axis of the channels")
        return
    source, space = lay_over(walk, node, source, space, dims & set(space.axes))
    results = walk.fact(node)
    first = results[0] if isinstance(results, tuple) else results
    keeps = len(first.shape) == rank
    axes = [a for a in range(rank) if keeps or a not in dims]
    atoms = space.atoms.reshape([space.atoms.shape[a] for a in axes])
    out = Space(atoms, axes.index(space.axis), zero=space.zero, records=space.records)
    if isinstance(results, tuple):
        walk.spaces[node] = tuple(out for _ in results)
        for index in range(len(results)):
            walk.steps.append(Reduced(node, source, (node, index), out, tuple(axes)))
        return
    if getattr(node.target, "__name__", str(node.target)) in ("std", "norm", "var"):
        walk.atoms.forbid_row_masks(space.atoms)
    walk.spaces[node] = out
    walk.steps.append(Reduced(node, source, node, out, tuple(axes)))


def _argument(
    walk: Walk, node: fx.Node, position: int, names: tuple[str, ...], default: Any
) -> Any:
    """Return an argument of a function, or the attribute of a module."""
    if node.op == "call_module":
        return getattr(walk.module(node), names[0], default)
    value = node.args[position] if len(node.args) > position else default
    for name in names:
        value = node.kwargs.get(name, value)
    return walk.fact(value) if isinstance(value, fx.Node) else value


def _ints(value: Any) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


_POOLS = ("max_pool", "avg_pool", "lp_pool", "adaptive_avg_pool", "adaptive_max_pool")
FUNCTIONS: dict[Any, Handler] = {
    getattr(scope, name): over_last(count)
    for count in (1, 2, 3)
    for kind in _POOLS
    for name in (f"{kind}{count}d", f"{kind}{count}d_with_indices")
    for scope in (F, torch)
    if hasattr(scope, name)
}
FUNCTIONS |= {F.pad: pad, F.interpolate: over_last(None), F.upsample: over_last(None)}
_SOFT = {F.softmax, F.log_softmax, F.softmin, torch.softmax, torch.log_softmax, F.gumbel_softmax}
FUNCTIONS |= {function: along(1) for function in _SOFT}
FUNCTIONS |= {F.glu: glu, F.normalize: along(2, default=1), F.unfold: unfold}
FUNCTIONS |= {torch.repeat_interleave: repeat_interleave, F.grid_sample: over_last(None)}
_CUMULATIVE = (torch.cumsum, torch.cumprod, torch.logcumsumexp)
FUNCTIONS |= {function: along(1) for function in _CUMULATIVE}
FUNCTIONS |= {torch.index_select: along(1)}
_SORTS = {name: along(1, default=-1) for name in ("sort", "argsort", "cummax", "cummin")}
_SORTS["topk"] = along(2, default=-1)
FUNCTIONS |= {getattr(torch, name): handler for name, handler in _SORTS.items()}
_REDUCTIONS = (
    *("mean", "sum", "amax", "amin", "max", "min", "std", "var", "prod", "logsumexp", "norm"),
    *("argmax", "argmin", "median", "all", "any", "nansum", "nanmean"),
)
FUNCTIONS |= {getattr(torch, name): reduce for name in _REDUCTIONS if hasattr(torch, name)}
METHODS: dict[str, Handler] = {name: reduce for name in _REDUCTIONS}
METHODS |= {name: along(1) for name in ("softmax", "log_softmax", "cumsum", "cumprod")}
METHODS |= {"index_select": along(1), "repeat_interleave": repeat_interleave, **_SORTS}
MODULES: dict[type[nn.Module], Handler] = {
    getattr(nn, f"{kind}{count}d"): over_last(count)
    for kind in (
        "MaxPool",
        "AvgPool",
        "AdaptiveAvgPool",
        "AdaptiveMaxPool",
        "LPPool",
        "ZeroPad",
        "ConstantPad",
        "ReflectionPad",
        "ReplicationPad",
        "CircularPad",
    )
    for count in (1, 2, 3)
    if hasattr(nn, f"{kind}{count}d")
}
MODULES |= {nn.Upsample: over_last(None), nn.UpsamplingNearest2d: over_last(2)}
MODULES |= {nn.UpsamplingBilinear2d: over_last(2)}
MODULES |= {nn.Softmax: along(0), nn.LogSoftmax: along(0), nn.Softmin: along(0)}
MODULES |= {nn.GLU: glu, nn.Unfold: unfold}
