"""Stock torch.onnx.export of the converted model: checker, integers, onnxruntime, codes."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from amct_fx import convert_amct, prepare_qat_amct
from amct_fx.nn.quantized import collect_codes

from .golden import networks as models
from .networks import Net, NetWithIsland, example
from .versions import skip_dynamo_exporter_of_2_6

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def converted_model(model: nn.Module, x: torch.Tensor) -> nn.Module:
    prepared = prepare_qat_amct(model.eval())
    prepared(x)
    return convert_amct(prepared)


def export(
    model: nn.Module, x: torch.Tensor, path: Path, *, dynamo: bool, dynamic: bool, opset: int
) -> onnx.ModelProto:
    shapes: dict[str, object] = {}
    if dynamic:
        batch = {0: torch.export.Dim("batch")}
        shapes = {"dynamic_shapes": (batch,)} if dynamo else {"dynamic_axes": {"x": {0: "batch"}}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            model,
            (x,),
            path,
            dynamo=dynamo,
            opset_version=opset,
            input_names=["x"],
            verbose=False,
            **shapes,
        )
    onnx.checker.check_model(path, full_check=True)
    return onnx.load(path)


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "static"])
@pytest.mark.parametrize("opset", [17, 18, 20])
def test_both_exporters_at_every_opset_agree_with_torch(tmp_path, dynamo, dynamic, opset):
    model = converted_model(Net(), example())
    export(model, example(), tmp_path / "m.onnx", dynamo=dynamo, dynamic=dynamic, opset=opset)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    for batch in (1, 5) if dynamic else (2,):
        x = example(batch)
        (result,) = session.run(None, {"x": x.numpy()})
        expected = model(x)
        assert (torch.from_numpy(result) - expected).abs().max() <= 0.01 * expected.abs().max()


@pytest.mark.parametrize("name", ["DepthwiseNet", "DeconvNet", "ConvFlattenLinear", "GroupedNet"])
@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_golden_networks_export(tmp_path, name, dynamo):
    skip_dynamo_exporter_of_2_6(dynamo and name == "DeconvNet")
    x = models.example_input(name)
    model = converted_model(models.build(name), x)
    export(model, x, tmp_path / "m.onnx", dynamo=dynamo, dynamic=True, opset=18)
    (result,) = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"x": x.numpy()})
    expected = model(x)
    assert (torch.from_numpy(result) - expected).abs().max() <= 0.01 * expected.abs().max()


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_the_file_holds_integers_and_only_standard_operators(tmp_path, dynamo):
    skip_dynamo_exporter_of_2_6(dynamo)
    model = converted_model(Net(), example())
    file = export(model, example(), tmp_path / "m.onnx", dynamo=dynamo, dynamic=True, opset=18)
    graph = file.graph
    assert {opset.domain for opset in file.opset_import} == {""}
    types = {item.name: item.data_type for item in graph.initializer}
    sizes = {item.name: int(np.prod(item.dims)) for item in graph.initializer}
    weights = [name for name, kind in types.items() if kind == TensorProto.INT8 and sizes[name] > 8]
    assert sum(sizes[name] for name in weights) == sum(
        m.weight_codes.numel() for m in model.modules() if hasattr(m, "weight_codes")
    )
    read = [node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"]
    biases = [name for name in read if types.get(name) == TensorProto.INT32]
    assert sorted(sizes[name] for name in biases) == [4, 8, 8, 8]
    kinds = [node.op_type for node in graph.node]
    assert kinds.count("QuantizeLinear") == 3
    assert "Cast" not in kinds
    assert "BatchNormalization" not in kinds
    large = [n for n, k in types.items() if k == TensorProto.FLOAT and sizes[n] > 8]
    assert not large


@pytest.mark.parametrize("dynamo", [True, False], ids=["dynamo", "torchscript"])
def test_codes_in_onnxruntime_equal_the_codes_in_torch(tmp_path, dynamo):
    model = converted_model(Net(), example(16))
    file = export(model, example(16), tmp_path / "m.onnx", dynamo=dynamo, dynamic=True, opset=18)
    outputs = [node.output[0] for node in file.graph.node if node.op_type == "QuantizeLinear"]
    for name in outputs:
        file.graph.output.append(helper.make_tensor_value_info(name, TensorProto.INT8, None))
    session = onnxruntime.InferenceSession(file.SerializeToString())
    x = torch.randn(64, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    results = session.run(outputs, {"x": x.numpy()})
    with collect_codes(model) as codes:
        model(x)
    for result, (expected,) in zip(results, codes.values(), strict=True):
        difference = np.abs(result.astype(int) - expected.numpy().astype(int))
        assert (difference == 0).mean() >= 0.995
        assert difference.max() <= 2


def test_a_model_with_an_island_exports_the_branch_that_the_example_takes(tmp_path):
    model = converted_model(NetWithIsland(), example(4))
    export(model, example(4), tmp_path / "m.onnx", dynamo=False, dynamic=False, opset=17)
    session = onnxruntime.InferenceSession(tmp_path / "m.onnx")
    (result,) = session.run(None, {"x": example(4).numpy()})
    expected = model(example(4))
    assert (torch.from_numpy(result) - expected).abs().max() <= 0.01 * expected.abs().max()


def test_int16_activations_export_at_opset_21(tmp_path):
    cfg = "retrain_data_quant_config { ulq_quantize { dst_type: INT16 } }"
    prepared = prepare_qat_amct(Net().eval(), cfg)
    prepared(example())
    model = convert_amct(prepared)
    export(model, example(), tmp_path / "m.onnx", dynamo=True, dynamic=False, opset=21)
    (result,) = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(
        None, {"x": example().numpy()}
    )
    assert torch.allclose(torch.from_numpy(result), model(example()), atol=1e-3)


def test_export_leaves_torch_and_the_model_as_they_were(tmp_path):
    """A fresh process exports with nothing but torch and a pickled converted model."""
    model = converted_model(models.build("TinyCNN"), models.example_input("TinyCNN"))
    torch.save(model, tmp_path / "model.pt")
    code = (
        "import torch, sys; m = torch.load(sys.argv[1], weights_only=False);"
        "torch.onnx.export(m, (torch.randn(1, 3, 8, 8),), sys.argv[2], dynamo=False)"
    )
    paths = [str(tmp_path / "model.pt"), str(tmp_path / "m.onnx")]
    root = str(Path(__file__).parents[1])
    subprocess.run([sys.executable, "-W", "ignore", "-c", code, *paths], check=True, cwd=root)
    onnx.checker.check_model(tmp_path / "m.onnx", full_check=True)
