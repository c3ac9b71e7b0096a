"""The demo: its data, its comparison of codes, and one short run from start to finish."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from amct_fx_demo import CONFIG, DigitsNet
from amct_fx_demo.data import Split, digits
from amct_fx_demo.deployment import CodeComparison, compare_codes, export, onnx_codes, onnx_logits
from amct_fx_demo.training import fit
from torch import nn
from typer.testing import CliRunner

from amct_fx.cli import app

from .versions import skip_dynamo_exporter_of_2_6


def test_a_third_of_the_digits_is_held_out_and_the_split_is_always_the_same() -> None:
    data = digits()
    assert data.train.images.shape == (1198, 1, 8, 8)
    assert data.held_out.images.shape == (599, 1, 8, 8)
    assert data.train.images.min() == 0
    assert data.train.images.max() == 1
    torch.testing.assert_close(digits(), data, rtol=0, atol=0)


def test_no_image_is_in_both_parts() -> None:
    data = digits()
    train = {image.numpy().tobytes() for image in data.train.images}
    assert not any(image.numpy().tobytes() in train for image in data.held_out.images)


def test_the_config_has_a_global_section_both_overrides_and_a_skip() -> None:
    text = "\n" + CONFIG.read_text(encoding="utf-8")
    for section in (
        "retrain_data_quant_config",
        "retrain_weight_quant_config",
        "override_layer_types",
        "override_layer_configs",
        "skip_layers",
    ):
        assert f"\n{section}" in text


def test_codes_are_compared_one_by_one() -> None:
    ours = [np.array([[1, 2], [3, 4]]), np.array([5, 6])]
    theirs = [np.array([[1, 2], [3, 4]]), np.array([5, 8])]
    assert compare_codes(ours, ours) == CodeComparison(equal=1.0, max_difference=0)
    assert compare_codes(ours, theirs) == CodeComparison(equal=5 / 6, max_difference=2)


@pytest.mark.parametrize(
    "theirs", [[], [np.zeros((2, 1))], [np.zeros(2), np.zeros(2)]], ids=["none", "shape", "more"]
)
def test_runs_with_different_quantizers_are_not_compared(theirs: list[np.ndarray]) -> None:
    with pytest.raises(ValueError, match="same quantizers"):
        compare_codes([np.zeros(2)], theirs)


def test_codes_are_read_from_the_activation_quantizers_of_a_file(tmp_path: Path) -> None:
    graph = onnx.parser.parse_graph(
        """
        quantized (float[N, 2] x) => (float[N, 2] y)
        <float scale = {0.5}, int8 zero = {3}>
        {
            codes = QuantizeLinear(x, scale, zero)
            y = DequantizeLinear(codes, scale, zero)
        }
        """
    )
    opset = onnx.helper.make_opsetid("", 18)
    model = onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9)
    file = tmp_path / "model.onnx"
    onnx.save(model, file)
    [codes] = onnx_codes(file, torch.tensor([[-1.0, 0.25], [0.75, 99.0]]))
    np.testing.assert_array_equal(codes, [[1, 3], [5, 127]])


def test_the_exported_float_network_takes_any_batch_size(tmp_path: Path) -> None:
    skip_dynamo_exporter_of_2_6()
    model = DigitsNet().eval()
    file = tmp_path / "float.onnx"
    export(model, file)
    assert list(tmp_path.iterdir()) == [file]
    for batch in (1, 3):
        images = torch.rand(batch, 1, 8, 8)
        torch.testing.assert_close(onnx_logits(file, images), model(images), rtol=1e-4, atol=1e-5)


def test_training_reports_its_progress_and_changes_the_model() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    before = model[1].weight.clone()
    reports: list[tuple[int, int]] = []
    train = Split(torch.rand(70, 1, 8, 8), torch.randint(10, (70,)))
    fit(model, train, epochs=2, max_lr=1e-2, progress=lambda *report: reports.append(report))
    assert reports == [(0, 2), (1, 2), (2, 2)]
    assert not torch.equal(model[1].weight, before)


@pytest.fixture(scope="module")
def figures(tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """Run the command with one epoch; return what it wrote."""
    skip_dynamo_exporter_of_2_6()
    file = tmp_path_factory.mktemp("demo") / "demo.json"
    arguments = ["demo", "--epochs", "1", "--seed", "1", "--json", str(file)]
    result = CliRunner().invoke(app, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    return json.loads(file.read_text(encoding="utf-8"))


def test_the_command_writes_exactly_the_nine_figures(figures: dict[str, float]) -> None:
    assert list(figures) == [
        "float_accuracy",
        "prepared_accuracy",
        "converted_accuracy",
        "onnxruntime_accuracy",
        "float_onnx_bytes",
        "int8_onnx_bytes",
        "equal_codes",
        "max_code_difference",
        "seconds",
    ]


def test_the_simulation_equals_the_deployed_model(figures: dict[str, float]) -> None:
    assert figures["equal_codes"] >= 0.995
    assert figures["max_code_difference"] <= 2
    assert figures["converted_accuracy"] == pytest.approx(figures["prepared_accuracy"], abs=0.005)
    assert figures["onnxruntime_accuracy"] == pytest.approx(
        figures["converted_accuracy"], abs=0.005
    )


def test_the_int8_file_is_at_most_0_35_of_the_float_file(figures: dict[str, float]) -> None:
    assert figures["int8_onnx_bytes"] <= 0.35 * figures["float_onnx_bytes"]
