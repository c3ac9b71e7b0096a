"""What functions make of meta tensors, where that is known without computing.

Layers and elementwise functions have a closed form here: the kernels of PyTorch for meta tensors
are written in Python in large part and take as long as small convolutions. The forms hold for
contiguous tensors of one floating point dtype and raise for all else, so nothing that a real run
would refuse goes through. Views and a few more go to PyTorch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

__all__ = ["IN_PLACE", "QUERIES", "Unknown", "on_meta", "result_of"]


class Unknown(Exception):  # noqa: N818  not an error: the model is run on real tensors then
    """Nothing is known of a call."""


def _asked(*names: str) -> list[Any]:
    """Return the functions of methods and attributes of tensors."""
    found = [getattr(Tensor, name) for name in names]
    return [item if callable(item) else item.__get__ for item in found]


QUERIES: Mapping[Any, Any] = {
    **dict.fromkeys(_asked("shape", "dtype", "ndim", "layout", "_version", "dim", "size")),
    **dict.fromkeys(_asked("numel", "nelement", "stride", "__len__", "is_contiguous")),
    **dict.fromkeys(_asked("is_floating_point", "is_complex", "is_inference")),
    **dict.fromkeys((torch.is_floating_point, torch.is_complex, torch.numel)),
    **dict.fromkeys(_asked("device"), torch.device),
}
"""Questions about a tensor, by their function; ``torch.device`` where a twin must not answer."""


def result_of(function: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what a function makes of tensors, as meta tensors; nothing is changed for real.

    Args:
        function: As a ``TorchFunctionMode`` sees it.
        args: Its positional arguments.
        kwargs: Its keyword arguments.

    Raises:
        Unknown: Nothing is known of such a call.
    """
    rule = _RULES.get(function)
    if rule is not None:
        return rule(*args, **kwargs)
    message = f"{getattr(function, '__name__', function)} is not known"
    raise Unknown(message)


def on_meta(tensor: Tensor) -> Tensor:
    """Return a meta tensor of the same shape, strides and dtype."""
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _need(condition: bool) -> None:
    if not condition:
        message = "an unusual call"
        raise Unknown(message)


def _made(shape: Sequence[int], like: Tensor) -> Tensor:
    return torch.empty(tuple(shape), dtype=like.dtype, device="meta")


def _is_plain(x: Any, like: Tensor | None = None) -> bool:
    """Say whether something is a contiguous floating point tensor, of the dtype of another."""
    usual = isinstance(x, Tensor) and x.is_floating_point() and x.is_contiguous()
    return usual and (like is None or x.dtype == like.dtype)


def _tuple(value: Any, count: int) -> tuple[int, ...]:
    """Return a setting for each spatial axis."""
    values = (value,) * count if isinstance(value, int) else tuple(value)
    values = values * count if len(values) == 1 else values
    _need(len(values) == count and all(type(item) is int for item in values))
    return values


def _check_layer(x: Tensor, weight: Tensor, bias: Tensor | None, channels: int) -> None:
    fits = _is_plain(x) and _is_plain(weight, x)
    _need(fits and (bias is None or (_is_plain(bias, x) and bias.shape == (channels,))))


def _convolution(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor:
    rank = weight.dim() - 2
    _check_layer(input, weight, bias, weight.shape[0])
    _need(input.dim() == weight.dim() and input.shape[1] == weight.shape[1] * groups)
    _need(weight.shape[0] % groups == 0 and input.numel() > 0)
    strides, dilations = _tuple(stride, rank), _tuple(dilation, rank)
    reach = [d * (k - 1) for d, k in zip(dilations, weight.shape[2:], strict=True)]
    if padding == "same":
        _need(set(strides) == {1})
        sizes = list(input.shape[2:])
    else:
        paddings = _tuple(0 if padding == "valid" else padding, rank)
        axes = zip(input.shape[2:], paddings, reach, strides, strict=True)
        sizes = [(size + 2 * p - r - 1) // s + 1 for size, p, r, s in axes]
    _need(min(sizes, default=1) > 0)
    return _made((input.shape[0], weight.shape[0], *sizes), input)


def _transposed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Tensor:
    rank, channels = weight.dim() - 2, weight.shape[1] * groups
    _check_layer(input, weight, bias, channels)
    _need(input.dim() == weight.dim() and input.shape[1] == weight.shape[0])
    _need(weight.shape[0] % groups == 0 and input.numel() > 0)
    numbers = [_tuple(value, rank) for value in (stride, padding, output_padding, dilation)]
    settings = list(zip(input.shape[2:], weight.shape[2:], *numbers, strict=True))
    sizes = [(n - 1) * s - 2 * p + d * (k - 1) + o + 1 for n, k, s, p, o, d in settings]
    _need(min(sizes, default=1) > 0)
    _need(all(o < max(s, d) for _, _, s, _, o, d in settings))
    return _made((input.shape[0], channels, *sizes), input)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    _need(weight.dim() == 2 and input.dim() >= 1)
    _check_layer(input, weight, bias, weight.shape[0])
    _need(input.shape[-1] == weight.shape[1])
    return _made((*input.shape[:-1], weight.shape[0]), input)


def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Tensor:
    given = [running_mean, running_var, *(t for t in (weight, bias) if t is not None)]
    _need(_is_plain(input) and input.dim() > 1 and not training)
    for tensor in given:
        _need(_is_plain(tensor, input))
        _need(tensor is not None and tensor.shape == input.shape[1:2])
    return _made(input.shape, input)


def _unary(position: int = 99) -> Callable[..., Tensor]:
    """Return the rule of an elementwise function; ``position`` of its argument ``inplace``."""

    def rule(input: Tensor, *settings: Any, inplace: bool = False, **named: Any) -> Tensor:
        values = [*settings, *named.values()]
        _need(_is_plain(input) and not any(isinstance(value, Tensor) for value in values))
        if len(settings) >= position:
            inplace = settings[position - 1]
        return _written(input) if inplace else _made(input.shape, input)

    return rule


def _written(x: Tensor) -> Tensor:
    """Count a change in place."""
    _need(x.is_meta)
    torch.relu_(x)
    return x


def _shape_of_both(input: Tensor, other: Any) -> tuple[int, ...]:
    if isinstance(other, (int, float)) and _is_plain(input):
        return tuple(input.shape)
    _need(_is_plain(input) and _is_plain(other, input))
    return tuple(torch.broadcast_shapes(input.shape, other.shape))


def _binary(input: Any, other: Any) -> Tensor:
    x, y = (input, other) if isinstance(input, Tensor) else (other, input)
    return _made(_shape_of_both(x, y), x)


def _binary_in_place(input: Tensor, other: Any) -> Tensor:
    _need(_shape_of_both(input, other) == tuple(input.shape))
    return _written(input)


def _concatenation(tensors: Sequence[Tensor], dim: int = 0) -> Tensor:
    first = tensors[0]
    _need(first.dim() > 0 and -first.dim() <= dim < first.dim())
    dim %= first.dim()
    rests = {(t.dim(), *t.shape[:dim], *t.shape[dim + 1 :]) for t in tensors}
    _need(len(rests) == 1 and all(_is_plain(t, first) for t in tensors))
    shape = list(first.shape)
    shape[dim] = sum(t.shape[dim] for t in tensors)
    return _made(shape, first)


def _adaptive_pool(rank: int) -> Callable[..., Tensor]:
    def rule(input: Tensor, output_size: Any) -> Tensor:
        sizes = (output_size,) * rank if isinstance(output_size, int) else tuple(output_size)
        _need(_is_plain(input) and input.dim() == rank + 2 and len(sizes) == rank)
        _need(input.numel() > 0)
        made = [a if s is None else s for a, s in zip(input.shape[2:], sizes, strict=True)]
        return _made((*input.shape[:2], *made), input)

    return rule


def _mean(input: Tensor, dim: Any = None, keepdim: bool = False) -> Tensor:
    axes = tuple(range(input.dim())) if dim is None else (dim,) if isinstance(dim, int) else dim
    _need(_is_plain(input) and input.dim() > 0 and len(axes) > 0)
    _need(all(type(axis) is int and -input.dim() <= axis < input.dim() for axis in axes))
    gone = {axis % input.dim() for axis in axes}
    _need(len(gone) == len(axes))
    sizes = [(1 if axis in gone else size, axis) for axis, size in enumerate(input.shape)]
    return _made([size for size, axis in sizes if keepdim or axis not in gone], input)


def _unary_in_place(input: Tensor, *settings: Any, **named: Any) -> Tensor:
    return _unary()(input, *settings, inplace=True, **named)


def _by_pytorch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the rule of a function that PyTorch follows on shapes as it does on values."""

    def rule(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        values = tree_leaves((args, kwargs))
        _need(isinstance(input, Tensor) and not any(isinstance(v, Tensor) for v in values))
        return function(on_meta(input), *args, **kwargs)

    return rule


def _float_by_pytorch(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same for a function that takes floating point tensors only."""
    follow = _by_pytorch(function)

    def rule(input: Tensor, *args: Any, **kwargs: Any) -> Any:
        _need(_is_plain(input))
        return follow(input, *args, **kwargs)

    return rule


def _everywhere(names: str, *owners: Any) -> list[Any]:
    """Return the functions of these names."""
    return [getattr(owner, n) for n in names.split() for owner in owners if hasattr(owner, n)]


_ELEMENTWISE = "relu sigmoid tanh abs neg exp erf sqrt clamp square sin cos"
_ARITHMETIC = "add sub mul div true_divide"
_VIEWS = """view reshape flatten unflatten permute transpose swapaxes movedim squeeze unsqueeze
    expand chunk split unbind narrow select contiguous detach t __getitem__"""
_POOLS = """max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d pad interpolate
    pixel_shuffle dropout dropout1d dropout2d dropout3d feature_alpha_dropout alpha_dropout"""

_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys((F.conv1d, F.conv2d, F.conv3d), _convolution),
    **dict.fromkeys((F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d), _transposed),
    **{F.linear: _linear, F.batch_norm: _batch_norm},
    **dict.fromkeys(_everywhere("relu relu6 hardswish hardsigmoid silu mish selu", F), _unary(1)),
    **dict.fromkeys(_everywhere("leaky_relu elu celu", F), _unary(2)),
    F.hardtanh: _unary(3),
    **dict.fromkeys(_everywhere("gelu softplus logsigmoid sigmoid tanh", F), _unary()),
    **dict.fromkeys(_everywhere(_ELEMENTWISE, torch, Tensor), _unary()),
    **dict.fromkeys(
        [getattr(Tensor, f"{name}_") for name in _ELEMENTWISE.split()], _unary_in_place
    ),
    **dict.fromkeys(
        _everywhere(_ARITHMETIC + " __rsub__ __radd__ __rmul__", torch, Tensor), _binary
    ),
    **dict.fromkeys(
        [getattr(Tensor, f"{name}_") for name in _ARITHMETIC.split()], _binary_in_place
    ),
    **dict.fromkeys((torch.cat, torch.concat, torch.concatenate), _concatenation),
    **dict.fromkeys((torch.mean, Tensor.mean), _mean),
    F.adaptive_avg_pool1d: _adaptive_pool(1),
    F.adaptive_avg_pool2d: _adaptive_pool(2),
    F.adaptive_avg_pool3d: _adaptive_pool(3),
    **{function: _by_pytorch(function) for function in _everywhere(_VIEWS, torch, Tensor)},
    **{function: _float_by_pytorch(function) for function in _everywhere(_POOLS, F)},
}

IN_PLACE: Mapping[Any, Any] = {
    getattr(Tensor, f"{name}_"): getattr(Tensor, name) for name in _ARITHMETIC.split()
}
"""The functions that make a new tensor, by those that write into their first argument."""
