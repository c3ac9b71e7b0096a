"""The commands ``amct-fx summary``, ``analyze`` and ``report``: output, messages, exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from amct_fx import AmctError, analyze, cli, save_checkpoint, summarize
from amct_fx.report import TrainingRecorder
from test import cli_models
from test.command_line import DATA, MODEL, PREPARED, plain, run

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
def checkpoint() -> str:
    """Write a checkpoint of a calibrated model."""
    save_checkpoint(cli_models.make_prepared(), "qat.pt")
    return "qat.pt"


def test_the_summary_of_a_float_model_is_that_of_the_prepared_one() -> None:
    result = run("summary", MODEL)
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-1] == "4 of 4 layers quantized"


def test_the_summary_follows_a_configuration() -> None:
    Path("quant.cfg").write_text('quant_skip_layers: "head"\n')
    found = json.loads(run("summary", MODEL, "--cfg", "quant.cfg", "--json").stdout)
    assert [layer["state"] for layer in found["layers"]] == ["qat", "qat", "qat", "float"]


def test_the_summary_of_a_checkpoint_shows_its_ranges(checkpoint: str) -> None:
    result = run("summary", checkpoint, "--model", MODEL)
    assert result.stdout == f"{summarize(cli_models.make_prepared())}\n"
    markdown = run("summary", checkpoint, "--model", MODEL, "--markdown").stdout
    assert markdown.startswith("| layer | type |")


def test_the_analysis_of_a_checkpoint_is_the_one_of_the_library(checkpoint: str) -> None:
    arguments = ("--data", DATA, "--metric", "test.cli_models:accuracy", "--json")
    found = json.loads(run("analyze", checkpoint, "--model", MODEL, *arguments).stdout)
    expected = analyze(
        cli_models.make_prepared(),
        None,
        cli_models.validation,
        metric=cli_models.accuracy,
        progress=False,
    )
    assert found["ranking"] == list(expected.ranking)
    assert found["quantized_value"] == pytest.approx(expected.quantized_value)
    assert found["metric"] == "accuracy"


def test_a_float_model_is_calibrated_with_the_data_before_it_is_analyzed() -> None:
    Path("quant.cfg").write_text("batch_num: 3\n")
    result = run("analyze", MODEL, "--cfg", "quant.cfg", "--data", "test.cli_models:loader")
    assert result.exit_code == 0
    assert "output MSE" in result.stdout
    assert "quant_skip_layers:" in result.stdout


def test_the_analysis_compares_with_a_float_model_and_stops_at_what_is_wanted() -> None:
    options = ("--float-model", MODEL, "--batches", "1", "--wanted", "1e9", "--each-quantizer")
    options += ("--json",)
    found = json.loads(run("analyze", PREPARED, "--data", DATA, *options).stdout)
    assert (found["float_value"], found["batches"], found["suggestions"]) == (0, 1, [])
    assert all(layer["harm_weight"] is not None for layer in found["layers"])


def test_the_report_is_a_page_with_the_history_that_was_given(checkpoint: str) -> None:
    recorder = TrainingRecorder(cli_models.make_prepared())
    recorder.step(1.0)
    Path("history.json").write_text(json.dumps(recorder.to_dict()))
    result = run(
        *("report", checkpoint, "--model", MODEL, "--data", DATA, "--title", "My net"),
        *("--history", "history.json", "-o", "page.html"),
    )
    assert (result.exit_code, result.stdout) == (0, "wrote page.html\n")
    page = Path("page.html").read_text(encoding="utf-8")
    assert "<title>My net</title>" in page
    assert '"steps":[1]' in page


def test_the_report_without_data_shows_the_summary() -> None:
    found = json.loads(run("report", MODEL, "--json").stdout)
    assert found["files"] == ["report.html"]
    assert len(found["layers"]) == 4
    assert Path("report.html").exists()


def test_pictures_need_data_and_matplotlib() -> None:
    assert run("report", MODEL, "--png", "plots").exit_code == 2
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    result = run("report", PREPARED, "--data", DATA, "--png", "plots")
    assert result.exit_code == 0
    assert Path("plots/sqnr.png").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("summary", "test.nothing:make"), 2, "names nothing that can be imported"),
        (("summary", "nothing.nets:make"), 2, "start in the folder that nothing is imported from"),
        (("summary", "test.cli_models:mak"), 2, "has no attribute 'mak'; did you mean 'make'?"),
        (("summary", "./nets/mine.py:make"), 2, "not its file: nets.mine:make"),
        (("summary", "test.cli_models:"), 2, "say what in the module: test.cli_models:FACTORY"),
        (("summary", "test.cli_models"), 2, "what makes a model is written PKG.MOD:FACTORY"),
        (("summary", "test.cli_models:number"), 2, "of type int, makes no model; name a function"),
        (("summary", "test.cli_models:make_something_else"), 2, "makes a list, not a"),
        (("summary", "test.cli_models:make_trouble"), 1, "RuntimeError: no such dataset"),
        (("summary", "missing.pt"), 2, "there is no file 'missing.pt'"),
        (("summary", "qat.pt"), 2, "holds no code: say what makes the float model"),
        (("summary", "qat.pt", "--model", MODEL, "--cfg", "a.cfg"), 2, "leave --cfg out"),
        (("summary", MODEL, "--model", MODEL), 2, "MODEL is no file"),
        (("summary", MODEL, "--cfg", "missing.cfg"), 1, "error: missing.cfg: there is no such"),
        (("summary", "missing.pt", "--model", MODEL), 1, "error: missing.pt: there is no such"),
        (("summary", ".", "--model", MODEL), 1, "error: . is a folder; give the path of a"),
        (("config", "convert", "a.cfg", "."), 1, "error: .: this is a folder; name a file in it"),
        (("summary", "text.pt", "--model", MODEL), 1, "text.pt is no checkpoint"),
        (("analyze", PREPARED), 2, "--data"),
        (("analyze", PREPARED, "--data", "test.cli_models:number"), 1, "iterable of batches"),
        (("analyze", PREPARED, "--data", "test.cli_models:wrong_shape"), 1, "shapes [2, 5, 8, 8]"),
        (
            ("analyze", PREPARED, "--data", DATA, "--metric", "test.cli_models:number"),
            2,
            "not a function(output, batch)",
        ),
        (
            ("analyze", PREPARED, "--data", DATA, "--metric", "test.cli_models:broken_metric"),
            1,
            "test.cli_models:broken_metric failed: KeyError: 'labels are missing'",
        ),
        (("analyze", PREPARED, "--data", DATA, "--device", "gpu"), 2, "cannot use gpu"),
        (("report", PREPARED, "-o", "no/such/folder.html"), 2, "cannot write"),
        (("report", PREPARED, "--history", "missing.json"), 1, "missing.json"),
        (("report", PREPARED, "--history", "text.pt"), 1, "TrainingRecorder.to_dict()"),
    ],
)
def test_mistakes_are_messages_without_a_traceback(
    checkpoint: str, arguments: tuple[str, ...], code: int, message: str
) -> None:
    Path("text.pt").write_text("no checkpoint")
    Path("a.cfg").write_text("batch_num: 2")
    result = run(*arguments)
    assert result.exit_code == code
    assert message in plain(result.stderr)
    assert "Traceback" not in result.output


def test_the_traceback_of_an_error_can_be_asked_for() -> None:
    result = run("--traceback", "summary", "test.cli_models:make_trouble")
    assert isinstance(result.exception, AmctError)
    assert isinstance(result.exception.__cause__, RuntimeError)


def test_the_traceback_of_a_name_that_cannot_be_imported_can_be_asked_for() -> None:
    Path("needs_more.py").write_text("import a_package_that_is_missing\n")
    result = run("--traceback", "summary", "needs_more:make")
    assert result.exit_code == 2
    assert 'needs_more.py", line 1' in result.stderr
    assert "names nothing that can be imported" in plain(result.stderr)


@pytest.mark.parametrize(
    "command", ["summary", "analyze", "report", "prune-plan", "export", "verify", "demo"]
)
def test_each_command_explains_itself_with_an_example(command: str) -> None:
    text = plain(run(command, "--help").stdout)
    assert f"amct-fx {command}" in text
    assert "Example:" in text
    assert "--json" in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_shell_completes_commands(shell: str) -> None:
    environment = {
        "_AMCT_FX_COMPLETE": f"complete_{shell}",
        "_TYPER_COMPLETE_FISH_ACTION": "get-args",
        "_TYPER_COMPLETE_ARGS": "amct-fx su",
        "COMP_WORDS": "amct-fx su",
        "COMP_CWORD": "1",
    }
    result = CliRunner().invoke(cli.app, [], prog_name="amct-fx", env=environment)
    assert "summary" in result.output
    assert "analyze" not in result.output


def test_the_help_lists_all_commands() -> None:
    text = plain(run("--help").stdout)
    for command in ("config", "summary", "report", "prune-plan", "export", "verify", "demo"):
        assert f" {command} " in text


def test_a_gpu_is_not_needed_to_read_a_checkpoint(checkpoint: str) -> None:
    assert torch.load(checkpoint, weights_only=True)["stage"] == "prepared"
    assert run("summary", checkpoint, "--model", MODEL).exit_code == 0


def test_a_module_that_raises_when_it_is_imported_is_an_error_of_its_code() -> None:
    Path("refuses.py").write_text("raise ValueError('no licence')\n")
    result = run("summary", "refuses:make")
    assert result.exit_code == 1
    assert "the import of refuses failed: ValueError: no licence" in result.output


def test_a_name_without_a_module_says_so() -> None:
    result = run("summary", ":make")
    assert result.exit_code == 2
    assert "'' is no name of a module" in plain(result.output)
