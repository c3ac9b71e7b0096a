"""The fast gradients of ULQ against the plain formulas and against float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amct_fx.observers import _ulq_function, functional
from amct_fx.observers._clip import like
from amct_fx.observers._reduce import as_vector
from amct_fx.observers._ulq_settings import Settings

from . import reference


def gradients(x: Tensor, clips: tuple[float, float], g: Tensor, **kwargs: Any) -> list[Tensor]:
    leaves = [x.detach().clone(memory_format=torch.preserve_format).requires_grad_()]
    leaves += [torch.tensor([clip]).requires_grad_() for clip in clips]
    y = functional.ulq_fake_quantize(*leaves, **kwargs)
    return list(torch.autograd.grad(y, leaves, g))


def plain(x: Tensor, clips: tuple[float, float], g: Tensor, num_bits: int = 8) -> list[Tensor]:
    upper, lower = (torch.tensor([clip]) for clip in clips)
    scale, offset = functional.ulq_qparams(upper, lower, num_bits=num_bits)
    found = Settings((upper, lower), (scale, offset.float()), num_bits)
    return list(_ulq_function._plain(x, g, found, True))  # type: ignore[arg-type]


def assert_agree(left: list[Tensor], right: list[Tensor], g: Tensor) -> None:
    assert torch.equal(left[0], right[0])
    magnitude = g.double().abs().sum().item()
    for a, b in zip(left[1:], right[1:], strict=True):
        assert abs(a.item() - b.item()) <= 1e-5 * abs(b.item()) + 1e-6 * magnitude


@given(
    st.integers(2, 16),
    st.floats(0.01, 4),
    st.floats(0.0, 4),
    st.integers(1, 5000),
    st.integers(0, 2**31),
)
@settings(max_examples=150, deadline=None)
def test_gradients_agree_with_float64_and_with_the_plain_formulas(
    bits: int, upper: float, lower: float, count: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x, g = torch.randn(2, count, generator=generator).unbind()
    upper, lower = (torch.tensor(v).item() for v in (upper, -lower))
    fast = gradients(x, (upper, lower), g, num_bits=bits)
    scale, offset = functional.ulq_qparams(
        torch.tensor([upper]), torch.tensor([lower]), num_bits=bits
    )
    exact = reference.ulq(
        x.double().numpy(),
        g.double().numpy(),
        upper,
        lower,
        num_bits=bits,
        scale_offset=(scale.item(), offset.item()),
    )
    # an element within rounding of a bound may count on either side
    on_a_bound = np.abs(fast[0].double().numpy() - exact.grad_x) > 0
    slack = float(np.abs(g.double().numpy())[on_a_bound].sum()) + exact.tie_magnitude
    assert on_a_bound.sum() <= 2
    for actual, wanted in ((fast[1], exact.grad_max), (fast[2], exact.grad_min)):
        assert abs(actual.item() - wanted) <= 1e-5 * exact.grad_magnitude + slack
    assert_agree(fast, plain(x, (upper, lower), g, bits), g)


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "transposed": lambda x: x.transpose(1, 3),
    "with gaps": lambda x: x[:, :, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 5, -1, -1),
    "of one element": lambda x: x[:1, :1, :1, :1],
    "0-d": lambda x: x[0, 0, 0, 0],
    "empty": lambda x: x[:0],
}


WAYS = ["whole", "in pieces", "as on an accelerator"]


def go(way: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the backward walk through the memory in one of its ways."""
    if way == "in pieces":
        monkeypatch.setattr(_ulq_function, "_PIECE", piece)
    elif way == "as on an accelerator":
        monkeypatch.setattr(_ulq_function, "may_read", lambda x: False)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("grad_layout", ["contiguous", "transposed back"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(
    layout: str, grad_layout: str, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    x = LAYOUTS[layout](torch.randn(3, 4, 6, 7))
    g = torch.randn(x.shape)
    if grad_layout == "transposed back" and x.dim() == 4:
        g = torch.randn(x.transpose(1, 2).shape).transpose(1, 2)
    wanted = plain(x, (1.0, -0.7), g)
    go(way, 50, monkeypatch)
    assert_agree(gradients(x, (1.0, -0.7), g), wanted, g)


def test_a_large_tensor_in_pieces() -> None:
    torch.manual_seed(1)
    x, g = torch.randn(2, 1 << 20, 3).unbind()
    assert x.numel() > _ulq_function._PIECE
    exact = reference.ulq(x.double().numpy(), g.double().numpy(), 1.5, -0.5, num_bits=8)
    fast = gradients(x, (1.5, -0.5), g)
    assert torch.equal(fast[0], torch.from_numpy(exact.grad_x).float())
    for actual, wanted in ((fast[1], exact.grad_max), (fast[2], exact.grad_min)):
        assert abs(actual.item() - wanted) <= 1e-6 * exact.grad_magnitude


@pytest.mark.parametrize("way", WAYS)
def test_frozen_clips_want_only_the_gradient_of_x(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(way, 7, monkeypatch)
    x = torch.linspace(-2, 2, 40).requires_grad_()
    y = functional.ulq_fake_quantize(x, torch.tensor([1.0]), torch.tensor([-1.0]))
    y.sum().backward()
    assert torch.equal(x.grad, (x.detach().abs() <= 1.0).float())


def test_elements_next_to_the_bounds_are_told_apart() -> None:
    clips = 1.5, -0.9
    scale, offset = functional.ulq_qparams(torch.tensor([1.5]), torch.tensor([-0.9]))
    highest, lowest = (127 - offset) * scale, (-128 - offset) * scale
    up, down = torch.tensor([math.inf]), torch.tensor([-math.inf])
    x = torch.cat([torch.nextafter(highest, up), highest, torch.nextafter(highest, down)])
    x = torch.cat([x, torch.nextafter(lowest, down), lowest, torch.nextafter(lowest, up)])
    assert gradients(x, clips, torch.ones(6))[0].tolist() == [0, 1, 1, 0, 1, 1]


@pytest.mark.parametrize("way", WAYS)
def test_infinite_inputs_are_clipped_and_nan_spreads(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    go(way, 2, monkeypatch)
    x = torch.tensor([math.inf, -math.inf, 0.3])
    grad_x, grad_max, grad_min = gradients(x, (1.0, -1.0), torch.ones(3))
    assert grad_x.tolist() == [0, 0, 1]
    assert grad_max.item() == pytest.approx(1, abs=0.01)
    assert grad_min.item() == pytest.approx(1, abs=0.01)
    x[0] = math.nan
    assert gradients(x, (1.0, -1.0), torch.ones(3))[1].isnan()


@pytest.mark.parametrize("layout", ["contiguous", "channels last", "with gaps"])
def test_an_output_made_again_by_a_layer_serves_as_well(layout: str) -> None:
    torch.manual_seed(3)
    x = LAYOUTS[layout](torch.randn(3, 4, 6, 7)).requires_grad_()
    g = torch.randn(x.shape)
    clips = [torch.tensor([clip]).requires_grad_() for clip in (1.0, -0.7)]
    scale, offset = functional.ulq_qparams(*clips, num_bits=8)
    settings = Settings((clips[0].detach(), clips[1].detach()), (scale, offset.float()), 8)
    y, source = _ulq_function.ulq_apply(x, (clips[0], clips[1]), settings)
    assert source is not None
    assert torch.equal(source.remade.get(x, *settings.qparams, 8), y)
    found = list(torch.autograd.grad(y, [x, *clips], g))
    assert source.remade.values is None
    assert_agree(found, plain(x.detach(), (1.0, -0.7), g), g)


def test_half_precision_sums_in_float32() -> None:
    torch.manual_seed(2)
    x, g = torch.randn(2, 10_000).to(torch.bfloat16).unbind()
    fast = gradients(x, (1.0, -1.0), g)
    wanted = plain(x.float(), (1.0, -1.0), g.float())
    assert fast[0].dtype == torch.bfloat16
    assert_agree([fast[0].float(), *fast[1:]], wanted, g)


def test_second_derivatives_exist() -> None:
    x = torch.linspace(-2, 2, 20).requires_grad_()
    clips = [torch.tensor([c]).requires_grad_() for c in (1.0, -1.0)]
    y = functional.ulq_fake_quantize(x, *clips)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    first.square().sum().backward()
    assert torch.equal(x.grad != 0, (x.detach().abs() <= 1) & (y.detach() != 0))


def test_vectors_pair_elements_whatever_their_layouts() -> None:
    a = torch.randn(2, 3, 4, 5)
    b = torch.randn(2, 3, 4, 5)
    expected = (a * b).sum()
    last = b.contiguous(memory_format=torch.channels_last)
    for left, right in ((a, b), (a, last), (last, a), (a.transpose(0, 2), b.transpose(0, 2))):
        vectors = as_vector(left), as_vector(like(right, left))
        torch.testing.assert_close(torch.dot(*vectors), expected)  # type: ignore[arg-type]
    assert as_vector(a[:, :, ::2]) is None
    assert as_vector(last).data_ptr() == last.data_ptr()  # type: ignore[union-attr]
