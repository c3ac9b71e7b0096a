"""ULQ under autograd: the fast form for eager, the plain one for compilers.

Both compute the formulas of spec/quantization.md 1.2. Eager pays for every pass over memory, so
there the gradients of both clips come out of dot products, the mask out of one comparison, and
temporaries are overwritten. A compiler fuses the plain formulas into one pass by itself.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from amct_fx.observers._clip import clip_with_excess, grad_above, grad_between, grad_inside, like
from amct_fx.observers._recompute import Remade, Source, fake_quantize_values, is_traced
from amct_fx.observers._reduce import as_vector, dot
from amct_fx.observers._scale import as_float32
from amct_fx.observers._ulq_settings import Limits, Settings, bounds, gradient_mix, rounding_error

_LARGE = 1 << 20
"""Elements beyond which a pass over memory leaves the caches of most processors."""

_PIECE = 1 << 18

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
        settings: Settings,
        remade: Remade | None,
    ) -> Tensor:
        """Return the fake-quantized ``x`` in its dtype."""
        effective, qparams, num_bits, *ctx.known = settings
        ctx.save_for_backward(x, *effective, *qparams)
        ctx.num_bits, ctx.remade = num_bits, remade
        return fake_quantize_values(x, *qparams, num_bits).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of x and of the original clips.

        With U, L the elements above and below the representable range, u = (M on U, m on L, x
        elsewhere)/s and e = (RNE(u) - u)/Q: grad_x = g outside U and L, grad_M = Σ g·(e + U),
        grad_m = Σ g·(L - e).
        """
        x, upper, lower, s, o = ctx.saved_tensors
        settings = Settings((upper, lower), (s, o), ctx.num_bits, *ctx.known)
        spare = None if ctx.remade is None else ctx.remade.drop()
        learns = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        if torch.compiler.is_compiling() or torch.is_grad_enabled():  # the latter: create_graph
            grad_x, *grad_clips = _plain(x, grads[0], settings, learns)
        else:
            grad_x, *grad_clips = _fast(x, grads[0], settings, learns, spare)
        return grad_x.to(x.dtype), *grad_clips, None, None


def _fast(
    x: Tensor, grad: Tensor, settings: Settings, learns: bool, spare: Tensor | None
) -> _Gradients:
    """Return the gradients of x, M and m.

    Args:
        x: The input of the forward.
        grad: Gradient of its output.
        settings: What the forward computed with.
        learns: Whether a clip wants a gradient.
        spare: Memory like ``x`` in float32 that no one needs any more.
    """
    inside, sums = _pass(x, grad, settings, learns, spare)
    if sums is None:
        return inside, None, None
    effective, qparams, num_bits, mix, _ = settings
    mix = gradient_mix(effective, qparams, num_bits) if mix is None else mix
    shape = effective[0].shape
    grad_max = mix.reshape(3).dot(sums)
    return inside, grad_max.view(shape), (sums[1] - grad_max).view(shape)


def _pass(
    x: Tensor, grad: Tensor, settings: Settings, learns: bool, spare: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return the gradient of x, float32, and, if wanted, R, C and P of :func:`gradient_mix`.

    A tensor that does not fit into the cache is visited in pieces.
    """
    values = as_float32(x)
    vector = as_vector(values)
    if vector is None:  # there are gaps in its memory
        values = values.contiguous()
        vector = values.view(-1)
    inside = torch.empty_like(values)
    flat, grads = as_vector(inside), as_vector(like(grad, values))
    assert flat is not None
    assert grads is not None
    limits, scale = _range_of(settings), settings.qparams[0]
    if len(vector) <= _LARGE or not vector.is_cpu:
        scratch = None if spare is None else as_vector(spare)
        return inside, _piece(vector, grads, limits, scale, learns, flat, scratch, None)
    u, rounding = flat.new_empty(2, _PIECE).unbind()
    sums = []
    for part, g, out in zip(*(t.split(_PIECE) for t in (vector, grads, flat)), strict=True):
        count = len(part)
        sums.append(_piece(part, g, limits, scale, learns, out, u[:count], rounding[:count]))
    return inside, torch.stack(sums).sum(0) if learns else None  # type: ignore[arg-type]


def _range_of(settings: Settings) -> Limits | tuple[Tensor, Tensor]:
    """Return the representable range: as numbers, if they are known, else as tensors."""
    return settings.limits or bounds(settings.qparams, settings.num_bits)


def _piece(
    values: Tensor,
    grad: Tensor,
    limits: Limits | tuple[Tensor, Tensor],
    scale: Tensor,
    learns: bool,
    inside: Tensor,
    u: Tensor | None,
    rounding: Tensor | None,
) -> Tensor | None:
    """Write the gradient of ``values`` into ``inside`` and return the sums, ``(3,)``, if wanted.

    Args:
        values: float32 ``(N,)``.
        grad: Gradient of the output, the same.
        limits: The representable range.
        scale: The scale.
        learns: Whether the sums are wanted.
        inside: Memory like ``values``, for the result.
        u: The same, for use in between; ``None`` takes new memory.
        rounding: The same.
    """
    if isinstance(limits, Limits):
        grad_between(grad, values, limits.below, limits.above, out=inside)
        if not learns:
            return None
        u = torch.clamp(values, limits.lowest, limits.highest, out=u)
    else:
        u = torch.maximum(values, limits[0], out=u).clamp_max_(limits[1])
        excess = torch.sub(u, values, out=inside)
        grad_inside(grad, excess, out=excess)
        if not learns:
            return None
    u.div_(scale)
    rounding = torch.round(u, out=rounding).sub_(u)
    error = dot(rounding, inside)
    outside = torch.sub(grad, inside, out=rounding)
    return torch.stack((error, outside.sum(), dot(outside, u)))


def _plain(x: Tensor, grad: Tensor, settings: Settings, learns: bool) -> _Gradients:
    """Return the gradients of x, M and m by the formulas as they stand."""
    clips, qparams, num_bits, *_ = settings
    s, o = (t.reshape(()) for t in qparams)
    lowest, highest = bounds((s, o), num_bits)
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
    e_above, e_below = (rounding_error(clip.reshape(()), s, steps) for clip in clips)
    grad_max = (products + above * (1 + e_above) + below * e_below).sum()
    grad_min = (below * (1 - e_below) - products - above * e_above).sum()
    return inside, grad_max.reshape(clips[0].shape), grad_min.reshape(clips[0].shape)


def ulq_apply(
    x: Tensor, clips: tuple[Tensor, Tensor], settings: Settings
) -> tuple[Tensor, Source | None]:
    """Fake-quantize ``x``; the gradients of the clips go to ``clips``.

    Returns:
        The result, and what it can be made from again; ``None`` where no gradient will ask for it
        or a graph is being recorded.
    """
    traced = is_traced()
    if not traced and not (torch.is_grad_enabled() and any(t.requires_grad for t in (x, *clips))):
        return fake_quantize_values(x, *settings.qparams, settings.num_bits).to(x.dtype), None
    remade = None if traced else Remade()
    y: Tensor = _ULQFunction.apply(x, *clips, settings, remade)  # type: ignore[no-untyped-call]
    return y, None if remade is None else Source(x, clips, settings, remade)


def apply_again(source: Source) -> Tensor:
    """Return the output of a source again, connected to its graph; for ``create_graph``."""
    y: Tensor = _ULQFunction.apply(source.x, *source.clips, source.settings, None)  # type: ignore[no-untyped-call]
    return y
