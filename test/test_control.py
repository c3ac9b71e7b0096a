"""Switches by name, freezing, and the schedule."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amct_fx import control, prepare_qat_amct

from .networks import Net, example


@pytest.fixture
def prepared() -> nn.Module:
    model = prepare_qat_amct(Net())
    model(example())
    return model


def test_everything_off_is_the_float_model():
    model = Net().eval()
    prepared = prepare_qat_amct(model)
    control.disable_fake_quant(prepared)
    assert torch.equal(prepared(example()), model(example()))


def test_a_pattern_switches_only_what_it_matches(prepared):
    quantized = prepared.eval()(example())
    assert control.disable_fake_quant(prepared, "ri*") == ["right"]
    assert not torch.equal(prepared(example()), quantized)
    control.enable_fake_quant(prepared)
    assert torch.equal(prepared(example()), quantized)


def test_a_pattern_that_matches_nothing_names_close_layers(prepared):
    with pytest.raises(RuntimeError, match="'rigth'; did you mean 'right'"):
        control.disable_fake_quant(prepared, "rigth")


def test_a_float_model_has_no_switches():
    with pytest.raises(RuntimeError, match="prepare_qat_amct first"):
        control.enable_observer(Net())


def test_a_disabled_observer_does_not_calibrate():
    prepared = prepare_qat_amct(Net())
    control.disable_observer(prepared, "head")
    prepared(example())
    assert not prepared.head.input_fake_quant.is_calibrated
    assert prepared.stem.input_fake_quant.is_calibrated
    control.enable_observer(prepared)
    prepared(example())
    assert prepared.head.input_fake_quant.is_calibrated


def test_frozen_ranges_do_not_learn_and_resume(prepared):
    control.freeze_ranges(prepared, "stem")
    prepared(example()).sum().backward()
    assert prepared.stem.input_fake_quant.clip_max.grad is None
    assert prepared.left.input_fake_quant.clip_max.grad is not None
    control.freeze_ranges(prepared, "stem", frozen=False)
    prepared(example()).sum().backward()
    assert prepared.stem.input_fake_quant.clip_max.grad is not None


def test_frozen_batch_norms_keep_their_statistics(prepared):
    assert control.freeze_bn(prepared) == ["bn"]
    before = prepared.bn.running_mean.clone()
    prepared(3 * example())
    assert torch.equal(prepared.bn.running_mean, before)


def test_the_schedule_resumes_from_its_state(prepared):
    first = control.QATSchedule(float_epochs=1, freeze_bn_epoch=2)
    assert [first.apply(prepared) for _ in range(2)] == ["calibrate", "learn"]
    second = control.QATSchedule()
    second.load_state_dict(first.state_dict())
    prepared.train()
    assert second.apply(prepared) == "learn, bn frozen"
    assert not prepared.bn.training
