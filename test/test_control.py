"""Switches by name, freezing, and the schedule."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

from amct_fx import control, prepare_qat_amct

from .networks import Net, Pyramid, example


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


def fake_quant_on(model: nn.Module) -> dict[str, bool]:
    return {
        name.removesuffix(".input_fake_quant"): bool(module.fake_quant_enabled)
        for name, module in model.named_modules()
        if name.endswith("input_fake_quant")
    }


def test_the_schedule_leaves_switches_of_the_user_alone(prepared):
    schedule = control.QATSchedule(float_epochs=2, freeze_ranges_epoch=4)
    control.disable_fake_quant(prepared, "stem")
    control.freeze_ranges(prepared, "head")
    schedule.apply(prepared)
    assert not any(fake_quant_on(prepared).values())
    control.enable_fake_quant(prepared, "left")
    schedule.apply(prepared)
    assert [name for name, on in fake_quant_on(prepared).items() if on] == ["left"]
    schedule.apply(prepared)
    assert [name for name, on in fake_quant_on(prepared).items() if not on] == ["stem"]
    control.disable_fake_quant(prepared, "head")
    schedule.apply(prepared)
    assert not fake_quant_on(prepared)["head"]
    assert not prepared.head.input_fake_quant.clip_max.requires_grad
    assert prepared.left.input_fake_quant.clip_max.requires_grad
    schedule.apply(prepared)
    assert not prepared.left.input_fake_quant.clip_max.requires_grad
    assert "head.input_fake_quant" not in schedule.frozen


def test_a_resumed_schedule_switches_what_it_had_switched():
    first = prepare_qat_amct(Net())
    schedule = control.QATSchedule(float_epochs=2, freeze_ranges_epoch=0)
    schedule.apply(first)
    resumed = control.QATSchedule()
    resumed.load_state_dict(json.loads(json.dumps(schedule.state_dict())))
    second = nn.DataParallel(prepare_qat_amct(Net()))
    resumed.apply(second)
    assert not any(fake_quant_on(second).values())
    assert not second.module.stem.input_fake_quant.clip_max.requires_grad
    resumed.apply(second)
    assert all(fake_quant_on(second).values())


def test_a_schedule_needs_a_prepared_model():
    with pytest.raises(RuntimeError, match="prepare_qat_amct first"):
        control.QATSchedule().apply(Net())


def test_param_groups_hold_each_parameter_once_and_ranges_do_not_decay():
    cfg = "retrain_weight_quant_config { ulq_retrain { } }"
    model = prepare_qat_amct(Pyramid(), cfg, reused="quantize")
    others, ranges = control.param_groups(model, weight_decay=0.1)
    both = [*others["params"], *ranges["params"]]
    assert len(both) == len(set(both))
    assert set(both) == set(model.parameters())
    assert (others["weight_decay"], ranges["weight_decay"]) == (0.1, 0.0)
    learned = {p for name, p in model.named_parameters() if "fake_quant" in name}
    assert set(ranges["params"]) == learned
    assert any(name.endswith("weight_fake_quant.scale") for name, _ in model.named_parameters())
    torch.optim.AdamW([others, ranges])


def test_learned_weight_scales_can_have_a_learning_rate_of_their_own():
    cfg = "retrain_weight_quant_config { ulq_retrain { } }"
    model = prepare_qat_amct(Pyramid(), cfg, reused="quantize")
    others, clips, scales = control.param_groups(model, lr=1e-3, range_lr=1e-2, scale_lr=1e-5)
    assert [group["lr"] for group in (others, clips, scales)] == [1e-3, 1e-2, 1e-5]
    named = {name: p for name, p in model.named_parameters() if "fake_quant" in name}
    assert set(scales["params"]) == {p for name, p in named.items() if name.endswith(".scale")}
    assert set(clips["params"]) == {p for name, p in named.items() if ".clip_" in name}
    assert scales["weight_decay"] == 0.0
    torch.optim.AdamW([others, clips, scales])


def test_automatic_learning_rates_of_weight_scales_follow_the_width_of_each():
    cfg = """
    retrain_weight_quant_config { ulq_retrain { } }
    override_layer_configs {
        layer_name: "left" retrain_weight_quant_config { ulq_retrain { dst_type: INT4 } }
    }
    """
    model = prepare_qat_amct(Net(), cfg)
    groups = control.param_groups(model, lr=0.127, scale_lr="auto")
    assert [group["lr"] for group in groups[2:]] == pytest.approx([0.127 / 7, 0.127 / 127])
    assert set(groups[2]["params"]) == {model.left.weight_fake_quant.scale}
    given = [parameter for group in groups for parameter in group["params"]]
    assert len(given) == len(set(given))
    assert set(given) == set(model.parameters())
    assert all(group["weight_decay"] == 0.0 for group in groups[1:])


def test_automatic_learning_rates_need_that_of_the_weights(prepared):
    with pytest.raises(ValueError, match=r"give that as lr="):
        control.param_groups(prepared, scale_lr="auto")
    with pytest.raises(ValueError, match=r"scale_lr='fast'.*\"auto\" or None"):
        control.param_groups(prepared, lr=1e-3, scale_lr="fast")
    assert len(control.param_groups(prepared, lr=1e-3, scale_lr="auto")) == 2  # ARQ learns nothing
