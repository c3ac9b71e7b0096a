"""ULQ under autograd: the fast form for eager, the plain one for compilers.

Both compute the formulas of spec/quantization.md 1.2. Eager pays for every pass over memory, so
there the gradients of both clips come out of dot products, the mask out of one comparison, and
temporaries are overwritten. A compiler fuses the plain formulas into one pass by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amct_fx.observers._clip import clip_with_excess, grad_above, grad_inside, like
from amct_fx.observers._recompute import Remade, Source, fake_quantize_values, is_traced
from amct_fx.observers._reduce import dot
from amct_fx.observers._scale import as_float32

_Gradients = tuple[Tensor, Tensor | None, Tensor | None]


class _ULQFunction(torch.autograd.Function):
    """Fake-quantize with the ULQ gradients.

    The clips come twice: the original tensors receive the gradients, the effective ones (fresh
    copies, see :func:`ulq_effective_clips`) are what forward computes with and backward saves. So
    the parameters may be overwritten between forward and backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        clip_max: Tensor,
        clip_min: Tensor,
        upper: Tensor,
        lower: Tensor,
        scale: Tensor,
        offset: Tensor,
        num_bits: int,
        remade: Remade | None,
    ) -> Tensor:
        """Return the fake-quantized ``x`` in its dtype."""
        ctx.save_for_backward(x, upper, lower, scale, offset)
        ctx.num_bits, ctx.remade = num_bits, remade
        return fake_quantize_values(x, scale, offset, num_bits).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the original clips.

        With U, L the elements above and below the representable range, u = (M on U, m on L, x
        elsewhere)/s and e = (RNE(u) - u)/Q: grad_x = g outside U and L, grad_M = Σ g·(e + U),
        grad_m = Σ g·(L - e).
        """
        x, upper, lower, s, o = ctx.saved_tensors
        num_bits: int = ctx.num_bits
        spare = None if ctx.remade is None else ctx.remade.drop()
        learns = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        if torch.compiler.is_compiling():
            grad_x, *grad_clips = _plain(x, grads[0], (upper, lower), (s, o), num_bits, learns)
        elif not learns:
            grad_x, *grad_clips = _inside(x, grads[0], (s, o), num_bits, spare)[1], None, None
        else:
            grad_x, *grad_clips = _fast(x, grads[0], (upper, lower), (s, o), num_bits, spare)
        return grad_x.to(x.dtype), *grad_clips, *[None] * 6


def _bounds(qparams: tuple[Tensor, Tensor], num_bits: int) -> tuple[Tensor, Tensor]:
    """Return the real values of the lowest and the highest code."""
    half = 2 ** (num_bits - 1)
    s, o = qparams
    return (-half - o).mul_(s), (half - 1 - o).mul_(s)


def _rounding_error(clip: Tensor, scale: Tensor, steps: int) -> Tensor:
    """Return ``e`` of the elements that were clipped to ``clip``: ``(RNE(u) - u) / Q``."""
    u = clip / scale
    return u.round().sub_(u).div_(steps)


def _inside(
    x: Tensor,
    grad: Tensor,
    qparams: tuple[Tensor, Tensor],
    num_bits: int,
    spare: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return ``x`` clamped to the range, the gradient where nothing was clipped, and ``grad``.

    All are float32 and of one memory format; the first two may be overwritten. ``spare`` is memory
    of that kind that no one needs any more.
    """
    lowest, highest = _bounds(qparams, num_bits)
    if x.dim() == 0:
        lowest, highest = lowest.reshape(()), highest.reshape(())
    values = as_float32(x)
    clamped = torch.maximum(values, lowest, out=spare).clamp_max_(highest)
    grad = like(grad, clamped)
    excess = clamped - values
    return clamped, grad_inside(grad, excess, out=excess), grad


def _fast(
    x: Tensor,
    grad: Tensor,
    clips: tuple[Tensor, Tensor],
    qparams: tuple[Tensor, Tensor],
    num_bits: int,
    spare: Tensor | None,
) -> _Gradients:
    """Return the gradients of x, M and m; for ``spare`` see :func:`_inside`.

    With u = clamp(x)/s, one dot product gives A = Σ g·(RNE(u) - u)/Q inside. With c = g outside,
    S_U + S_L = Σ c, and <c, u> = u_max·S_U + u_min·S_L tells them apart. Source: houses.md 5.1,
    with the error taken from u and not from the output, whose codes may round otherwise at ties.
    """
    s, o = qparams
    half, steps = 2 ** (num_bits - 1), 2**num_bits - 1
    u, inside, grad = _inside(x, grad, qparams, num_bits, spare)
    u.div_(s if x.dim() else s.reshape(()))
    rounding = u.round().sub_(u)
    error = dot(rounding, inside).div(steps)
    outside = torch.sub(grad, inside, out=rounding)
    total = outside.sum()
    above = (dot(outside, u) + (half + o) * total).div_(steps)
    below = total - above
    error = error.addcmul(_rounding_error(clips[0], s, steps), above)
    error = error.addcmul_(_rounding_error(clips[1], s, steps), below)
    return inside, error + above, below - error


def _plain(
    x: Tensor,
    grad: Tensor,
    clips: tuple[Tensor, Tensor],
    qparams: tuple[Tensor, Tensor],
    num_bits: int,
    learns: bool,
) -> _Gradients:
    """Return the gradients of x, M and m by the formulas as they stand."""
    s, o = (t.reshape(()) for t in qparams)
    lowest, highest = _bounds((s, o), num_bits)
    values = x.to(torch.float32)
    grad = like(grad, values)
    clamped, excess = clip_with_excess(values, lowest, highest)
    inside = grad_inside(grad, excess)
    if not learns:
        return inside, None, None
    steps = 2**num_bits - 1
    above, below = grad_above(grad, excess), grad_above(grad, -excess)
    u = clamped / s
    products = (u.round() - u) / steps * inside  # g·e; e of clipped elements:
    e_above, e_below = (_rounding_error(clip.reshape(()), s, steps) for clip in clips)
    grad_max = (products + above * (1 + e_above) + below * e_below).sum()
    grad_min = (below * (1 - e_below) - products - above * e_above).sum()
    return inside, grad_max.reshape(clips[0].shape), grad_min.reshape(clips[0].shape)


def ulq_apply(
    x: Tensor,
    clips: tuple[Tensor, Tensor],
    effective: tuple[Tensor, Tensor],
    qparams: tuple[Tensor, Tensor],
    num_bits: int,
) -> tuple[Tensor, Source | None]:
    """Fake-quantize ``x`` with ready-made effective clips and float (scale, offset).

    Returns:
        The result, and what it can be made from again; ``None`` where no gradient will ask for it
        or a graph is being recorded.
    """
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (x, *clips))
    if not recorded and not is_traced():
        return fake_quantize_values(x, *qparams, num_bits).to(x.dtype), None
    remade = None if is_traced() else Remade()
    y: Tensor = _ULQFunction.apply(x, *clips, *effective, *qparams, num_bits, remade)  # type: ignore[no-untyped-call]
    return y, None if remade is None else Source(x, *qparams, num_bits, remade)
