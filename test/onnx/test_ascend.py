"""The deploy file: AMCT's graphs node for node, and an integer interpreter against torch."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import helper, numpy_helper
from torch import nn

from amct_fx import ExportError, convert_amct, export_onnx, prepare_qat_amct

from ..golden.reader import GRAPH_RUNS, load_graph
from ..versions import skip_dynamo_exporter_of_2_6
from .cases import CASES, INT4, INT16, Recurrent, converted, rand, spread
from .interpreter import run_deploy
from .trained import trained

DTYPES = {1: "float32", 3: "int8", 6: "int32", 7: "int64", 13: "uint64"}


def deploy(model, x, path, **options) -> onnx.ModelProto:
    export_onnx(model, x, path, format="ascend", input_names=["in"], **options)
    return onnx.load(path)


@pytest.mark.parametrize("run", GRAPH_RUNS)
def test_the_deploy_file_is_the_recorded_one_node_for_node(run, tmp_path):
    model, recorded = trained(run)
    file = deploy(model, recorded.x_fixed, tmp_path / "d.onnx", output_names=["out"])
    golden = load_graph(run, "deploy")
    arrays = {item.name: numpy_helper.to_array(item) for item in file.graph.initializer}
    ours = [node for node in file.graph.node if node.op_type != "Constant"]
    theirs = [node for node in golden.nodes if node["op"] != "Constant"]
    assert [node.op_type for node in ours] == [node["op"] for node in theirs]
    for node, expected in zip(ours, theirs, strict=True):
        assert (node.name, node.domain) == (expected["name"], "")
        found = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        found = {k: v.decode() if isinstance(v, bytes) else v for k, v in found.items()}
        assert found.keys() == expected["attributes"].keys()
        for key, value in expected["attributes"].items():
            same = value if isinstance(value, (str, list)) else pytest.approx(value, rel=1e-5)
            assert found[key] == same, key
        for ours_in, theirs_in in zip(node.input, expected["inputs"], strict=True):
            if theirs_in in golden.arrays:
                assert_same_constant(arrays[ours_in], golden.arrays[theirs_in])
        if node.op_type.startswith("Ascend"):
            assert list(node.output) == expected["outputs"]
    assert [(item.domain, item.version) for item in file.opset_import] == [("", 16)]
    assert [i.name for i in file.graph.input] == ["in"]


def assert_same_constant(ours, golden):
    assert (ours.dtype, ours.shape) == (golden.dtype, golden.shape)
    if golden.dtype == np.uint64:
        scales = [a.astype(np.uint32).view(np.float32) for a in (ours, golden)]
        assert scales[0] == pytest.approx(scales[1], rel=1e-5)
        assert not (ours >> np.uint64(32)).any()
    else:
        slack = 1 + 1e-6 * np.abs(
            golden.astype(np.int64)
        )  # large codes have more bits than float32
        assert (np.abs(ours.astype(np.int64) - golden.astype(np.int64)) <= slack).all()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("cfg", [None, INT16], ids=["int8", "int16"])
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_integers_of_the_file_compute_what_the_converted_model_computes(
    name, cfg, exporter, tmp_path
):
    skip_dynamo_exporter_of_2_6(exporter == "dynamo" and name == "conv2d")
    network, x = CASES[name]
    model = converted(network(), x, cfg)
    file = deploy(model, x, tmp_path / "d.onnx", exporter=exporter)
    other = rand(*x.shape, seed=7)
    values = run_deploy(file, {"in": other.numpy()})
    expected = model(other)
    result = torch.from_numpy(values[file.graph.output[0].name])
    assert (result - expected).abs().max() <= 1e-3 * spread(expected)
    kinds = {node.op_type for node in file.graph.node}
    assert not kinds & {"QuantizeLinear", "DequantizeLinear", "Cast"}


@pytest.mark.parametrize("name", ["conv2d", "linear"])
def test_int4_weights_are_packed_in_pairs(name, tmp_path):
    network, x = CASES[name]
    model = without_groups(network())
    model = converted(model, x, INT4)
    file = deploy(model, x, tmp_path / "d.onnx")
    shapes = {item.name: tuple(item.dims) for item in file.graph.initializer}
    layers = {n: m for n, m in model.named_modules() if getattr(m, "weight_bits", 8) == 4}
    assert layers
    packed = tuple(f"{layer}.sub_module.weight" for layer in layers)
    for layer, module in layers.items():
        full = module.weight.numel()
        assert np.prod(shapes[f"{layer}.sub_module.weight"]) * 2 == full
    values = run_deploy(file, {"in": x.numpy()}, int4=packed)
    expected = model(x)
    result = torch.from_numpy(values[file.graph.output[0].name])
    assert (result - expected).abs().max() <= 1e-3 * spread(expected)


def without_groups(model: nn.Module) -> nn.Module:
    if hasattr(model, "grouped"):
        model.grouped = nn.ConvTranspose2d(8, 4, 3, bias=False)
    return model


@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("cfg", [None, INT4, INT16], ids=["a8w8", "a8w4", "a16w8"])
def test_recurrent_layers_are_one_node_each(bias, cfg, tmp_path):
    x = rand(3, 7, 4)
    model = converted(Recurrent(bias), x, cfg)
    file = deploy(model, x, tmp_path / "d.onnx", output_names=["z", "last", "h", "c"])
    nodes = {n.name: n for n in file.graph.node if n.op_type.startswith("Basic")}
    assert [n.op_type for n in nodes.values()] == [
        "BasicLSTMInplaceFillWindowCache",
        "BasicGRUInplaceFillWindowCache",
    ]
    shapes = {
        item.name: (DTYPES[item.data_type], tuple(item.dims)) for item in file.graph.initializer
    }
    half = 2 if cfg == INT4 else 1
    lstm, gru = nodes["lstm"], nodes["gru"]
    assert (len(lstm.input), len(gru.input)) == (9, 8)
    assert shapes[lstm.input[1]] == ("int8", (1, 24, 4 // half))
    assert shapes[lstm.input[2]] == ("int8", (1, 24, 6 // half))
    assert shapes[lstm.input[8]] == ("uint64", (48,))
    assert lstm.input[7] == gru.input[6] == ""
    assert (lstm.input[5] != "") == bias
    if bias:
        assert shapes[lstm.input[5]] == ("int32", (1, 48))
    found = {item.name: helper.get_attribute_value(item) for item in lstm.attribute}
    assert found["quant_dtype"] == (6 if cfg == INT16 else 2)
    assert (found["clip"], found["direction"], found["activations"]) == (-1.0, b"forward", [])
    int4 = tuple(i for n in nodes.values() for i in n.input[1:3]) if cfg == INT4 else ()
    values = run_deploy(file, {"in": x.numpy()}, int4=int4)
    for name, expected in zip(("z", "last", "h", "c"), model(x), strict=True):
        error = (torch.from_numpy(values[name]) - expected).abs().max()
        assert error <= 1e-3 * spread(expected), name


def test_consumers_of_one_tensor_share_a_quantizer_and_keep_their_order(tmp_path):
    model, run = trained("sharedinput_default")
    file = deploy(model, run.x_fixed, tmp_path / "d.onnx")
    quants = [n.name for n in file.graph.node if n.op_type == "AscendQuant"]
    assert quants == ["stem.quant", "q.quant", "o.quant"]


def test_equal_quantizers_of_one_tensor_are_merged(tmp_path):
    """Two islands quantize the same tensor, each with a quantizer of its own."""

    class Island(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return self.conv(x) if x.shape[0] else x

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Island(), Island()

        def forward(self, x):
            return self.a(x) + self.b(x)

    x = rand(2, 4, 5, 5)
    model = converted(Two(), x)
    file = deploy(model, x, tmp_path / "d.onnx")
    assert [n.name for n in file.graph.node if n.op_type == "AscendQuant"] == ["a.conv.quant"]
    values = run_deploy(file, {"in": x.numpy()})
    result = torch.from_numpy(values[file.graph.output[0].name])
    assert torch.allclose(result, model(x), atol=1e-5)


def test_a_layer_called_twice_has_one_weight_and_two_names(tmp_path):
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x):
            return self.conv(torch.relu(self.conv(x)))

    x = rand(2, 4, 5, 5)
    prepared = prepare_qat_amct(Twice(), reused="quantize")
    prepared(x)
    file = deploy(prepared, x, tmp_path / "d.onnx")
    convs = [n for n in file.graph.node if n.op_type == "Conv"]
    assert [n.name for n in convs] == ["conv", "conv_1"]
    assert convs[0].input[1] == convs[1].input[1]


def test_half_precision_models_get_half_precision_results(tmp_path):
    x = rand(2, 4, 6, 6).half()
    model = converted(nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), nn.Conv2d(4, 2, 1)).half(), x)
    file = deploy(model, x, tmp_path / "d.onnx")
    dequants = [n for n in file.graph.node if n.op_type == "AscendDequant"]
    assert [helper.get_attribute_value(n.attribute[0]) for n in dequants] == [1, 1]


def test_bfloat16_is_refused_with_the_name_of_the_layer(tmp_path):
    x = rand(2, 4, 6, 6).bfloat16()
    model = converted(nn.Sequential(nn.Conv2d(4, 4, 1)).bfloat16(), x)
    with pytest.raises(ExportError, match="0: AscendDequant makes float32 or float16"):
        deploy(model, x, tmp_path / "d.onnx")
    assert not list(tmp_path.iterdir())


def test_the_file_has_no_dead_nodes_and_no_notes_of_the_exporter(tmp_path):
    skip_dynamo_exporter_of_2_6()
    network, x = CASES["conv2d"]
    file = deploy(converted(network(), x), x, tmp_path / "d.onnx", exporter="dynamo", opset=18)
    read = {name for node in file.graph.node for name in node.input}
    read |= {item.name for item in file.graph.output}
    assert all(set(node.output) & read for node in file.graph.node)
    assert all(item.name in read for item in file.graph.initializer)
    assert not any(node.metadata_props or node.doc_string for node in file.graph.node)
    assert not file.functions


def test_a_linear_with_one_scale_for_each_output_is_refused(tmp_path):
    cfg = """override_layer_configs { layer_name: "0" retrain_weight_quant_config {
        arq_retrain { channel_wise: true } } }"""
    prepared = prepare_qat_amct(nn.Sequential(nn.Linear(4, 3)), cfg, linear_channel_wise=True)
    prepared(rand(5, 4))
    with pytest.raises(ExportError, match="0: ATC's Gemm takes one weight scale"):
        deploy(prepared, rand(5, 4), tmp_path / "d.onnx")
    assert not list(tmp_path.iterdir())


def test_a_linear_of_zeros_keeps_its_bias_with_one_scale(tmp_path):
    network = nn.Sequential(nn.Linear(4, 3))
    with torch.no_grad():
        network[0].weight.zero_()
        network[0].bias.copy_(torch.tensor([0.013, -2.0, 0.0]))
    model = converted(network, rand(5, 4))
    file = deploy(model, rand(5, 4), tmp_path / "d.onnx")
    [param] = [i for i in file.graph.initializer if i.name == "0.dequant.param"]
    assert list(param.dims) == [1]
    values = run_deploy(file, {"in": rand(5, 4).numpy()})
    result = torch.from_numpy(values[file.graph.output[0].name])
    assert torch.allclose(result, network(rand(5, 4)), atol=1e-5)


def test_half_precision_scales_are_truncated_to_19_bits(tmp_path):
    network, x = CASES["conv2d"]
    prepared = prepare_qat_amct(network().eval(), "fakequant_precision_mode: FORCE_FP16_QUANT")
    prepared(x)
    file = deploy(prepared, x, tmp_path / "d.onnx")
    params = [i for i in file.graph.initializer if i.name.endswith(".dequant.param")]
    assert len(params) == 3
    for param in params:
        assert not (numpy_helper.to_array(param) & np.uint64(0x1FFF)).any()
    values = run_deploy(file, {"in": x.numpy()})
    expected = convert_amct(prepared)(x)
    result = torch.from_numpy(values[file.graph.output[0].name])
    assert (result - expected).abs().max() <= 1e-3 * spread(expected)
