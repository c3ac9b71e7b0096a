"""The blocks of the README and of the documentation run as printed, and print what is shown."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise, zip_longest
from pathlib import Path

import pytest
import torch
from amct_fx_demo import CONFIG, DemoResult
from rich.console import Console

import amct_fx
from amct_fx import cli
from amct_fx.config.distill import load_distill_config
from test.docs_names import NEEDS, is_there, names_of

from .versions import skip_dynamo_exporter_of_2_6

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
PAGES += [page.relative_to(ROOT).as_posix() for page in sorted(ROOT.glob("docs/**/*.md"))]
CHECKED = {
    "python": "runs here",
    "diff": "its new side runs here",
    "text": "is what the Python block before it prints",
    "protobuf": "is read here",
    "bash": "runs in test_docs_commands.py, or in .ci/run",
    "{toctree}": "is checked by Sphinx",
    "{include}": "is checked by Sphinx",
    "{eval-rst}": "is checked by Sphinx",
}
DEMO = "What `amct-fx demo` printed"  # its figures differ from machine to machine


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    language: str
    needs: str | None
    text: str

    @property
    def code(self) -> str:
        """What Python runs: of a diff the new side."""
        if self.language == "python":
            return self.text
        lines = [line for line in self.text.splitlines() if not line.startswith("-")]
        return "\n".join(line[1:] for line in lines)


def blocks(page: str, *languages: str) -> list[Block]:
    """Return the fenced blocks of a page, or those in some languages."""
    text = (ROOT / page).read_text(encoding="utf-8")
    fence = r"(?:^<!-- needs: (.*?) -->\n)?^```(\S+)[^\n]*\n(.*?)^```$"
    found = re.findall(fence, text, re.MULTILINE | re.DOTALL)
    made = [Block(language, needs or None, body) for needs, language, body in found]
    return [block for block in made if not languages or block.language in languages]


@contextlib.contextmanager
def no_process_group_left() -> Iterator[None]:
    try:
        yield
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python", "diff")])
def test_the_python_of_the_page_runs_and_prints_what_is_shown(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = blocks(page)
    skip_dynamo_exporter_of_2_6(any("dynamo=True" in block.code for block in found))
    monkeypatch.chdir(tmp_path)
    shutil.copy(CONFIG, "quant.cfg")
    names, missing = names_of(page), []
    with no_process_group_left():
        for block, after in zip_longest(found, found[1:]):
            if block.language not in ("python", "diff"):
                continue
            if block.needs is not None:
                if not is_there(block.needs):
                    missing.append(block.needs)
                    continue
                names.update(NEEDS[block.needs](monkeypatch))
            printed = io.StringIO()
            with contextlib.redirect_stdout(printed):
                exec(compile(block.code, page, "exec"), names)
            if after is not None and after.language == "text":
                assert_shown(after.text, printed.getvalue())
    if missing:
        pytest.skip(f"NOT RUN: blocks of {page} that need {', '.join(missing)}")


def assert_shown(shown: str, printed: str) -> None:
    """Compare as doctest does: ``...`` stands for anything, white space for white space."""
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    same = doctest.OutputChecker().check_output(shown, printed, flags)
    assert same, f"the page shows\n{shown}\nbut its code prints\n{printed}"


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_the_page_is_of_a_kind_that_is_checked(page: str) -> None:
    found = blocks(page)
    fences = re.findall(r"^```", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    assert len(fences) == 2 * len(found)
    assert {block.language for block in found} <= set(CHECKED)
    assert {block.needs for block in found} <= {None, *NEEDS}
    if DEMO in (ROOT / page).read_text(encoding="utf-8"):
        return
    for before, block in pairwise(found):
        assert block.language != "text" or before.language == "python"
    assert not found or found[0].language != "text"


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "protobuf")])
def test_the_configurations_of_the_page_can_be_read(page: str) -> None:
    for block in blocks(page, "protobuf"):
        if "distill_group" in block.text:
            load_distill_config(block.text)
        else:
            assert amct_fx.load_config(block.text) != amct_fx.load_config(None)


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_the_page_lead_somewhere(page: str) -> None:
    text = re.sub(r"`[^`\n]+`", "", (ROOT / page).read_text(encoding="utf-8"))  # code has no links
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    missing = [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()]
    assert missing == []


def test_the_table_of_the_demo_has_the_rows_of_today() -> None:
    result = DemoResult(0.9, 0.9, 0.9, 0.9, 100, 30, 0.999, 1, 30.0)
    table = io.StringIO()
    Console(file=table, width=100).print(cli._demo_table(result))
    (shown,) = [block.text for block in blocks("README.md", "text")]
    assert labels(shown) == labels(table.getvalue())


def labels(table: str) -> list[str]:
    """Return the first column of a table of rich, without figures."""
    cells = [line.split("│")[1] for line in table.splitlines() if line.startswith("│")]
    return [re.sub(r"[\d.]+", "#", cell).strip() for cell in cells]
