"""Lowered models: with own schemas always, with the true torch-npu where it and a C compiler are.

Both run in processes of their own: a process that has defined the schemas must never import the
true library. CI installs the wheel into a folder and names it in ``AMCT_FX_TORCH_NPU``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from test.npu import kernels, stub
from test.npu.scenario import REGISTERED, operators_of_training, without_kernel

ROOT = Path(__file__).parents[2]
MISSING = stub.why_not()


@pytest.fixture(
    scope="module",
    params=[
        "table",
        pytest.param("stub", marks=pytest.mark.skipif(MISSING is not None, reason=str(MISSING))),
    ],
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Return what a process of its own saw."""
    folder = tmp_path_factory.mktemp(request.param)
    command = [sys.executable, "-m", "test.npu.scenario", request.param, str(folder)]
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_the_schemas_are_those_of_the_table(found: Any) -> None:
    for schema in kernels.SCHEMAS:
        name = schema.partition("(")[0]
        assert torch._C.parse_schema(found["schemas"][name]) == torch._C.parse_schema(
            f"npu::{schema}"
        )


def test_without_a_device_the_operators_are_there(found: Any) -> None:
    assert found["state"] == "NO_DEVICE"


@pytest.mark.parametrize("model", ["branches", "island", "tokens", "bits", "one_sample"])
def test_the_lowered_model_computes_what_the_converted_one_does(found: Any, model: str) -> None:
    assert found["graph"][model]["error"] < 1e-3


@pytest.mark.parametrize("model", ["branches", "tokens"])
def test_it_does_so_outside_of_a_graph_too(found: Any, model: str) -> None:
    assert found["eager"][model]["error"] < 1e-3


def test_linear_layers_may_return_bfloat16(found: Any) -> None:
    assert found["bfloat16"]["error"] < 1e-2
    assert {row[1] for row in found["bfloat16"]["rows"]} == {"npu_quant_matmul"}


@pytest.mark.parametrize(
    ("form", "limit"), [("compiled", 1e-3), ("pickled", 1e-3), ("bfloat16", 0.2)]
)
def test_other_forms_of_the_model_compute_the_same(found: Any, form: str, limit: float) -> None:
    assert found["forms"][form] < limit


def test_each_term_of_the_zero_point_is_needed(found: Any) -> None:
    errors = found["asymmetry"]
    assert errors["right"] < 1e-3
    assert errors["no offset_x"] > 0.05
    assert errors["no bias term"] > 0.05


def operators(rows: Any) -> dict[str, str]:
    return {name: operator for name, operator, _ in rows if operator}


def test_what_the_operators_cannot_do_stays_as_it_was(found: Any) -> None:
    conv, matmul = "npu_quant_conv2d", "npu_quant_matmul"
    graph, eager = found["graph"], found["eager"]
    assert operators(graph["branches"]["rows"]) == {
        "stem": conv,
        "plain": conv,
        "same": conv,
        "head": matmul,
    }
    assert operators(eager["branches"]["rows"]) == {"head": matmul}
    assert operators(graph["tokens"]["rows"]) == {"q": matmul, "k": matmul, "out": matmul}
    assert operators(graph["bits"]["rows"]) == {"3": matmul}
    assert operators(graph["island"]["rows"]) == {"0": matmul, "1.a": matmul, "1.b": matmul}


@pytest.mark.parametrize(
    ("mode", "model", "layer", "reason"),
    [
        ("graph", "branches", "grouped", "it has 2 groups, npu_quant_conv2d takes 1"),
        ("graph", "branches", "uneven", "its padding 'same' needs more on one side"),
        ("eager", "branches", "stem", "int8 convolutions run only in a static graph"),
        ("graph", "tokens", "rnn", "int8 operators for Linear and Conv2d, not for LSTM"),
        ("graph", "tokens", "conv", "int8 operators for Linear and Conv2d, not for Conv1d"),
        ("graph", "bits", "0", "its weight has 4 bits"),
        ("graph", "bits", "2", "its input has 16 bits"),
    ],
)
def test_every_fallback_has_a_reason_in_all_reports(
    found: Any, mode: str, model: str, layer: str, reason: str
) -> None:
    case = found[mode][model]
    [row] = [row for row in case["rows"] if row[0] == layer]
    assert row[1] == ""
    assert reason in row[2]
    assert reason in case["text"]
    assert case["summary"][layer] == [f"int{4 if '4 bits' in reason else 8}", f"npu: {row[2]}"]


def test_the_summary_says_which_layers_run_in_integers(found: Any) -> None:
    for case in found["graph"].values():
        for name, operator, _ in case["rows"]:
            assert case["summary"][name][0].endswith(" npu") == bool(operator)


def test_fake_tensors_pass_the_kernels_for_shapes(found: Any) -> None:
    quantize, conv = "npu.npu_quantize.default", "npu.npu_quant_conv2d.default"
    matmul = "npu.npu_quant_matmul.default"
    # The input of stem; one tensor for plain and same, which grouped reads dequantized; and head's.
    expected = [quantize, conv, quantize, conv, conv, quantize, matmul]
    assert found["exported"]["branches"] == expected
    assert found["exported"]["bits"] == [quantize, matmul]
    assert found["exported_eager"] == [quantize, matmul]


def test_wrong_calls_are_refused_by_the_kernels_for_shapes(found: Any) -> None:
    said = found["rejections"]
    assert said["right"] == ""
    assert "torch.int64" in said["float scale"]
    assert "scale shape should equal to cout" in said["one scale"]
    assert "bias" in said["short bias"]


def test_other_uses_of_a_lowered_model(found: Any) -> None:
    said = found["other uses"]
    assert "converted for torch-npu; export one converted without a backend" in said["export"]
    assert "already converted" in said["convert"]
    assert said["restored"] == "amct_fx.nn.quantized"


def test_torch_npu_has_the_operators_that_the_list_names(found: Any) -> None:
    assert found["missing"] == []


@pytest.mark.parametrize("stage", ["calibration", "steady"])
def test_training_calls_only_what_torch_npu_has(stage: str) -> None:
    """``registered_operators.txt``: what the dispatcher of torch-npu 2.13 said under stubs.

    The steady steps run on the meta device, so they read no value on the host either.
    """
    registered = set(REGISTERED.read_text().split())
    composed = set(operators_of_training()[stage]) - registered
    assert without_kernel(sorted(composed)) == []
