"""The commands that the documentation prints run, with the files and modules they speak of."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from amct_fx import load_checkpoint, save_checkpoint
from amct_fx.report import TrainingRecorder
from test import cli_models
from test.command_line import run

DOCS = Path(__file__).parents[1] / "docs"
MODELS = "from test.cli_models import make, make as make_model\n"
DATA = "from test.cli_models import accuracy, validation\n"
FILES = {
    "my/__init__.py": "",
    "my/models.py": MODELS,
    "my/data.py": DATA,
    "my_nets.py": MODELS,
    "quant.cfg": 'batch_num: 2\nskip_layers: "stem"\n',
    "mindspore.cfg": 'skip_layers: "backbone.conv"\n',
    "prune.cfg": """prune_config { filter_pruner {
        balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }""",
}


def commands(page: Path) -> list[str]:
    """Return the lines of a page's shell blocks that call ``amct-fx``."""
    shell = re.findall(r"^```bash\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in shell for line in block.splitlines() if line.startswith("amct-fx ")]


@pytest.fixture
def _workplace(empty_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the folder with what the pages take for granted."""
    monkeypatch.syspath_prepend(empty_folder)
    for name, text in FILES.items():
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    prepared = cli_models.make_prepared()
    save_checkpoint(prepared, "qat.pt")
    recorder = TrainingRecorder(prepared)
    recorder.step(1.0)
    Path("history.json").write_text(json.dumps(recorder.to_dict()))


@pytest.mark.usefixtures("_workplace")
@pytest.mark.parametrize(
    "page", [p for p in sorted(DOCS.glob("*.md")) if commands(p)], ids=lambda page: page.stem
)
def test_the_commands_of_the_page_run_one_after_the_other(page: Path) -> None:
    for line in commands(page):
        result = run(*shlex.split(line, comments=True)[1:])
        assert result.exit_code == 0, f"{line}\n{result.output}"
    load_checkpoint("qat.pt", cli_models.make())  # no command has written over it
