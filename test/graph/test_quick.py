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


class Heads(nn.Module):
    """Has a second head while training, if there is one; hands its mode on if asked to."""

    def __init__(self, aux: bool, hands_on: bool = False) -> None:
        super().__init__()
        self.fc, self.aux = nn.Linear(4, 4), nn.Linear(4, 4) if aux else None
        self.has_aux, self.hands_on = aux, hands_on

    def forward(self, x: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        x = self.fc(x)
        if self.hands_on:
            x = nn.functional.dropout(x, 0.5, self.training)
        if self.training and self.has_aux:
            return x, self.aux(x)
        return x


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("hands_on", [True, False])
def test_a_branch_on_the_mode_that_changes_nothing_is_traced(hands_on: bool, training: bool):
    model, x = nn.Sequential(Heads(aux=False, hands_on=hands_on)).train(training), torch.ones(2, 4)
    captured = capture(model, is_layer)
    assert [region.name for region in captured.regions] == [""]
    assert captured.islands == []
    reads = [n.target for n in captured.regions[0].graph.nodes if n.op == "get_attr"]
    assert reads == (["0.training"] if hands_on else [])
    inner = model[0]
    install_graph(model, captured.regions[0].graph, captured.regions[0].guard)
    assert torch.equal(model.eval()(x), inner.fc(x))
    assert torch.equal(model.train()(x), inner.fc(x)) != hands_on


def test_a_branch_on_the_mode_that_matters_stays_python():
    captured = capture(nn.Sequential(Heads(aux=True)), is_layer)
    assert [island.name for island in captured.islands] == ["0"]
    assert "self.training" in captured.islands[0].reason


def test_what_only_one_mode_reads_is_watched():
    model = Heads(aux=False)
    captured = capture(model, is_layer)
    assert "has_aux" in [name for _, name, _ in captured.regions[0].guard.watched]


def test_a_constant_that_depends_on_the_mode_is_not_frozen():
    def scaled(module: nn.Module, x: Tensor) -> Tensor:
        return x * torch.full((4,), 2.0 if module.training else 1.0)

    model, x = Runs(scaled), torch.ones(2, 4)
    captured = capture(model, is_layer)
    for region in captured.regions:
        install_graph(region.module, region.graph, region.guard)
    for training in (True, False):
        expected = model.fc(scaled(model.train(training), x))
        assert torch.equal(model(x), expected)
