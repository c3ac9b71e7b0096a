"""Prepare: islands, reused and tied layers, mappings, example inputs, readers around a change."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.fx
import torch.nn.utils.prune
from torch import Tensor, nn
from torch.ao.quantization import QConfig, QConfigMapping, disable_fake_quant

from amct_fx import AmctWarning, convert_amct, get_qconfig_mapping, prepare_qat_amct, summarize
from amct_fx.nn import qat
from amct_fx.observers import ARQFakeQuantize, ULQFakeQuantize

from .networks import (
    Attend,
    Branching,
    Net,
    NetWithIsland,
    Pyramid,
    example,
    quantizer_targets,
)


@pytest.fixture
def x() -> Tensor:
    return example()


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
