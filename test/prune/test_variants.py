"""Variants that spec/pruning.md names: Linear chains, concatenations, heads, transposed layers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx import convert_amct, prepare_qat_amct
from test.prune import networks as nets
from test.prune.helpers import assert_exact, kept, plan_for

IMAGE = nets.golden_input(2, 3, 16, 16)
FLAT, TOKENS = nets.golden_input(4, 6), nets.golden_input(2, 5, 6)
Forward = Callable[[Any, Tensor], Tensor]


def pruned(model: nn.Module, example: Tensor, **options: Any) -> set[str]:
    nets.golden_weights(model)
    plan = plan_for(model, example, **options)
    assert_exact(model, plan, example)
    return set(kept(plan))


def chain(forward: Forward, bias: bool = True, last: int = 16, **more: nn.Module) -> nets.Net:
    layers = {"l1": nn.Linear(6, 16, bias=bias), "l2": nn.Linear(last, 4, bias=bias)}
    return nets.Net(forward, **layers, **more)


@pytest.mark.parametrize("example", [FLAT, TOKENS], ids=["2-D", "3-D"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("mode", ["amct", "native"])
def test_linear_chains_are_pruned(mode: str, bias: bool, example: Tensor) -> None:
    model = chain(lambda m, x: m.l2(F.relu(m.l1(x))), bias)
    assert pruned(model, example, mode=mode) == {"l1"}


@pytest.mark.parametrize("mode", ["amct", "native"])
def test_residual_linears_are_pruned_together(mode: str) -> None:
    model = chain(
        lambda m, x: m.l2(m.l1(x) + m.l3(F.relu(m.l1b(x)))),
        l3=nn.Linear(16, 16),
        l1b=nn.Linear(6, 16),
    )
    assert pruned(model, FLAT, mode=mode) == {"l1", "l3", "l1b"}


@pytest.mark.parametrize(
    ("forward", "last"),
    [
        (lambda m, x: m.l2(torch.cat([m.l1(x), m.l3(x)], 1)), 32),
        (lambda m, x: m.l2(F.gelu(m.l1(x)) + m.l3(x)), 16),
    ],
    ids=["cat", "gelu"],
)
def test_amct_stops_between_linears_at_these(forward: Forward, last: int) -> None:
    model = chain(forward, last=last, l3=nn.Linear(6, 16))
    assert pruned(model, FLAT, mode="amct") == set()
    assert pruned(model, FLAT) == {"l1", "l3"}


def test_an_lstm_reads_whole_features() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.l1, self.lstm = nn.Linear(6, 16), nn.LSTM(16, 4, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.lstm(F.relu(self.l1(x)))[0]

    for mode in ("amct", "native"):
        model = nets.golden_weights(Recurrent())
        assert kept(plan_for(model, TOKENS, mode=mode)) == {}


@pytest.mark.parametrize("mode", ["amct", "native"])
@pytest.mark.parametrize("skip", ["a", "b"])
def test_a_skipped_branch_of_a_concatenation_keeps_its_place(skip: str, mode: str) -> None:
    model = nets.concat()
    assert pruned(model, IMAGE, mode=mode, skip=(skip,)) == {"a", "b"} - {skip}


@pytest.mark.parametrize("dim", [1, -3])
def test_the_network_input_may_be_a_branch(dim: int) -> None:
    def forward(m: nets.Net, x: Tensor) -> Tensor:
        return m.out(torch.cat([x, m.b(x)], dim=dim))

    model = nets.Net(forward, b=nets.conv(3, 16), out=nets.conv(19, 4))
    assert pruned(model, IMAGE, mode="amct") == set()
    assert pruned(model, IMAGE) == {"b"}


@pytest.mark.parametrize("mode", ["amct", "native"])
def test_one_tensor_may_be_concatenated_twice(mode: str) -> None:
    def forward(m: nets.Net, x: Tensor) -> Tensor:
        y = m.a(x)
        return m.out(F.relu(torch.cat([y, y], 1)))

    model = nets.Net(forward, a=nets.conv(3, 8), out=nets.conv(16, 4))
    assert pruned(model, IMAGE, mode=mode) == {"a"}


@pytest.mark.parametrize("mode", ["amct", "native"])
def test_a_branch_may_be_concatenated_and_then_added(mode: str) -> None:
    def forward(m: nets.Net, x: Tensor) -> Tensor:
        a, b, c = m.a(x), m.b(x), m.c(x)
        return m.out(F.relu(torch.cat([b, c], 1))) + m.out2(a + b)

    model = nets.Net(
        forward,
        a=nets.conv(3, 8),
        b=nets.conv(3, 8),
        c=nets.conv(3, 8),
        out=nets.conv(16, 4),
        out2=nets.conv(8, 4),
    )
    nets.golden_weights(model)
    plan = plan_for(model, IMAGE, mode=mode)
    assert plan["a"].producers == ("a", "b")
    assert set(kept(plan)) == {"a", "b", "c"}
    assert_exact(model, plan, IMAGE)


HEADS: dict[str, Callable[[Tensor], Tensor]] = {
    "flatten": lambda x: torch.flatten(F.adaptive_avg_pool2d(x, 1), 1),
    "reshape": lambda x: F.adaptive_avg_pool2d(x, 1).reshape(x.shape[0], -1),
    "mean": lambda x: x.mean((2, 3)),
    "mean_twice": lambda x: x.mean(3).mean(2),
    "sum": lambda x: x.sum((2, 3)),
    "amax": lambda x: torch.amax(x, (2, 3)),
    "squeeze": lambda x: F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1),
    "index": lambda x: F.adaptive_avg_pool2d(x, 1)[:, :, 0, 0],
    "view": lambda x: F.adaptive_avg_pool2d(x, 1).view(x.size(0), -1),
    "view_channels": lambda x: F.adaptive_avg_pool2d(x, 1).reshape(-1, 16),
    "avg_pool": lambda x: F.avg_pool2d(x, 16).flatten(1),
    "relu_between": lambda x: F.relu(F.adaptive_avg_pool2d(x, 1)).flatten(1),
    "max": lambda x: F.adaptive_max_pool2d(x, 1).flatten(1),
}


@pytest.mark.parametrize("head", HEADS)
def test_heads_of_classifiers(head: str) -> None:
    function = HEADS[head]
    model = nets.Net(lambda m, x: m.fc(function(m.c(x))), c=nets.conv(3, 16), fc=nn.Linear(16, 4))
    assert pruned(model, IMAGE) == {"c"}
    assert pruned(model, IMAGE, mode="amct") == ({"c"} if head in ("flatten", "reshape") else set())


def test_a_pooled_map_read_twice_is_no_head_for_amct() -> None:
    def forward(m: nets.Net, x: Tensor) -> Tensor:
        y = F.adaptive_avg_pool2d(m.c(x), 1)
        return m.fc(y.flatten(1)) + m.d(y).flatten(1)

    model = nets.Net(forward, c=nets.conv(3, 16), fc=nn.Linear(16, 4), d=nets.conv(16, 4, 1))
    assert pruned(model, IMAGE, mode="amct") == set()
    assert pruned(model, IMAGE) == {"c"}


def test_batch_norm_over_another_axis_than_that_of_the_channels() -> None:
    def forward(m: nets.Net, x: Tensor) -> Tensor:
        return m.l2(m.n(m.l1(x)))

    example = nets.golden_input(2, 3, 5, 6)
    model = chain(forward, n=nn.BatchNorm2d(3))
    assert pruned(model, example) == set()


def test_a_layer_whose_pruning_would_leave_nothing_keeps_one_channel() -> None:
    model = nets.Net(lambda m, x: m.b(m.a(x)), a=nets.conv(3, 3), b=nets.conv(3, 4))
    nets.golden_weights(model)
    plan = plan_for(model, IMAGE, ratio=0.9)
    assert len(kept(plan)["a"]) == 1
    assert_exact(model, plan, IMAGE)


def test_a_part_with_one_channel_is_never_emptied() -> None:
    def forward(m: nets.Net, x: Tensor) -> Tensor:
        y = m.a(x)
        return m.b(y[:, :1]) + m.c(y[:, 1:])

    model = nets.Net(forward, a=nets.conv(3, 8), b=nets.conv(1, 4), c=nets.conv(7, 4))
    nets.golden_weights(model)
    for seed in range(8):
        torch.manual_seed(seed)
        nn.init.normal_(model.a.weight)
        plan = plan_for(model, IMAGE, ratio=0.7)
        assert_exact(model, plan, IMAGE)


@pytest.mark.parametrize("example", [torch.randn(1, 3, 4, 4, 4), None])
def test_a_model_without_a_layer_that_is_quantized_is_pruned(example):
    layers = [nn.ConvTranspose3d(3, 8, 2), nn.ReLU(), nn.ConvTranspose3d(8, 4, 2)]
    model = nn.Sequential(*layers).eval()
    config = """prune_config { filter_pruner { balanced_l2_norm_filter_prune {
        prune_ratio: 0.5 ascend_optimized: false } } }"""
    small = convert_amct(prepare_qat_amct(model, config, example))
    assert (small[0].out_channels, small[2].in_channels) == (4, 4)
    assert small(torch.randn(1, 3, 4, 4, 4)).shape == (1, 4, 6, 6, 6)
