"""Prepare: what is inserted where, what stays, and what training does to it."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
import torch.fx
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.ao.quantization import disable_fake_quant

from amct_fx import AmctWarning, prepare_qat_amct, summarize
from amct_fx.nn import qat
from amct_fx.observers import ULQFakeQuantize

from .networks import Net, example, quantizer_targets


@pytest.fixture
def x() -> Tensor:
    return example()


def test_only_inputs_and_weights_of_quantizable_layers_are_quantized():
    prepared = prepare_qat_amct(Net())
    assert quantizer_targets(prepared) == [
        "stem.input_fake_quant",
        "left.input_fake_quant",
        "head.input_fake_quant",
    ]
    assert type(prepared.bn) is nn.BatchNorm2d


def test_consumers_of_one_tensor_share_the_quantizer_of_the_first():
    prepared = prepare_qat_amct(Net())
    owners = [name for name, m in prepared.named_modules() if isinstance(m, ULQFakeQuantize)]
    assert owners == [
        "stem.input_fake_quant",
        "left.input_fake_quant",
        "head.input_fake_quant",
    ]
    rows = {row.name: row.input for row in summarize(prepared).rows}
    assert rows["right"].endswith("of left")


def test_consumers_with_other_settings_get_their_own_quantizer():
    cfg = """override_layer_configs { layer_name: "right"
        retrain_data_quant_config { ulq_quantize { dst_type: INT16 } } }"""
    prepared = prepare_qat_amct(Net(), cfg)
    assert "right.input_fake_quant" in quantizer_targets(prepared)
    assert prepared.right.input_fake_quant.num_bits == 16


def test_a_skipped_consumer_reads_the_float_tensor(x):
    prepared = prepare_qat_amct(Net(), 'skip_layers: "left"')
    assert type(prepared.left) is nn.Conv2d
    assert quantizer_targets(prepared)[1] == "right.input_fake_quant"


def test_an_owner_that_runs_second_still_quantizes_in_time(x):
    class SecondFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 4, 1)
            self.b = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = self.b(x)
            return y + self.a(x)

    prepared = prepare_qat_amct(SecondFirst())
    assert quantizer_targets(prepared) == ["a.input_fake_quant"]
    assert torch.isfinite(prepared(x)).all()


def test_readers_before_and_after_an_in_place_change_do_not_share(x):
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 4, 1)
            self.b = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = x * 1.0
            y = self.a(x)
            x.relu_()
            return y + self.b(x)

    model = InPlace()
    prepared = prepare_qat_amct(model)
    assert quantizer_targets(prepared) == ["a.input_fake_quant", "b.input_fake_quant"]
    prepared.apply(disable_fake_quant)
    assert torch.allclose(prepared(x), model(x))
    assert prepared.b.input_fake_quant.fixed_min
    assert not prepared.a.input_fake_quant.fixed_min


def test_with_fake_quant_disabled_the_model_is_the_float_model(x):
    model = Net().eval()
    prepared = prepare_qat_amct(model)
    prepared.apply(disable_fake_quant)
    assert torch.equal(prepared(x), model(x))


def test_fixed_min_follows_the_relu_rule_and_the_nonnegative_rule():
    relu = prepare_qat_amct(Net())
    assert [m.fixed_min for m in relu.modules() if isinstance(m, ULQFakeQuantize)] == [
        False,
        True,
        False,
    ]
    more = prepare_qat_amct(Net(), fixed_min_rule="nonnegative")
    assert more.head.input_fake_quant.fixed_min


def test_an_explicit_fixed_min_always_wins():
    cfg = "retrain_data_quant_config { ulq_quantize { fixed_min: false } }"
    prepared = prepare_qat_amct(Net(), cfg)
    assert not prepared.left.input_fake_quant.fixed_min


def test_the_input_model_is_untouched(x):
    model = Net()
    state = copy.deepcopy(model.state_dict())
    text, rng = repr(model), torch.get_rng_state()
    prepared = prepare_qat_amct(model)
    prepared(x).sum().backward()
    assert repr(model) == text
    assert type(model) is Net
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert torch.equal(rng, torch.get_rng_state())


def test_in_place_changes_the_model_itself():
    model = Net()
    stem = model.stem
    assert prepare_qat_amct(model, inplace=True) is model
    assert model.stem is stem
    assert isinstance(stem, qat.Conv2d)


def test_a_float_checkpoint_loads_by_name(x):
    torch.manual_seed(3)
    other = Net().eval()
    prepared = prepare_qat_amct(Net()).eval()
    result = prepared.load_state_dict(other.state_dict(), strict=False)
    assert not result.unexpected_keys
    assert all("fake_quant" in key for key in result.missing_keys)
    prepared.apply(disable_fake_quant)
    assert torch.equal(prepared(x), other(x))


def test_class_methods_attributes_and_modes_survive():
    model = Net().eval()
    model.left.weight.requires_grad_(False)
    model.tag = {"a": 1}
    prepared = prepare_qat_amct(model)
    assert isinstance(prepared, Net)
    assert prepared.describe() == "Net with 4 classes"
    assert prepared.tag == {"a": 1}
    assert not any(module.training for module in prepared.modules())
    assert not prepared.left.weight.requires_grad
    assert prepared.left.stride == (1, 1)


def test_every_learnable_exists_after_prepare(x):
    prepared = prepare_qat_amct(Net())
    before = {name: (id(p), p.shape) for name, p in prepared.named_parameters()}
    keys = list(prepared.state_dict())
    prepared(x)
    assert before == {name: (id(p), p.shape) for name, p in prepared.named_parameters()}
    assert list(prepared.state_dict()) == keys
    assert {name for name in before if "fake_quant" in name} == {
        f"{layer}.input_fake_quant.clip_{end}"
        for layer in ("stem", "left", "head")
        for end in ("max", "min")
    }


@pytest.mark.parametrize(("optimizer", "lr"), [(torch.optim.SGD, 0.5), (torch.optim.AdamW, 0.05)])
def test_the_users_own_loop_trains_it(optimizer, lr):
    torch.manual_seed(0)
    prepared = prepare_qat_amct(Net())
    opt = optimizer(prepared.parameters(), lr=lr)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 20, 0.5)
    y = torch.arange(16) % 4
    x = example(16) + y[:, None, None, None]
    losses = []
    for epoch in range(40):
        for part, target in zip(x.split(8), y.split(8), strict=True):
            loss = F.cross_entropy(prepared(part), target) / 2
            loss.backward()
        losses.append(loss.item())
        opt.step()
        opt.zero_grad(set_to_none=True)
        schedule.step()
        if epoch % 5 == 0:
            prepared.eval()
            prepared(x)
            prepared.train()
    assert losses[-1] < 0.7 * losses[0]


def test_validation_never_moves_a_range(x):
    prepared = prepare_qat_amct(Net())
    prepared(x)
    state = copy.deepcopy(prepared.state_dict())
    prepared.eval()
    prepared(100 * x)
    with torch.no_grad():
        prepared(100 * x)
    with torch.inference_mode():
        prepared(100 * x)
    assert all(torch.equal(state[key], value) for key, value in prepared.state_dict().items())
    prepared.train()
    prepared(x).sum().backward()


def test_training_resumes_bit_for_bit(x):
    def steps(model: nn.Module, count: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(count):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()

    torch.manual_seed(0)
    float_model = Net()
    straight = prepare_qat_amct(float_model, "batch_num: 2")
    steps(straight, 6)
    first = prepare_qat_amct(float_model, "batch_num: 2")
    steps(first, 3)
    second = prepare_qat_amct(Net(), "batch_num: 2")
    second.load_state_dict(first.state_dict())
    steps(second, 3)
    for key, value in straight.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key


def test_two_prepared_models_share_nothing(x):
    model = Net()
    first, second = prepare_qat_amct(model), prepare_qat_amct(model)
    state = copy.deepcopy(second.state_dict())
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    first(x).sum().backward()
    optimizer.step()
    assert all(torch.equal(state[key], value) for key, value in second.state_dict().items())


def test_one_summary_line_is_logged(caplog):
    with caplog.at_level(logging.INFO, logger="amct_fx"):
        prepare_qat_amct(Net())
    assert [record.message for record in caplog.records] == ["prepared 4 of 4 layers"]


def test_linear_per_channel_from_the_global_section_warns_once():
    cfg = "retrain_weight_quant_config { arq_retrain { channel_wise: true } }"
    with pytest.warns(AmctWarning, match="head"):
        prepared = prepare_qat_amct(Net(), cfg)
    assert prepared.head.weight_fake_quant.ch_axis is None


def test_weight_ulq_adds_a_learned_scale_that_trains(x):
    cfg = "retrain_weight_quant_config { ulq_retrain { } }"
    prepared = prepare_qat_amct(Net(), cfg)
    scale = prepared.left.weight_fake_quant.scale
    assert scale.shape == (8,)
    prepared(x).square().sum().backward()
    assert scale.grad.abs().sum() > 0


def test_dictionaries_tuples_and_none_come_back_as_they_were(x):
    class Outputs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> dict[str, object]:
            return {"y": self.conv(x), "aux": None, "n": 3, "both": (x, [x])}

    output = prepare_qat_amct(Outputs())(x)
    assert (output["aux"], output["n"]) == (None, 3)
    assert isinstance(output["both"], tuple)
    output["y"].sum().backward()


def test_a_single_layer_can_be_the_model(x):
    prepared = prepare_qat_amct(nn.Conv2d(3, 4, 1))
    assert isinstance(prepared, qat.Conv2d)
    assert prepared.input_fake_quant is not None
    assert torch.isfinite(prepared(x)).all()
