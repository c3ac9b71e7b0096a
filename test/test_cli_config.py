"""The commands ``amct-fx config``: tables, messages, exit codes, files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from amct_fx import load_config
from test import command_line
from test.command_line import plain

if TYPE_CHECKING:
    from typer.testing import Result

pytestmark = pytest.mark.usefixtures("empty_folder")
MODEL = "test.golden.networks:PlainChain"
QUANT = """skip_layers: "c1"
retrain_data_quant_config { ulq_quantize { clip_max_min { clip_max: 6 clip_min: -6 } } }
override_layer_types { layer_type: "Linear"
  retrain_weight_quant_config { ulq_retrain { } } }
"""
PRUNE = "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 } } }\n"
DISTILL = 'group_size: 2\ndistill_group { start_layer_name: "c3" end_layer_name: "fc" }\n'


def run(*arguments: str) -> Result:
    return command_line.run("config", *arguments)


def file(text: str, name: str = "quant.cfg") -> str:
    Path(name).write_text(text)
    return name


def test_check_says_ok() -> None:
    result = run("check", file(QUANT))
    assert (result.exit_code, result.output) == (0, "quant.cfg: OK\n")


def test_check_with_a_model_counts_the_layers() -> None:
    result = run("check", file(QUANT), "--model", MODEL)
    assert (result.exit_code, result.output) == (0, "quant.cfg: OK: 3 of 4 layers quantized\n")
    result = run("check", file(PRUNE), "--model", MODEL)
    assert result.output == "quant.cfg: OK: 0 of 4 layers quantized, 4 pruned\n"


def test_an_error_has_a_caret_under_the_column_and_exit_code_1() -> None:
    result = run("check", file("batch_num: 1\n  skip_layer: 'a'\n"))
    assert result.exit_code == 1
    assert result.stdout == ""
    message, line, caret = result.stderr.splitlines()
    assert message.startswith("error: quant.cfg:2:3: unknown field 'skip_layer'; did you mean")
    assert (line, caret) == ("  skip_layer: 'a'", "  ^")


def test_an_error_about_the_model_has_one_too() -> None:
    text = 'batch_num: 2 skip_layers: "c9"'
    assert run("check", file(text)).exit_code == 0
    for command in ("check", "show"):
        result = run(command, file(text), "--model", MODEL)
        assert result.exit_code == 1
        assert "'c9', which is not in the model (layers: 'c1'" in result.stderr
        assert result.stderr.splitlines()[1:] == [text, " " * 26 + "^"]


def test_an_error_without_a_place_is_one_line() -> None:
    result = run("check", "missing.cfg")
    assert result.exit_code == 1
    assert "no such configuration file" in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_warnings_go_to_stderr_and_are_no_failure() -> None:
    text = QUANT + "skip_layers: 'c1'"
    result = run("check", file(text), "--model", MODEL)
    assert result.exit_code == 0
    assert result.stderr == "warning: quant.cfg:5:14: skip_layers has 'c1' more than once\n"


def test_check_as_json() -> None:
    result = run("check", file("batch_num: 1\nbatch_num: 2"), "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 0
    assert (report["file"], report["ok"], report["error"]) == ("quant.cfg", True, None)
    assert "batch_num is given 2 times" in report["warnings"][0]

    result = run("check", file("\nbatch: 1"), "--json")
    report = json.loads(result.stdout)
    assert result.exit_code == 1
    assert report["ok"] is False
    assert (report["error"]["line"], report["error"]["column"]) == (2, 1)
    assert report["error"]["message"].startswith("unknown field 'batch'")

    report = json.loads(run("check", "missing.cfg", "--json").stdout)
    assert "no such configuration file" in report["error"]["message"]
    assert report["error"]["line"] is None


def test_show_prints_a_row_for_each_layer() -> None:
    result = run("show", file(QUANT), "--model", MODEL)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["layer", "c1", "c2", "c3", "fc", "3"]
    assert lines[1].endswith("skip_layers has 'c1' (quant.cfg:1:14)")
    assert "INT8 (-6 … 6)  global, line 2  INT8 ARQ channel  default" in lines[2]
    assert "INT8 ULQ tensor   type 'Linear', line 4" in lines[4]
    assert lines[-1] == "3 of 4 layers quantized"


def test_show_as_json() -> None:
    result = run("show", file(QUANT), "--model", MODEL, "--json")
    [first, second, *_] = json.loads(result.stdout)["layers"]
    assert first["reason"] == "skip_layers has 'c1' (quant.cfg:1:14)"
    assert (second["layer"], second["type"]) == ("c2", "Conv2d")
    assert second["activation_from"] == "global, line 2"
    assert second["weight_from"] == "default"
    assert second["pruning"] == "-"


def test_show_reads_json_files_and_says_why_layers_are_left_out() -> None:
    text = '{\n"version": 1,\n"fc": {\n"retrain_weight_config": {"algo": "ulq_retrain"}}}'
    lines = run("show", file(text, "a.json"), "--model", MODEL).stdout.splitlines()
    assert lines[1].endswith("the configuration does not list it")
    assert "INT8 ULQ tensor  layer 'fc', line 3" in lines[4]


def test_files_of_distillation_are_shown_with_their_groups() -> None:
    path = file(DISTILL)
    assert "2 groups" in run("check", path, "--distill", "--model", MODEL).stdout
    lines = run("show", path, "--distill", "--model", MODEL).stdout.splitlines()
    assert lines[-3:] == [
        "group: c1, b1, r1, c2, b2, r2",
        "group: c3, r3, gap, fc",
        "4 of 4 layers quantized, 2 groups",
    ]
    table = json.loads(run("show", path, "--distill", "--model", MODEL, "--json").stdout)
    assert table["groups"][1] == ["c3", "r3", "gap", "fc"]
    assert run("check", path).exit_code == 1


def test_a_linear_by_name_takes_the_option() -> None:
    text = """override_layer_configs { layer_name: "fc"
retrain_weight_quant_config { arq_retrain { channel_wise: true } } }"""
    assert run("check", file(text), "--model", MODEL).exit_code == 1
    for command in ("check", "show"):
        arguments = (command, file(text), "--model", MODEL, "--linear-channel-wise")
        assert run(*arguments).exit_code == 0


def test_convert_goes_through_all_kinds_of_files() -> None:
    mindspore = file('skip_layer_types: "nn.Dense"\nskip_layers: "old"\n', "mindspore.cfg")
    renamed = ("--dialect", "mindspore", "--rename", "old=c1")
    result = run("convert", mindspore, "pytorch.cfg", *renamed)
    assert (result.exit_code, result.stdout) == (0, "wrote pytorch.cfg\n")
    assert 'skip_layer_types: "Linear"' in Path("pytorch.cfg").read_text()
    assert run("convert", "pytorch.cfg", "new/a.json", "--model", MODEL).exit_code == 0
    assert run("convert", "new/a.json", "back.cfg").exit_code == 0
    assert run("convert", "back.cfg", "b.json", "--model", MODEL).exit_code == 0
    assert Path("b.json").read_text() == Path("new/a.json").read_text()
    enabled = json.loads(Path("b.json").read_text())
    assert [name for name in ("c1", "c2", "c3", "fc") if enabled[name]["retrain_enable"]] == [
        "c2",
        "c3",
    ]


def test_convert_names_the_file_as_json() -> None:
    result = run("convert", file(QUANT), "new.cfg", "--json")
    assert json.loads(result.output) == {"file": "new.cfg"}
    assert Path("new.cfg").exists()


def test_convert_writes_nothing_on_failure() -> None:
    result = run("convert", file(PRUNE), "a.json", "--model", MODEL)
    assert result.exit_code == 1
    assert "cannot hold pruning" in result.stderr
    result = run("convert", file("batch: 1"), "a.cfg")
    assert (result.exit_code, result.stderr.splitlines()[-1]) == (1, "^")
    assert not Path("a.json").exists()
    assert not Path("a.cfg").exists()


def test_a_dialect_is_refused_with_its_line() -> None:
    result = run("check", file("\nbatch_num: 2"), "--dialect", "mindspore")
    assert result.exit_code == 1
    assert "quant.cfg:2:1: the MindSpore dialect has no field" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("show", "quant.cfg"), "--model"),
        (("check",), "FILE"),
        (("convert", "quant.cfg"), "OUT"),
        (("convert", "quant.cfg", "a.json"), "say which one"),
        (("check", "quant.cfg", "--dialect", "tensorflow"), "mindspore"),
        (("check", "quant.cfg", "--rename", "c1"), "write OLD=NEW, not 'c1'"),
        (("check", "quant.cfg", "--model", "nowhere:make"), "No module named 'nowhere'"),
        (("check", "quant.cfg", "--model", MODEL + "s"), "PlainChains"),
        (("check", "quant.cfg", "--model", "json"), "PKG.MOD:FACTORY"),
        (("check", "quant.cfg", "--model", ":make"), "PKG.MOD:FACTORY"),
        (("check", "quant.cfg", "--model", "json:__doc__"), "makes no model"),
        (("check", "quant.cfg", "--model", "builtins:dict"), "makes a dict"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_wrong_usage_ends_with_exit_code_2(arguments: tuple[str, ...], message: str) -> None:
    file(QUANT)
    result = run(*arguments)
    assert result.exit_code == 2
    assert message in plain(result.stderr)


def test_a_model_from_the_current_folder_may_be_an_object_or_fail() -> None:
    Path("own_nets.py").write_text(
        "from torch import nn\nmade = nn.Sequential(nn.Linear(2, 2))\n"
        "class Box:\n    made = made\n"
        "def broken():\n    raise KeyError('weights')\n"
    )
    path = list(sys.path)
    for name in ("own_nets:made", "own_nets:Box.made"):
        result = run("check", file("batch_num: 2"), "--model", name)
        assert result.output == "quant.cfg: OK: 1 of 1 layers quantized\n"
    result = run("check", "quant.cfg", "--model", "own_nets:broken")
    assert result.exit_code == 1
    assert result.stderr == "error: own_nets:broken failed: KeyError: 'weights'\n"
    Path("own_damaged.py").write_text("def (")
    result = run("check", "quant.cfg", "--model", "own_damaged:make")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: the import of own_damaged failed: SyntaxError")
    assert sys.path == path


def test_a_prepared_or_empty_model_is_an_error() -> None:
    Path("empty_nets.py").write_text("from torch import nn\nempty = nn.Sequential(nn.ReLU())\n")
    result = run("show", file("batch_num: 2"), "--model", "empty_nets:empty")
    assert result.exit_code == 1
    assert "no layer that can be quantized" in result.stderr


def test_the_command_in_its_own_process() -> None:
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), *sys.path])
    command = [sys.executable, "-m", "amct_fx.cli", "config", "check"]

    def call(name: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(
            [*command, name], env=environment, capture_output=True, text=True, check=False
        )

    result = call(file("batch_num: many\n"))
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        "error: quant.cfg:1:12: batch_num must be a whole number from 0 to 4294967295, not many\n"
        "batch_num: many\n"
        "           ^\n"
    )
    result = call(file(load_config(QUANT).to_cfg()))
    assert (result.returncode, result.stdout, result.stderr) == (0, "quant.cfg: OK\n", "")
