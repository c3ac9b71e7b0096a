"""``y += 1``: Python writes into the old tensor, which something else may read."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amct_fx.graph import capture, install_graph

Forward = Callable[[Any, Tensor], Tensor]


class Runs(nn.Module):
    """Runs a function of the test."""

    def __init__(self, function: Forward) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("factor", torch.ones(4))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x)


def same_name(m: Runs, x: Tensor) -> Tensor:
    y = before = m.fc(x)
    y += 1
    return m.out(y) + before


def view_of_it(m: Runs, x: Tensor) -> Tensor:
    y = m.fc(x)
    flat = y.view(-1)
    flat *= 2
    return m.out(y)


def it_under_a_view(m: Runs, x: Tensor) -> Tensor:
    y = m.fc(x)
    flat = y.view(-1)
    y -= 2
    return m.out(y) + flat.sum()


def part_of_it(m: Runs, x: Tensor) -> Tensor:
    y = m.fc(x)
    first = y[:, :2]
    first /= 2
    return m.out(y)


def buffer(m: Runs, x: Tensor) -> Tensor:
    factor = m.factor
    factor *= 2
    return m.out(m.fc(x) * m.factor)


def weight(m: Runs, x: Tensor) -> Tensor:
    data = m.fc.weight.data
    data *= 0.5
    return m.out(m.fc(x))


def residual(m: Runs, x: Tensor) -> Tensor:
    y = m.fc(x)
    y += x
    y *= 0.5
    return m.out(y)


def parts(m: Runs, x: Tensor) -> Tensor:
    y = m.fc(x).unflatten(1, (2, 2))
    first, second = y[:, 0], y[:, 1]
    first *= 3
    return m.out(torch.cat([first, second], 1))


def size(m: Runs, x: Tensor) -> Tensor:
    count = before = x.shape[0] * x.size(1)
    count *= 2
    return m.out(m.fc(x) * count + before)


def regions_of(function: Forward) -> list[str]:
    """Trace a model that runs ``function``; it must compute what it did."""
    model, x = Runs(function), torch.randn(3, 4)
    expected = copy.deepcopy(model)(x)
    captured = capture(model, lambda module: type(module) is nn.Linear)
    for region in captured.regions:
        install_graph(region.module, region.graph, region.guard)
    assert torch.equal(model(x), expected)
    return [region.name for region in captured.regions]


@pytest.mark.parametrize(
    "function", [same_name, view_of_it, it_under_a_view, part_of_it, buffer, weight]
)
def test_a_write_that_something_else_reads_stays_python(function: Forward) -> None:
    assert regions_of(function) == []


@pytest.mark.parametrize("function", [residual, parts, size])
def test_a_write_that_nothing_else_reads_is_traced(function: Forward) -> None:
    assert regions_of(function) == [""]


def test_a_part_that_writes_into_what_the_parent_reads_again_stays_python() -> None:
    def adds(m: Runs, x: Tensor) -> Tensor:
        x += 1
        return m.out(x)

    class Parent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc, self.part = nn.Linear(4, 4), Runs(adds)

        def forward(self, x: Tensor) -> Tensor:
            y = self.fc(x)
            return self.part(y) + y

    model, x = Parent(), torch.randn(3, 4)
    expected = model(x)
    captured = capture(model, lambda module: type(module) is nn.Linear)
    for region in captured.regions:
        install_graph(region.module, region.graph, region.guard)
    assert torch.equal(model(x), expected)
