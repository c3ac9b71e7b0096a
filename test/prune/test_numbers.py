"""Numbers read from shapes, and what becomes of zeros: both can go wrong without any error."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx import convert_amct, prepare_qat_amct, prune_plan
from test.prune import networks as nets
from test.versions import skip_unless_fx_traces

CFG = """prune_config { filter_pruner {
    balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }"""
IMAGE = torch.rand(2, 3, 12, 12)
OTHER = torch.rand(3, 3, 18, 14)
Operation = Callable[[Tensor], Tensor]


def network(operation: Operation, channels: int = 16) -> nn.Module:
    torch.manual_seed(0)
    return nets.Net(
        lambda m, x: m.out(operation(m.a(x))), a=nets.conv(3, 16), out=nets.conv(channels, 4)
    )


def gram(x: Tensor) -> Tensor:
    """Multiply every place by every other, over the channels."""
    return (x.flatten(2).transpose(1, 2) @ x.flatten(2)).unsqueeze(1)


def assert_removal_changes_nothing(model: nn.Module, *inputs: Tensor) -> None:
    prepared = prepare_qat_amct(model, CFG, IMAGE).eval()
    converted = convert_amct(prepared)
    for x in inputs:
        torch.testing.assert_close(converted(x), prepared(x), rtol=1e-5, atol=1e-5)


def is_cut(model: nn.Module) -> bool:
    return any("a" in group.producers for group in prune_plan(model, CFG, IMAGE).groups)


COUNTED_CHANNELS: dict[str, Operation] = {
    "a size": lambda x: x * x.size(1),
    "a slice elsewhere": lambda x: x[:, :, : x.shape[1] - 6],
    "a start elsewhere": lambda x: x[:, :, x.shape[1] // 8 :],
    "a row": lambda x: x[:, :, x.shape[1] - 10].unsqueeze(2),
    "a roll elsewhere": lambda x: x.roll(x.shape[1] // 4, 2),
    "a roll along them": lambda x: x.roll(x.shape[1] // 2, 1),
    "a shuffle": lambda x: F.pixel_unshuffle(F.pixel_shuffle(x, x.shape[1] // 8), 2),
    "a scale": lambda x: x * math.sqrt(x.shape[1]),
}


@pytest.mark.parametrize("name", COUNTED_CHANNELS)
def test_a_count_of_channels_that_is_no_size_of_a_result_keeps_its_value(name: str) -> None:
    skip_unless_fx_traces(COUNTED_CHANNELS[name])
    model = network(COUNTED_CHANNELS[name])
    assert is_cut(model)
    assert_removal_changes_nothing(model, IMAGE, OTHER)


COUNTED_ELEMENTS: dict[str, Operation] = {
    "numel": lambda x: x * x.numel() / 1000,
    "numel of a part": lambda x: x / x[0].numel() * 1000,
    "numel of a shape": lambda x: x * x.shape.numel() / 1000,
    "stride": lambda x: x * x.stride(0) / 1000,
    "bytes": lambda x: x * x.nbytes / 1000,
    "a count of sizes": lambda x: x * (1 + x.shape.count(16)),
    "a product of sizes": lambda x: x * (x.shape[1] * x.shape[2]) / 100,
}


@pytest.mark.parametrize("name", COUNTED_ELEMENTS)
def test_a_number_of_channels_and_inputs_alike_keeps_the_channels(name: str) -> None:
    model = network(COUNTED_ELEMENTS[name])
    assert not is_cut(model)
    assert_removal_changes_nothing(model, IMAGE, OTHER)


SIZES_OF_INPUTS: dict[str, Operation] = {
    "unflatten the batch": lambda x: x.flatten(0, 1).unflatten(0, (x.shape[0], -1)),
    "unflatten the places": lambda x: x.flatten(2).unflatten(-1, (x.shape[2], x.shape[3])),
    "split the places": lambda x: torch.cat(
        torch.split(torch.cat([x, x], 2), [x.shape[2], x.shape[2]], 2), 1
    ).view(x.shape[0], 2, 16, x.shape[2], x.shape[3])[:, 0],
}


@pytest.mark.parametrize("name", SIZES_OF_INPUTS)
def test_sizes_of_the_inputs_are_not_written_into_the_graph(name: str) -> None:
    skip_unless_fx_traces(SIZES_OF_INPUTS[name])
    model = network(SIZES_OF_INPUTS[name])
    assert is_cut(model)
    assert_removal_changes_nothing(model, IMAGE, OTHER)


NO_LONGER_ZERO: dict[str, Operation] = {
    "add(other=)": lambda x: torch.add(x, other=1.0),
    "method add(other=)": lambda x: x.add(other=1.0),
    "sub(other=)": lambda x: torch.sub(x, other=2.0),
    "div(other=)": lambda x: torch.div(x, other=x),
    "+ size": lambda x: x + x.shape[2] / 12,
    "hardtanh": lambda x: F.hardtanh(x, 0.1, 1.0),
    "Hardtanh": nn.Hardtanh(0.1, 1.0),
}


@pytest.mark.parametrize("name", NO_LONGER_ZERO)
def test_masked_channels_that_are_no_longer_zero_are_not_cut_in_a_product(name: str) -> None:
    operation = NO_LONGER_ZERO[name]
    model = network(lambda x: gram(operation(x)), channels=1)
    assert not is_cut(model)
    assert_removal_changes_nothing(model, IMAGE)


STILL_ZERO: dict[str, Operation] = {
    "hardtanh": F.hardtanh,
    "add(alpha=)": lambda x: torch.add(x, x.relu(), alpha=2),
    "mul(other=)": lambda x: torch.mul(x, other=3.0),
}


@pytest.mark.parametrize("name", STILL_ZERO)
def test_masked_channels_that_are_still_zero_are_cut_in_a_product(name: str) -> None:
    operation = STILL_ZERO[name]
    model = network(lambda x: gram(operation(x)), channels=1)
    assert is_cut(model)
    assert_removal_changes_nothing(model, IMAGE)


WITHOUT_SLOPE_AT_ZERO: dict[str, Operation] = {
    "hypot": lambda x: torch.hypot(x, x.neg()),
    "atan2": lambda x: torch.atan2(x, x.neg()),
    "xlogy": lambda x: torch.xlogy(x.abs(), x.abs()),
    "lgamma": lambda x: x.lgamma().clamp(-9, 9),
    "digamma": lambda x: x.digamma().clamp(-9, 9),
    "remainder": lambda x: x % x.neg(),
    "fmod": lambda x: torch.fmod(x, x.neg()),
    "addcdiv": lambda x: torch.addcdiv(x, x, x.abs()),
    "div(other=)": lambda x: torch.div(x, other=x.exp() * x),
}


@pytest.mark.parametrize("name", WITHOUT_SLOPE_AT_ZERO)
def test_no_gradient_is_nan_behind_a_function_without_a_slope_at_zero(name: str) -> None:
    model = network(WITHOUT_SLOPE_AT_ZERO[name])
    prepared = prepare_qat_amct(model, CFG, IMAGE)
    prepared(IMAGE).square().mean().backward()
    assert is_cut(model)
    assert all(p.grad is None or p.grad.isfinite().all() for p in prepared.parameters())
