"""``verify_onnx``: agreement of every format, and corrupted files found and named."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from torch import nn

from amct_fx import (
    AmctFileNotFoundError,
    ArgumentError,
    ArgumentTypeError,
    ExportError,
    InputDataError,
    convert_amct,
    export_onnx,
    prepare_qat_amct,
    verify_onnx,
)

from ..networks import Net, NetWithIsland, example
from .cases import CASES, INT4, INT16, Recurrent, converted, rand

FORMATS = ("qdq", "ascend", "fake_quant")


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return converted(Net(), example(16))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "m.onnx"


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("name", CASES)
def test_every_kind_of_layer_agrees(name, format, path):
    network, x = CASES[name]
    model = converted(network(), x)
    export_onnx(model, x, path, format=format, exporter="torchscript")
    result = verify_onnx(path, model, rand(*x.shape, seed=4))
    assert result.passed, str(result)
    names = {n for n, m in model.named_modules() if hasattr(m, "weight_codes")}
    assert {row.name for row in result.rows} == names
    for row in result.rows:
        assert row.own_equal == 1
        assert row.equal >= 0.99
        assert min(row.sqnr, row.own_sqnr, result.output_sqnr) > 60


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("cfg", [None, INT4, INT16], ids=["a8w8", "a8w4", "a16w8"])
def test_recurrent_layers_agree(cfg, format, path):
    x = rand(3, 5, 4)
    model = converted(Recurrent(), x, cfg)
    options = {"opset": 21} if cfg == INT16 and format == "qdq" else {"exporter": "torchscript"}
    export_onnx(model, x, path, format=format, **options)
    result = verify_onnx(path, model, x)
    assert result.passed, str(result)
    assert {row.name for row in result.rows} >= {"lstm", "gru"}


def test_prepared_models_islands_and_both_exporters_are_verified(path):
    prepared = prepare_qat_amct(NetWithIsland())
    prepared(example(4))
    for exporter in ("dynamo", "torchscript"):
        export_onnx(prepared, example(4), path, exporter=exporter, format="qdq")
        assert verify_onnx(path, prepared, example(4)).passed


def corrupted(path, change):
    """Write the file with one of its constants changed."""
    file = onnx.load(path)
    tensors = {item.name: item for item in file.graph.initializer}
    tensors.update(
        {n.output[0]: n.attribute[0].t for n in file.graph.node if n.op_type == "Constant"}
    )
    change(file, tensors)
    onnx.save(file, path)


def scale_input(name, factor):
    """Return a change of the input scale of a layer."""

    def change(file, tensors):
        node = next(n for n in file.graph.node if n.name == f"{name}.quant")
        if node.op_type == "AscendQuant":
            attribute = next(a for a in node.attribute if a.name == "scale")
            attribute.f /= factor
        else:
            scale_constant(node.input[1], factor)(file, tensors)

    return change


def scale_constant(name, factor):
    def change(file, tensors):
        value = numpy_helper.to_array(tensors[name]) * np.float32(factor)
        tensors[name].CopyFrom(numpy_helper.from_array(value.astype(np.float32), name))

    return change


def scale_params(name, factor, channel):
    def change(file, tensors):
        bits = numpy_helper.to_array(tensors[name]).astype(np.uint32)
        scale = bits.view(np.float32).copy()
        scale[channel] *= np.float32(factor)
        changed = scale.view(np.uint32).astype(np.uint64)
        tensors[name].CopyFrom(numpy_helper.from_array(changed, name))

    return change


def flip_code(name):
    def change(file, tensors):
        codes = numpy_helper.to_array(tensors[name]).copy()
        codes.flat[2] = -codes.flat[2] - 50
        tensors[name].CopyFrom(numpy_helper.from_array(codes, name))

    return change


CORRUPTIONS = [
    ("qdq", scale_input("left", 1.02), "left", "quantizer"),
    ("qdq", flip_code("right.weight_codes"), "right", "weights"),
    ("qdq", flip_code("head.bias_codes"), "head", "bias"),
    ("ascend", scale_input("head", 1.02), "head", "quantizer"),
    ("ascend", scale_params("stem.dequant.param", 1.01, 3), "stem", "scales"),
    ("ascend", flip_code("left.sub_module.bias"), "left", "bias"),
    ("fake_quant", scale_constant("left.quant.fakequant.scale.output0", 1.02), "left", "quantizer"),
    ("fake_quant", scale_constant("right.fakedequant.dqscale.output0", 0.99), "right", "scales"),
]


@pytest.mark.parametrize(("format", "change", "layer", "word"), CORRUPTIONS)
def test_a_corrupted_layer_is_found_and_named(model, path, format, change, layer, word):
    export_onnx(model, example(16), path, format=format, exporter="torchscript")
    assert verify_onnx(path, model, example(16)).passed
    corrupted(path, change)
    result = verify_onnx(path, model, example(16))
    assert not result.passed
    assert result.first_diverging == layer
    row = next(row for row in result.rows if row.problem)
    assert word in row.problem
    assert f"the first layer that differs is {layer}" in str(result)


def test_outputs_that_differ_behind_equal_layers_do_not_pass(path):
    net = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).eval()
    prepared = prepare_qat_amct(net)
    prepared(rand(16, 4))
    export_onnx(prepared, rand(16, 4), path, format="ascend", exporter="torchscript")
    assert verify_onnx(path, prepared, rand(16, 4)).passed
    corrupted(path, scale_constant("1.weight", 2.0))
    result = verify_onnx(path, prepared, rand(16, 4))
    assert result.first_diverging is None
    assert not result.passed
    assert "something that is not quantized differs" in str(result)


def test_outputs_may_be_infinite_where_the_model_says_so(path):
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 6)

        def forward(self, x):
            return self.fc(x).masked_fill(torch.arange(6) > 3, -torch.inf)

    prepared = prepare_qat_amct(Masked())
    prepared(rand(16, 4))
    export_onnx(prepared, rand(16, 4), path, format="fake_quant")
    result = verify_onnx(path, prepared, rand(16, 4))
    assert result.passed
    assert result.output_sqnr > 60


def test_the_table_has_a_line_for_each_layer(model, path):
    export_onnx(model, example(16), path, format="fake_quant")
    lines = str(verify_onnx(path, model, example(16))).splitlines()
    assert lines[0].split() == ["layer", "equal", "largest", "SQNR", "own", "SQNR"]
    assert [line.split()[0] for line in lines[1:-1]] == ["stem", "left", "right", "head"]
    assert lines[-1].startswith("every layer agrees")


def test_the_model_is_not_changed(model, path):
    export_onnx(model, example(16), path)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    verify_onnx(path, model, example(16))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any(module._forward_hooks for module in model.modules())


def test_what_is_no_file_of_the_model_is_refused(model, path, tmp_path):
    with pytest.raises(ArgumentTypeError, match="path must be str or a path, not NoneType"):
        verify_onnx(None, model, example(16))
    with pytest.raises(AmctFileNotFoundError, match="there is no file"):
        verify_onnx(path, model, example())
    with pytest.raises(ArgumentError, match="is a folder"):
        verify_onnx(tmp_path, model, example())
    path.write_text("not a model")
    with pytest.raises(ExportError, match="cannot be read as an ONNX file"):
        verify_onnx(path, model, example())
    export_onnx(convert_amct(model_of(nn.Conv2d(3, 4, 3))), example(), path)
    with pytest.raises(ExportError, match="has no layer 'stem'"):
        verify_onnx(path, model, example())


def model_of(layer: nn.Module) -> nn.Module:
    prepared = prepare_qat_amct(nn.Sequential(layer))
    prepared(example())
    return prepared


def test_batches_that_do_not_fit_are_refused(model, path):
    export_onnx(model, example(2), path)
    with pytest.raises(InputDataError, match="batch must be a tensor, a tuple"):
        verify_onnx(path, model, [example(2)])
    shape = (
        r"cannot run on this batch; give one of the shape that the file takes \(x \[2, 3, 8, 8\]"
    )
    with pytest.raises(InputDataError, match=shape):
        verify_onnx(path, model, example(3))
    with pytest.raises(InputDataError, match="the model cannot run on this batch"):
        verify_onnx(path, model, rand(2, 5, 8, 8))


@pytest.mark.parametrize("format", FORMATS)
def test_half_precision_models_are_verified(format, path):
    x = example(4).half()
    model = converted(Net().half(), x)
    export_onnx(model, x, path, format=format, exporter="torchscript")
    result = verify_onnx(path, model, x)
    assert result.passed, str(result)


@pytest.mark.parametrize("format", ["ascend", "fake_quant"])
def test_an_initial_state_that_is_given_is_compared_too(format, path):
    class Stateful(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.gru = nn.LSTM(4, 6, batch_first=True), nn.GRU(6, 4)

        def forward(self, x, state, h):
            y, _ = self.lstm(x, state)
            return self.gru(y, h)

    args = (rand(3, 5, 4), (rand(1, 3, 6, seed=1), rand(1, 3, 6, seed=2)), rand(1, 5, 4, seed=3))
    prepared = prepare_qat_amct(Stateful().eval())
    prepared(*args)
    export_onnx(prepared, args, path, format=format)
    result = verify_onnx(path, prepared, args)
    assert result.passed, str(result)
    assert min(row.own_sqnr for row in result.rows) > 60


@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_layers_with_equal_weights_and_constant_inputs_keep_their_names(exporter, path):
    """Exporters merge equal constants, and an input may be a parameter."""

    class Queries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.queries = nn.Parameter(rand(1, 3, 8))
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.b.load_state_dict(self.a.state_dict())

        def forward(self, x):
            return self.a(self.queries) + self.b(x)

    x = rand(2, 3, 8, seed=1)
    model = converted(Queries(), x)
    for format in ("qdq", "ascend"):
        export_onnx(model, x, path, format=format, exporter=exporter, opset=18)
        result = verify_onnx(path, model, x)
        assert result.passed
        assert [row.name for row in result.rows] == ["a", "b"]


def test_codes_on_ties_do_not_count_against_the_layer_that_reads_them(path):
    """The simulation multiplies by the reciprocal of the scale, so ties may fall either way."""
    model = converted(nn.Sequential(nn.Linear(8, 4)), rand(64, 8))
    scale = float(model[0].input_quantizer.scale)
    x = rand(512, 8, seed=5)
    x[:2] = scale * (torch.arange(16).reshape(2, 8) + 0.5)
    export_onnx(model, x, path, format="fake_quant")
    result = verify_onnx(path, model, x)
    assert result.passed
    assert result.rows[0].own_largest <= 1
    assert result.rows[0].own_sqnr > 100


class NamedLikeOperators(nn.Module):
    """Layers with the names that graphs give to calls of other layers, and one that only trains."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.linear, self.conv2d = (nn.Linear(4, 4) for _ in range(3))
        self.aux = nn.Linear(4, 2)

    def forward(self, x):
        y = self.conv2d(self.linear(self.fc(x)))
        return (y, self.aux(y)) if self.training else y


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_layers_keep_names_that_operators_have_and_may_run_in_training_only(exporter, format, path):
    x = rand(5, 4)
    prepared = prepare_qat_amct(NamedLikeOperators())
    for _ in range(2):
        prepared(x)
    export_onnx(prepared, x, path, format=format, exporter=exporter, opset=18)
    result = verify_onnx(path, prepared, x)
    assert result.passed, str(result)
    assert [row.name for row in result.rows] == ["fc", "linear", "conv2d"]


class TiedDecoder(nn.Module):
    """Reads the weight of a layer that it also calls; only the call has a quantized input."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.middle = nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.middle(self.encoder(x)) @ self.encoder.weight


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("exporter", ["torchscript", "dynamo"])
def test_the_weight_of_a_layer_may_be_read_beside_its_calls(exporter, format, path):
    x = rand(2, 3, 6)
    model = converted(TiedDecoder(), x)
    export_onnx(model, x, path, format=format, exporter=exporter, opset=18)
    result = verify_onnx(path, model, x)
    assert result.passed, str(result)
    assert result.output_sqnr > 60
    assert [row.name for row in result.rows] == ["encoder", "middle"]
