"""ULQ: learned clips for activations (per tensor, asymmetric).

Notation, as in the formulas below: ``b`` bits, ``h = 2**(b-1)``, ``Q = 2**b - 1``, codes from
``qmin = -h`` to ``qmax = h - 1``; RNE is rounding half to even. All arithmetic is float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from amct_fx.observers._checks import check_floating, check_num_bits
from amct_fx.observers._scale import as_float32, one_below_eps, symmetric_scale, true_divide
from amct_fx.observers._ulq_function import ulq_apply
from amct_fx.observers._ulq_settings import Settings


def ulq_effective_clips(
    clip_max: Tensor,
    clip_min: Tensor,
    *,
    fixed_min: bool = False,
    previous: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor]:
    """Apply ``fixed_min`` and the guard against clips that crossed.

    1. ``fixed_min`` sets the lower clip to 0.
    2. The guard falls back on the previous clips, first match only: both when the clips are
       equal, else the upper one when it is negative, else the lower one when it is positive.

    Nothing is read on the host, nothing is written, autograd is not followed.

    Args:
        clip_max: Upper clip, shape ``(1,)`` or ``()``.
        clip_min: Lower clip, same shape.
        fixed_min: Force the lower clip to 0.
        previous: Clips of the previous forward for the guard; ``None`` means no guard.

    Returns:
        Fresh float32 tensors ``(clip_max, clip_min)``, never views of the arguments.

    Example:
        >>> t = torch.tensor
        >>> ulq_effective_clips(t([-0.2]), t([-0.9]), previous=(t([1.1]), t([-0.8])))
        (tensor([1.1000]), tensor([-0.9000]))
        >>> ulq_effective_clips(t([0.7]), t([0.7]), previous=(t([1.1]), t([-0.8])))
        (tensor([1.1000]), tensor([-0.8000]))
        >>> ulq_effective_clips(t([1.5]), t([-0.9]), fixed_min=True)
        (tensor([1.5000]), tensor([0.]))
    """
    with torch.no_grad():
        if previous is None:
            upper = clip_max.to(torch.float32, copy=True)
            return upper, torch.zeros_like(upper) if fixed_min else clip_min.to(upper, copy=True)
        upper = as_float32(clip_max)
        lower = torch.zeros_like(upper) if fixed_min else as_float32(clip_min)
        last_upper, last_lower = as_float32(previous[0]), as_float32(previous[1])
        equal, negative, positive = upper == lower, upper < 0, lower > 0
        return (
            torch.where(equal | negative, last_upper, upper),
            torch.where(equal | (positive > negative), last_lower, lower),
        )


def ulq_scale_offset(
    clip_max: Tensor, clip_min: Tensor, num_bits: int, symmetric: bool
) -> tuple[Tensor, Tensor]:
    """Return scale and offset, both float32, of effective float32 clips."""
    half = 2 ** (num_bits - 1)
    if symmetric:
        scale = symmetric_scale(clip_max, clip_min, num_bits)
        return scale, torch.zeros_like(scale)
    lower = clip_min.clamp(max=0)
    scale = one_below_eps(true_divide(clip_max.clamp(min=0) - lower, 2**num_bits - 1))
    # Where the scale became 1, the clips are so small that this rounds to -half, as it must.
    return scale, (-half - lower / scale).round_()


def ulq_qparams(
    clip_max: Tensor,
    clip_min: Tensor,
    *,
    num_bits: int = 8,
    symmetric: bool = False,
) -> tuple[Tensor, Tensor]:
    """Turn clips into a scale and an offset.

    With ``M+ = max(M, 0)`` and ``m- = min(m, 0)``: ``s = (M+ - m-) / Q`` and
    ``o = RNE(-h - m-/s)``; a scale below :data:`EPS` becomes 1 with offset ``-h``. Symmetric:
    ``s = max(|M|, |m|) / (h - 1)``, or ``/ h`` when ``|M| < |m|``, and ``o = 0``.

    Args:
        clip_max: Upper clip M after the guard (see :func:`ulq_effective_clips`).
        clip_min: Lower clip m, same shape.
        num_bits: Width of the integer codes, 2 to 16.
        symmetric: Use offset 0.

    Returns:
        ``(scale, offset)``: float32 and int32, of the shape of the clips. The real value of code
        ``q`` is ``(q - offset) * scale``.

    Example:
        >>> scale, offset = ulq_qparams(torch.tensor([1.5]), torch.tensor([-0.9]))
        >>> print(f"{scale.item():.9g} {offset.item()}")
        0.00941176526 -32
        >>> scale, offset = ulq_qparams(torch.tensor([2.5]), torch.tensor([-1.0]), symmetric=True)
        >>> print(f"{scale.item():.9g} {offset.item()}")
        0.0196850393 0
    """
    check_num_bits(num_bits)
    upper, lower = ulq_effective_clips(clip_max, clip_min)
    with torch.no_grad():
        scale, offset = ulq_scale_offset(upper, lower, num_bits, symmetric)
        return scale, offset.to(torch.int32)


def ulq_fake_quantize(
    x: Tensor,
    clip_max: Tensor,
    clip_min: Tensor,
    *,
    num_bits: int = 8,
    fixed_min: bool = False,
    previous: tuple[Tensor, Tensor] | None = None,
    symmetric: bool = False,
) -> Tensor:
    """Simulate the quantization of an activation with learned clips.

    ``y = (clamp(RNE(x/s + o), qmin, qmax) - o) * s`` with scale and offset of
    :func:`ulq_qparams`. The gradients of the clips go to the tensors given here, also where
    ``fixed_min`` or the guard replaced their values.

    Args:
        x: Activation of any shape, memory format and floating dtype.
        clip_max: Upper clip, shape ``(1,)`` or ``()``.
        clip_min: Lower clip, same shape.
        num_bits: Width of the integer codes, 2 to 16.
        fixed_min: Force the lower clip to 0.
        previous: Clips of the previous forward for the guard, see :func:`ulq_effective_clips`.
        symmetric: Use offset 0.

    Returns:
        The fake-quantized activation, shape, memory format and dtype of ``x``; differentiable in
        ``x``, ``clip_max`` and ``clip_min``.

    Example:
        >>> x = torch.tensor([-1.6, -0.5, 0.03, 2.5])
        >>> clip_max = torch.tensor([1.5], requires_grad=True)
        >>> clip_min = torch.tensor([-0.9], requires_grad=True)
        >>> y = ulq_fake_quantize(x, clip_max, clip_min)
        >>> [f"{v:.9g}" for v in y.tolist()]
        ['-0.903529465', '-0.498823553', '0.0282352958', '1.49647069']
        >>> y.sum().backward()
        >>> print(f"{clip_max.grad.item():.4f} {clip_min.grad.item():.4f}")
        0.9968 1.0032
    """
    check_num_bits(num_bits)
    check_floating(x, "x")
    effective = ulq_effective_clips(clip_max, clip_min, fixed_min=fixed_min, previous=previous)
    with torch.no_grad():
        qparams = ulq_scale_offset(*effective, num_bits, symmetric)
    return ulq_apply(x, (clip_max, clip_min), Settings(effective, qparams, num_bits))[0]
