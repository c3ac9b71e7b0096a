"""Convolution and Linear that keep the float input for backward instead of the quantized one.

The float input is kept anyway, by the quantizer and by most producers (ReLU, layer norm), so a
quantized layer then needs no more memory than a float one. Backward makes the quantized input
again, once for all layers that read it; results and gradients are the same to the last bit. Only
in eager: a compiler decides by itself what to keep.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from amct_fx.observers import Source
from amct_fx.observers._arq import straight_through
from amct_fx.observers._ulq_function import apply_again

__all__ = ["Weight", "convolution", "linear"]


class Weight(NamedTuple):
    """A weight that the operator reads, and what its gradient goes to.

    Attributes:
        receiver: Receives the gradient of the values; floating point.
        values: What is computed with, without a graph; ``None`` for the receiver itself.
    """

    receiver: Tensor
    values: Tensor | None = None


def convolution(
    input: Tensor,
    weight: Weight,
    bias: Tensor | None,
    source: Source,
    geometry: tuple[Any, ...],
) -> Tensor:
    """Convolve a fake-quantized ``input`` ``[N, C, *]``, as ``torch.convolution`` does.

    Args:
        input: The fake-quantized input; receives the gradient, is not kept.
        weight: The weight.
        bias: The bias or ``None``.
        source: What ``input`` was made from.
        geometry: stride, padding, dilation, transposed, output padding, groups.
    """
    forward = functools.partial(_convolve, geometry=geometry)
    backward = functools.partial(_convolution_gradients, geometry=geometry)
    return _apply(input, weight, bias, source, forward, backward)


def linear(input: Tensor, weight: Weight, bias: Tensor | None, source: Source) -> Tensor:
    """Multiply a fake-quantized ``input`` ``[*, in]`` with ``weight``, as ``F.linear`` does.

    Args:
        input: The fake-quantized input; receives the gradient, is not kept.
        weight: ``[out, in]``.
        bias: ``[out]`` or ``None``.
        source: What ``input`` was made from.
    """
    return _apply(input, weight, bias, source, F.linear, _linear_gradients)


def _convolve(
    input: Tensor, weight: Tensor, bias: Tensor | None, *, geometry: tuple[Any, ...]
) -> Tensor:
    return torch.convolution(input, weight, bias, *geometry)


def _convolution_gradients(
    grad: Tensor,
    input: Tensor,
    weight: Tensor,
    wanted: tuple[bool, bool, bool],
    *,
    geometry: tuple[Any, ...],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    out_channels = grad.shape[1]
    gradients: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward.default(
        grad, input, weight, [out_channels], *geometry, wanted
    )
    return gradients


def _linear_gradients(
    grad: Tensor, input: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    rows = grad.reshape(-1, grad.shape[-1])
    return (
        (rows @ weight).view(input.shape) if wanted[0] else None,
        rows.t() @ input.reshape(-1, input.shape[-1]) if wanted[1] else None,
        rows.sum(0) if wanted[2] else None,
    )


def _apply(
    input: Tensor,
    weight: Weight,
    bias: Tensor | None,
    source: Source,
    forward: Callable[..., Tensor],
    backward: Callable[..., Any],
) -> Tensor:
    """Run the operator in the dtype that autocast, if it is on, would choose."""
    kind = input.device.type
    if _autocasts(kind):
        dtype = torch.get_autocast_dtype(kind)
        input, bias = input.to(dtype), None if bias is None else bias.to(dtype)
        receiver, values = weight
        weight = (
            Weight(receiver.to(dtype)) if values is None else Weight(receiver, values.to(dtype))
        )
    result: Tensor = _Recomputing.apply(input, *weight, bias, source, forward, backward)  # type: ignore[no-untyped-call]
    return result


def _autocasts(kind: str) -> bool:
    """Say whether autocast is on; there is none for some devices, such as meta."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def _no_view(output: Tensor) -> Tensor:
    """Return ``output`` as a tensor of its own, which the next operation may change in place.

    ``F.linear`` reshapes the matrix that it computed; autograd forbids changes of views made here.
    """
    if not output._is_view():
        return output
    made: Tensor = torch.ops.aten._unsafe_view.default(output, output.shape)
    return made


class _Recomputing(torch.autograd.Function):
    """An operator on a quantized input that backward makes again."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        receiver: Tensor,
        values: Tensor | None,
        bias: Tensor | None,
        source: Source,
        forward: Callable[..., Tensor],
        backward: Callable[..., Any],
    ) -> Tensor:
        """Run the operator."""
        weight = receiver if values is None else values
        ctx.save_for_backward(source.x, weight)
        # Clips, and a weight whose values are given, only say where gradients go; whoever writes to
        # them must not disturb backward.
        ctx.clips, ctx.settings, ctx.remade = source[1:]
        ctx.receiver = None if values is None else receiver
        ctx.gradients = backward
        if not _autocasts(input.device.type):
            return _no_view(forward(input, weight, bias))
        with torch.autocast(input.device.type, enabled=False):
            return _no_view(forward(input, weight, bias))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Make the quantized input again and return the gradients of the operator."""
        x, weight = ctx.saved_tensors
        settings = ctx.settings
        of_input, of_weight, _, of_bias = ctx.needs_input_grad[:4]
        if torch.is_grad_enabled():  # create_graph
            input = apply_again(Source(x, ctx.clips, settings, ctx.remade))
        else:
            input = ctx.remade.get(x, *settings.qparams, settings.num_bits)
        input = input.to(x.dtype).to(weight.dtype)
        if torch.is_grad_enabled() and ctx.receiver is not None:
            weight = straight_through(ctx.receiver, weight)
        grad, grad_weight, grad_bias = ctx.gradients(
            grads[0], input, weight, (of_input, of_weight, of_bias)
        )
        return grad, grad_weight, None, grad_bias, None, None, None
