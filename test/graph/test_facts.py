"""Facts about graphs: non-negative inputs, versions of tensors, batch norm pairs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from amct_fx.graph import (
    batch_norm_after,
    capture,
    is_nonnegative_input,
    layer_calls,
    tensor_version,
)


class Body(nn.Module):
    """A layer behind whatever ``before`` does; ``parts`` are its modules."""

    def __init__(self, before: Callable[[nn.Module, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.before = before
        for name, part in parts.items():
            self.add_module(name, part)
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.before(self, x))


def call_of_layer(model: nn.Module) -> fx.Node:
    (region,) = capture(model, lambda m: type(m) is nn.Conv2d).regions
    (call,) = layer_calls(region.graph, model)[model.layer]
    return call


def lower_through_view(x: Tensor) -> Tensor:
    x.view(-1).sub_(3)
    return x


def relu_of_a_part(x: Tensor) -> Tensor:
    x[:, :1].relu_()
    return x


RELUS = {
    "module": Body(lambda m, x: m.act(x), act=nn.ReLU()),
    "module in place": Body(lambda m, x: m.act(x), act=nn.ReLU(inplace=True)),
    "F.relu": Body(lambda m, x: F.relu(x)),
    "F.relu in place": Body(lambda m, x: F.relu(x, inplace=True)),
    "F.relu_": Body(lambda m, x: F.relu_(x * 1)),
    "torch.relu": Body(lambda m, x: torch.relu(x)),
    "method": Body(lambda m, x: x.relu()),
    "method in place": Body(lambda m, x: (x * 1).relu_()),
    "through dropout": Body(lambda m, x: m.drop(x.relu()), drop=nn.Dropout(0.5)),
    "through identity": Body(lambda m, x: m.same(x.relu()), same=nn.Identity()),
    "through F.dropout": Body(lambda m, x: F.dropout(x.relu(), 0.5, True)),
    "add then relu": Body(lambda m, x: torch.relu(x + x)),
}

ONLY_NONNEGATIVE = {
    "max pool": Body(lambda m, x: m.pool(x.relu()), pool=nn.MaxPool2d(2)),
    "functional max pool": Body(lambda m, x: F.max_pool2d(x.relu(), 2)),
    "average pool": Body(lambda m, x: F.adaptive_avg_pool2d(x.relu(), 1)),
    "flatten": Body(lambda m, x: x.relu().flatten(2).unsqueeze(3)),
    "zero pad": Body(lambda m, x: F.pad(x.relu(), (1, 1, 1, 1))),
    "concat": Body(lambda m, x: torch.cat([x.relu(), x.sigmoid()], 0)),
    "add": Body(lambda m, x: x.relu() + x.abs()),
    "relu6": Body(lambda m, x: m.act(x), act=nn.ReLU6()),
    "clamp": Body(lambda m, x: x.clamp(min=0)),
    "sigmoid": Body(lambda m, x: torch.sigmoid(x)),
    "softmax": Body(lambda m, x: F.softmax(x, 1)),
    "hardtanh from 0": Body(lambda m, x: m.act(x), act=nn.Hardtanh(0, 1)),
}

NEVER = {
    "graph input": Body(lambda m, x: x),
    "batch norm": Body(lambda m, x: m.bn(x.relu()), bn=nn.BatchNorm2d(4)),
    "hardswish": Body(lambda m, x: F.hardswish(x)),
    "gelu": Body(lambda m, x: F.gelu(x)),
    "leaky relu": Body(lambda m, x: F.leaky_relu(x)),
    "prelu": Body(lambda m, x: m.act(x), act=nn.PReLU()),
    "add of anything": Body(lambda m, x: x.relu() + x),
    "add of a negative number": Body(lambda m, x: x.relu() + -0.5),
    "concat of anything": Body(lambda m, x: torch.cat([x.relu(), x], 0)),
    "clamp below": Body(lambda m, x: x.clamp(min=-1)),
    "pad with a negative value": Body(lambda m, x: F.pad(x.relu(), (1, 1), value=-1.0)),
    "hardtanh": Body(lambda m, x: m.act(x), act=nn.Hardtanh()),
    "add by keyword": Body(lambda m, x: torch.add(x.relu(), other=x)),
    "add with a factor": Body(lambda m, x: torch.add(x.relu(), x.relu(), alpha=-2)),
    "product by keyword": Body(lambda m, x: x.relu().mul(other=x)),
    "changed through a view": Body(lambda m, x: lower_through_view(x.relu())),
    "relu of a part only": Body(lambda m, x: relu_of_a_part(x * 1)),
    "subtraction": Body(lambda m, x: x.relu() - x.relu()),
}


@pytest.mark.parametrize("model", RELUS.values(), ids=RELUS)
def test_a_relu_in_any_form_makes_the_input_nonnegative(model):
    call = call_of_layer(model)
    assert is_nonnegative_input(call, model, "relu")
    assert is_nonnegative_input(call, model, "nonnegative")


@pytest.mark.parametrize("model", ONLY_NONNEGATIVE.values(), ids=ONLY_NONNEGATIVE)
def test_the_nonnegative_rule_sees_more_than_amct(model):
    call = call_of_layer(model)
    assert not is_nonnegative_input(call, model, "relu")
    assert is_nonnegative_input(call, model, "nonnegative")


@pytest.mark.parametrize("model", NEVER.values(), ids=NEVER)
def test_nothing_is_claimed_without_proof(model):
    call = call_of_layer(model)
    assert not is_nonnegative_input(call, model, "relu")
    assert not is_nonnegative_input(call, model, "nonnegative")


def test_the_nonnegative_rule_never_lies_on_data():
    x = torch.randn(2, 4, 6, 6)
    for model in (*RELUS.values(), *ONLY_NONNEGATIVE.values()):
        assert model.before(model, x.clone()).min() >= 0


class TwoReaders(nn.Module):
    """The second layer reads the tensor after it was changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)
        self.second = nn.Conv2d(4, 4, 1)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        y = self.layer(x)
        self.act(x)
        return y + self.second(x)


def test_readers_before_and_after_an_in_place_change_see_different_versions():
    model = TwoReaders()
    (region,) = capture(model, lambda m: type(m) is nn.Conv2d).regions
    calls = layer_calls(region.graph, model)
    first, second = calls[model.layer][0], calls[model.second][0]
    assert first.args == second.args
    assert tensor_version(first.args[0], first, model) is None
    assert tensor_version(first.args[0], second, model).target == "act"
    assert not is_nonnegative_input(first, model)
    assert is_nonnegative_input(second, model)


class AfterLayer(nn.Module):
    """A layer, and whatever ``after`` does with its output."""

    def __init__(self, after: Callable[[nn.Module, Tensor], Tensor], **parts: nn.Module) -> None:
        super().__init__()
        self.after = after
        for name, part in parts.items():
            self.add_module(name, part)
        self.layer = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self, self.layer(x))


def test_a_batch_norm_that_is_the_only_reader_is_found():
    model = AfterLayer(lambda m, y: m.bn(y), bn=nn.BatchNorm2d(4))
    assert batch_norm_after(call_of_layer(model), model).target == "bn"


@pytest.mark.parametrize(
    "model",
    [
        AfterLayer(lambda m, y: m.bn(y) + y, bn=nn.BatchNorm2d(4)),
        AfterLayer(lambda m, y: m.bn(y.relu()), bn=nn.BatchNorm2d(4)),
        AfterLayer(lambda m, y: m.norm(y), norm=nn.GroupNorm(1, 4)),
        AfterLayer(lambda m, y: y),
    ],
    ids=["second reader", "relu between", "other norm", "output"],
)
def test_other_followers_are_no_batch_norm_pair(model):
    assert batch_norm_after(call_of_layer(model), model) is None


def test_a_functional_batch_norm_on_the_models_own_tensors_is_found():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Conv2d(4, 4, 1)
            self.bn = nn.BatchNorm2d(4)

        def forward(self, x: Tensor) -> Tensor:
            bn = self.bn
            return F.batch_norm(self.layer(x), bn.running_mean, bn.running_var, bn.weight, bn.bias)

    model = Functional()
    assert batch_norm_after(call_of_layer(model), model).target is F.batch_norm


class ThroughView(nn.Module):
    """Changes the tensor through a view between two readers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 4, 1)
        self.second = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        y = self.layer(x)
        x[:, :1].add_(5.0)
        return y + self.second(x)


def test_a_change_through_a_view_makes_a_new_version():
    model = ThroughView()
    (region,) = capture(model, lambda m: type(m) is nn.Conv2d).regions
    calls = layer_calls(region.graph, model)
    first, second = calls[model.layer][0], calls[model.second][0]
    assert tensor_version(first.args[0], first, model) is None
    assert tensor_version(first.args[0], second, model).target == "add_"


def test_the_result_of_an_in_place_operation_is_the_tensor_itself():
    class Twice(ThroughView):
        def forward(self, x: Tensor) -> Tensor:
            x = x * 2
            z = x.relu_()
            y = self.layer(z)
            x.sub_(3)
            return y + self.second(z)

    model = Twice()
    (region,) = capture(model, lambda m: type(m) is nn.Conv2d).regions
    calls = layer_calls(region.graph, model)
    assert is_nonnegative_input(calls[model.layer][0], model)
    assert not is_nonnegative_input(calls[model.second][0], model)
