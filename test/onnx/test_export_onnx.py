"""``export_onnx``: what it accepts, refuses and leaves behind."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto
from torch import nn

from amct_fx import (
    ArgumentError,
    ArgumentTypeError,
    ConvertError,
    ExportError,
    InputDataError,
    ModelStateError,
    ModelTypeError,
    convert_amct,
    export_onnx,
    prepare_qat_amct,
    verify_onnx,
)
from amct_fx.onnx.files import write_model

from ..networks import Attend, Net, NetWithIsland, example
from ..versions import skip_dynamo_exporter_of_2_6
from .cases import INT16, rand

FORMATS = ("qdq", "ascend", "fake_quant")


@pytest.fixture
def prepared() -> nn.Module:
    model = prepare_qat_amct(Net())
    model(example(8))
    return model


def run(path, *inputs):
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    names = [item.name for item in session.get_inputs()]
    feeds = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
    return [torch.from_numpy(y) for y in session.run(None, feeds)]


@pytest.mark.parametrize("format", FORMATS)
def test_prepared_and_converted_models_give_the_same_file(prepared, format, tmp_path):
    export_onnx(prepared.train(), example(), tmp_path / "a.onnx", format=format)
    export_onnx(convert_amct(prepared), example(), tmp_path / "b.onnx", format=format)
    files = [onnx.load(tmp_path / name).graph for name in ("a.onnx", "b.onnx")]
    assert files[0].SerializeToString() == files[1].SerializeToString()


@pytest.mark.parametrize("format", FORMATS)
def test_the_model_is_not_changed(prepared, format, tmp_path):
    for model in (prepared, convert_amct(prepared)):
        before, kinds = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
        mode = model.training
        export_onnx(model, example(), tmp_path / "m.onnx", format=format)
        assert [type(m) for m in model.modules()] == kinds
        assert model.training == mode
        for key, value in model.state_dict().items():
            assert not isinstance(value, torch.Tensor) or torch.equal(value, before[key])


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_qdq_holds_unsigned_activations_and_integer_constants(prepared, exporter, tmp_path):
    export_onnx(prepared, example(), tmp_path / "m.onnx", exporter=exporter, dynamic_batch=True)
    onnx.checker.check_model(tmp_path / "m.onnx", full_check=True)
    file = onnx.load(tmp_path / "m.onnx")
    zero = {i.name: onnx.numpy_helper.to_array(i) for i in file.graph.initializer}
    quantizes = [n for n in file.graph.node if n.op_type == "QuantizeLinear"]
    assert [n.name for n in quantizes] == ["stem.quant", "left.quant", "head.quant"]
    assert all(zero[n.input[2]].dtype == np.uint8 for n in quantizes)
    assert zero[quantizes[1].input[2]] == 0  # behind a ReLU, -128 + 128
    kinds = {i.data_type for i in file.graph.initializer if np.prod(i.dims) > 8}
    assert kinds == {TensorProto.INT8}
    [result] = run(tmp_path / "m.onnx", example(5))
    expected = convert_amct(prepared)(example(5))
    assert (result - expected).abs().max() <= 0.01 * expected.abs().max()


def test_signed_and_unsigned_activations_are_the_same_codes(prepared, tmp_path):
    results = []
    for signed in (False, True):
        export_onnx(prepared, example(), tmp_path / "m.onnx", signed_activations=signed)
        file = onnx.load(tmp_path / "m.onnx")
        for node in list(file.graph.node):
            if node.op_type == "QuantizeLinear":
                kind = TensorProto.INT8 if signed else TensorProto.UINT8
                file.graph.output.append(
                    onnx.helper.make_tensor_value_info(node.output[0], kind, None)
                )
        session = onnxruntime.InferenceSession(file.SerializeToString())
        [x] = session.get_inputs()
        results.append(session.run(None, {x.name: example().numpy()})[1:])
    for unsigned, signed in zip(*results, strict=True):
        assert (unsigned.astype(int) - 128 == signed.astype(int)).all()


def test_int16_activations_take_the_opset_that_has_them(tmp_path):
    model = prepare_qat_amct(Net().eval(), INT16)
    model(example())
    export_onnx(model, example(), tmp_path / "m.onnx")
    assert onnx.load(tmp_path / "m.onnx").opset_import[0].version == 21
    [result] = run(tmp_path / "m.onnx", example())
    assert torch.allclose(result, convert_amct(model)(example()), atol=1e-3)
    with pytest.raises(ArgumentError, match="from 21 to 23, because of its INT16 activations"):
        export_onnx(model, example(), tmp_path / "n.onnx", opset=18)


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
def test_names_and_dynamic_axes_are_those_that_were_asked_for(prepared, exporter, tmp_path):
    skip_dynamo_exporter_of_2_6(exporter == "dynamo")
    export_onnx(
        prepared,
        example(1),
        tmp_path / "m.onnx",
        exporter=exporter,
        input_names=["image"],
        output_names=["logits"],
        dynamic_axes={"image": {0: "n"}, "logits": [0]},
    )
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    assert [(i.name, i.shape) for i in session.get_inputs()] == [("image", ["n", 3, 8, 8])]
    assert [i.name for i in session.get_outputs()] == ["logits"]
    for batch in (1, 3):
        assert session.run(None, {"image": example(batch).numpy()})[0].shape == (batch, 4)


def test_dynamic_shapes_go_to_the_exporter_that_takes_them(prepared, tmp_path):
    shapes = ({0: torch.export.Dim("n")},)
    export_onnx(prepared, example(), tmp_path / "m.onnx", dynamic_shapes=shapes)
    assert run(tmp_path / "m.onnx", example(7))[0].shape == (7, 4)
    with pytest.raises(ArgumentError, match="dynamic_shapes needs the exporter 'dynamo'"):
        export_onnx(
            prepared,
            example(),
            tmp_path / "n.onnx",
            dynamic_shapes=shapes,
            exporter="torchscript",
        )


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_with_an_island_exports(format, tmp_path):
    model = prepare_qat_amct(NetWithIsland())
    model(example(4))
    export_onnx(model, example(4), tmp_path / "m.onnx", format=format)
    names = {node.name for node in onnx.load(tmp_path / "m.onnx").graph.node}
    assert {"stem", "middle.conv", "middle.tail.0", "head"} <= names


@pytest.mark.parametrize("format", FORMATS)
def test_a_model_that_was_only_pruned_is_written_as_plain_floats(format, tmp_path):
    cfg = """prune_config { n_out_of_m_pruner { l1_selective_prune {
        n_out_of_m_type: M4N2 update_freq: 0 } } }"""
    model = prepare_qat_amct(nn.Sequential(nn.Conv2d(8, 8, 3), nn.ReLU()), cfg)
    model(rand(2, 8, 6, 6))
    x = rand(2, 8, 6, 6)
    for given in (model, convert_amct(model)):
        export_onnx(given, x, tmp_path / "m.onnx", format=format)
        assert [n.op_type for n in onnx.load(tmp_path / "m.onnx").graph.node] == ["Conv", "Relu"]
        assert torch.allclose(run(tmp_path / "m.onnx", x)[0], convert_amct(model)(x), atol=1e-5)


WRONG = [
    ({"format": "acsend"}, ArgumentError, "did you mean 'ascend'"),
    ({"format": None}, ArgumentError, "format must be one of"),
    ({"exporter": "onnx"}, ArgumentError, "exporter must be"),
    ({"opset": 12}, ArgumentError, "needs an opset from 13 to 23, not 12"),
    ({"opset": 19, "format": "ascend"}, ArgumentError, "from 11 to 18, not 19"),
    ({"opset": "18"}, ArgumentTypeError, "opset must be int"),
    ({"opset": True}, ArgumentTypeError, "opset must be int"),
    ({"input_names": "x"}, ArgumentTypeError, "input_names must be a list"),
    ({"input_names": ["x", "y"]}, ArgumentError, "2 names for 1 input"),
    ({"input_names": [3]}, ArgumentError, "must hold names, not 3"),
    ({"output_names": ["y", "y"]}, ArgumentError, "a name twice"),
    ({"dynamic_axes": ["x"]}, ArgumentTypeError, "dynamic_axes must be a dict"),
    (
        {"input_names": ["image"], "dynamic_axes": {"imag": {0: "n"}}},
        ArgumentError,
        "'imag' is no input or output .*did you mean 'image'",
    ),
    ({"input_names": ["x"], "dynamic_axes": {"x": {4: "n"}}}, ArgumentError, "so no axis 4"),
    ({"input_names": ["x"], "dynamic_axes": {"x": {-1: "n"}}}, ArgumentError, "axes from 0"),
    ({"input_names": ["x"], "dynamic_axes": {"x": 0}}, ArgumentError, "axes from 0"),
    ({"fold_unfused_weights": True, "format": "ascend"}, ArgumentError, "is for formats 'qdq'"),
    ({"dynamic_batch": True, "dynamic_axes": {}}, ArgumentError, "give only one of"),
    ({"dynamic_axes": {3: {0: "n"}}}, ArgumentError, "as keys, not 3"),
    ({"input_names": ["x"], "dynamic_axes": {"x": {0: 3}}}, ArgumentError, "axes from 0"),
    ({"input_names": ["x"], "output_names": ["x"]}, ArgumentError, "both hold 'x'"),
    ({"output_names": ["a", "b"]}, ArgumentError, "2 names for 1 output"),
    ({"output_names": ["a", "b"], "format": "ascend"}, ArgumentError, "2 names for 1 output"),
    ({"output_names": ["y"], "dynamic_axes": {"y": {9: "n"}}}, ArgumentError, "so no axis 9"),
]


@pytest.mark.parametrize(("options", "error", "text"), WRONG)
def test_wrong_arguments_are_named_and_nothing_is_written(prepared, tmp_path, options, error, text):
    with pytest.raises(error, match=text):
        export_onnx(prepared, example(), tmp_path / "m.onnx", **options)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("args", [[example()], {"x": 1}, {"y": example()}, None, (), (1, 2)])
def test_inputs_must_hold_a_tensor_that_forward_takes(prepared, tmp_path, args):
    with pytest.raises(InputDataError, match="args"):
        export_onnx(prepared, args, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_no_file(prepared, tmp_path):
    for path in (tmp_path, f"{tmp_path}/new/", ""):
        with pytest.raises(ArgumentError, match="path must name a file"):
            export_onnx(prepared, example(), path)
    assert not list(tmp_path.iterdir())


def test_models_in_the_wrong_state_are_refused(prepared, tmp_path):
    path = tmp_path / "m.onnx"
    with pytest.raises(ModelTypeError):
        export_onnx("model", example(), path)
    with pytest.raises(ModelStateError, match="not prepared"):
        export_onnx(Net(), example(), path)
    with pytest.raises(ConvertError, match="never calibrated"):
        export_onnx(prepare_qat_amct(Net()), example(), path)
    with pytest.raises(ModelStateError, match=r"in training mode; call model.eval\(\)"):
        export_onnx(convert_amct(prepared).train(), example(), path)
    assert not list(tmp_path.iterdir())


def test_inputs_that_do_not_fit_are_no_error_of_the_exporter(prepared, tmp_path):
    message = r"cannot run on the example inputs, of shapes \[\[2, 5, 8, 8\]\]; .* 3 channels"
    with pytest.raises(InputDataError, match=message):
        export_onnx(prepared, rand(2, 5, 8, 8), tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


class SingularValues(nn.Module):
    """Something for which ONNX has no operator."""

    def forward(self, x):
        return torch.linalg.svdvals(x)


def unwritable() -> nn.Module:
    prepared = prepare_qat_amct(nn.Sequential(nn.Conv2d(3, 4, 3), SingularValues()))
    prepared(example())
    return prepared.eval()


def test_a_failed_exporter_says_what_went_wrong_and_not_only_where(tmp_path):
    match = r"torch.onnx.export cannot write this model \(dynamo: .*svd.*; torchscript: .*svd"
    with pytest.raises(ExportError, match=match) as caught:
        export_onnx(unwritable(), example(), tmp_path / "m.onnx")
    assert "\x1b" not in str(caught.value)
    assert "This is step" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_a_file_in_place_of_a_folder_is_named(prepared, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError, match=r"is a file, not a folder: '.*/file'"):
        export_onnx(prepared, example(), tmp_path / "file" / "m.onnx", format="ascend")


def test_an_error_leaves_the_old_file(prepared, tmp_path, monkeypatch):
    path = tmp_path / "m.onnx"
    path.write_bytes(b"old")

    def full_disk(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full_disk)
    with pytest.raises(OSError, match="No space left"):
        export_onnx(prepared, example(), path, format="ascend")
    assert [item.name for item in tmp_path.iterdir()] == ["m.onnx"]
    assert path.read_bytes() == b"old"


def test_missing_folders_are_made_and_the_file_has_its_mode(prepared, tmp_path):
    path = tmp_path / "a" / "b" / "m.onnx"
    export_onnx(prepared, example(), path, format="fake_quant")
    assert path.stat().st_mode & 0o777 == 0o640


@pytest.mark.parametrize(
    ("format", "suffix"), [("ascend", "deploy"), ("fake_quant", "fakequant"), ("qdq", "qdq")]
)
def test_what_is_too_large_for_one_file_lies_beside_it(prepared, tmp_path, format, suffix):
    export_onnx(prepared, example(), tmp_path / "one.onnx", format=format)
    whole = onnx.load(tmp_path / "one.onnx")
    large = max(whole.graph.initializer, key=lambda item: len(item.raw_data))
    copied = onnx.ModelProto()
    copied.CopyFrom(whole)
    limit = whole.ByteSize() - len(large.raw_data) // 2
    write_model(copied, tmp_path / "out" / "m.onnx", suffix=suffix, max_bytes=limit)
    beside = f"{large.name}_{suffix}.external"
    assert {item.name for item in (tmp_path / "out").iterdir()} == {beside, "m.onnx"}
    assert (tmp_path / "out" / beside).read_bytes() == large.raw_data
    loaded = onnx.load(tmp_path / "out" / "m.onnx")
    assert [t.raw_data for t in loaded.graph.initializer] == [
        t.raw_data for t in whole.graph.initializer
    ]
    if format != "ascend":
        assert torch.equal(
            run(tmp_path / "out" / "m.onnx", example())[0],
            run(tmp_path / "one.onnx", example())[0],
        )


def test_tensors_beside_a_file_share_no_file_though_their_names_look_alike(tmp_path):
    weights = {name: np.full(64, i, np.float32) for i, name in enumerate(("a/b", "a_b", "a:b"))}
    node = onnx.helper.make_node("Sum", list(weights), ["y"])
    output = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [64])
    constants = [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()]
    graph = onnx.helper.make_graph([node], "g", [], [output], constants)
    write_model(onnx.helper.make_model(graph), tmp_path / "m.onnx", suffix="qdq", max_bytes=300)
    assert len(list(tmp_path.iterdir())) == 4
    for tensor in onnx.load(tmp_path / "m.onnx").graph.initializer:
        assert (onnx.numpy_helper.to_array(tensor) == weights[tensor.name]).all()


class TwoInputs(nn.Module):
    """Takes a mask by name, a flag, and inputs inside a tuple; returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, pair, mask=None, double=False):
        y = self.a(pair[0]) + self.b(pair[1])
        y = y if mask is None else y * mask
        return {"once": y, "twice": 2 * y if double else y}


@pytest.mark.parametrize("format", FORMATS)
def test_nested_inputs_names_of_arguments_and_dicts_of_results(format, tmp_path):
    pair, mask = (rand(5, 4), rand(5, 4, seed=1)), rand(5, 1, seed=2)
    model = prepare_qat_amct(TwoInputs())
    model(pair, mask, double=True)
    args = {"pair": pair, "mask": mask, "double": True}
    export_onnx(
        model,
        args,
        tmp_path / "m.onnx",
        format=format,
        dynamic_batch=True,
        input_names=["x", "y", "mask"],
        output_names=["once", "twice"],
    )
    file = onnx.load(tmp_path / "m.onnx")
    assert [item.name for item in file.graph.input] == ["x", "y", "mask"]
    assert [item.name for item in file.graph.output] == ["once", "twice"]
    assert verify_onnx(tmp_path / "m.onnx", model, args).passed
    if format != "ascend":
        other = rand(7, 4, seed=3), rand(7, 4, seed=4), rand(7, 1, seed=5)
        once, twice = run(tmp_path / "m.onnx", *other)
        expected = convert_amct(model)(other[:2], other[2], double=True)
        assert torch.allclose(once, expected["once"], atol=1e-5)
        assert torch.allclose(twice, 2 * once)


class Scaled(nn.Module):
    """Takes a number between two tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x, factor=2.0, mask=None):
        y = self.fc(x) * factor
        return y if mask is None else y * mask


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("args", [(rand(2, 4),), (rand(2, 4), 0.5, rand(3))])
def test_numbers_are_constants_and_inputs_have_the_names_of_arguments(args, exporter, tmp_path):
    model = prepare_qat_amct(Scaled(), None, args)
    model(*args)
    path = tmp_path / "m.onnx"
    export_onnx(model, args, path, format="fake_quant", exporter=exporter)
    tensors = [item for item in args if isinstance(item, torch.Tensor)]
    assert [item.name for item in onnx.load(path).graph.input] == ["x", "mask"][: len(tensors)]
    assert torch.allclose(run(path, *tensors)[0], convert_amct(model)(*args), atol=1e-5)
    assert verify_onnx(path, model, args).passed


def test_a_failed_exporter_prints_nothing(tmp_path, capsys):
    with pytest.raises(ExportError):
        export_onnx(unwritable(), example(), tmp_path / "m.onnx", exporter="torchscript")
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("format", ["ascend", "fake_quant", "qdq"])
def test_attention_is_written_without_its_fused_kernel(format, tmp_path):
    x = rand(2, 6, 16)
    model = prepare_qat_amct(Attend().eval())
    model(x)
    enabled = torch.backends.mha.get_fastpath_enabled()
    export_onnx(model, x, tmp_path / "m.onnx", format=format)
    assert torch.backends.mha.get_fastpath_enabled() == enabled
    assert verify_onnx(tmp_path / "m.onnx", model, x).passed


def test_what_each_exporter_said_is_told_and_no_graph_is_printed(tmp_path, capfd):
    x = rand(2, 6, 16)
    model = prepare_qat_amct(Attend().eval())
    model(x)
    said = r"torchscript: .*opset version 11 is not supported.*; dynamo: it wrote opset 18"
    with pytest.raises(ExportError, match=said):
        export_onnx(model, x, tmp_path / "m.onnx", format="ascend", opset=11)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("format", ["ascend", "fake_quant"])
def test_grouped_transposed_convolutions_go_down_to_operator_set_11(format, tmp_path):
    x = rand(2, 4, 6, 6)
    model = prepare_qat_amct(nn.Sequential(nn.ConvTranspose2d(4, 6, 3, groups=2)))
    model(x)
    export_onnx(model, x, tmp_path / "m.onnx", format=format, opset=11)
    assert onnx.load(tmp_path / "m.onnx").opset_import[0].version == 11
    assert verify_onnx(tmp_path / "m.onnx", model, x).passed


def test_a_default_opset_gives_way_to_the_exporter(prepared, tmp_path):
    export_onnx(prepared, example(), tmp_path / "m.onnx", format="ascend", exporter="dynamo")
    assert onnx.load(tmp_path / "m.onnx").opset_import[0].version == 18
    with pytest.raises(ExportError, match="wrote opset 18, which it could not convert to 16"):
        export_onnx(
            prepared, example(), tmp_path / "n.onnx", format="ascend", exporter="dynamo", opset=16
        )
    assert not (tmp_path / "n.onnx").exists()
