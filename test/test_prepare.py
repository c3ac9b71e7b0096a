"""Prepare: what is inserted where, what stays, and what training does to it."""

from __future__ import annotations

import copy
import logging
from dataclasses import dataclass

import pytest
import torch
import torch.fx
import torch.nn.functional as F
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.ao.quantization import QConfig, QConfigMapping, disable_fake_quant

from amct_fx import AmctWarning, convert_amct, get_qconfig_mapping, prepare_qat_amct, summarize
from amct_fx.graph import fx_graph_of
from amct_fx.nn import qat
from amct_fx.observers import ARQFakeQuantize, ULQFakeQuantize

from .networks import Attend, Branching, Net, NetWithIsland, Pyramid, example


@pytest.fixture
def x() -> Tensor:
    return example()


def quantizer_targets(model: nn.Module) -> list[str]:
    nodes = fx_graph_of(model).nodes
    return [str(n.target) for n in nodes if str(n.target).endswith("input_fake_quant")]


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


def test_an_island_keeps_its_python_code_and_its_layers_are_quantized(x):
    model = NetWithIsland().eval()
    prepared = prepare_qat_amct(model)
    assert isinstance(prepared.middle.conv, qat.Conv2d)
    assert prepared.middle.conv.quantizes_input
    assert type(prepared.middle) is Branching
    text = str(summarize(prepared))
    assert "not traced: middle (Branching)" in text
    assert "control flow" in text
    prepared.apply(disable_fake_quant)
    for batch in (1, 4):
        assert torch.equal(prepared(example(batch)), model(example(batch)))


def test_strict_refuses_islands_that_hold_layers():
    with pytest.raises(ValueError, match="middle"):
        prepare_qat_amct(NetWithIsland(), strict=True)


def test_the_fast_path_of_transformer_layers_does_not_bypass_the_quantizers():
    prepared = prepare_qat_amct(Attend()).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        prepared(x)
    assert prepared.encoder.layers[0].linear1.input_fake_quant.is_calibrated
    assert prepared.encoder.layers[1].linear2.input_fake_quant.is_calibrated


@pytest.mark.filterwarnings("ignore:one forward calls:amct_fx.AmctWarning")
def test_layers_left_out_are_reported_with_the_reason():
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.reflect = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
            self.twice = nn.Conv2d(4, 4, 1)
            self.tied = nn.Conv2d(4, 4, 1)
            self.other = nn.Conv2d(4, 4, 1)
            self.other.weight = self.tied.weight
            self.unused = nn.Conv2d(4, 4, 1)
            self.deep = nn.Conv3d(4, 4, 1, dilation=(2, 1, 1))
            self.plain = nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            x = self.twice(self.twice(self.reflect(x)))
            x = self.other(self.tied(x))
            return self.plain(self.deep(x[:, :, None]).squeeze(2))

    prepared = prepare_qat_amct(Odd())
    reasons = {row.name: row.reason for row in summarize(prepared).rows}
    assert "padding_mode" in reasons["reflect"]
    assert "2 times" in reasons["twice"]
    assert "shared" in reasons["tied"]
    assert "shared" in reasons["other"]
    assert "never called" in reasons["unused"]
    assert "dilation" in reasons["deep"]
    assert reasons["plain"] == ""
    assert prepared.other.weight is prepared.tied.weight
    assert torch.isfinite(prepared(example())).all()


def test_a_qconfig_mapping_can_be_printed_edited_and_passed():
    model = Net()
    mapping = get_qconfig_mapping('skip_layers: "head"', model)
    assert mapping.module_name_qconfigs["head"] is None
    mapping.set_module_name("left", None)
    prepared = prepare_qat_amct(model, mapping)
    assert type(prepared.left) is nn.Conv2d
    assert isinstance(prepared.right, qat.Conv2d)
    assert type(prepared.head) is nn.Linear


def test_a_hand_written_qconfig_mapping_works_by_type_and_name():
    qconfig = QConfig(
        activation=ULQFakeQuantize.with_args(batch_num=2),
        weight=ARQFakeQuantize.with_args(num_bits=8, ch_axis=0),
    )
    mapping = QConfigMapping().set_object_type(nn.Conv2d, qconfig).set_module_name("stem", None)
    prepared = prepare_qat_amct(Net(), mapping)
    assert type(prepared.stem) is nn.Conv2d
    assert isinstance(prepared.left, qat.Conv2d)
    assert type(prepared.head) is nn.Linear


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


@pytest.mark.filterwarnings("ignore:one forward calls:amct_fx.AmctWarning")
def test_reused_and_tied_layers_stay_float_by_default():
    rows = {row.name: row for row in summarize(prepare_qat_amct(Pyramid())).rows}
    assert [name for name, row in rows.items() if row.state == "qat"] == ["stem", "down"]
    assert "alias" not in rows


def test_reused_layers_get_one_quantizer_for_all_calls(x):
    prepared = prepare_qat_amct(Pyramid(), "batch_num: 2", reused="quantize")
    assert quantizer_targets(prepared).count("head.input_fake_quant") == 2
    assert prepared.head.input_fake_quant.batch_num == 4
    assert prepared.first.weight_fake_quant is prepared.second.weight_fake_quant
    assert prepared.first.weight is prepared.second.weight
    prepared(x)
    assert not prepared.head.input_fake_quant.is_calibrated
    prepared(x)
    assert prepared.head.input_fake_quant.is_calibrated
    sum(output.sum() for output in prepared(x)).backward()
    assert prepared.head.input_fake_quant.clip_max.grad is not None


def test_tied_layers_with_different_settings_are_refused():
    cfg = """override_layer_configs { layer_name: "second"
        retrain_weight_quant_config { ulq_retrain { } } }"""
    model = Pyramid()
    text = repr(model)
    with pytest.raises(
        ValueError, match=r"'first' and 'second' share one weight.*same weight half"
    ):
        prepare_qat_amct(model, cfg, reused="quantize", inplace=True)
    assert repr(model) == text


def test_a_weight_tied_along_different_axes_is_refused_with_that_reason():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Conv2d(3, 4, 3)
            self.up = nn.ConvTranspose2d(4, 3, 3)
            self.up.weight = self.down.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.up(self.down(x))

    with pytest.raises(ValueError, match=r"'down' and 'up'.*different axes.*channel_wise: false"):
        prepare_qat_amct(Tied(), reused="quantize")
    cfg = "retrain_weight_quant_config { arq_retrain { channel_wise: false } }"
    prepared = prepare_qat_amct(Tied(), cfg, reused="quantize")
    assert torch.isfinite(prepared(example())).all()


@pytest.mark.parametrize("method", ["prune", "spectral_norm"])
def test_weights_that_a_hook_sets_stay_float_with_the_reason(method, x):
    model = Net()
    if method == "prune":
        torch.nn.utils.prune.l1_unstructured(model.left, "weight", 0.5)
    else:
        torch.nn.utils.spectral_norm(model.left)
    prepared = prepare_qat_amct(model)
    assert "hook" in {row.name: row.reason for row in summarize(prepared).rows}["left"]
    prepared(x)
    assert torch.isfinite(convert_amct(prepared)(x)).all()


def test_quantizers_of_torch_are_refused_by_name():
    mapping = torch.ao.quantization.get_default_qat_qconfig_mapping()
    with pytest.raises(ValueError, match=r"layer 'stem' uses FusedMovingAvg.*ULQFakeQuantize"):
        prepare_qat_amct(Net(), mapping)


def test_a_mapping_swallows_no_pruning():
    with pytest.raises(
        ValueError, match="cannot prune; give the configuration to prepare_qat_amct"
    ):
        get_qconfig_mapping("prune_config { n_out_of_m_pruner { l1_selective_prune { } } }", Net())


def test_weights_that_no_configuration_can_name_are_reported_too():
    summary = summarize(prepare_qat_amct(Attend()))
    others = {row.name: row.reason for row in summary.others}
    assert "MultiheadAttention is no layer type" in others["encoder.layers.0.self_attn"]
    assert "only exact Linear" in others["encoder.layers.0.self_attn.out_proj"]
    assert "5 of 5 layers quantized, 4 modules of other types float" in str(summary)


def test_islands_without_layers_are_not_worth_a_line():
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if self.training else x

    prepared = prepare_qat_amct(nn.Sequential(nn.Conv2d(3, 4, 1), Noise(), nn.Conv2d(4, 4, 1)))
    assert not summarize(prepared).islands
    prepared(example())
    assert not torch.equal(prepared(example()), prepared.eval()(example()))


@pytest.mark.parametrize("network", [Net, Pyramid, NetWithIsland])
def test_every_layer_reads_its_own_input_on_the_grid_of_its_quantizer(network):
    """With fake-quant on: within half a step of the float tensor, clipped to the range."""
    model = network().eval()
    prepared = prepare_qat_amct(model, reused="quantize")
    x = example(4)
    prepared(x)
    seen: list[tuple[str, Tensor]] = []
    for name, layer in prepared.named_modules():
        if isinstance(layer, qat.QATLayer):
            layer.register_forward_pre_hook(
                lambda _, args, name=name: seen.append((name, args[0].detach()))
            )
    prepared(x)
    assert seen
    for name, tensor in seen:
        quantizer = prepared.get_submodule(name).input_quantizer
        scale, zero_point = quantizer.calculate_qparams()
        codes = tensor / scale + zero_point
        if not prepared.get_submodule(name).quantizes_input:
            assert (codes - codes.round()).abs().max() < 1e-3, name
            assert codes.min() >= -128.01
            assert codes.max() <= 127.01


def test_a_graph_module_is_taken_with_its_graph(x):
    graph_module = torch.fx.symbolic_trace(Net())
    expected = graph_module.eval()(x)
    prepared = prepare_qat_amct(graph_module)
    assert [row.state for row in summarize(prepared).rows] == ["qat"] * 4
    prepared(x)
    clone = copy.deepcopy(prepared)
    assert torch.equal(clone(x), prepared(x))
    converted = convert_amct(prepared)
    assert type(converted.bn) is nn.Identity
    assert torch.isfinite(converted(x)).all()
    prepared.apply(disable_fake_quant)
    assert torch.allclose(prepared(x), expected)
    assert isinstance(graph_module, torch.fx.GraphModule)


def test_reused_layers_are_warned_about_once():
    with pytest.warns(AmctWarning, match=r"one forward calls 'head' several times") as caught:
        prepare_qat_amct(Pyramid())
    assert len(caught) == 1


def test_an_unbatched_convolution_is_left_out_where_example_inputs_show_it(x):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Flatten(), nn.Linear(64, 2))
    rows = summarize(prepare_qat_amct(model, example_inputs=x[0])).rows
    assert rows[0].reason == "its input has no batch axis"
    assert rows[1].state == "qat"
    rows = summarize(prepare_qat_amct(nn.Sequential(nn.Conv2d(3, 4, 1)), example_inputs=(x,))).rows
    assert rows[0].state == "qat"


def test_example_inputs_the_model_cannot_take_are_refused(x):
    with pytest.raises(RuntimeError, match="cannot run on example_inputs"):
        prepare_qat_amct(Net(), example_inputs=x[:, :2])


def test_example_inputs_and_dataclass_outputs_go_together(x):
    prepared = prepare_qat_amct(Returning(), example_inputs=x)
    assert not summarize(prepared).islands
    assert isinstance(prepared(x), Pair)


@dataclass
class Pair:
    """Two tensors."""

    first: Tensor
    second: Tensor


class Returning(nn.Module):
    """Returns a dataclass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Pair:
        y = self.conv(x)
        return Pair(y, y + 1)


class Writes(nn.Module):
    """Python code that changes its input."""

    def forward(self, x: Tensor) -> Tensor:
        return x.sub_(3.0) if x.sum() > -1e9 else x


def sub_out(h: Tensor) -> Tensor:
    return torch.add(h, -3.0, out=h)


def foreach(h: Tensor) -> Tensor:
    torch._foreach_sub_([h], 3.0)
    return h


def through_split(h: Tensor) -> Tensor:
    torch.hsplit(h, 3)[0].sub_(3.0)
    return h


@pytest.mark.parametrize("change", [Writes(), sub_out, foreach, through_split])
def test_readers_around_a_change_of_any_form_do_not_share(change, x):
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 4, 1)
            self.b = nn.Conv2d(3, 4, 1)
            self.change = change

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(x)
            y = self.a(h)
            self.change(h)
            return y + self.b(h)

    model = Around().eval()
    with torch.no_grad():
        prepared = prepare_qat_amct(model)
        prepared(x)
        expected = model(x)
        assert (prepared(x) - expected).abs().max() <= 0.05 * expected.abs().max()


def test_a_layer_with_two_names_under_an_island_is_called_once():
    class Alias(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c = nn.Conv2d(3, 4, 1)
            self.a = nn.Sequential(self.c, nn.ReLU())

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) if x.sum() > -1e9 else x

    prepared = prepare_qat_amct(Alias())
    assert summarize(prepared).rows[0].state == "qat"
    prepared(example())
    assert torch.isfinite(convert_amct(prepared)(example())).all()
