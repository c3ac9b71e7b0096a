"""The command ``amct-fx``: arguments, messages, exit codes, files."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import amct_fx_demo
import pytest
from amct_fx_demo import DemoResult

import amct_fx
from amct_fx.errors import ConfigError
from test.command_line import run

RESULT = DemoResult(
    float_accuracy=0.99,
    prepared_accuracy=0.985,
    converted_accuracy=0.984,
    onnxruntime_accuracy=0.983,
    float_onnx_bytes=1_000_000,
    int8_onnx_bytes=300_000,
    equal_codes=0.99987,
    max_code_difference=1,
    seconds=12.5,
)


@pytest.fixture
def demo_calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Replace the demo by one that takes no time; return the list of its calls."""
    calls: list[dict[str, Any]] = []

    def run_demo(**arguments: Any) -> DemoResult:
        calls.append(arguments)
        arguments["report"]("Training", 1, 2)
        return RESULT

    monkeypatch.setattr(amct_fx_demo, "run_demo", run_demo)
    return calls


def test_version_is_the_one_of_the_package() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.output == f"amct-fx {amct_fx.__version__}\n"


def test_without_a_command_the_help_is_shown() -> None:
    assert "demo" in run().output


def test_demo_passes_its_options_on(demo_calls: list[dict[str, Any]]) -> None:
    assert run("demo", "--seed", "7", "--epochs", "3").exit_code == 0
    [call] = demo_calls
    assert (call["seed"], call["epochs"]) == (7, 3)


def test_demo_prints_one_table_and_no_progress_when_not_on_a_terminal(
    demo_calls: list[dict[str, Any]],
) -> None:
    result = run("demo")
    assert "0.9850" in result.stdout
    assert "300,000 bytes" in result.stdout
    assert "0.30 x float" in result.stdout
    assert "99.987%" in result.stdout
    assert result.stderr == ""


def test_demo_writes_the_nine_figures_as_json(
    demo_calls: list[dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "result.json"
    file.write_text("old")
    assert run("demo", "--json", str(file)).exit_code == 0
    assert json.loads(file.read_text()) == dataclasses.asdict(RESULT)
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("name", ["missing/result.json", ".", "file/result.json", "x" * 300])
def test_a_bad_json_path_is_reported_before_the_demo_starts(
    demo_calls: list[dict[str, Any]], tmp_path: Path, name: str
) -> None:
    (tmp_path / "file").touch()
    result = run("demo", "--json", str(tmp_path / name))
    assert result.exit_code == 2
    assert "--json" in result.stderr
    assert demo_calls == []


def test_a_device_is_not_replaced_by_the_json_file(demo_calls: list[dict[str, Any]]) -> None:
    result = run("demo", "--json", "/dev/null")
    assert result.exit_code == 2
    assert "not a regular file" in " ".join(result.stderr.split())
    assert Path("/dev/null").is_char_device()


def test_a_failed_write_is_a_message_and_keeps_the_old_file(
    demo_calls: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "result.json"
    file.write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    result = run("demo", "--json", str(file))
    assert result.exit_code == 1
    assert result.stderr == "error: No space left on device\n"
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize(
    "arguments",
    [
        ("--epochs", "0"),
        ("--epochs", "many"),
        ("--seed", "-1"),
        ("--seed", str(2**64)),
        ("--nonsense",),
        ("stray",),
    ],
    ids=" ".join,
)
def test_wrong_usage_ends_with_exit_code_2(
    demo_calls: list[dict[str, Any]], arguments: tuple[str, ...]
) -> None:
    result = run("demo", *arguments)
    assert result.exit_code == 2
    assert demo_calls == []


@pytest.fixture
def broken_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace the demo by one that meets a bad configuration."""

    def run_demo(**_arguments: Any) -> DemoResult:
        message = "unknown field 'fixed_mn'"
        raise ConfigError(message, file="quant.cfg", line=3, column=5)

    monkeypatch.setattr(amct_fx_demo, "run_demo", run_demo)


@pytest.mark.usefixtures("broken_demo")
def test_an_error_of_the_package_is_a_message_and_exit_code_1() -> None:
    result = run("demo")
    assert result.exit_code == 1
    assert result.stderr == "error: quant.cfg:3:5: unknown field 'fixed_mn'\n"
    assert isinstance(result.exception, SystemExit)


@pytest.mark.usefixtures("broken_demo")
def test_traceback_option_shows_where_the_error_came_from() -> None:
    result = run("--traceback", "demo")
    assert result.exit_code == 1
    assert isinstance(result.exception, ConfigError)


def run_script(prelude: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a fresh interpreter, after the statements of ``prelude``."""
    code = f"import sys; {prelude}; from amct_fx.cli import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_missing_demo_package_is_named_with_the_command_that_installs_it() -> None:
    result = run_script("sys.modules['sklearn.datasets'] = None", "demo")
    assert result.returncode == 1
    assert result.stderr == (
        "error: the demo needs sklearn.datasets: python -m pip install 'amct-fx[demo]'\n"
    )


def test_without_typer_the_command_says_what_to_install() -> None:
    result = run_script("sys.modules['typer'] = None", "demo")
    assert result.returncode == 1
    assert result.stderr == "amct-fx needs typer: python -m pip install 'amct-fx[cli]'\n"
