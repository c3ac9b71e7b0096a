"""ARQ computes once while a weight does not change, and never hands out a stale result."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from amct_fx import prepare_qat_amct
from amct_fx.control import weights_unchanged
from amct_fx.observers import ARQFakeQuantize, arq, functional


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Every weight that ARQ computes a result for."""
    weights: list[Tensor] = []
    original = arq.quantize_weight

    def spy(weight: Tensor, *rest: Any) -> Tensor:
        weights.append(weight)
        return original(weight, *rest)

    monkeypatch.setattr(arq, "quantize_weight", spy)
    return weights


def module_and_weight() -> tuple[ARQFakeQuantize, nn.Parameter]:
    return ARQFakeQuantize(ch_axis=0, num_channels=4), nn.Parameter(torch.randn(4, 6))


def expected(weight: Tensor) -> Tensor:
    return functional.arq_fake_quantize(weight, ch_axis=0)


def test_an_evaluation_computes_a_weight_twice_at_most(computed: list[Tensor]) -> None:
    module, weight = module_and_weight()
    for _ in range(6):
        assert torch.equal(module.eval()(weight), expected(weight))
    assert len(computed) == 2


def test_gradient_accumulation_computes_once_a_step(computed: list[Tensor]) -> None:
    module, weight = module_and_weight()
    for step in range(3):
        computed.clear()
        weight.grad = None
        for _ in range(4):
            y = module(weight)
            assert torch.equal(y, expected(weight))
            y.backward(torch.ones_like(y))
        assert len(computed) == (2 if step == 0 else 1)
        assert torch.equal(weight.grad, torch.full_like(weight, 4.0))
        with torch.no_grad():
            weight.sub_(0.1)


def test_a_training_that_changes_its_weights_keeps_nothing() -> None:
    module, weight = module_and_weight()
    for _ in range(4):
        module(weight)
        assert module._cache._kept is None
        with torch.no_grad():
            weight.mul_(1.1)


CHANGES: dict[str, Any] = {
    "in place": lambda w: w.detach().mul_(2),
    "through data": lambda w: w.data.mul_(2),
    "through numpy": lambda w: w.detach().numpy().__imul__(2),
    "one element through data": lambda w: w.data[3, 5:].fill_(77.0),
    "two rows swapped through data": lambda w: w.data.copy_(w.data.flip(0).clone()),
    "another tensor as data": lambda w: setattr(w, "data", w.data * 3),
    "a state dict": lambda w: w.data.copy_(torch.randn(4, 6)),
    "not finite": lambda w: w.data.fill_(float("nan")),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_noticed(name: str, training: bool) -> None:
    module, weight = module_and_weight()
    module.train(training)
    for _ in range(3):
        module(weight)
    for _ in range(3):
        CHANGES[name](weight)
        for _ in range(3):
            torch.testing.assert_close(
                module(weight), expected(weight), rtol=0, atol=0, equal_nan=True
            )
    if training:
        assert torch.equal(
            module.scale.nan_to_num(), functional.arq_qparams(weight, ch_axis=0).nan_to_num()
        )


def test_a_result_changed_in_place_is_not_handed_out_again() -> None:
    module, weight = module_and_weight()
    module.eval()
    with torch.no_grad():
        for _ in range(4):
            y = module(weight)
            assert torch.equal(y, expected(weight))
            y.mul_(2)


def test_other_settings_and_other_weights_get_their_own_result() -> None:
    module, weight = module_and_weight()
    for _ in range(3):
        module(weight)
    module.num_bits = 4
    assert torch.equal(module(weight), functional.arq_fake_quantize(weight, num_bits=4, ch_axis=0))
    other = torch.randn(4, 6)
    for w in (other, weight, other):
        result = functional.arq_fake_quantize(w, num_bits=4, ch_axis=0)
        assert torch.equal(module(w), result)


def test_copies_and_pickles_start_empty() -> None:
    module, weight = module_and_weight()
    for _ in range(3):
        module(weight)
    assert module._cache._kept is not None
    for clone in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert clone._cache._kept is None
        assert torch.equal(clone(weight), expected(weight))


def test_a_replaced_or_averaged_model_uses_its_own_weights() -> None:
    model = prepare_qat_amct(nn.Sequential(nn.Linear(4, 4))).eval()
    x = torch.randn(3, 4)
    before = [model(x) for _ in range(4)][-1]
    replaced = {"0.weight": torch.randn(4, 4)}
    fresh = copy.deepcopy(model)
    fresh[0].weight.data.copy_(replaced["0.weight"])
    assert torch.equal(functional_call(model, replaced, (x,)), fresh(x))
    assert torch.equal(model(x), before)
    average = torch.optim.swa_utils.AveragedModel(model)
    for _ in range(3):
        average(x)
    with torch.no_grad():
        model[0].weight.add_(1)
    average.update_parameters(model)
    assert torch.equal(average(x), copy.deepcopy(average)(x))


def test_inference_mode_and_back() -> None:
    module, weight = module_and_weight()
    module.eval()
    with torch.inference_mode():
        for _ in range(3):
            assert torch.equal(module(weight), expected(weight))
    for _ in range(3):
        y = module(weight)
    y.sum().backward()
    assert torch.equal(weight.grad, torch.ones_like(weight))


def test_the_promise_that_no_weight_changes(computed: list[Tensor]) -> None:
    model = prepare_qat_amct(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)))
    x = torch.randn(3, 4)
    model(x)
    computed.clear()
    with weights_unchanged(model):
        for _ in range(5):
            model(x).sum().backward()
    assert len(computed) == 2
    with torch.no_grad():
        model[0].weight.mul_(2)
    fresh = copy.deepcopy(model)
    assert torch.equal(model.eval()(x), fresh.eval()(x))


def test_compiled_models_follow_changed_weights() -> None:
    torch._dynamo.reset()
    model = prepare_qat_amct(nn.Sequential(nn.Linear(4, 4))).eval()
    x = torch.randn(3, 4)
    for _ in range(3):
        model(x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(compiled(x), model(x))
        model[0].weight.data.mul_(2)
