"""LSTM and GRU, converted, and in files of ONNX."""

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

from amct_fx import convert_amct, prepare_qat_amct, summarize
from amct_fx.graph import fx_graph_of
from amct_fx.nn import quantized
from amct_fx.nn.quantized import collect_codes
from test.nn.rnn import (
    BATCH,
    HIDDEN,
    TIME,
    Model,
    WithState,
    both,
    inputs,
    trained,
    weight_cfg,
)

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
