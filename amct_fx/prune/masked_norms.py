"""Norms whose statistics run over channels that will go: those of the channels that stay.

While training, the masked model has all channels. A layer norm would count the masked ones, too;
here it does not, so the masked model computes what the one without them will. The mask is a buffer
of full size, as those of weights. Source: spec/pruning.md section 3.1, ``norm_axis="mask_aware"``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from amct_fx.graph.region import GraphForward, fx_graph_of, guard_of, install_graph

if TYPE_CHECKING:
    from amct_fx.prune.plan_parts import NormMask

__all__ = ["MaskedNorm", "attach_norm_masks", "fold_norm_masks", "kept_statistics"]


def kept_statistics(
    x: Tensor, mask: Tensor, dims: Sequence[int], eps: float | None, *, centre: bool = True
) -> Tensor:
    """Normalise over some axes by the statistics of what a mask keeps.

    Args:
        x: Any shape, floating point; half precision is computed in float32.
        mask: Nonzero where an entry counts; broadcastable to ``x``.
        dims: The axes, counted from the last.
        eps: Added to the variance; ``None``: the epsilon of the dtype.
        centre: Subtract the mean.

    Returns:
        The same shape and dtype; 0 where the mask is.

    Example:
        >>> kept_statistics(torch.tensor([1.0, 3, 100]), torch.tensor([1, 1, 0]), [-1], 0.0)[:2]
        tensor([-1.,  1.])
    """
    wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    kept = mask.to(wide.dtype).reshape((1,) * (x.dim() - mask.dim()) + tuple(mask.shape))
    dims = list(dims)
    repeats = math.prod(x.shape[d] for d in dims) / math.prod(kept.shape[d] for d in dims)
    count = kept.sum(dims, keepdim=True) * repeats
    wide = wide * kept
    if centre:
        wide = (wide - wide.sum(dims, keepdim=True) / count) * kept
    variance = wide.square().sum(dims, keepdim=True) / count
    return (wide * torch.rsqrt(variance + eps)).to(x.dtype)


def _layer_norm(
    x: Tensor,
    mask: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> Tensor:
    y = kept_statistics(x, mask, range(-len(shape), 0), eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _rms_norm(
    x: Tensor, mask: Tensor, shape: Sequence[int], weight: Tensor | None, eps: float | None
) -> Tensor:
    y = kept_statistics(x, mask, range(-len(shape), 0), eps, centre=False)
    return y if weight is None else y * weight


def _group_norm(
    x: Tensor, mask: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    split = x.unflatten(1, (groups, -1))
    ones = (1,) * (x.dim() - 2)
    kept = mask.reshape(groups, -1, *ones)
    y = kept_statistics(split, kept, range(1 - x.dim(), 0), eps).flatten(1, 2)
    y = y if weight is None else y * weight.reshape(-1, *ones)
    return y if bias is None else y + bias.reshape(-1, *ones)


class MaskedNorm(nn.Module):
    """Mixin of norms that count only the channels of their buffer ``kept``.

    Attributes:
        kept: uint8, over the channels.
    """

    kept: Tensor
    float_class: ClassVar[type[nn.Module]]


class MaskedLayerNorm(MaskedNorm, nn.LayerNorm):
    """A layer norm over kept channels."""

    float_class = nn.LayerNorm

    def forward(self, x: Tensor) -> Tensor:
        """Normalise by the statistics of the kept channels."""
        shape = self.normalized_shape
        return _layer_norm(x, self.kept, shape, self.weight, self.bias, self.eps)


class MaskedLayerNorm2d(MaskedLayerNorm):
    """A layer norm over the kept channels along axis 1."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalise by the statistics of the kept channels."""
        return super().forward(x.movedim(1, -1)).movedim(-1, 1)


class MaskedGroupNorm(MaskedNorm, nn.GroupNorm):
    """A group norm over the kept channels of each group."""

    float_class = nn.GroupNorm

    def forward(self, input: Tensor) -> Tensor:
        """Normalise by the statistics of the kept channels."""
        return _group_norm(input, self.kept, self.num_groups, self.weight, self.bias, self.eps)


_OVER_AXIS_1 = {"timm.layers.norm.LayerNorm2d"}
_CLASSES: dict[type[nn.Module], type[MaskedNorm]] = {
    nn.LayerNorm: MaskedLayerNorm,
    nn.GroupNorm: MaskedGroupNorm,
}
if hasattr(nn, "RMSNorm"):

    class MaskedRMSNorm(MaskedNorm, nn.RMSNorm):
        """A root mean square norm over kept channels."""

        float_class = nn.RMSNorm

        def forward(self, x: Tensor) -> Tensor:
            """Normalise by the mean square of the kept channels."""
            return _rms_norm(x, self.kept, self.normalized_shape, self.weight, self.eps)

    _CLASSES[nn.RMSNorm] = MaskedRMSNorm


class MaskedCall(nn.Module):
    """Stands in a graph for ``F.layer_norm`` and its like, with their arguments.

    Args:
        kind: ``"layer_norm"``, ``"rms_norm"`` or ``"group_norm"``.
        mask: Nonzero where a channel stays; of a rank that broadcasts to the normalised axes.
    """

    kept: Tensor

    def __init__(self, kind: str, mask: Tensor) -> None:
        super().__init__()
        self.kind = kind
        self.register_buffer("kept", (mask != 0).to(torch.uint8))

    def forward(self, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Normalise by the statistics of the kept channels."""
        names, run, defaults = _CALLS[self.kind]
        given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
        return run(input, self.kept, *[given[name] for name in names])


_OPTIONAL: dict[str, Any] = {"weight": None, "bias": None, "eps": 1e-5}
_CALLS: dict[str, tuple[tuple[str, ...], Callable[..., Tensor], dict[str, Any]]] = {
    "layer_norm": (("normalized_shape", "weight", "bias", "eps"), _layer_norm, _OPTIONAL),
    "rms_norm": (("normalized_shape", "weight", "eps"), _rms_norm, {**_OPTIONAL, "eps": None}),
    "group_norm": (("num_groups", "weight", "bias", "eps"), _group_norm, _OPTIONAL),
}
_FUNCTIONS: Mapping[str, Any] = {k: getattr(F, k) for k in _CALLS if hasattr(F, k)}


def attach_norm_masks(model: nn.Module, masks: Sequence[NormMask]) -> None:
    """Let norms count only channels that stay.

    Args:
        model: The model, which runs its graphs; changed in place.
        masks: Which norms, and what they keep.
    """
    for mask in masks:
        if mask.call:
            _mask_call(model.get_submodule(mask.layer), mask.call, mask.kept)
        else:
            _mask_module(model.get_submodule(mask.layer), mask.kept)


def _mask_module(module: nn.Module, kept: Tensor) -> None:
    below = type(module)
    masked = next(_CLASSES[cls] for cls in below.__mro__ if cls in _CLASSES)
    if f"{below.__module__}.{below.__qualname__}" in _OVER_AXIS_1:
        masked = MaskedLayerNorm2d
    device = next((tensor.device for tensor in module.parameters()), None)
    module.__dict__["_unmasked_class"] = below
    module.__class__ = masked
    module.register_buffer("kept", kept.to(torch.uint8).to(device))


def _mask_call(part: nn.Module, name: str, kept: Tensor) -> None:
    assert isinstance(part, GraphForward)
    graph = fx_graph_of(part)
    node = next(node for node in graph.nodes if node.name == name)
    key = f"{name}_kept"
    while hasattr(part, key):
        key = f"_{key}"
    kind = str(getattr(node.target, "__name__", ""))
    device = next((tensor.device for tensor in part.parameters()), None)
    part.add_module(key, MaskedCall(kind, kept.to(device)))
    node.op, node.target = "call_module", key
    install_graph(part, graph, replace(guard_of(part), exclusive=True))


def fold_norm_masks(model: nn.Module) -> None:
    """Make every norm what it was; its mask is gone.

    Args:
        model: Our own copy; changed in place.
    """
    for module in list(model.modules()):
        if isinstance(module, MaskedNorm):
            del module._buffers["kept"]
            module.__class__ = module.__dict__.pop("_unmasked_class")
        if isinstance(module, GraphForward):
            _fold_calls(module)


def _fold_calls(part: GraphForward) -> None:
    graph = fx_graph_of(part)
    calls = [node for node in graph.nodes if _masked_call(part, node) is not None]
    for node in calls:
        masked = _masked_call(part, node)
        assert masked is not None
        key = str(node.target)
        node.op, node.target = "call_function", _FUNCTIONS[masked.kind]
        delattr(part, key)
    if calls:
        install_graph(part, graph, guard_of(part))


def _masked_call(part: nn.Module, node: fx.Node) -> MaskedCall | None:
    module = part.get_submodule(str(node.target)) if node.op == "call_module" else None
    return module if isinstance(module, MaskedCall) else None
