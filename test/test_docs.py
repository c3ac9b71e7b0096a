"""The Python of the README and of the documentation runs as it is printed."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
from amct_fx_demo import CONFIG, DigitsNet
from torch import nn

import amct_fx

from .versions import skip_dynamo_exporter_of_2_6

ROOT = Path(__file__).parents[1]
PAGES = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"]
FROM_PREPARED = [
    f"docs/{page}.md" for page in ("ascend", "deployment", "onnxruntime", "resume", "training")
]
PAGES += [page.relative_to(ROOT).as_posix() for page in sorted(ROOT.glob("docs/**/*.md"))]


def blocks(page: str, language: str) -> list[str]:
    """Return the fenced blocks of one language in a page."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def train(model: nn.Module) -> None:
    """Stand for the training loop of the reader."""
    with torch.no_grad():
        for _ in range(2):
            model.train()(torch.rand(8, 1, 8, 8))
    model.eval()


def make_model(page: str) -> nn.Module:
    """Return the model that the page starts from."""
    if page not in FROM_PREPARED:
        return DigitsNet()
    prepared = amct_fx.prepare_qat_amct(DigitsNet(), CONFIG)
    train(prepared)
    return prepared


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")])
def test_the_python_of_the_page_runs(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    skip_dynamo_exporter_of_2_6(any("dynamo=True" in block for block in blocks(page, "python")))
    monkeypatch.chdir(tmp_path)
    shutil.copy(CONFIG, "quant.cfg")
    names = {
        "model": make_model(page),
        "train": train,
        "train_one_epoch": train,
        "example_inputs": (torch.rand(2, 1, 8, 8),),
        "float_model": DigitsNet(),
    }
    for block in blocks(page, "python"):
        exec(compile(block, page, "exec"), names)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "protobuf")])
def test_the_configurations_of_the_page_can_be_read(page: str) -> None:
    for block in blocks(page, "protobuf"):
        assert amct_fx.load_config(block) != amct_fx.load_config(None)


@pytest.mark.parametrize("page", PAGES)
def test_the_links_of_the_page_lead_somewhere(page: str) -> None:
    text = re.sub(r"`[^`\n]+`", "", (ROOT / page).read_text(encoding="utf-8"))  # code has no links
    targets = re.findall(r"\]\((?!https?:)([^)#]+)", text)
    missing = [target for target in targets if not (ROOT / page).parent.joinpath(target).exists()]
    assert missing == []
