"""Measured latency as the cost of a search: every width of a layer is timed once."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx.prune import latency, prune_plan, search_channel_pruning
from amct_fx.prune.latency import LayerClock

CONFIG = """prune_config { filter_pruner {
    balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }"""
FREE = "ascend_optimized: false"
IMAGES = torch.randn(2, 3, 8, 8)


class Kinds(nn.Module):
    """Layers of every kind, two of them alike, and a product without a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.first, self.second = (nn.Conv2d(8, 8, 3, padding=1, bias=False) for _ in range(2))
        self.depthwise = nn.Conv2d(8, 16, 3, groups=8, padding=1)
        self.grouped = nn.Conv2d(16, 12, 1, groups=2)
        self.up = nn.ConvTranspose2d(12, 8, 2, 2, groups=2)
        self.up_depthwise = nn.ConvTranspose2d(8, 8, 3, 2, output_padding=1, groups=8)
        self.linear = nn.Linear(8, 6)
        self.last = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.first(self.stem(x)).relu())
        x = self.up_depthwise(self.up(self.grouped(self.depthwise(x))))
        return self.linear(x.mean((2, 3))) @ self.last


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Tensor]]:
    """Measure nothing: a layer takes its operations, in steps of eight output channels."""
    done: list[tuple[Any, Tensor]] = []

    def fastest(call: Any, shape: tuple[int, ...]) -> float:
        layer, value = call.build(shape)
        assert layer(value).shape[0] == value.shape[0]
        done.append((layer, value))
        return math.ceil(shape[0] / 8) * 8 * math.prod(shape[1:]) * 1e-9

    monkeypatch.setattr(latency, "_fastest", fastest)
    return done


def test_layers_alike_are_measured_once_and_each_width_once(runs: Any):
    model = Kinds().eval()
    plan = prune_plan(model, CONFIG, IMAGES)
    clock = LayerClock(model, plan, IMAGES)
    names = [cost.name for cost in plan.costs]
    assert len(runs) == clock.measured == 7  # first and second are alike
    first, second = names.index("first"), names.index("second")
    assert clock.seconds(first, (8, 5, 3, 3)) == clock.seconds(second, (8, 5, 3, 3)) > 0
    assert clock.measured == 8
    product = next(
        i for i, cost in enumerate(plan.costs) if cost.name not in dict(model.named_modules())
    )
    assert clock.seconds(product, plan.costs[product].shape) > 0
    assert clock.measured == 8


def test_smaller_layers_are_those_that_pruning_leaves(runs: Any):
    model = Kinds().eval()
    plan = prune_plan(model, CONFIG, IMAGES)
    clock = LayerClock(model, plan, IMAGES)
    names = [cost.name for cost in plan.costs]
    shapes = {
        "stem": (4, 3, 3, 3),
        "depthwise": (8, 1, 3, 3),
        "grouped": (6, 4, 1, 1),
        "up": (6, 2, 2, 2),
        "up_depthwise": (4, 1, 3, 3),
        "linear": (6, 4),
    }
    for name, shape in shapes.items():
        clock.seconds(names.index(name), shape)
        layer, value = runs[-1]
        assert type(layer) is type(model.get_submodule(name))
        assert tuple(layer.weight.shape) == shape
        assert (
            layer(value).shape[2:]
            == model.get_submodule(name)(
                torch.zeros(value.shape[0], *_full_input(model.get_submodule(name), value))
            ).shape[2:]
        )


def _full_input(layer: Any, value: Tensor) -> tuple[int, ...]:
    if isinstance(layer, nn.Linear):
        return (layer.in_features,)
    return layer.in_channels, *value.shape[2:]


def test_wide_layers_are_measured_at_some_widths(runs: Any):
    model = nn.Sequential(nn.Conv2d(3, 256, 1), nn.ReLU(), nn.Conv2d(256, 4, 1)).eval()
    clock = LayerClock(model, prune_plan(model, CONFIG, IMAGES), IMAGES)
    for width in range(1, 257):
        clock.seconds(0, (width, 3, 1, 1))
    assert clock.measured == 2 + 31
    assert clock.seconds(0, (4, 3, 1, 1)) == pytest.approx(clock.seconds(0, (8, 3, 1, 1)) / 2)


def test_time_for_measuring_is_bounded(runs: Any):
    model = Kinds().eval()
    clock = LayerClock(model, prune_plan(model, CONFIG, IMAGES), IMAGES, budget=0)
    full = clock.seconds(0, (8, 3, 3, 3))
    assert clock.seconds(0, (2, 3, 3, 3)) == pytest.approx(full / 4)
    assert clock.measured == 7


def test_the_search_follows_what_is_measured(runs: Any):
    """Eight channels are as dear as one here, so only whole steps of eight pay."""
    model = nn.Sequential(nn.Conv2d(3, 32, 1), nn.ReLU(), nn.Conv2d(32, 4, 1)).eval()
    data = [IMAGES, torch.randn(2, 4, 8, 8)]
    found = search_channel_pruning(model, f"compress_ratio: 2 {FREE}", data, metric="latency")
    clock = LayerClock(model, found.plan, IMAGES[:1])
    kept = len(found.plan.groups[0].kept)
    full = clock.seconds(0, (32, 3, 1, 1)) + clock.seconds(1, (4, 32, 1, 1))
    left = clock.seconds(0, (kept, 3, 1, 1)) + clock.seconds(1, (4, kept, 1, 1))
    assert kept == 16
    assert found.ratio == pytest.approx(full / left)


def test_layers_are_timed_in_their_memory_format_and_dtype():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).eval()
    model = model.double().to(memory_format=torch.channels_last)
    images = IMAGES.double().to(memory_format=torch.channels_last)
    state = torch.get_rng_state()
    clock = LayerClock(model, prune_plan(model, CONFIG, images), images)
    layer, value = clock._calls[1].build((4, 4, 3, 3))  # type: ignore[union-attr]
    assert layer.weight.dtype == value.dtype == torch.float64
    assert value.is_contiguous(memory_format=torch.channels_last)
    assert not value.is_contiguous()
    assert layer.weight.is_contiguous(memory_format=torch.channels_last)
    assert clock.seconds(1, (4, 4, 3, 3)) > 0
    assert torch.equal(state, torch.get_rng_state())


@pytest.mark.filterwarnings("ignore:the (largest )?ratio that can be reached")
def test_a_search_for_latency_says_what_it_reached():
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU())
    model.append(nn.Conv2d(64, 8, 1))
    images = torch.randn(1, 3, 32, 32)
    data = [images, F.adaptive_avg_pool2d(images[:, :1].expand(1, 8, 32, 32), 28)]
    found = search_channel_pruning(model, "compress_ratio: 1.2", data, metric="latency")
    assert found.metric == "latency"
    assert found.ratio > 1
