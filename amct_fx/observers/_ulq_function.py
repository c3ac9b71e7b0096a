"""ULQ under autograd: the fast form for eager, the plain one for compilers.

Both compute the formulas of spec/quantization.md 1.2. Eager pays for every pass over memory, so
there the gradients of both clips come out of dot products, the mask out of one comparison, and
temporaries are overwritten. A compiler fuses the plain formulas into one pass by itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from amct_fx.observers._clip import clip_with_excess, grad_above, grad_between, grad_inside, like
from amct_fx.observers._recompute import Remade, Source, fake_quantize_values, is_traced
from amct_fx.observers._reduce import as_vector
from amct_fx.observers._scale import as_float32
from amct_fx.observers._ulq_settings import (
    Settings,
    bounds,
    gradient_mix,
    host_numbers,
    may_read,
    rounding_error,
)

_PIECE = 1 << 20
"""Elements of a tensor on a CPU that are visited at once. More would take more memory in between;
fewer would send an element to the cache of another core than the operations before and after."""

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
        made = None if ctx.remade is None else ctx.remade.drop()
        learns = ctx.needs_input_grad[1] or ctx.needs_input_grad[2]
        if torch.compiler.is_compiling() or torch.is_grad_enabled():  # the latter: create_graph
            grad_x, *grad_clips = _plain(x, grads[0], settings, learns)
        else:
            grad_x, *grad_clips = _fast(x, grads[0], settings, learns, made)
        return grad_x.to(x.dtype), *grad_clips, None, None


class _Streams(NamedTuple):
    """Vectors on the memory that a backward walks through, float32 ``(N,)``.

    Attributes:
        values: The input of the forward.
        grad: Gradient of its output.
        inside: Where the gradient of the input goes.
        made: The output of the forward, if a layer has made it again; is overwritten.
    """

    values: Tensor
    grad: Tensor
    inside: Tensor
    made: Tensor | None = None


def _fast(
    x: Tensor, grad: Tensor, settings: Settings, learns: bool, made: Tensor | None
) -> _Gradients:
    """Return the gradients of x, float32, and of M and m.

    Args:
        x: The input of the forward.
        grad: Gradient of its output.
        settings: What the forward computed with.
        learns: Whether a clip wants a gradient.
        made: The output of the forward in float32, which no one needs any more.
    """
    values = as_float32(x)
    if as_vector(values) is None:  # there are gaps in its memory
        values = values.contiguous()
    inside = torch.empty_like(values)
    tensors = [values, like(grad, values), inside]
    if made is not None and learns:
        tensors.append(like(made, values))
    streams = _Streams(*map(as_vector, tensors))  # type: ignore[arg-type]
    if not may_read(x):
        return inside, *_on_device(streams, settings, learns)
    grad_clips = _on_host(streams, settings, learns)
    if grad_clips is None:
        return inside, None, None
    if not math.isfinite(sum(grad_clips)):  # of an infinite input, which meets a gradient of 0
        return _plain(x, grad, settings, learns)
    grad_max, grad_min = (torch.full_like(settings.effective[0], value) for value in grad_clips)
    return inside, grad_max, grad_min


def _on_host(streams: _Streams, settings: Settings, learns: bool) -> tuple[float, float] | None:
    """Walk through the memory of a CPU; return the gradients of M and m, if they are wanted."""
    effective, qparams, num_bits, _, numbers = settings
    numbers = numbers or host_numbers(effective, qparams, num_bits)[0]
    if not learns:
        values, grad, inside, *_ = streams
        grad_between(grad, values, numbers.below, numbers.above, out=inside)
        return None
    error = total = position = 0.0
    for values, grad, inside, *made in _pieces(streams):
        grad_between(grad, values, numbers.below, numbers.above, out=inside)
        outside = grad - inside
        total += outside.sum().item()
        # Outside, the output is one of the ends.
        ends = made[0] if made else values.clamp(numbers.lowest, numbers.highest)
        position += outside.dot(ends).item()
        u = torch.div(values, qparams[0], out=ends)
        error += torch.round(u, out=outside).sub_(u).dot(inside).item()
    of_error, of_total, of_position = numbers.mix
    grad_max = of_error * error + of_total * total + of_position * position / numbers.scale
    return grad_max, total - grad_max


def _pieces(streams: _Streams) -> Iterable[tuple[Tensor, ...]]:
    """Split vectors that are long."""
    vectors = tuple(vector for vector in streams if vector is not None)
    if len(streams.values) <= _PIECE:
        return (vectors,)
    return zip(*(vector.split(_PIECE) for vector in vectors), strict=True)


def _on_device(
    streams: _Streams, settings: Settings, learns: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Walk through the memory of an accelerator, for which the host does not wait."""
    effective, qparams, num_bits, mix, _ = settings
    values, grad, inside, made = streams
    lowest, highest = bounds(qparams, num_bits)
    clamped = torch.maximum(values, lowest, out=made).clamp_max_(highest)
    grad_inside(grad, torch.sub(clamped, values, out=inside), out=inside)
    if not learns:
        return None, None
    u = clamped.div_(qparams[0])
    rounding = u.round().sub_(u)
    error = rounding.dot(inside)
    outside = torch.sub(grad, inside, out=rounding)
    total = outside.sum()
    sums = torch.stack((error, total, outside.dot(u)))
    mix = gradient_mix(effective, qparams, num_bits) if mix is None else mix
    grad_max = mix.reshape(3).dot(sums)
    shape = effective[0].shape
    return grad_max.view(shape), (total - grad_max).view(shape)


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
