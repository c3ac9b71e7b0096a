"""LSTM and GRU with quantization: equal to a slow reference, trained, saved, compiled."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfig, disable_fake_quant

from amct_fx import AmctWarning, convert_amct, prepare_qat_amct
from amct_fx.nn import qat
from amct_fx.observers import ARQFakeQuantize, ULQFakeQuantize
from test.nn.rnn import (
    HIDDEN,
    INPUT,
    Model,
    both,
    inputs,
    trained,
    weight_cfg,
)

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
