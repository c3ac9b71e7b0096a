"""The package as a whole: what it exports, what importing it costs, its version."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import amct_fx
from amct_fx import errors

ROOT = Path(__file__).parents[1]


HEAVY = (
    "amct_fx_demo",
    "google.protobuf",
    "matplotlib",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "rich",
    "sklearn",
    "torch_npu",
    "typer",
)


def test_the_public_names_are_these() -> None:
    assert sorted(amct_fx.__all__) == [
        "AmctError",
        "AmctFileNotFoundError",
        "AmctIsADirectoryError",
        "AmctNotADirectoryError",
        "AmctWarning",
        "ArgumentError",
        "ArgumentTypeError",
        "BackendError",
        "CalibrationError",
        "CheckpointError",
        "CheckpointKeyError",
        "CompressionConfig",
        "ConfigError",
        "ConfigFileNotFoundError",
        "ConfigTypeError",
        "ConvertError",
        "DistillError",
        "ExportError",
        "InputDataError",
        "LayerNameError",
        "LayerTypeError",
        "MissingExtraError",
        "ModelError",
        "ModelStateError",
        "ModelTypeError",
        "PruneError",
        "RecordError",
        "RecordParseError",
        "analyze",
        "convert_amct",
        "distill",
        "export_onnx",
        "get_backend_config",
        "get_qconfig_mapping",
        "load_checkpoint",
        "load_config",
        "param_groups",
        "prepare_distill_amct",
        "prepare_qat_amct",
        "prune_plan",
        "save_checkpoint",
        "search_channel_pruning",
        "summarize",
        "verify_onnx",
    ]


@pytest.mark.parametrize("name", amct_fx.__all__)
def test_each_public_name_exists_and_is_documented(name: str) -> None:
    assert getattr(amct_fx, name).__doc__


def test_each_error_derives_from_a_builtin_that_users_expect() -> None:
    expected = (OSError, ImportError, KeyError, RuntimeError, TypeError, ValueError)
    names = [name for name in errors.__all__ if name.endswith("Error") and name != "AmctError"]
    assert names
    for name in names:
        error = getattr(errors, name)
        assert issubclass(error, amct_fx.AmctError)
        assert issubclass(error, expected)


def test_importing_the_package_loads_nothing_heavy_beyond_torch() -> None:
    code = """
        import json, sys, torch
        before = set(sys.modules)
        import amct_fx
        print(json.dumps(sorted(set(sys.modules) - before)))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    loaded = json.loads(output)
    assert "amct_fx" in loaded
    assert [name for name in loaded if f"{name}.".startswith(tuple(f"{h}." for h in HEAVY))] == []


def test_the_version_is_the_one_in_pyproject() -> None:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    [version] = re.findall(r'^version = "(.+)"$', text, re.MULTILINE)
    assert amct_fx.__version__ == version


def test_the_package_is_marked_as_typed() -> None:
    assert Path(amct_fx.__file__).with_name("py.typed").exists()
