"""LSTM and GRU: equal to torch in float; which are quantized, where, and from which range."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfig, disable_fake_quant

from amct_fx import convert_amct, prepare_qat_amct, summarize
from amct_fx.graph import fx_graph_of
from amct_fx.nn import qat
from amct_fx.observers import ARQFakeQuantize, ULQFakeQuantize
from amct_fx.observers.functional import ifmr_range
from test.nn.rnn import (
    BATCH,
    HIDDEN,
    INPUT,
    Model,
    WithState,
    both,
    inputs,
    state_for,
    tensors,
)

# Float behaviour


@both
@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("with_state", [True, False])
def test_without_fake_quant_outputs_states_and_gradients_are_torchs(
    cls, batch_first, bias, with_state
):
    layer = cls(INPUT, HIDDEN, batch_first=batch_first, bias=bias)
    prepared = prepare_qat_amct(layer)
    prepared.apply(disable_fake_quant)
    x = inputs() if batch_first else inputs().transpose(0, 1)
    args = (x, state_for(layer)) if with_state else (x,)
    for _ in range(2):
        expected, actual = tensors(layer(*args)), tensors(prepared(*args))
        torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)
    sum(t.square().sum() for t in expected).backward()
    sum(t.square().sum() for t in actual).backward()
    for name, parameter in layer.named_parameters():
        torch.testing.assert_close(prepared.get_parameter(name).grad, parameter.grad)


@both
def test_state_shapes_are_torchs_for_batched_and_unbatched_inputs(cls):
    layer = cls(INPUT, HIDDEN, batch_first=True)
    prepared = prepare_qat_amct(layer)
    converted = None
    for x in (inputs(), inputs(1), inputs()[0]):
        expected = [t.shape for t in tensors(layer(x))]
        assert [t.shape for t in tensors(prepared(x))] == expected
        converted = converted or convert_amct(prepared)
        assert [t.shape for t in tensors(converted(x))] == expected


@both
def test_an_initial_state_of_the_wrong_shape_is_refused_as_by_torch(cls):
    prepared = prepare_qat_amct(cls(INPUT, HIDDEN, batch_first=True))
    wrong = torch.zeros(1, 1, HIDDEN)
    with pytest.raises(RuntimeError, match="Expected hidden size"):
        prepared(inputs(), (wrong, wrong) if cls is nn.LSTM else wrong)


def test_inputs_of_other_ranks_are_refused():
    prepared = prepare_qat_amct(nn.Sequential(nn.GRU(INPUT, HIDDEN)))
    with pytest.raises(ValueError, match="layer '0': the input of GRU must be 2-D or 3-D, not 4-D"):
        prepared(torch.zeros(2, 2, 2, INPUT))


# Which layers


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"num_layers": 2}, "num_layers=2"),
        ({"bidirectional": True}, "bidirectional=True"),
        ({"num_layers": 2, "dropout": 0.5}, "dropout=0.5"),
        ({"proj_size": 3}, "proj_size=3"),
    ],
)
def test_other_forms_stay_float_with_a_reason(options, reason):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(INPUT, HIDDEN, **options)
            self.head = nn.LazyLinear(2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0])

    model = Two()
    model(inputs())
    prepared = prepare_qat_amct(model)
    rows = {row.name: row for row in summarize(prepared).rows}
    assert type(prepared.rnn) is nn.LSTM
    assert reason in rows["rnn"].reason
    assert rows["head"].state == "qat"
    with pytest.raises(ValueError, match=reason):
        qat.LSTM.from_float(model.rnn, QConfig(ULQFakeQuantize, ARQFakeQuantize))


@both
def test_layers_that_share_a_weight_stay_float_or_share_the_quantizer(cls):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = cls(INPUT, HIDDEN), cls(INPUT, HIDDEN)
            self.b.weight_hh_l0 = self.a.weight_hh_l0
            self.head = nn.Linear(HIDDEN, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.a(x)[0] + self.b(x)[0])

    rows = {row.name: row for row in summarize(prepare_qat_amct(Tied())).rows}
    assert "shared" in rows["a"].reason
    assert "shared" in rows["b"].reason
    prepared = prepare_qat_amct(Tied(), reused="quantize")
    assert prepared.a.weight_hh_fake_quant is prepared.b.weight_hh_fake_quant
    assert prepared.a.weight_ih_fake_quant is not prepared.b.weight_ih_fake_quant
    prepared(inputs())
    convert_amct(prepared)(inputs())


@both
def test_a_layer_called_twice_calibrates_on_both_calls(cls):
    class Twice(Model):
        def forward(self, x: Tensor) -> Tensor:
            output, state = self.rnn(x)
            return self.head(output + self.rnn(2 * x, state)[0])

    model = Twice(cls)
    prepared = prepare_qat_amct(model, reused="quantize")
    prepared(inputs())
    first, state = model.rnn(inputs())
    second = model.rnn(2 * inputs(), state)[0]
    h = state[0] if cls is nn.LSTM else state
    batches = [torch.zeros(BATCH, 1, HIDDEN), first[:, :-1], h, second[:, :-1]]
    expected = ifmr_range([batch.detach() for batch in batches])
    # The second call starts from the state of the quantized layer.
    torch.testing.assert_close(
        prepared.rnn.hidden_fake_quant.clip_max.detach(), expected[0], rtol=0.02, atol=0
    )


def test_a_packed_sequence_is_refused_with_the_name_of_the_layer():
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.LSTM(INPUT, HIDDEN, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return self.rnn(packed)[0].data

    prepared = prepare_qat_amct(Packed())
    with pytest.raises(
        TypeError, match=r"layer 'rnn': .* not a PackedSequence; .*quant_skip_layers"
    ):
        prepared(inputs(), torch.tensor([5, 4, 2]))


# Insertion


@both
def test_the_input_quantizer_is_a_shared_node_and_the_hidden_one_belongs_to_the_layer(cls):
    class Shared(Model):
        def forward(self, x: Tensor) -> Tensor:
            x = torch.relu(x)
            return self.rnn(x)[0].mean() + self.stem(x).mean()

    prepared = prepare_qat_amct(Shared(cls))
    nodes = [str(node.target) for node in fx_graph_of(prepared).nodes]
    assert [name for name in nodes if "fake_quant" in name] == ["stem.input_fake_quant"]
    assert "input_fake_quant" not in dict(prepared.rnn.named_modules())
    assert isinstance(prepared.rnn.hidden_fake_quant, ULQFakeQuantize)
    prepared(inputs())
    row = {row.name: row for row in summarize(prepared).rows}["rnn"]
    assert "of stem; hidden state 8 bits, scale=" in row.input
    assert row.weight == f"ARQ, 8 bits, {2 * prepared.rnn.weight_hh_l0.shape[0]} scales"


def test_only_the_input_is_replaced_when_the_state_is_the_same_tensor():
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = nn.GRU(HIDDEN, HIDDEN)

        def forward(self, x: Tensor) -> Tensor:
            return self.rnn(x, x)[0]

    prepared = prepare_qat_amct(Same())
    (call,) = (node for node in fx_graph_of(prepared).nodes if node.target == "rnn")
    assert [str(argument) for argument in call.args] == ["rnn_input_fake_quant", "x"]
    assert torch.isfinite(prepared(torch.randn(1, BATCH, HIDDEN))).all()


@both
def test_fixed_min_of_the_hidden_state_follows_the_producer_of_h0(cls):
    plain, relu = prepare_qat_amct(Model(cls)), prepare_qat_amct(WithState(cls))
    flags = [
        (model.rnn.input_fake_quant.fixed_min, model.rnn.hidden_fake_quant.fixed_min)
        for model in (plain, relu)
    ]
    assert flags == [(True, False), (False, True)]
    cfg = "retrain_data_quant_config { ulq_quantize { fixed_min: true } }"
    for model in (prepare_qat_amct(Model(cls), cfg), prepare_qat_amct(WithState(cls), cfg)):
        assert model.rnn.input_fake_quant.fixed_min
        assert model.rnn.hidden_fake_quant.fixed_min


@both
def test_explicit_clips_apply_to_both_quantizers(cls):
    clips = "clip_max_min { clip_max: 2 clip_min: -1 }"
    prepared = prepare_qat_amct(
        Model(cls), f"retrain_data_quant_config {{ ulq_quantize {{ {clips} }} }}"
    )
    for quantizer in (prepared.rnn.input_fake_quant, prepared.rnn.hidden_fake_quant):
        assert (quantizer.clip_max.item(), quantizer.clip_min.item()) == (2, -1)
        assert quantizer.is_calibrated


# Calibration


def hidden_states(layer: nn.RNNBase, x: Tensor, h0: Tensor | None = None) -> Tensor:
    """Return h0 … h_{T-1} of a float layer with ``batch_first``."""
    state = None if h0 is None else (h0, torch.zeros_like(h0)) if layer.mode == "LSTM" else h0
    output = layer(x, state)[0].detach()
    h0 = torch.zeros_like(output[:, :1]) if h0 is None else h0.transpose(0, 1)
    return torch.cat([h0, output[:, :-1]], 1)


@both
@pytest.mark.parametrize("mode", [True, False], ids=["train", "eval"])
def test_the_hidden_range_starts_with_ifmr_over_the_states_of_the_float_layer(cls, mode):
    layer = cls(INPUT, HIDDEN, batch_first=True)
    batches = [inputs(), 2 * inputs()]
    states = [hidden_states(layer, x) for x in batches]
    prepared = prepare_qat_amct(nn.Sequential(layer).train(mode), "batch_num: 2")
    fake_quant = prepared[0].hidden_fake_quant
    prepared(batches[0])
    assert not fake_quant.is_calibrated
    torch.testing.assert_close(fake_quant.clip_max.detach(), states[0].max().reshape(1))
    torch.testing.assert_close(fake_quant.clip_min.detach(), states[0].min().reshape(1))
    prepared(batches[1])
    assert fake_quant.is_calibrated
    clips = fake_quant.clip_max.detach(), fake_quant.clip_min.detach()
    torch.testing.assert_close(clips, ifmr_range(states), rtol=1e-6, atol=0)


@both
def test_an_initial_state_is_part_of_the_calibration_data(cls):
    model = WithState(cls)
    x, h = inputs(), torch.randn(1, BATCH, HIDDEN)
    states = hidden_states(model.rnn, model.stem(x).detach(), h.relu())
    prepared = prepare_qat_amct(model)
    prepared.stem.apply(disable_fake_quant)
    prepared(x, h)
    expected = ifmr_range(states)[0]
    torch.testing.assert_close(
        prepared.rnn.hidden_fake_quant.clip_max.detach(), expected, rtol=1e-6, atol=0
    )


@both
def test_fake_quant_is_active_from_the_first_forward_on(cls):
    model = nn.Sequential(cls(INPUT, HIDDEN, batch_first=True))
    prepared = prepare_qat_amct(model, "batch_num: 2")
    output = prepared(inputs())[0]
    assert not torch.allclose(output, model(inputs())[0], atol=1e-5)
    output.sum().backward()
    assert all(parameter.grad is not None for parameter in prepared.parameters())


@both
def test_without_observer_the_hidden_state_stays_float_until_calibration(cls):
    model = nn.Sequential(cls(INPUT, HIDDEN, batch_first=True))
    prepared = prepare_qat_amct(model)
    for module in prepared.modules():
        if isinstance(module, ULQFakeQuantize):
            module.enable_observer(False)
        elif isinstance(module, ARQFakeQuantize):
            module.enable_fake_quant(False)
    torch.testing.assert_close(prepared(inputs())[0], model(inputs())[0])
    assert not prepared[0].hidden_fake_quant.is_calibrated


def test_nan_in_the_state_names_the_layer_and_changes_nothing():
    prepared = prepare_qat_amct(nn.Sequential(nn.GRU(INPUT, HIDDEN, batch_first=True)))
    state = copy.deepcopy(prepared.state_dict())
    with pytest.raises(RuntimeError, match="layer '0': NaN"):
        prepared(inputs() * float("nan"))
    assert all(torch.equal(state[key], value) for key, value in prepared.state_dict().items())
