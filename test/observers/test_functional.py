"""Properties of the plain functions over shapes, dtypes, bit widths and extreme ranges."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from amct_fx.errors import CalibrationError, ConfigError
from amct_fx.observers import functional

from . import reference

BITS = st.integers(2, 16)
SHAPES = st.lists(st.integers(0, 5), min_size=0, max_size=4)
EXPONENTS = st.integers(-30, 30)
SEEDS = st.integers(0, 2**31)
DTYPES = st.sampled_from([torch.float16, torch.bfloat16, torch.float32, torch.float64])


def rand(shape: list[int], seed: int, magnitude: float = 1.0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * magnitude


def scalar(value: float) -> Tensor:
    return torch.tensor([value])


def numpy(tensor: Tensor) -> Any:
    return tensor.detach().double().numpy()


# ULQ


@given(SHAPES, BITS, EXPONENTS, st.booleans(), SEEDS, st.floats(-2, 2), st.floats(-2, 2))
@settings(max_examples=300)
def test_ulq_follows_the_float64_reference(
    shape: list[int],
    bits: int,
    exponent: int,
    fixed_min: bool,
    seed: int,
    upper: float,
    lower: float,
) -> None:
    unit = 10.0**exponent
    x = rand(shape, seed, unit)
    clips = scalar(upper * unit).requires_grad_(), scalar(lower * unit).requires_grad_()
    previous = scalar(1.1 * unit), scalar(-0.8 * unit)
    g = rand(shape, seed + 1)
    x.requires_grad_()
    y = functional.ulq_fake_quantize(
        x, *clips, num_bits=bits, fixed_min=fixed_min, previous=previous
    )
    y.backward(g)
    effective = functional.ulq_effective_clips(*clips, fixed_min=fixed_min, previous=previous)
    scale, offset = functional.ulq_qparams(*effective, num_bits=bits)
    kwargs: dict[str, Any] = {
        "num_bits": bits,
        "fixed_min": fixed_min,
        "previous": (previous[0].item(), previous[1].item()),
    }
    args = numpy(x), numpy(g), clips[0].item(), clips[1].item()
    free = reference.ulq(*args, **kwargs)
    tied = reference.ulq(*args, **kwargs, scale_offset=(scale.item(), offset.item()))

    assert (effective[0].item(), effective[1].item()) == (free.clip_max, free.clip_min)
    near_epsilon = abs(free.scale - 1) < 1e-12 or abs(free.scale / functional.EPS - 1) < 1e-6
    if not near_epsilon:
        assert scale.item() == pytest.approx(free.scale, rel=1e-6)
        slack = 2.0**bits * 2e-7 + 1e-5
        assert abs(offset.item() - free.exact_offset) <= 0.5 + slack
    # float32 rounds x/s and the sum with o: a few units in the last place of the code itself
    unsure = reference.near_tie(tied.exact_codes, 1e-5 + 2.0**bits * 2.0**-22)
    steps = np.abs(numpy(y) - tied.y) / scale.item()
    beyond = np.abs(tied.exact_codes) > 2.0**24
    assert np.all(steps[~unsure] < 0.01)
    assert np.all(steps[unsure & ~beyond] < 1.01)
    assert torch.all((x.grad == 0) | (x.grad == g))


@given(BITS, st.floats(0.01, 100), st.floats(0.01, 100), SEEDS)
def test_ulq_gradients_follow_the_reference(
    bits: int, upper: float, lower: float, seed: int
) -> None:
    x, g = rand([200], seed, upper).requires_grad_(), rand([200], seed + 1)
    clips = scalar(upper).requires_grad_(), scalar(-lower).requires_grad_()
    functional.ulq_fake_quantize(x, *clips, num_bits=bits).backward(g)
    scale, offset = functional.ulq_qparams(*clips, num_bits=bits)
    expected = reference.ulq(
        numpy(x),
        numpy(g),
        clips[0].item(),
        clips[1].item(),
        num_bits=bits,
        scale_offset=(scale.item(), offset.item()),
    )
    slack = 1e-6 * expected.grad_magnitude + expected.tie_magnitude
    assert clips[0].grad.item() == pytest.approx(expected.grad_max, rel=1e-5, abs=slack)
    assert clips[1].grad.item() == pytest.approx(expected.grad_min, rel=1e-5, abs=slack)
    border = np.isclose(numpy(x), scale.item() * (2 ** (bits - 1) - 1 - offset.item()), rtol=1e-6)
    border |= np.isclose(numpy(x), scale.item() * (-(2 ** (bits - 1)) - offset.item()), rtol=1e-6)
    assert np.all((numpy(x.grad) == expected.grad_x) | border)


@given(st.integers(-60, 60), st.integers(-4, 4))
def test_ties_go_to_the_even_code(k: int, power: int) -> None:
    scale = 2.0**power
    clips = scalar(127 * scale), scalar(-128 * scale)
    y = functional.ulq_fake_quantize(scalar((k + 0.5) * scale), *clips)
    assert (y.item() / scale) % 2 == 0
    assert abs(y.item() / scale - (k + 0.5)) == 0.5


@given(DTYPES, SHAPES, SEEDS)
def test_other_dtypes_compute_in_float32_and_come_back(
    dtype: torch.dtype, shape: list[int], seed: int
) -> None:
    x = rand(shape, seed).to(dtype).requires_grad_()
    wide = x.detach().float().requires_grad_()
    clips = [scalar(1.5).requires_grad_() for _ in range(2)]
    lower = [scalar(-0.9).requires_grad_() for _ in range(2)]
    y = functional.ulq_fake_quantize(x, clips[0], lower[0])
    expected = functional.ulq_fake_quantize(wide, clips[1], lower[1])
    y.sum().backward()
    expected.sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    assert torch.equal(y, expected.to(dtype))
    assert torch.equal(x.grad, wide.grad.to(dtype))
    assert torch.equal(clips[0].grad, clips[1].grad)
    assert torch.equal(lower[0].grad, lower[1].grad)


@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_clips_may_be_scalars_or_low_precision(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    clip_max = torch.full(shape, 1.5, dtype=dtype).requires_grad_()
    clip_min = torch.full(shape, -0.5, dtype=dtype).requires_grad_()
    x = torch.randn(3, 4)
    y = functional.ulq_fake_quantize(x, clip_max, clip_min)
    y.sum().backward()
    assert y.shape == x.shape
    for clip in (clip_max, clip_min):
        assert (clip.grad.shape, clip.grad.dtype) == (shape, dtype)
    assert functional.ulq_fake_quantize(torch.tensor(0.3), clip_max, clip_min).shape == ()


def test_outputs_do_not_alias_the_clips() -> None:
    clips = scalar(1.0), scalar(-1.0)
    for previous in (None, (scalar(2.0), scalar(-2.0))):
        upper, lower = functional.ulq_effective_clips(*clips, previous=previous)
        upper.add_(5)
        lower.add_(5)
        assert (clips[0].item(), clips[1].item()) == (1.0, -1.0)


@pytest.mark.parametrize("memory_format", [torch.channels_last, torch.contiguous_format])
def test_the_memory_format_is_kept_in_both_directions(memory_format: torch.memory_format) -> None:
    def check(tensor: Tensor) -> None:
        assert tensor.is_contiguous(memory_format=memory_format)

    values = torch.randn(2, 3, 4, 5)
    leaf = values.to(memory_format=memory_format).requires_grad_()
    x = leaf * 1
    x.register_hook(check)
    clips = scalar(1.0).requires_grad_(), scalar(-1.0).requires_grad_()
    y = functional.ulq_fake_quantize(x, *clips)
    y.sum().backward(retain_graph=True)
    y.backward(torch.randn(2, 3, 4, 5))  # a contiguous gradient
    check(y)
    check(leaf.grad)
    assert torch.equal(y, functional.ulq_fake_quantize(values, *clips))
    weight = (values.to(memory_format=memory_format)).requires_grad_()
    for axis, groups in ((None, 1), (0, 1), (1, 2)):
        fake = functional.arq_fake_quantize(weight, ch_axis=axis, groups=groups)
        check(fake)
        expected = functional.arq_fake_quantize(values, ch_axis=axis, groups=groups)
        assert torch.equal(fake, expected)


def test_gradients_are_only_computed_for_what_needs_them() -> None:
    x = torch.randn(10, requires_grad=True)
    functional.ulq_fake_quantize(x, scalar(1.0), scalar(-1.0)).sum().backward()
    assert x.grad is not None
    clip = scalar(1.0).requires_grad_()
    functional.ulq_fake_quantize(torch.randn(10), clip, scalar(-1.0)).sum().backward()
    assert clip.grad is not None


# IFMR


@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=4),
    st.sampled_from([2, 4, 8]),
    st.integers(-3, 30),
    st.floats(-3, 3),
    SEEDS,
)
@settings(max_examples=150)
def test_ifmr_finds_a_minimum_of_the_reference(
    sizes: list[int], bits: int, exponent: int, shift: float, seed: int
) -> None:
    batches = [(rand([n], seed + n) + shift) * 10.0**exponent for n in sizes]
    found = functional.ifmr_search(batches, num_bits=bits)
    expected = reference.ifmr(numpy(torch.cat(batches)), bits)
    losses = expected["losses"]
    noise = (expected["scales"].max() * 2.0**bits * 2.0**-22) ** 2
    assert losses[found.index] <= losses.min() * (1 + 1e-5) + noise
    np.testing.assert_allclose(found.candidates.double(), expected["scales"], rtol=2e-7)
    half = 2 ** (bits - 1)
    assert found.clip_max.item() == pytest.approx((half - 1) * found.scale.item(), rel=1e-6)
    assert found.clip_min.item() == -half * found.scale.item()


@given(st.lists(st.integers(0, 40), min_size=1, max_size=5).filter(any), DTYPES, SEEDS)
def test_ifmr_of_batches_equals_ifmr_of_their_union(
    sizes: list[int], dtype: torch.dtype, seed: int
) -> None:
    batches = [rand([n, 2], seed + i).to(dtype) for i, n in enumerate(sizes)]
    split = functional.ifmr_search(batches)
    whole = functional.ifmr_search(torch.cat(batches))
    assert split.index == whole.index
    assert (split.clip_max, split.clip_min) == (whole.clip_max, whole.clip_min)
    torch.testing.assert_close(split.losses, whole.losses, rtol=1e-12, atol=0)


def test_ifmr_losses_are_accurate_over_many_chunks() -> None:
    x = rand([400_001], 5)
    found = functional.ifmr_search(x)
    data = numpy(x)
    for i in (0, 30, 60):
        s = found.candidates[i].item()
        # The error of each element is float32, as in AMCT; only their sum is exact.
        steps = np.clip(np.rint((x / found.candidates[i]).numpy()), -128, 127)
        exact = ((np.clip(steps, -127, 127) * s - data) ** 2).mean()
        assert found.losses[i].item() == pytest.approx(exact, rel=1e-5)
        error = torch.from_numpy(steps).clamp(-127, 127) * found.candidates[i] - x
        exact = error.square().double().mean().item()
        assert found.losses[i].item() == pytest.approx(exact, rel=1e-7)


def test_beyond_a_million_elements_the_largest_is_dropped() -> None:
    x = rand([1_000_001], 3).clamp(-3, 3)
    x[10], x[20] = 1000.0, -1000.0
    found = functional.ifmr_search(x.split(300_000))
    assert found.clip_max.item() < 4
    assert functional.ifmr_search(x[:1_000_000]).clip_max.item() > 600


def test_ifmr_of_huge_data_does_not_overflow() -> None:
    x = rand([1000], 1)
    small = functional.ifmr_search(x)
    huge = functional.ifmr_search(x * 2.0**100)
    assert huge.index == small.index
    assert torch.isfinite(huge.losses).all()
    torch.testing.assert_close(huge.losses, small.losses * 2.0**200, rtol=1e-6, atol=0)


def test_ifmr_reads_channels_last_without_a_copy() -> None:
    from amct_fx.observers._ifmr import flatten_in_memory_order

    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    for tensor in (x, x.contiguous(), x[0], x.permute(3, 1, 0, 2)):
        flat = flatten_in_memory_order(tensor)
        assert flat.data_ptr() == tensor.data_ptr()
        assert torch.equal(flat.sort().values, tensor.flatten().sort().values)
    sliced = x[:, :2, 1:3]
    flat = flatten_in_memory_order(sliced)
    assert torch.equal(flat.sort().values, sliced.flatten().sort().values)
    expanded = torch.randn(3, 1).expand(3, 4)
    assert flatten_in_memory_order(expanded).numel() == 12


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_ifmr_refuses_values_that_are_not_finite(bad: float) -> None:
    with pytest.raises(CalibrationError, match="NaN or infinity"):
        functional.ifmr_range([torch.ones(3), torch.tensor([0.0, bad])])


def test_ifmr_refuses_no_data() -> None:
    for nothing in ([], torch.empty(0), [torch.empty(0, 2), torch.empty(3, 0)]):
        with pytest.raises(CalibrationError, match="no calibration data"):
            functional.ifmr_range(nothing)


# ARQ and weight-ULQ


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=5),
    BITS,
    EXPONENTS,
    st.sampled_from([None, 0]),
    SEEDS,
)
@settings(max_examples=200)
def test_arq_follows_the_float64_reference(
    shape: list[int], bits: int, exponent: int, axis: int | None, seed: int
) -> None:
    weight = rand(shape, seed, 10.0**exponent)
    scale = functional.arq_qparams(weight, num_bits=bits, ch_axis=axis)
    rows = numpy(weight).reshape(shape[0] if axis == 0 else 1, -1)
    expected = reference.arq_scale(rows, bits)
    border = np.abs(expected / functional.EPS - 1) < 1e-6
    np.testing.assert_allclose(scale.double().numpy()[~border], expected[~border], rtol=2e-7)
    fake = functional.arq_fake_quantize(weight, num_bits=bits, ch_axis=axis)
    codes = numpy(fake).reshape(rows.shape) / numpy(scale)[:, None]
    noise = 1e-3 + 2.0**bits * 2.0**-23  # float32 noise of code times scale
    assert np.all(np.abs(codes - np.rint(codes)) <= noise)
    half = 2 ** (bits - 1)
    assert np.all((codes >= -half - noise) & (codes <= half - 1 + noise))
    steps = numpy(scale)[:, None]
    reachable = np.minimum(rows, (half - 1) * steps)
    errors = np.abs(reachable - numpy(fake).reshape(rows.shape))
    assert np.all(errors <= (0.5 + 2.0**bits * 2.0**-22) * steps)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2), SEEDS)
def test_transposed_weights_have_one_row_per_output_channel(
    groups: int, inputs: int, outputs: int, spatial: int, seed: int
) -> None:
    weight = rand([groups * inputs, outputs, *[2] * spatial], seed)
    geometry = {"ch_axis": 1, "groups": groups}
    rows = functional.to_output_major(weight, **geometry)
    expected = reference.output_rows(numpy(weight), True, groups)
    assert rows.shape == (groups * outputs, inputs, *[2] * spatial)
    assert np.array_equal(numpy(rows).reshape(expected.shape), expected)
    assert torch.equal(functional.from_output_major(rows, **geometry), weight)
    scale = functional.arq_qparams(weight, **geometry)
    assert torch.equal(scale, functional.arq_qparams(rows, ch_axis=0))
    moved = functional.arq_fake_quantize(rows, ch_axis=0)
    assert torch.equal(
        functional.arq_fake_quantize(weight, **geometry),
        functional.from_output_major(moved, **geometry),
    )


def test_a_transposed_layer_quantized_by_row_equals_quantizing_its_output_channels() -> None:
    layer = torch.nn.ConvTranspose2d(4, 6, 3, groups=2, bias=False)
    fake = functional.arq_fake_quantize(layer.weight, num_bits=4, ch_axis=1, groups=2).detach()
    scale = functional.arq_qparams(layer.weight, num_bits=4, ch_axis=1, groups=2)
    with torch.no_grad():
        layer.weight.copy_(fake)
        ones = torch.zeros(1, 4, 1, 1)
        for channel in range(4):
            ones[0, :, 0, 0] = torch.eye(4)[channel]
            codes = layer(ones) / scale.reshape(1, -1, 1, 1)
            torch.testing.assert_close(codes, codes.round(), atol=1e-4, rtol=0)


@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("spatial", [0, 1, 2, 3])
@pytest.mark.parametrize("transposed", [False, True])
def test_weight_ulq_gradients_for_every_layer_type(
    groups: int, per_channel: bool, spatial: int, transposed: bool
) -> None:
    shape = [groups * 2, 4, *[2] * spatial]
    weight, g = torch.randn(shape).requires_grad_(), torch.randn(shape)
    axis = 1 if transposed else 0
    rows = reference.output_rows(numpy(weight), transposed, groups)
    count = len(rows) if per_channel else 1
    scale = (torch.rand(count) * 0.1 + 0.02).requires_grad_()
    y = functional.ulq_weight_fake_quantize(weight, scale, num_bits=4, ch_axis=axis, groups=groups)
    y.backward(g)
    by_row = reference.weight_ulq_grad(
        rows,
        reference.output_rows(numpy(g), transposed, groups),
        np.broadcast_to(numpy(scale), len(rows)),
        4,
    )
    expected = by_row if per_channel else by_row.sum(keepdims=True)
    np.testing.assert_allclose(numpy(scale.grad), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(weight.grad, g)


@pytest.mark.parametrize("raw", [0.0, -0.01, 1e-8, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("axis", [None, 0])
def test_the_effective_scale_is_positive_and_finite(raw: float, axis: int | None) -> None:
    weight = torch.randn(3, 8)
    scale = torch.full((1 if axis is None else 3,), 0.02)
    scale[-1] = raw
    scale.requires_grad_()
    effective = functional.weight_ulq_scale(weight, scale, ch_axis=axis)
    arq = functional.arq_qparams(weight, ch_axis=axis)
    assert torch.equal(effective[-1], arq[-1])
    assert torch.equal(effective[:-1], scale[:-1])
    y = functional.ulq_weight_fake_quantize(weight, scale, ch_axis=axis)
    y.sum().backward()
    assert torch.isfinite(y).all()
    assert torch.isfinite(scale.grad).all()
    assert (weight - y)[-1].abs().max() <= arq[-1] * 0.51


def test_a_scale_at_the_limit_is_used_as_it_is() -> None:
    scale = torch.tensor([functional.EPS])
    assert torch.equal(functional.weight_ulq_scale(torch.randn(4), scale), scale)


def test_bf16_weights_and_empty_weights() -> None:
    weight = torch.randn(4, 3).bfloat16()
    fake = functional.arq_fake_quantize(weight, ch_axis=0)
    assert fake.dtype == torch.bfloat16
    assert functional.arq_qparams(torch.empty(0, 3), ch_axis=0).shape == (0,)
    assert functional.arq_qparams(torch.empty(3, 0), ch_axis=0).tolist() == [1, 1, 1]
    assert functional.arq_fake_quantize(torch.empty(3, 0)).shape == (3, 0)


# One rounding everywhere, compilation, bad arguments


@given(st.integers(1, 4), st.integers(1, 6), BITS, SEEDS)
def test_per_channel_with_equal_scales_is_per_tensor_bit_for_bit(
    rows: int, columns: int, bits: int, seed: int
) -> None:
    weight = rand([rows, columns], seed)
    scale = torch.rand(1, generator=torch.Generator().manual_seed(seed)) * 0.1 + 0.001
    one = functional.ulq_weight_fake_quantize(weight, scale, num_bits=bits)
    many = functional.ulq_weight_fake_quantize(
        weight, scale.expand(rows).clone(), num_bits=bits, ch_axis=0
    )
    assert torch.equal(one, many)


def test_compiled_functions_equal_eager_ones() -> None:
    torch._dynamo.reset()

    def forward(x: Tensor, weight: Tensor, upper: Tensor, lower: Tensor, scale: Tensor) -> Tensor:
        x = functional.ulq_fake_quantize(x, upper, lower, previous=(upper, lower))
        learned = functional.ulq_weight_fake_quantize(weight, scale, ch_axis=0)
        return x @ functional.arq_fake_quantize(weight, ch_axis=0).T + x @ learned.T

    compiled = torch.compile(forward, fullgraph=True, backend="aot_eager")
    results = []
    for function in (forward, compiled):
        torch.manual_seed(1)
        weight = torch.randn(5, 8)
        inputs = [torch.randn(3, 8), weight, scalar(1.5), scalar(-0.7), torch.full((5,), 0.01)]
        for tensor in inputs:
            tensor.requires_grad_()
        y = function(*inputs)
        y.square().sum().backward()
        results.append([y, *(tensor.grad for tensor in inputs)])
    for eager, other in zip(*results, strict=True):
        torch.testing.assert_close(other, eager, rtol=2e-5, atol=2e-4)


@pytest.mark.parametrize("bits", [1, 17, -8, 2.5, True])
def test_wrong_bits_are_refused_everywhere(bits: Any) -> None:
    one = scalar(1.0)
    calls = [
        lambda: functional.ulq_qparams(one, -one, num_bits=bits),
        lambda: functional.ulq_fake_quantize(one, one, -one, num_bits=bits),
        lambda: functional.ifmr_range(one, num_bits=bits),
        lambda: functional.arq_qparams(one, num_bits=bits),
        lambda: functional.arq_fake_quantize(one, num_bits=bits),
        lambda: functional.ulq_weight_fake_quantize(one, one, num_bits=bits),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="num_bits must be an integer from 2 to 16"):
            call()


def test_wrong_geometries_are_refused() -> None:
    weight = torch.randn(4, 3)
    with pytest.raises(ConfigError, match="ch_axis must be None, 0 or 1"):
        functional.arq_qparams(weight, ch_axis=2)
    with pytest.raises(ConfigError, match=r"3 groups .* divisible by 3"):
        functional.to_output_major(weight, ch_axis=1, groups=3)
    with pytest.raises(ConfigError, match=r"1 or 4 elements .* got shape \(3,\)"):
        functional.ulq_weight_fake_quantize(weight, torch.ones(3), ch_axis=0)


@pytest.mark.parametrize("wrong", [torch.arange(3), torch.ones(2, dtype=torch.bool), None, 3.0])
def test_tensors_that_are_not_floating_are_type_errors(wrong: Any) -> None:
    one = scalar(1.0)
    for call in (
        lambda: functional.ulq_fake_quantize(wrong, one, -one),
        lambda: functional.ifmr_range([wrong]),
        lambda: functional.arq_qparams(wrong),
        lambda: functional.ulq_weight_fake_quantize(wrong, one),
    ):
        with pytest.raises(TypeError, match="floating point"):
            call()
