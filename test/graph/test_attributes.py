"""Plain attributes that forward reads stay alive."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from amct_fx import convert_amct, prepare_qat_amct
from amct_fx.graph import capture, guard_of
from amct_fx.observers import ULQFakeQuantize


class Inner(nn.Module):
    """Reads attributes of many kinds."""

    shift = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.gain = 2.0
        self.sizes = (-1, 4)
        self.skip: str | None = None
        self.unread = 3

    @property
    def double(self) -> float:
        return self.gain * 2

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x).reshape(self.sizes) * self.double + self.shift
        return y if self.skip is None else y + x


class Outer(nn.Module):
    """Holds the readers."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(Inner(), nn.ReLU())
        self.second = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


CHANGES = [("gain", 3.0), ("shift", -1.0), ("skip", "yes"), ("sizes", (1, -1)), ("gain", 2)]


def test_the_values_that_the_graph_relies_on_are_known():
    (region,) = capture(Outer(), lambda module: type(module) is nn.Linear).regions
    values = (("gain", 2.0), ("shift", 1.0), ("sizes", (-1, 4)), ("skip", None))
    assert set(region.guard.watched) == {
        (path, name, value) for path in ("first.0", "second") for name, value in values
    }


def same(model: nn.Module) -> nn.Module:
    return model


def through_pickle(model: nn.Module) -> nn.Module:
    return pickle.loads(pickle.dumps(model))


@pytest.mark.parametrize("way", [same, copy.deepcopy, through_pickle, convert_amct])
@pytest.mark.parametrize(("name", "value"), CHANGES)
def test_a_changed_attribute_changes_what_the_model_computes(way, name, value):
    torch.manual_seed(0)
    model = Outer()
    x = torch.randn(1, 4)
    prepared = prepare_qat_amct(model)
    prepared(4 * x)  # wide ranges
    prepared = way(prepared.eval())
    before = prepared(x)
    for part in (model.first[0], prepared.first[0]):
        setattr(part, name, value)
    found, expected = prepared(x), model(x)
    assert (found - expected).abs().max() <= 0.05 * expected.abs().max()
    setattr(prepared.first[0], name, getattr(Inner(), name))
    assert torch.equal(prepared(x), before)


def test_a_compiled_model_notices_too():
    model = Outer()
    prepared = prepare_qat_amct(model)
    x = torch.randn(3, 4)
    prepared(x)
    compiled = torch.compile(prepared, fullgraph=True, backend="eager")
    assert torch.equal(compiled(x), prepared(x))
    prepared.second.gain = 5.0
    assert torch.equal(compiled(x), prepared(x))
    assert guard_of(prepared).watched


def test_an_island_does_not_make_its_parent_watch_it():
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            return self.fc(x) * self.calls

    model = nn.Sequential(Counts(), nn.Linear(4, 4), Inner())
    regions = capture(model, lambda module: type(module) is nn.Linear).regions
    assert {path for path, _, _ in regions[0].guard.watched} == {"2"}


def test_each_call_quantizes_each_tensor_once_while_nothing_changes():
    prepared = prepare_qat_amct(Outer())
    calls = []
    for part in prepared.modules():
        if isinstance(part, ULQFakeQuantize):
            part.register_forward_hook(lambda *_: calls.append(1))
    prepared(torch.randn(2, 4))
    assert len(calls) == 2
