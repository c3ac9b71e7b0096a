"""AMCT's simulation file: its recorded results and nodes, in stock onnxruntime."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from amct_fx import export_onnx

from ..golden.reader import GRAPH_RUNS, load_graph
from .cases import CASES, INT4, INT16, Recurrent, converted, rand, spread
from .trained import trained


def simulate(model, x, path, **options):
    export_onnx(model, x, path, format="fake_quant", input_names=["in"], **options)
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    return onnx.load(path), [torch.from_numpy(y) for y in session.run(None, {"in": x.numpy()})]


@pytest.mark.parametrize("run", GRAPH_RUNS)
def test_the_result_is_the_recorded_one_within_a_step(run, tmp_path):
    model, recorded = trained(run)
    _, [result] = simulate(model, recorded.x_fixed, tmp_path / "f.onnx", output_names=["out"])
    step = spread(recorded.y_fake_quant) / 255
    assert (result - recorded.y_fake_quant).abs().max() <= step


@pytest.mark.parametrize("run", GRAPH_RUNS)
def test_the_nodes_are_the_recorded_ones(run, tmp_path):
    model, recorded = trained(run)
    file, _ = simulate(model, recorded.x_fixed, tmp_path / "f.onnx", output_names=["out"])
    golden = {node["name"]: node for node in load_graph(run, "fake_quant").nodes}
    ours = {node.name: node for node in file.graph.node}
    own = {name for name in golden if "sub_module/Constant" not in name}
    assert own <= ours.keys()
    for name in own:
        node, expected = ours[name], golden[name]
        assert node.op_type == expected["op"]
        assert len(node.input) == len(expected["inputs"])
        if name.endswith((".fakequant.sub", ".mul")):
            assert list(node.output) == expected["outputs"]
        if node.op_type == "Constant":
            value = onnx.numpy_helper.to_array(helper.get_attribute_value(node.attribute[0]))
            assert list(value.shape) == expected["attributes"]["value"]["shape"]
            assert value.ravel() == pytest.approx(
                expected["attributes"]["value"]["values"], rel=1e-5
            )


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cfg", [None, INT16], ids=["int8", "int16"])
def test_every_kind_of_layer_is_simulated(name, cfg, tmp_path):
    network, x = CASES[name]
    model = converted(network(), x, cfg)
    file, [result] = simulate(model, x, tmp_path / "f.onnx")
    onnx.checker.check_model(file, full_check=True)
    expected = model(x)
    assert (result - expected).abs().max() <= 5e-3 * spread(expected)
    weights = [i for i in file.graph.initializer if i.name.endswith(".sub_module.weight")]
    assert weights
    for weight in weights:
        codes = onnx.numpy_helper.to_array(weight)
        assert weight.data_type == TensorProto.FLOAT
        assert np.array_equal(codes, np.rint(codes))


def test_int4_weights_are_unpacked(tmp_path):
    network, x = CASES["linear"]
    model = converted(network(), x, INT4)
    file, [result] = simulate(model, x, tmp_path / "f.onnx")
    assert torch.allclose(result, model(x), atol=1e-5)
    shapes = {i.name: list(i.dims) for i in file.graph.initializer}
    assert shapes["wide.sub_module.weight"] == [8, 16]


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("cfg", [None, INT4, INT16], ids=["a8w8", "a8w4", "a16w8"])
def test_recurrent_layers_are_standard_nodes_with_dequantized_weights(bias, cfg, tmp_path):
    x = rand(3, 7, 4)
    model = converted(Recurrent(bias), x, cfg)
    file, results = simulate(model, x, tmp_path / "f.onnx")
    assert {"LSTM", "GRU"} <= {node.op_type for node in file.graph.node}
    for result, expected in zip(results, model(x), strict=True):  # h stays float between the steps
        assert (result - expected).abs().max() <= 0.02 * spread(expected)


def test_the_batch_may_vary(tmp_path):
    network, x = CASES["linear"]
    model = converted(network(), x)
    export_onnx(model, x, tmp_path / "f.onnx", format="fake_quant", dynamic_batch=True)
    session = onnxruntime.InferenceSession(tmp_path / "f.onnx")
    assert session.get_inputs()[0].shape == ["batch", 5, 8]
    other = rand(9, 5, 8, seed=3)
    [result] = session.run(None, {session.get_inputs()[0].name: other.numpy()})
    assert torch.allclose(torch.from_numpy(result), model(other), atol=1e-5)
