"""Parameters and buffers that meet channels in other forms than they are stored in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx import convert_amct, prepare_qat_amct
from amct_fx.prune import remove_channels
from test.prune import networks as nets
from test.prune.helpers import assert_exact, kept, plan_for

IMAGE, TOKENS = nets.golden_input(2, 3, 16, 16), nets.golden_input(2, 5, 6)
Forward = Callable[[Any, Tensor], Tensor]


class Scaled(nn.Module):
    """Owns parameters and buffers of eight channels in several shapes."""

    def __init__(self, forward: Forward, tokens: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8) if tokens else nets.conv(3, 8)
        self.b = nn.Linear(8, 4) if tokens else nets.conv(8, 4)
        self.c = nn.Linear(6, 8) if tokens else nets.conv(3, 8)
        self.gamma = nn.Parameter(torch.rand(8))
        self.beta = nn.Parameter(torch.rand(8))
        self.tall = nn.Parameter(torch.rand(8, 1, 1))
        self.scalar = nn.Parameter(torch.rand(1))
        self.position = nn.Parameter(torch.rand(1, 5, 8))
        self.start = nn.Parameter(torch.rand(1, 1, 8))
        self.plane = nn.Parameter(torch.rand(1, 8, 4, 4))
        self.square = nn.Parameter(torch.rand(8, 8))
        self.twice = nn.Parameter(torch.rand(16))
        self.register_buffer("mean", torch.rand(8))
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def widths(forward: Forward, *, tokens: bool = False) -> dict[str, int]:
    """Return how many channels stay of what loses some; the oracle must hold."""
    model = nets.golden_weights(Scaled(forward, tokens))
    example = TOKENS if tokens else IMAGE
    plan = plan_for(model, example)
    assert_exact(model, plan, example)
    before = {name: tuple(p.shape) for name, p in model.named_parameters()}
    remove_channels(model, plan)
    lost = [n for n, p in model.named_parameters() if tuple(p.shape) != before[n] and "." not in n]
    return {name: len(rows) for name, rows in kept(plan).items()} | dict.fromkeys(lost, 4)


IMAGES: dict[str, tuple[Forward, set[str]]] = {
    "none_index": (lambda m, x: m.b(m.a(x) * m.gamma[None, :, None, None]), {"gamma"}),
    "ellipsis_index": (lambda m, x: m.b(m.a(x) * m.gamma[..., None, None]), {"gamma"}),
    "view": (lambda m, x: m.b(m.gamma.view(1, -1, 1, 1) * m.a(x)), {"gamma"}),
    "view_of_numbers": (lambda m, x: m.b(m.gamma.view(1, 8, 1, 1) * m.a(x)), {"gamma"}),
    "reshape": (lambda m, x: m.b(torch.reshape(m.gamma, (1, 8, 1, 1)) + m.a(x)), {"gamma"}),
    "unsqueeze": (lambda m, x: m.b(m.a(x) - m.gamma.unsqueeze(-1).unsqueeze(-1)), {"gamma"}),
    "unflatten": (lambda m, x: m.b(m.a(x) - m.gamma.unflatten(0, (8, 1, 1))), {"gamma"}),
    "expand": (lambda m, x: m.b(m.a(x) + m.tall.expand(2, 8, 16, 16)), {"tall"}),
    "expand_like": (lambda m, x: m.b(m.a(x) + m.tall.expand_as(m.c(x))), {"tall", "c"}),
    "expand_size": (lambda m, x: m.b(m.a(x) * m.tall.expand(x.size(0), -1, 16, 16)), {"tall"}),
    "flatten": (lambda m, x: m.b(m.a(x) * m.tall.flatten()[:, None, None]), {"tall"}),
    "permute": (lambda m, x: m.b(m.a(x) * m.tall.permute(2, 0, 1)[0, :, :, None]), {"tall"}),
    "channels_last": (
        lambda m, x: m.b((m.a(x).permute(0, 2, 3, 1) * m.gamma).permute(0, 3, 1, 2)),
        {"gamma"},
    ),
    "affine": (
        lambda m, x: m.b(torch.addcmul(m.beta.view(-1, 1, 1), m.gamma.view(-1, 1, 1), m.a(x))),
        {"gamma", "beta"},
    ),
    "function_of_it": (lambda m, x: m.b(m.a(x) * m.gamma.sigmoid().view(1, -1, 1, 1)), {"gamma"}),
    "function_of_two": (
        lambda m, x: m.b(m.a(x) * (m.gamma.exp() + m.scalar * m.beta)[:, None, None]),
        {"gamma", "beta"},
    ),
    "buffer": (
        lambda m, x: m.b((m.a(x) - m.mean.view(1, -1, 1, 1)) / m.tall.abs().sqrt()),
        {"tall"},
    ),
    "frozen_batch_norm": (
        lambda m, x: m.b(
            m.a(x) * (m.gamma * (m.mean.abs() + 1e-5).rsqrt()).view(1, -1, 1, 1)
            + (m.beta - m.mean * m.gamma * (m.mean.abs() + 1e-5).rsqrt()).reshape(1, -1, 1, 1)
        ),
        {"gamma", "beta"},
    ),
    "used_twice": (
        lambda m, x: m.b(m.a(x) * m.gamma[:, None, None] + m.gamma.view(-1, 1, 1)),
        {"gamma"},
    ),
    "joins_two_layers": (
        lambda m, x: m.b(m.a(x) * m.gamma[:, None, None] + m.c(x).relu() * m.tall),
        {"gamma", "tall", "c"},
    ),
    "joined_by_it": (
        lambda m, x: m.b(m.a(x) * m.gamma[:, None, None]) + m.b(m.c(x) * m.gamma.view(-1, 1, 1)),
        {"gamma", "c"},
    ),
    "resized": (
        lambda m, x: m.b(m.a(x) + F.interpolate(m.plane, scale_factor=4.0)),
        {"plane"},
    ),
    "flipped_and_back": (
        lambda m, x: m.b(m.a(x) * m.gamma.flip(0)[:, None, None].flip(0)),
        {"gamma"},
    ),
    "behind_a_shuffle": (
        lambda m, x: m.b(nets.shuffle(m.a(x), 2) * m.gamma[:, None, None]),
        {"gamma"},
    ),
    "on_a_flattened_map": (
        lambda m, x: m.b((m.a(x).flatten(2) * m.gamma[:, None]).unflatten(2, (16, 16))),
        {"gamma"},
    ),
    "stacked": (
        lambda m, x: m.b(torch.stack([m.a(x), m.tall.expand(2, 8, 16, 16)]).sum(0)),
        {"tall"},
    ),
    "prelu_by_hand": (
        lambda m, x: m.b(F.relu(m.a(x)) - m.gamma.view(1, -1, 1, 1) * F.relu(-m.a(x))),
        {"gamma"},
    ),
}
SEQUENCES: dict[str, tuple[Forward, set[str]]] = {
    "position": (lambda m, x: m.b(m.a(x) + m.position), {"position"}),
    "position_part": (lambda m, x: m.b(m.a(x) + m.position[:, : x.size(1)]), {"position"}),
    "position_places": (
        lambda m, x: m.b(m.a(x[:, :3]) + m.position[:, 1:4]),
        {"position"},
    ),
    "class_token": (
        lambda m, x: m.b(torch.cat([m.start.expand(x.shape[0], -1, -1), m.a(x)], 1)),
        {"start"},
    ),
    "both": (
        lambda m, x: m.b(torch.cat([m.start.expand(2, -1, -1), m.a(x)[:, 1:]], 1) + m.position),
        {"start", "position"},
    ),
}


@pytest.mark.parametrize("form", IMAGES)
def test_a_parameter_follows_the_channels_of_a_map(form: str) -> None:
    forward, follows = IMAGES[form]
    assert widths(forward) == dict.fromkeys({"a"} | follows, 4)


@pytest.mark.parametrize("form", SEQUENCES)
def test_a_parameter_follows_the_features_of_tokens(form: str) -> None:
    forward, follows = SEQUENCES[form]
    assert widths(forward, tokens=True) == dict.fromkeys({"a"} | follows, 4)


PINS: dict[str, Forward] = {
    "read_before": lambda m, x: m.gamma.sum() + m.b(m.a(x) * m.gamma[:, None, None]),
    "read_after": lambda m, x: m.b(m.a(x) * m.gamma[:, None, None]) + m.gamma.sum(),
    "view_read_after": lambda m, x: read_after(m, x, m.gamma[:, None, None]),
    "flipped": lambda m, x: m.b(m.a(x) * m.gamma.flip(0)[:, None, None]),
    "returned": lambda m, x: (m.b(m.a(x) * m.gamma[:, None, None]), m.gamma * 2),  # type: ignore[return-value]
    "normalised": lambda m, x: m.b(m.a(x) * m.gamma.softmax(0)[:, None, None]),
    "centred": lambda m, x: m.b(m.a(x) * (m.gamma - m.gamma.mean())[:, None, None]),
    "a_part_of_it": lambda m, x: m.b(m.a(x) * m.twice[:8, None, None]),
    "rolled_and_plain": lambda m, x: m.b(
        (m.a(x) * m.gamma[:, None, None]) * m.gamma.roll(1)[:, None, None]
    ),
    "meets_the_input": lambda m, x: m.b(m.a(x) * m.gamma[:, None, None]) + x[:, :1] * m.gamma[0],
    "both_axes": lambda m, x: m.b(
        (m.a(x).permute(0, 2, 3, 1)[:, :8] * m.square[:, None]).permute(0, 3, 1, 2)
        + (m.c(x).permute(0, 2, 3, 1)[:, :8] * m.square.t()[:, None]).permute(0, 3, 1, 2)
    ),
    "weight_of_a_layer": lambda m, x: m.b(m.a(x)) + m.a.weight.abs().sum(),
    "bias_of_a_layer": lambda m, x: m.b(m.a(x) - m.a.bias.view(-1, 1, 1)) + m.a.bias.norm(),
    "put_together": lambda m, x: m.b(
        m.a(x) * torch.cat([m.gamma[:4], m.twice[4:8]])[:, None, None]
    ),
    "repeated": lambda m, x: m.b(m.a(x) * torch.kron(m.gamma[:2], m.gamma[:4])[:, None, None]),
    "into_a_product": lambda m, x: m.b(m.a(x) * m.gamma[:, None, None]) + m.gamma @ m.beta,
}


def read_after(m: Scaled, x: Tensor, view: Tensor) -> Tensor:
    y = m.a(x) * view
    return m.b(y) * view.sum()


@pytest.mark.parametrize("form", PINS)
def test_a_parameter_that_something_reads_as_a_whole_stays(form: str) -> None:
    assert not {"a", "gamma", "square", "twice"} & set(widths(PINS[form]))


def test_the_reason_names_what_reads_the_parameter() -> None:
    model = nets.golden_weights(Scaled(PINS["weight_of_a_layer"]))
    reasons = {layer.name: layer for layer in plan_for(model, IMAGE).pinned}
    assert reasons["a"].code == "tied_parameter"
    assert reasons["a"].text == "abs_1 reads all of a.weight"


def test_a_parameter_of_blocks_is_the_same_for_all_of_them() -> None:
    def forward(m: Scaled, x: Tensor) -> Tensor:
        blocks = m.a(x).unflatten(-1, (2, 4)) * m.gamma[:4]
        return m.b(blocks.flatten(-2))

    assert "a" not in widths(forward, tokens=True)

    def whole(m: Scaled, x: Tensor) -> Tensor:
        blocks = torch.cat([m.a(x), m.c(x)], -1).unflatten(-1, (2, 8)) * m.gamma
        both = blocks.flatten(-2)
        return m.b(both[..., :8] + both[..., 8:])

    assert widths(whole, tokens=True) == dict.fromkeys(("a", "c", "gamma"), 4)


def test_a_part_that_the_example_did_not_reach_keeps_what_it_reads() -> None:
    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nets.conv(3, 8), nets.conv(8, 4)
            self.gamma = nn.Parameter(torch.rand(8))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x) * self.gamma[:, None, None])

    class Other(nn.Module):
        def __init__(self, inner: Inner) -> None:
            super().__init__()
            self.c, self.inner = nets.conv(4, 8), inner

        def forward(self, x: Tensor) -> Tensor:
            return self.c(x) * self.inner.gamma[:, None, None]

    class Chooses(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Inner()
            self.other = Other(self.inner)

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            return self.other(y) if y.sum() > 1e9 else y

    model = nets.golden_weights(Chooses())
    plan = plan_for(model, IMAGE)
    assert kept(plan) == {}
    assert_exact(model, plan, IMAGE)


@pytest.mark.parametrize("form", ["view", "affine", "frozen_batch_norm", "channels_last"])
@pytest.mark.parametrize("apply", ["convert", "prepare"])
def test_parameters_are_cut_together_with_quantizers(form: str, apply: str) -> None:
    cfg = """prune_config { filter_pruner {
        balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }
        retrain_data_quant_config { ulq_quantize { } }"""
    forward, follows = IMAGES[form]
    model = nets.golden_weights(Scaled(forward))
    prepared = prepare_qat_amct(model, cfg, IMAGE, apply=apply)
    prepared.train()(IMAGE).square().mean().backward()
    expected = prepared.eval()(IMAGE)
    converted = convert_amct(prepared)
    assert (converted(IMAGE) - expected).abs().max() <= 0.02 * expected.abs().max()
    for name in follows:
        assert 4 in getattr(converted, name).shape
