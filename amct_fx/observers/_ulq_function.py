"""ULQ under autograd: the fast form for eager, the plain one for compilers.

Both compute the formulas of spec/quantization.md 1.2. Eager pays for every pass over memory, so
there the gradients of both clips come out of dot products, the mask out of one comparison, and
temporaries are overwritten. A compiler fuses the plain formulas into one pass by itself.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from amct_fx.observers._clip import clip_with_excess, grad_above, grad_inside, like
from amct_fx.observers._recompute import Remade, Source, fake_quantize_values, is_traced
from amct_fx.observers._reduce import as_vector, dot
from amct_fx.observers._scale import as_float32

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
        settings = _Settings((upper, lower), (s, o), ctx.num_bits)
        spare = None if ctx.remade is None else ctx.remade.drop()
        learns = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        if torch.compiler.is_compiling() or torch.is_grad_enabled():  # the latter: create_graph
            grad_x, *grad_clips = _plain(x, grads[0], settings, learns)
        else:
            grad_x, *grad_clips = _fast(x, grads[0], settings, learns, spare)
        return grad_x.to(x.dtype), *grad_clips, *[None] * 6


class _Settings(NamedTuple):
    """Effective clips, (scale, offset) and width of the codes of one forward."""

    clips: tuple[Tensor, Tensor]
    qparams: tuple[Tensor, Tensor]
    num_bits: int


def _bounds(qparams: tuple[Tensor, Tensor], num_bits: int) -> tuple[Tensor, Tensor]:
    """Return the real values of the lowest and the highest code."""
    half = 2 ** (num_bits - 1)
    s, o = qparams
    return (-half - o).mul_(s), (half - 1 - o).mul_(s)


def _rounding_error(clip: Tensor, scale: Tensor, steps: int) -> Tensor:
    """Return ``e`` of the elements that were clipped to ``clip``: ``(RNE(u) - u) / Q``."""
    u = clip / scale
    return u.round().sub_(u).div_(steps)


class _Sums(NamedTuple):
    """``Σ g·(RNE(u) - u)`` inside, ``Σ g`` and ``Σ g·u`` outside, with u = clamp(x)/s; 0-d."""

    rounding: Tensor
    outside: Tensor
    position: Tensor


def _fast(
    x: Tensor, grad: Tensor, settings: _Settings, learns: bool, spare: Tensor | None
) -> _Gradients:
    """Return the gradients of x, M and m.

    With c = g outside, S_U + S_L = Σ c, and Σ c·u = u_max·S_U + u_min·S_L tells them apart. Source:
    houses.md 5.1, with the rounding error taken from u and not from the output, whose codes may
    round otherwise at ties.

    Args:
        x: The input of the forward.
        grad: Gradient of its output.
        settings: What the forward computed with.
        learns: Whether a clip wants a gradient.
        spare: Memory like ``x`` in float32 that no one needs any more.
    """
    (upper, lower), (s, o), num_bits = settings
    inside, sums = _pass(x, grad, settings, learns, spare)
    if sums is None:
        return inside, None, None
    half, steps = 2 ** (num_bits - 1), 2**num_bits - 1
    above = (sums.position + (half + o) * sums.outside).div_(steps)
    below = sums.outside - above
    error = sums.rounding / steps
    error = error.addcmul(_rounding_error(upper, s, steps), above)
    error = error.addcmul_(_rounding_error(lower, s, steps), below)
    return inside, error + above, below - error


def _pass(
    x: Tensor, grad: Tensor, settings: _Settings, learns: bool, spare: Tensor | None
) -> tuple[Tensor, _Sums | None]:
    """Return the gradient of x, float32, and the sums, if wanted.

    A tensor that does not fit into the cache is visited in pieces.
    """
    lowest, highest = _bounds(settings.qparams, settings.num_bits)
    s, _ = settings.qparams
    if x.dim() == 0:
        lowest, highest, s = lowest.reshape(()), highest.reshape(()), s.reshape(())
    values = as_float32(x)
    limits = lowest, highest, s
    vector = as_vector(values) if _is_large(x) else None
    if vector is None:
        inside = torch.empty_like(values)
        return inside, _piece(values, like(grad, inside), limits, learns, inside, spare, None)
    inside = torch.empty_like(values)
    flat, grads = as_vector(inside), as_vector(like(grad, inside))
    assert flat is not None
    assert grads is not None
    u, rounding = flat.new_empty(2, _PIECE).unbind()
    sums = []
    for part, g, out in zip(*(t.split(_PIECE) for t in (vector, grads, flat)), strict=True):
        count = len(part)
        sums.append(_piece(part, g, limits, learns, out, u[:count], rounding[:count]))
    if not learns:
        return inside, None
    return inside, _Sums(*(torch.stack(t).sum() for t in zip(*filter(None, sums), strict=True)))


def _is_large(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.numel() > _LARGE


def _piece(
    values: Tensor,
    grad: Tensor,
    limits: tuple[Tensor, Tensor, Tensor],
    learns: bool,
    inside: Tensor,
    u: Tensor | None,
    rounding: Tensor | None,
) -> _Sums | None:
    """Write the gradient of ``values`` into ``inside`` and return the sums, if wanted.

    Args:
        values: float32.
        grad: Gradient of the output, float32, of the same memory format.
        limits: Lowest and highest real value, scale.
        learns: Whether the sums are wanted.
        inside: Memory like ``values``, for the result.
        u: The same, for use in between; ``None`` takes new memory.
        rounding: The same.
    """
    lowest, highest, scale = limits
    u = torch.maximum(values, lowest, out=u).clamp_max_(highest)
    excess = torch.sub(u, values, out=inside)
    grad_inside(grad, excess, out=excess)
    if not learns:
        return None
    u.div_(scale)
    rounding = torch.round(u, out=rounding).sub_(u)
    error = dot(rounding, inside)
    outside = torch.sub(grad, inside, out=rounding)
    return _Sums(error, outside.sum(), dot(outside, u))


def _plain(x: Tensor, grad: Tensor, settings: _Settings, learns: bool) -> _Gradients:
    """Return the gradients of x, M and m by the formulas as they stand."""
    clips, qparams, num_bits = settings
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
    if remade is None:
        return y, None
    return y, Source(x, clips, effective, qparams, num_bits, remade)


def apply_again(source: Source) -> Tensor:
    """Return the output of a source again, connected to its graph; for ``create_graph``."""
    y: Tensor = _ULQFunction.apply(  # type: ignore[no-untyped-call]
        source.x, *source.clips, *source.effective, *source.qparams, source.num_bits, None
    )
    return y
