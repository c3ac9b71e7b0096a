"""ARQ and weight-ULQ: symmetric quantization of weights.

ARQ recomputes the scale from the weight in every forward and learns nothing. Weight-ULQ starts
with that scale and learns it. Codes run over the full range, ``-h`` to ``h - 1``; offset 0.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from amct_fx.errors import ConfigError
from amct_fx.observers._checks import check_floating, check_num_bits
from amct_fx.observers._clip import clip_with_excess, grad_above, grad_inside, like
from amct_fx.observers._geometry import count_rows, split_groups, spread, to_output_major
from amct_fx.observers._scale import EPS, as_float32, symmetric_scale

_LARGEST = torch.finfo(torch.float32).max


def arq_qparams(
    weight: Tensor,
    *,
    num_bits: int = 8,
    ch_axis: int | None = None,
    groups: int = 1,
) -> Tensor:
    """Return the ARQ scale of a weight.

    Per channel (or tensor), with ``a = max w`` and ``z = min w``: ``s = max(|a|, |z|) / D`` where
    ``D = h`` if ``|a| < |z|``, else ``h - 1``; a scale below :data:`EPS` becomes 1.

    Args:
        weight: Weight in the layout of its layer, any floating dtype.
        num_bits: Width of the integer codes, 2 to 16.
        ch_axis: ``None`` for one scale, 0 for one per output channel, 1 for one per output
            channel of a transposed convolution ``[Cin, Cout/groups, k…]``.
        groups: Groups of the transposed convolution; ignored otherwise.

    Returns:
        float32 scale of shape ``(Cout,)`` or ``(1,)``, without gradient.

    Example:
        >>> w = torch.tensor([[0.5, -1.0, 0.25, 0.1], [1.0, -1.0, 0.3, 0.7], [0.0, 0, 0, 0]])
        >>> [f"{s:.9g}" for s in arq_qparams(w, ch_axis=0).tolist()]
        ['0.0078125', '0.00787401572', '1']
        >>> print(f"{arq_qparams(w).item():.9g}")
        0.00787401572
    """
    check_num_bits(num_bits)
    check_floating(weight, "weight")
    with torch.no_grad():
        return symmetric_scale(*arq_extremes(weight, ch_axis, groups), num_bits)


def arq_extremes(weight: Tensor, ch_axis: int | None, groups: int) -> tuple[Tensor, Tensor]:
    """Return the largest and the smallest value for each scale of a weight, float32.

    An empty weight has zeros.
    """
    values = as_float32(weight.detach())
    if weight.numel() == 0:
        rows = 1 if ch_axis is None else count_rows(weight, ch_axis, groups)
        return values.new_zeros(rows), values.new_zeros(rows)
    if ch_axis is None:
        return values.amax().reshape(1), values.amin().reshape(1)
    major = to_output_major(values, ch_axis=ch_axis, groups=groups).unsqueeze(-1)
    others = list(range(1, major.dim()))
    return major.amax(others), major.amin(others)


def quantize_weight(
    weight: Tensor, scale: Tensor, num_bits: int, ch_axis: int | None, groups: int
) -> Tensor:
    """Return ``clamp(RNE(w/s), qmin, qmax) * s`` in the dtype of ``weight``."""
    half = 2 ** (num_bits - 1)
    s = spread(scale, weight, ch_axis, groups)
    values = as_float32(split_groups(weight, ch_axis, groups))
    result = (values / s).round_().clamp_(-half, half - 1).mul_(s).to(weight.dtype)
    return result.flatten(0, 1) if ch_axis == 1 else result


class _ARQFunction(torch.autograd.Function):
    """Fake-quantize a weight; the gradient passes unchanged and nothing is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        scale: Tensor,
        num_bits: int,
        ch_axis: int | None,
        groups: int,
    ) -> Tensor:
        """Return the fake-quantized weight."""
        return quantize_weight(weight, scale, num_bits, ch_axis, groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Pass the gradient on."""
        return grads[0], None, None, None, None


def arq_apply(
    weight: Tensor, scale: Tensor, num_bits: int, ch_axis: int | None, groups: int
) -> Tensor:
    """Fake-quantize ``weight`` with a ready-made scale; identity gradient."""
    result: Tensor = _ARQFunction.apply(weight, scale, num_bits, ch_axis, groups)  # type: ignore[no-untyped-call]
    return result


class _StraightThrough(torch.autograd.Function):
    """Hand out values made before; their gradient passes unchanged to the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, values: Tensor) -> Tensor:
        """Return the values as a tensor of its own on the same memory."""
        return values.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Pass the gradient on."""
        return grads[0], None


def straight_through(weight: Tensor, values: Tensor) -> Tensor:
    """Return ``values``, which were made from ``weight``, with the identity as gradient."""
    passed: Tensor = _StraightThrough.apply(weight, values)  # type: ignore[no-untyped-call]
    return passed


def arq_fake_quantize(
    weight: Tensor,
    *,
    num_bits: int = 8,
    ch_axis: int | None = None,
    groups: int = 1,
) -> Tensor:
    """Simulate the quantization of a weight with the scale of :func:`arq_qparams`.

    ``clamp(RNE(w/s), qmin, qmax) * s``. The gradient of the weight is the identity, also where
    codes are clamped; the scale gets none.

    Args:
        weight: Weight in the layout of its layer, any floating dtype.
        num_bits: Width of the integer codes, 2 to 16.
        ch_axis: See :func:`arq_qparams`.
        groups: See :func:`arq_qparams`.

    Returns:
        The fake-quantized weight, shape, memory format and dtype of ``weight``.

    Example:
        >>> w = torch.tensor([[0.5, -1.0, 0.25, 0.1]])
        >>> arq_fake_quantize(w, num_bits=4, ch_axis=0)
        tensor([[ 0.5000, -1.0000,  0.2500,  0.1250]])
    """
    scale = arq_qparams(weight, num_bits=num_bits, ch_axis=ch_axis, groups=groups)
    return arq_apply(weight, scale, num_bits, ch_axis, groups)


def weight_ulq_scale(
    weight: Tensor,
    scale: Tensor,
    *,
    num_bits: int = 8,
    ch_axis: int | None = None,
    groups: int = 1,
) -> Tensor:
    """Return the effective scale of weight-ULQ: positive and finite whatever was learned.

    A learned scale that is finite and at least :data:`EPS` is used as it is. Where an optimizer
    step pushed it below (or to NaN or infinity), the ARQ scale of the current weight takes its
    place, so the channel restarts from a sane grid instead of dying or flipping its sign. The
    rule needs only the weight and the learned scale, so training, evaluation, state dict and
    conversion agree.

    Args:
        weight: Weight in the layout of its layer.
        scale: Learned scale, ``(Cout,)`` or ``(1,)``.
        num_bits: Width of the integer codes, 2 to 16.
        ch_axis: See :func:`ulq_weight_fake_quantize`.
        groups: See :func:`arq_qparams`.

    Returns:
        A fresh float32 tensor of the shape of ``scale``, without gradient.

    Example:
        >>> w = torch.tensor([[0.5, -1.27], [1.0, -1.28]])
        >>> weight_ulq_scale(w, torch.tensor([0.02, -0.004]), ch_axis=0)
        tensor([0.0200, 0.0100])
    """
    check_num_bits(num_bits)
    rows = count_rows(weight, ch_axis, groups)
    if scale.numel() not in (1, rows):
        message = (
            f"scale must have 1 or {rows} elements for a weight of shape {tuple(weight.shape)}, "
            f"got shape {tuple(scale.shape)}"
        )
        raise ConfigError(message)
    with torch.no_grad():
        learned = scale.detach().to(torch.float32)
        axis = ch_axis or 0 if scale.numel() > 1 else None
        restart = arq_qparams(weight, num_bits=num_bits, ch_axis=axis, groups=groups)
        usable = (learned >= EPS) & (learned <= _LARGEST)
        return torch.where(usable, learned, restart.reshape(learned.shape))


class _WeightULQFunction(torch.autograd.Function):
    """Fake-quantize a weight with a learned scale.

    The scale comes twice: the parameter receives the gradient, the effective scale is a fresh
    tensor that backward saves, so the parameter may be overwritten in between.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        scale: Tensor,
        effective: Tensor,
        num_bits: int,
        ch_axis: int | None,
        groups: int,
    ) -> Tensor:
        """Return the fake-quantized weight."""
        ctx.save_for_backward(weight, effective)
        ctx.settings = (num_bits, ch_axis, groups)
        return quantize_weight(weight, effective, num_bits, ch_axis, groups)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the weight (identity) and of the scale.

        With v = w/s: d = RNE(v) - v inside [-h·s, (h-1)·s], -h below, h - 1 above; grad_s =
        Σ_row d·g / sqrt(K·(h-1)), K elements per row; per tensor the sum runs over all rows.
        """
        (grad,) = grads
        weight, scale = ctx.saved_tensors
        num_bits, ch_axis, groups = ctx.settings
        grad_scale = None
        if ctx.needs_input_grad[1]:
            half = 2 ** (num_bits - 1)
            s = spread(scale, weight, ch_axis, groups)
            w = split_groups(weight, ch_axis, groups).to(torch.float32)
            g = like(split_groups(grad, ch_axis, groups), w)
            v, excess = clip_with_excess(w, s * -half, s * (half - 1))
            v.div_(s)
            products = v.round().sub_(v).mul_(grad_inside(g, excess))
            products.add_(grad_above(g, excess), alpha=half - 1)
            products.sub_(grad_above(g, excess.neg_()), alpha=half)
            rows = count_rows(weight, ch_axis, groups)
            if scale.numel() == 1:
                total = products.sum()
            else:
                if ch_axis == 1:
                    products = products.transpose(1, 2).flatten(0, 1)
                total = products.flatten(1).sum(1)
            per_row = weight.numel() // max(rows, 1)
            grad_scale = (total / math.sqrt(per_row * (half - 1))).reshape(scale.shape)
        return grad, grad_scale, None, None, None, None


def weight_ulq_apply(
    weight: Tensor,
    scale: Tensor,
    effective: Tensor,
    num_bits: int,
    ch_axis: int | None,
    groups: int,
) -> Tensor:
    """Fake-quantize ``weight`` with a ready-made effective scale; ``scale`` gets the gradient."""
    result: Tensor = _WeightULQFunction.apply(  # type: ignore[no-untyped-call]
        weight, scale, effective, num_bits, ch_axis, groups
    )
    return result


def ulq_weight_fake_quantize(
    weight: Tensor,
    scale: Tensor,
    *,
    num_bits: int = 8,
    ch_axis: int | None = None,
    groups: int = 1,
) -> Tensor:
    """Simulate the quantization of a weight with a learned scale.

    ``clamp(RNE(w/s), qmin, qmax) * s`` with the effective scale of :func:`weight_ulq_scale`. The
    gradient of the weight is the identity; that of the scale is ``Σ d·g / sqrt(K·(h - 1))`` with
    K elements per output channel.

    Args:
        weight: Weight in the layout of its layer, any floating dtype.
        scale: Learned scale, ``(Cout,)`` or ``(1,)``; the number of elements decides between per
            channel and per tensor.
        num_bits: Width of the integer codes, 2 to 16.
        ch_axis: Axis of the output channels, ``None`` counts as 0; 1 for transposed convolutions
            ``[Cin, Cout/groups, k…]``. It decides K also when there is only one scale.
        groups: Groups of the transposed convolution; ignored otherwise.

    Returns:
        The fake-quantized weight, differentiable in ``weight`` and ``scale``.

    Example:
        >>> w = torch.tensor([[0.5, -1.0, 0.25, 0.1]])
        >>> scale = torch.tensor([0.006], requires_grad=True)
        >>> y = ulq_weight_fake_quantize(w, scale, ch_axis=0)
        >>> y
        tensor([[ 0.4980, -0.7680,  0.2520,  0.1020]], grad_fn=<_WeightULQFunctionBackward>)
        >>> (y * torch.tensor([[1.0, 2, 3, 4]])).sum().backward()
        >>> print(f"{scale.grad.item():.9g}")
        -11.2694283
    """
    check_floating(weight, "weight")
    effective = weight_ulq_scale(weight, scale, num_bits=num_bits, ch_axis=ch_axis, groups=groups)
    return weight_ulq_apply(weight, scale, effective, num_bits, ch_axis, groups)
