"""LSTM and GRU: equal to torch in float, to a slow reference when quantized, and when converted."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfig, disable_fake_quant

from amct_fx import AmctWarning, convert_amct, prepare_qat_amct, summarize
from amct_fx.graph import fx_graph_of
from amct_fx.nn import qat, quantized
from amct_fx.nn.quantized import collect_codes
from amct_fx.observers import ARQFakeQuantize, ULQFakeQuantize
from amct_fx.observers.functional import ifmr_range

CLASSES = [nn.LSTM, nn.GRU]
BATCH, TIME, INPUT, HIDDEN = 3, 5, 4, 6

both = pytest.mark.parametrize("cls", CLASSES, ids=["LSTM", "GRU"])


class Model(nn.Module):
    """A recurrent layer behind a ReLU, and a Linear on its last output."""

    def __init__(self, cls: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.stem = nn.Linear(INPUT, INPUT)
        self.rnn = cls(INPUT, HIDDEN, batch_first=True, **options)
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(torch.relu(self.stem(x)))[0][:, -1])


class WithState(Model):
    """A model that computes the initial hidden state."""

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        h = torch.relu(h)
        state = (h, torch.zeros_like(h)) if isinstance(self.rnn, nn.LSTM) else h
        return self.head(self.rnn(self.stem(x), state)[0][:, -1])


def inputs(batch: int = BATCH) -> Tensor:
    return torch.randn(batch, TIME, INPUT, generator=torch.Generator().manual_seed(1))


def state_for(layer: nn.RNNBase) -> Any:
    generator = torch.Generator().manual_seed(2)
    h, c = (torch.rand(1, BATCH, HIDDEN, generator=generator) - 0.5 for _ in range(2))
    return (h, c) if isinstance(layer, nn.LSTM) else h


def tensors(result: Any) -> list[Tensor]:
    output, state = result
    return [output, *(state if isinstance(state, tuple) else (state,))]


def trained(model: nn.Module, *args: Tensor, cfg: str | None = None, steps: int = 3) -> nn.Module:
    prepared = prepare_qat_amct(model, cfg)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        prepared(*args).square().mean().backward()
        optimizer.step()
    return prepared


def weight_cfg(algo: str, *, channel_wise: bool = True, dst_type: str = "INT8") -> str:
    return (
        "quant_skip_types: 'Linear' retrain_weight_quant_config "
        f"{{ {algo} {{ channel_wise: {channel_wise} dst_type: {dst_type} }} }}"
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


# Numerics


def reference_fake_quant(x: Tensor, fake_quant: ULQFakeQuantize) -> Tensor:
    """Quantize in float64 with the clips of ``fake_quant``."""
    half, steps = 2 ** (fake_quant.num_bits - 1), 2**fake_quant.num_bits - 1
    upper, lower = fake_quant.clip_max.detach().double(), fake_quant.clip_min.detach().double()
    scale = (upper.clamp(min=0) - lower.clamp(max=0)) / steps
    offset = torch.round(-half - lower.clamp(max=0) / scale)
    return ((x / scale + offset).round().clamp(-half, half - 1) - offset) * scale


def reference_weight(weight: Tensor, scale: Tensor, bits: int) -> Tensor:
    half, scale = 2 ** (bits - 1), scale.detach().double().reshape(-1, 1)
    return (weight.detach().double() / scale).round().clamp(-half, half - 1) * scale


def reference(layer: Any, x: Tensor) -> Tensor:
    """Run a quantized layer with ``batch_first`` step by step in float64."""
    bits = layer.weight_bits
    w_ih, w_hh = (
        reference_weight(getattr(layer, name), layer.weight_scale(name), bits)
        for name in ("weight_ih_l0", "weight_hh_l0")
    )
    b_ih, b_hh = layer.bias_ih_l0.detach().double(), layer.bias_hh_l0.detach().double()
    h = c = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    outputs = []
    for t in range(x.shape[1]):
        from_x = reference_fake_quant(x[:, t].double(), layer.input_fake_quant) @ w_ih.T + b_ih
        from_h = reference_fake_quant(h, layer.hidden_fake_quant) @ w_hh.T + b_hh
        if layer.mode == "LSTM":
            i, f, g, o = (from_x + from_h).chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
        else:
            (r_x, z_x, n_x), (r_h, z_h, n_h) = from_x.chunk(3, 1), from_h.chunk(3, 1)
            z = (z_x + z_h).sigmoid()
            h = (1 - z) * (n_x + (r_x + r_h).sigmoid() * n_h).tanh() + z * h
        outputs.append(h)
    return torch.stack(outputs, 1)


@both
@pytest.mark.parametrize("algo", ["arq_retrain", "ulq_retrain"])
@pytest.mark.parametrize("channel_wise", [True, False])
@pytest.mark.parametrize("bits", ["A8W8", "A8W4", "A16W8"])
def test_the_quantized_layer_equals_a_float64_simulation(cls, algo, channel_wise, bits):
    cfg = weight_cfg(algo, channel_wise=channel_wise, dst_type=f"INT{bits[-1]}")
    cfg += f"retrain_data_quant_config {{ ulq_quantize {{ dst_type: INT{bits[1:-2]} }} }}"
    layer = trained(Model(cls), inputs(), cfg=cfg).rnn.eval()
    assert layer.weight_bits == int(bits[-1])
    scales = layer.weight_scale("weight_hh_l0").numel()
    assert scales == (layer.weight_hh_l0.shape[0] if channel_wise else 1)
    x = inputs().relu()
    output = layer(layer.input_fake_quant(x))[0]
    expected = reference(layer, x)
    # A code at a rounding tie may differ by one; most seeds have none.
    close = (output.double() - expected).abs() <= 1e-5
    assert close.double().mean() >= 0.95
    assert (output.double() - expected).abs().max() <= 0.02


@both
@pytest.mark.parametrize("algo", ["arq_retrain", "ulq_retrain"])
def test_weights_biases_scales_and_clips_get_gradients(cls, algo):
    prepared = trained(Model(cls), inputs(8), cfg=weight_cfg(algo), steps=2)
    for name, parameter in prepared.rnn.named_parameters():
        assert parameter.grad.abs().sum() > 0, name
    scales = [name for name, _ in prepared.rnn.named_parameters() if name.endswith(".scale")]
    assert len(scales) == (2 if algo == "ulq_retrain" else 0)


@both
@pytest.mark.parametrize("channel_wise", [True, False])
def test_learned_weight_scales_stay_positive(cls, channel_wise):
    cfg = weight_cfg("ulq_retrain", channel_wise=channel_wise)
    prepared = trained(Model(cls), inputs(), cfg=cfg)
    for name in ("weight_ih_l0", "weight_hh_l0"):
        scale = prepared.rnn.weight_scale(name)
        assert (scale > 0).all()
        assert (scale < 0.5).all()


@pytest.mark.parametrize("size", [(5, 6), (4, 5)], ids=["odd input", "odd hidden"])
def test_int4_falls_back_to_int8_for_odd_sizes(size):
    cfg = "retrain_weight_quant_config { arq_retrain { dst_type: INT4 } }"
    with pytest.warns(AmctWarning, match="'?0'?"):
        prepared = prepare_qat_amct(nn.Sequential(nn.GRU(*size)), cfg)
    assert prepared[0].weight_bits == 8


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_train_and_convert(cls, dtype):
    x = inputs().to(dtype)
    prepared = trained(Model(cls).to(dtype), x).eval()
    converted = convert_amct(prepared)
    assert converted(x).dtype == dtype
    assert prepared.rnn.hidden_fake_quant.clip_max.dtype == torch.float32
    torch.testing.assert_close(converted(x), prepared(x), atol=0.02, rtol=0.05)


@both
def test_autocast_trains(cls):
    prepared = prepare_qat_amct(Model(cls))
    with torch.autocast("cpu", torch.bfloat16):
        for _ in range(2):
            loss = prepared(inputs()).float().square().mean()
    loss.backward()
    assert torch.isfinite(loss)
    assert all(torch.isfinite(parameter.grad).all() for parameter in prepared.parameters())


# Life cycle


@both
def test_eval_writes_nothing_and_no_grad_is_respected(cls):
    prepared = trained(Model(cls), inputs()).eval()
    state = copy.deepcopy(prepared.state_dict())
    with torch.no_grad():
        assert not prepared(10 * inputs()).requires_grad
    with torch.inference_mode():
        prepared(10 * inputs())
    assert all(torch.equal(state[key], value) for key, value in prepared.state_dict().items())


@both
@pytest.mark.parametrize("algo", ["arq_retrain", "ulq_retrain"])
def test_training_resumes_from_a_state_dict_bit_for_bit(cls, algo):
    def steps(model: nn.Module, count: int) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(count):
            optimizer.zero_grad()
            model(inputs()).square().mean().backward()
            optimizer.step()

    cfg = f"batch_num: 2 {weight_cfg(algo)}"
    float_model = Model(cls)
    straight, first, second = (prepare_qat_amct(copy.deepcopy(float_model), cfg) for _ in range(3))
    steps(straight, 5)
    steps(first, 3)
    second.load_state_dict(first.state_dict())
    steps(second, 2)
    for key, value in straight.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key


@both
def test_a_float_checkpoint_loads_by_name(cls):
    other = Model(cls)
    prepared = prepare_qat_amct(Model(cls))
    result = prepared.load_state_dict(other.state_dict(), strict=False)
    assert not result.unexpected_keys
    assert all("fake_quant" in key for key in result.missing_keys)
    prepared.apply(disable_fake_quant)
    torch.testing.assert_close(prepared(inputs()), other(inputs()))


@both
def test_copies_and_pickles_own_their_parameters(cls):
    prepared = trained(Model(cls), inputs()).eval()
    expected = prepared(inputs())
    for clone in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared))):
        assert torch.equal(clone(inputs()), expected)
        with torch.no_grad():
            clone.rnn.weight_hh_l0.add_(1)
        assert torch.equal(prepared(inputs()), expected)
        assert not torch.equal(clone(inputs()), expected)


@both
@torch._dynamo.config.patch(allow_rnn=True)  # fullgraph=True needs it for torch's own layers too
def test_compile_and_export_capture_one_graph(cls):
    torch._dynamo.reset()  # other tests have compiled the same forwards
    x = inputs()[:, :2]
    prepared = trained(Model(cls), x)
    expected = copy.deepcopy(prepared)(x)
    compiled = torch.compile(prepared, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), expected)
    prepared.eval()
    for model in (prepared, convert_amct(prepared)):
        expected = model(x)
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x), expected)
        exported = torch.export.export(model, (x,), strict=False).module()
        torch.testing.assert_close(exported(x), expected, atol=0.01, rtol=0)


@both
def test_a_layer_in_an_island_quantizes_its_own_input(cls):
    class Branching(Model):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if x.shape[0] > 1 else super().forward(2 * x)

    model = Branching(cls)
    prepared = trained(model, inputs())
    assert prepared.rnn.quantizes_input
    assert prepared.rnn.hidden_fake_quant.layer_name == "rnn"
    converted = convert_amct(prepared)
    for x in (inputs(), inputs(1)):
        torch.testing.assert_close(converted(x), prepared.eval()(x), atol=0.01, rtol=0)


@both
def test_from_float_shares_parameters_and_leaves_the_float_layer_alone(cls):
    layer = cls(INPUT, HIDDEN)
    qconfig = QConfig(ULQFakeQuantize.with_args(), ARQFakeQuantize.with_args(ch_axis=0))
    made = (qat.LSTM if cls is nn.LSTM else qat.GRU).from_float(layer, qconfig)
    assert isinstance(made, cls)
    assert made.weight_hh_l0 is layer.weight_hh_l0
    assert made.weight_hh_fake_quant.num_channels == layer.weight_hh_l0.shape[0]
    made.weight_hh_l0 = nn.Parameter(torch.zeros_like(layer.weight_hh_l0))
    assert layer._flat_weights[1] is layer.weight_hh_l0
    assert torch.isfinite(made(inputs().transpose(0, 1))[0]).all()


# Conversion


@both
@pytest.mark.parametrize("algo", ["arq_retrain", "ulq_retrain"])
@pytest.mark.parametrize("channel_wise", [True, False])
@pytest.mark.parametrize("bits", ["A8W8", "A8W4", "A16W8"])
@pytest.mark.parametrize("bias", [True, False])
def test_the_converted_model_equals_the_prepared_one(cls, algo, channel_wise, bits, bias):
    cfg = weight_cfg(algo, channel_wise=channel_wise, dst_type=f"INT{bits[-1]}")
    cfg += f"retrain_data_quant_config {{ ulq_quantize {{ dst_type: INT{bits[1:-2]} }} }}"
    prepared = trained(Model(cls, bias=bias), inputs(), cfg=cfg).eval()
    converted = convert_amct(prepared)
    expected, actual = prepared(inputs()), converted(inputs())
    assert (actual - expected).abs().max() <= 0.01 * expected.abs().max()
    layer = converted.rnn
    assert type(layer) is (quantized.LSTM if cls is nn.LSTM else quantized.GRU)
    assert not list(layer.parameters())
    assert layer.weight_hh_codes.dtype == torch.int8
    assert layer.weight_ih_codes.int().abs().max() <= 2 ** (int(bits[-1]) - 1)
    assert layer.hidden_quantize.zero_point.dtype == getattr(torch, f"int{bits[1:-2]}")
    assert (layer.bias_hh_codes is not None) == bias


@both
def test_biases_are_codes_of_the_input_scale_and_of_the_hidden_scale(cls):
    prepared = trained(Model(cls), inputs())
    layer = convert_amct(prepared).rnn
    for part, scale in (("ih", layer.input_quantize.scale), ("hh", layer.hidden_quantize.scale)):
        step = scale * getattr(layer, f"weight_{part}_scale")
        bias = prepared.rnn.get_parameter(f"bias_{part}_l0").detach()
        codes = torch.round(bias.double() / step.double())
        assert torch.equal(getattr(layer, f"bias_{part}_codes").double(), codes)
        assert torch.equal(getattr(layer, f"bias_{part}_scale"), step)


@both
def test_dead_rows_keep_their_biases(cls):
    model = Model(cls)
    with torch.no_grad():
        model.rnn.weight_hh_l0[3] = 0
        model.rnn.weight_ih_l0.zero_()
        model.rnn.bias_hh_l0[3] = 0.013
    prepared = prepare_qat_amct(model).eval()
    prepared(inputs())
    converted = convert_amct(prepared)
    assert abs(converted.rnn.bias_hh_l0[3] - 0.013) <= 1e-6 * 0.013
    torch.testing.assert_close(converted.rnn.bias_ih_l0, prepared.rnn.bias_ih_l0, rtol=1e-5, atol=0)
    torch.testing.assert_close(converted(inputs()), prepared(inputs()), atol=1e-3, rtol=0)


def test_codes_of_the_hidden_state_are_recorded_for_every_step():
    prepared = trained(Model(nn.LSTM), inputs()).eval()
    converted = convert_amct(prepared)
    with collect_codes(converted) as codes:
        converted(inputs())
    made = codes["rnn.hidden_quantize"]
    assert len(made) == TIME
    assert all(code.shape == (BATCH, HIDDEN) for code in made)
    assert (made[0] == converted.rnn.hidden_quantize.zero_point).all()


@both
def test_the_converted_model_is_an_ordinary_module(cls):
    converted = convert_amct(trained(Model(cls), inputs()))
    expected = converted(inputs())
    for clone in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert torch.equal(clone(inputs()), expected)
    other = convert_amct(trained(Model(cls), 2 * inputs()))
    other.load_state_dict(converted.state_dict())
    assert torch.equal(other(inputs()), expected)
    assert torch.equal(converted.to("cpu", torch.float32)(inputs()), expected)
    assert isinstance(converted.rnn, cls)
    assert [t.shape for t in converted.rnn.all_weights[0]][1][1] == HIDDEN
    assert "float_input" not in str(fx_graph_of(converted))
    assert "hidden state 8 bits, scale=" in str(summarize(converted))


def test_an_uncalibrated_layer_does_not_convert():
    with pytest.raises(RuntimeError, match="ranges of 'rnn', 'head'"):
        convert_amct(prepare_qat_amct(Model(nn.GRU), 'skip_layers: "stem"'))


# ONNX


@both
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("with_state", [True, False])
def test_both_exporters_agree_with_torch_for_any_batch(tmp_path, cls, dynamo, with_state):
    x, h = inputs()[:, :3], torch.randn(1, BATCH, HIDDEN)
    args = (x, h) if with_state else (x,)
    model = (WithState if with_state else Model)(cls)
    converted = convert_amct(trained(model, *args))
    export(converted, args, tmp_path / "m.onnx", dynamo=dynamo)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    for batch in (1, BATCH):
        feeds = {"x": x[:batch].numpy()} | ({"h": h[:, :batch].numpy()} if with_state else {})
        (result,) = session.run(None, feeds)
        expected = converted(*(torch.from_numpy(feed) for feed in feeds.values()))
        assert (torch.from_numpy(result) - expected).abs().max() <= 0.01 * expected.abs().max()


def export(model: nn.Module, args: tuple[Tensor, ...], path: Path, *, dynamo: bool) -> None:
    """Export with a free batch size; the file must be valid and hold each weight once."""
    names = ["x", "h"][: len(args)]
    if dynamo:
        batch = torch.export.Dim("batch", max=1024)
        shapes: dict[str, Any] = {"dynamic_shapes": ({0: batch}, {1: batch})[: len(args)]}
    else:
        shapes = {"dynamic_axes": {"x": {0: "batch"}, "h": {1: "batch"}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model, args, path, dynamo=dynamo, opset_version=18, input_names=names, verbose=False,
            **shapes,
        )  # fmt: skip
    onnx.checker.check_model(path, full_check=True)
    graph = onnx.load(path).graph
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("QuantizeLinear") == 3 + args[0].shape[1]
    large = {item.name for item in graph.initializer if item.data_type == onnx.TensorProto.INT8}
    read = [node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"]
    assert all(read.count(name) <= 1 for name in large)
