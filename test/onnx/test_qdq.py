"""The QDQ forms for onnxruntime and for AMCT's ONNX tool: kernels, values, structure."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import numpy_helper
from torch import Tensor, nn

from amct_fx import (
    ArgumentError,
    ArgumentTypeError,
    CalibrationError,
    ExportError,
    InputDataError,
    convert_amct,
    export_onnx,
    prepare_qat_amct,
    verify_onnx,
)

from ..golden import networks
from ..networks import Net, NetWithIsland, example
from ..test_outputs import Residual
from .cases import CASES, INT16, Recurrent, converted, rand, spread

NETWORKS = {
    "Net": (Net, example(8)),
    "Residual": (Residual, example(8)),
    **{
        name: (getattr(networks, name), networks.example_input(name))
        for name in ("ResidualDown", "PlainChain", "DepthwiseNet", "ConcatNet")
        if hasattr(networks, name)
    },
    "conv1d": CASES["conv1d"],
    "conv3d": CASES["conv3d"],
    "linear": CASES["linear"],
}


def kernels(path, tmp_path) -> Counter[str]:
    """Return the operators that onnxruntime runs."""
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(tmp_path / "optimized.onnx")
    options.log_severity_level = 3
    onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return Counter(n.op_type for n in onnx.load(tmp_path / "optimized.onnx").graph.node)


def run(path, x: Tensor) -> Tensor:
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return torch.from_numpy(session.run(None, {session.get_inputs()[0].name: x.numpy()})[0])


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.onnx"


@pytest.mark.parametrize(
    ("name", "exporter"),
    [*((name, "torchscript") for name in NETWORKS), ("Residual", "dynamo"), ("linear", "dynamo")],
)
@pytest.mark.parametrize("trained", [True, False], ids=["trained", "calibrated"])
def test_qdq_full_runs_every_conv_and_gemm_in_an_integer_kernel(
    name, exporter, trained, path, tmp_path
):
    network, x = NETWORKS[name]
    model = prepare_qat_amct(network(), outputs="quantize" if trained else "float").eval()
    model(x)
    data = None if trained else [x]
    export_onnx(model, x, path, format="qdq_full", calibration_data=data, exporter=exporter)
    onnx.checker.check_model(path, full_check=True)
    found = kernels(path, tmp_path)
    assert not found.keys() & {"Conv", "FusedConv", "Gemm", "MatMul"}
    layers = [m for m in model.modules() if hasattr(m, "weight_fake_quant")]
    convolutions = sum(isinstance(m, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) for m in layers)
    assert found["QLinearConv"] == convolutions
    linears = sum(isinstance(m, nn.Linear) for m in layers)
    assert found["QGemm"] + found["MatMulIntegerToFloat"] + found["QLinearMatMul"] == linears
    expected = convert_amct(model)(x)
    error = (run(path, x) - expected).abs().max()
    assert error <= (1e-3 if trained else 0.05) * spread(expected)


def test_qdq_full_of_a_trained_model_is_what_was_trained(path):
    model = prepare_qat_amct(Residual(), outputs="quantize").train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for seed in range(4):
        optimizer.zero_grad()
        model(rand(4, 3, 8, 8, seed=seed)).square().mean().backward()
        optimizer.step()
    export_onnx(model, example(4), path, format="qdq_full")
    result = verify_onnx(path, model, rand(4, 3, 8, 8, seed=9))
    assert result.passed, str(result)
    assert min(row.equal for row in result.rows) >= 0.995
    assert result.output_sqnr > 40


def test_qdq_full_needs_ranges_and_other_formats_none(path):
    model = prepare_qat_amct(Net())
    model(example())
    with pytest.raises(ArgumentError, match="give calibration_data, a list of batches, or prepare"):
        export_onnx(model, example(), path, format="qdq_full")
    with pytest.raises(ArgumentError, match="give calibration_data"):
        export_onnx(model, example(), path, format="qdq_full", calibration_data=[])
    for batch, text in (([], "not list"), ({}, "missing a required"), (rand(2, 9), "cannot run")):
        with pytest.raises(InputDataError, match=f"batch of calibration_data.*{text}|{text}"):
            export_onnx(model, example(), path, format="qdq_full", calibration_data=[batch])
    for data, kind in ((example(), "Tensor"), (3, "int"), ("abc", "str"), ({}, "dict")):
        with pytest.raises(ArgumentTypeError, match=f"must be a list of batches, not {kind}"):
            export_onnx(model, example(), path, format="qdq_full", calibration_data=data)
    bad = [example() * torch.inf]
    with pytest.raises(CalibrationError, match="holds NaN or Inf"):
        export_onnx(model, example(), path, format="qdq_full", calibration_data=bad)
    with pytest.raises(ArgumentError, match="calibration_data is for format 'qdq_full'"):
        export_onnx(model, example(), path, calibration_data=[example()])
    trained = prepare_qat_amct(Net(), outputs="quantize")
    trained(example())
    with pytest.raises(ArgumentError, match="the model has trained ranges"):
        export_onnx(trained, example(), path, format="qdq_full", calibration_data=[example()])
    with pytest.raises(ExportError, match=r"is read by .*Add"):
        export_onnx(trained, example(), path, format="ascend")
    assert not path.exists()


def test_a_repeated_quantizer_changes_no_code(path):
    """Behind a convolution, before ReLU6 and MaxPool, with ranges that begin below zero."""
    network = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 5)
    )
    x = 9 * example(8)
    model = converted(network, x)
    results = []
    for format, data in (("qdq", None), ("qdq_full", [x])):
        export_onnx(model, x, path, format=format, calibration_data=data, exporter="torchscript")
        results.append(run(path, x))
        quantizers = [n for n in onnx.load(path).graph.node if n.op_type == "QuantizeLinear"]
        assert len(quantizers) == (2 if format == "qdq" else 3)
    assert torch.equal(*results)


@pytest.mark.parametrize("clip_max", [5.0, 6.0, 6.5])
def test_a_clip_is_dropped_only_where_the_quantizer_does_the_same(clip_max, path):
    network = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU6(), nn.Conv2d(8, 4, 1))
    x = 9 * example(8)
    model = prepare_qat_amct(network, fixed_min_rule="nonnegative")
    model(x)
    model[2].input_fake_quant.set_clips(clip_max, 0.0)
    export_onnx(model, x, path, format="qdq_full", calibration_data=[x], exporter="torchscript")
    clips = [n for n in onnx.load(path).graph.node if n.op_type == "Clip"]
    assert len(clips) == (1 if clip_max > 6.02 else 0)
    result = verify_onnx(path, model, x)
    assert min(row.equal for row in result.rows) >= 0.999


def test_an_island_keeps_float_results_and_the_rest_is_fused(path, tmp_path):
    model = prepare_qat_amct(NetWithIsland())
    model(example(4))
    export_onnx(model, example(4), path, format="qdq_full", calibration_data=[example(4)])
    assert kernels(path, tmp_path)["QLinearConv"] >= 2


def test_weights_that_cannot_be_fused_may_be_folded(path, tmp_path):
    model = converted(Residual(), example(8))
    export_onnx(model, example(8), path, exporter="torchscript")
    plain = run(path, example(8))
    export_onnx(model, example(8), path, exporter="torchscript", fold_unfused_weights=True)
    kinds = {i.name: i.data_type for i in onnx.load(path).graph.initializer}
    assert kinds["b.weight"] == onnx.TensorProto.FLOAT
    assert kinds["a.weight_codes"] == onnx.TensorProto.INT8
    assert "b.weight_codes" not in kinds
    assert torch.allclose(run(path, example(8)), plain, atol=1e-6)
    assert kernels(path, tmp_path)["QLinearConv"] == 1
    assert verify_onnx(path, model, example(8)).passed


@pytest.mark.parametrize("name", ["conv1d", "conv2d", "conv3d", "linear"])
def test_pairs_stand_on_every_activation_and_weight(name, path):
    network, x = CASES[name]
    per_tensor = None
    if name in ("conv1d", "conv2d"):  # transposed convolutions with groups
        per_tensor = "retrain_weight_quant_config { arq_retrain { channel_wise: false } }"
    model = converted(network(), x, per_tensor)
    export_onnx(model, x, path, format="qdq_pairs")
    file = onnx.load(path)
    onnx.checker.check_model(file, full_check=True)
    makers = {output: node for node in file.graph.node for output in node.output}
    constants = {i.name: numpy_helper.to_array(i) for i in file.graph.initializer}
    names = {n for n, m in model.named_modules() if hasattr(m, "weight_codes")}
    operators = {node.name: node for node in file.graph.node if node.name in names}
    assert operators.keys() == names
    for operator in operators.values():
        for tensor in operator.input[:2]:
            back = makers[tensor]
            forth = makers[back.input[0]]
            assert (forth.op_type, back.op_type) == ("QuantizeLinear", "DequantizeLinear")
            assert list(forth.input[1:]) == list(back.input[1:])
            assert forth.attribute == back.attribute
        weight = constants[makers[makers[operator.input[1]].input[0]].input[0]]
        assert weight.dtype == np.float32
        if operator.op_type in ("Gemm", "MatMul"):
            assert weight.ndim == 2
            assert constants[makers[operator.input[1]].input[1]].ndim == 0
        for bias in operator.input[2:]:
            assert constants[bias].dtype == np.float32
    assert {array.dtype for array in constants.values()} <= {
        np.dtype(kind) for kind in ("float32", "int8", "int64")
    }
    assert (run(path, x) - model(x)).abs().max() <= 1e-3 * spread(model(x))
    assert verify_onnx(path, model, x).passed


def test_pairs_name_the_layers_that_the_tool_does_not_take(path):
    cases = [
        (Recurrent(), rand(3, 7, 4), {}, "lstm: amct_onnx takes no quantized LSTM"),
        (CASES["conv1d"][0](), CASES["conv1d"][1], {}, "up: .*transposed convolution with groups"),
        (nn.Sequential(nn.Conv2d(3, 4, 1).half()), example().half(), {}, "0: .*float32 only"),
    ]
    for network, x, options, text in cases:
        model = prepare_qat_amct(network, **options).eval()
        model(x)
        with pytest.raises(ExportError, match=text):
            export_onnx(model, x, path, format="qdq_pairs")
    cfg = """override_layer_configs { layer_name: "0" retrain_weight_quant_config {
        arq_retrain { channel_wise: true } } }"""
    model = prepare_qat_amct(nn.Sequential(nn.Linear(4, 3)), cfg, linear_channel_wise=True)
    model(rand(5, 4))
    with pytest.raises(ExportError, match="0: amct_onnx takes one weight scale for a Linear"):
        export_onnx(model, rand(5, 4), path, format="qdq_pairs")
    int16 = prepare_qat_amct(Net(), INT16)
    int16(example())
    with pytest.raises(ArgumentError, match="'qdq_pairs' cannot hold INT16 activations"):
        export_onnx(int16, example(), path, format="qdq_pairs")
    assert not path.exists()


def test_a_dead_linear_still_has_one_scale_in_pairs(path):
    network = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        network[0].weight.zero_()
        network[0].bias[0] = 0
    model = converted(network, rand(5, 4))
    assert model[0].weight_scale.numel() == 6
    export_onnx(model, rand(5, 4), path, format="qdq_pairs")
    assert (run(path, rand(5, 4)) - model(rand(5, 4))).abs().max() <= 1e-5
