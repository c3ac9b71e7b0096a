"""The commands ``amct-fx export`` and ``verify``: files, messages, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
import torch
from onnx import numpy_helper

from amct_fx import prune_plan, save_checkpoint
from amct_fx.prune import PrunePlan
from test import cli_models
from test.command_line import DATA, MODEL, PREPARED, plain, run

pytestmark = pytest.mark.usefixtures("empty_folder")
SHAPE = "4x3x8x8"


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


PRUNE = """prune_config { filter_pruner {
    balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }
"""


def test_prune_plan_prints_the_plan_of_the_library() -> None:
    Path("prune.cfg").write_text(PRUNE)
    plan = prune_plan(cli_models.make(), PRUNE, torch.randn(1, 3, 8, 8))
    arguments = ("prune-plan", MODEL, "prune.cfg", "--input", "1x3x8x8")
    assert run(*arguments).stdout == f"{plan}\n"
    assert PrunePlan.from_json(run(*arguments, "--json").stdout).groups == plan.groups
    assert run("prune-plan", MODEL, "prune.cfg", "--mode", "amct", "--data", DATA).exit_code == 0


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
        (("export", PREPARED, "a.onnx", "--input", "4x9x8x8"), 1, "of shapes [[4, 9, 8, 8]]"),
        (("export", PREPARED, "a.onnx", "--input", SHAPE, "--format", "tflite"), 2, "tflite"),
        (("export", PREPARED, "a.onnx", "--input", SHAPE, "--opset", "3"), 1, "opset"),
        (("export", MODEL, "a.onnx", "--input", SHAPE), 1, "give the checkpoint of a trained"),
        (("verify", "text.onnx", MODEL, "--input", SHAPE), 1, "give the checkpoint of a trained"),
        (("prune-plan", MODEL, "missing.cfg"), 1, "missing.cfg"),
        (("prune-plan", MODEL, "empty.cfg"), 1, "error:"),
        (("verify", "missing.onnx", PREPARED, "--input", SHAPE), 1, "missing.onnx"),
        (("verify", "text.onnx", PREPARED, "--input", SHAPE), 1, "text.onnx"),
    ],
)
def test_mistakes_are_messages_without_a_traceback(
    arguments: tuple[str, ...], code: int, message: str
) -> None:
    Path("empty.cfg").write_text("")
    Path("text.onnx").write_text("no file of ONNX")
    result = run(*arguments)
    assert result.exit_code == code
    assert message in plain(result.stderr)
    assert "Traceback" not in result.output
    assert not Path("a.onnx").exists()
