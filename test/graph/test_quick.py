"""Tracing in one go: how often a forward runs, and what must still be looked at closely."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from amct_fx.graph import capture, install_graph


def is_layer(module: nn.Module) -> bool:
    return type(module) is nn.Linear


class Runs(nn.Module):
    """Calls a function of the user's in its forward."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.function = [function]

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.function[0](self, x))


def test_a_forward_that_hides_nothing_runs_once():
    runs = []
    model = nn.Sequential(*[Runs(lambda _, x: runs.append(1) or x) for _ in range(3)])
    captured = capture(model, is_layer)
    assert [region.name for region in captured.regions] == [""]
    assert len(runs) == 3


def constant_product(_: nn.Module, x: Tensor) -> Tensor:
    table = torch.linspace(0, 1, 16).reshape(4, 4)
    return x @ (table @ table + 1e-5)


@pytest.mark.parametrize("grad", [True, False])
def test_constants_keep_the_precision_that_the_forward_gives_them(grad: bool):
    model, x = Runs(constant_product), torch.randn(2, 4)
    expected = model(x)
    with torch.set_grad_enabled(grad):
        (region,) = capture(model, is_layer).regions
    install_graph(region.module, region.graph, region.guard)
    assert torch.equal(model(x), expected)


def sets_back(module: nn.Module, x: Tensor) -> Tensor:
    module.scale = 2.0
    x = x * module.scale
    module.scale = 1.0
    return x


def test_a_value_that_is_set_read_and_set_back_is_not_frozen_into_a_graph():
    model = nn.Sequential(Runs(sets_back), nn.Linear(4, 4))
    model[0].scale = 1.0
    captured = capture(model, is_layer)
    for region in captured.regions:
        install_graph(region.module, region.graph, region.guard)
    x = torch.randn(2, 4)
    assert torch.equal(model(x), model[1](model[0].fc(x * 2)))


def test_a_failed_attempt_leaves_the_model_as_it_was():
    def counts(module: nn.Module, x: Tensor) -> Tensor:
        module.count += 1
        return x

    model = nn.Sequential(nn.Linear(4, 4), Runs(counts))
    model[1].count = 0
    captured = capture(model, is_layer)
    assert [island.name for island in captured.islands] == ["1"]
    assert model[1].count == 0
