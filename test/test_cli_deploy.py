"""The commands ``amct-fx export`` and ``verify``: files, messages, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from onnx import numpy_helper
from typer.testing import CliRunner, Result

from amct_fx import cli, save_checkpoint
from test import cli_models

MODEL = "test.cli_models:make"
PREPARED = "test.cli_models:make_prepared"
DATA = "test.cli_models:validation"
SHAPE = "4x3x8x8"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def plain(text: str) -> str:
    """Return the words of a message in a box."""
    return " ".join(text.replace("│", " ").split())


def test_export_writes_the_file_of_a_checkpoint_and_verify_finds_it_right() -> None:
    save_checkpoint(cli_models.make_prepared(), "qat.pt")
    source = ("qat.pt", "--model", MODEL)
    result = run("export", source[0], "net.onnx", *source[1:], "--input", SHAPE)
    assert result.exit_code == 0
    assert result.stdout.startswith("wrote net.onnx: qdq, ")
    assert "QuantizeLinear" in {node.op_type for node in onnx.load("net.onnx").graph.node}
    result = run("verify", "net.onnx", *source, "--data", DATA)
    assert result.exit_code == 0
    assert "every layer agrees" in result.stdout


def test_the_format_and_the_batch_size_can_be_chosen() -> None:
    options = ("--input", SHAPE, "--format", "ascend", "--dynamic-batch", "--json")
    result = run("export", PREPARED, "deploy.onnx", *options)
    assert result.exit_code == 0
    found = json.loads(result.stdout)
    assert (found["file"], found["format"]) == ("deploy.onnx", "ascend")
    assert found["bytes"] == Path("deploy.onnx").stat().st_size
    model = onnx.load("deploy.onnx")
    assert "AscendQuant" in {node.op_type for node in model.graph.node}
    assert model.graph.input[0].type.tensor_type.shape.dim[0].dim_param


def test_verify_names_the_layer_that_differs_and_ends_with_exit_code_3() -> None:
    run("export", PREPARED, "net.onnx", "--input", SHAPE)
    model = onnx.load("net.onnx")
    scales = {node.input[1] for node in model.graph.node if node.op_type == "DequantizeLinear"}
    wrong = next(item for item in model.graph.initializer if item.name in scales and item.dims)
    wrong.CopyFrom(numpy_helper.from_array(2 * numpy_helper.to_array(wrong), wrong.name))
    onnx.save(model, "wrong.onnx")
    result = run("verify", "wrong.onnx", PREPARED, "--input", SHAPE, "--json")
    assert result.exit_code == 3
    found = json.loads(result.stdout)
    assert found["passed"] is False
    assert found["first_diverging"] in {"stem", "left", "right", "head"}
    assert (
        "the first layer that differs"
        in run("verify", "wrong.onnx", PREPARED, "--input", SHAPE).stdout
    )


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("export", PREPARED, "a.onnx"), 2, "--input SHAPE or by --data"),
        (("export", PREPARED, "a.onnx", "--input", "4,3"), 2, "a shape such as 1x3x224x224"),
        (("export", PREPARED, "a.onnx", "--input", "4x9x8x8"), 1, "error:"),
        (("export", PREPARED, "a.onnx", "--input", SHAPE, "--format", "tflite"), 2, "tflite"),
        (("export", PREPARED, "a.onnx", "--input", SHAPE, "--opset", "3"), 1, "opset"),
        (("export", MODEL, "a.onnx", "--input", SHAPE), 1, "never calibrated"),
        (("verify", "missing.onnx", PREPARED, "--input", SHAPE), 1, "missing.onnx"),
        (("verify", "text.onnx", PREPARED, "--input", SHAPE), 1, "text.onnx"),
    ],
)
def test_mistakes_are_messages_without_a_traceback(
    arguments: tuple[str, ...], code: int, message: str
) -> None:
    Path("text.onnx").write_text("no file of ONNX")
    result = run(*arguments)
    assert result.exit_code == code
    assert message in plain(result.stderr)
    assert "Traceback" not in result.output
    assert not Path("a.onnx").exists()
