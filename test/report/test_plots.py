"""The PNG files, and what is said without matplotlib."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from amct_fx import MissingExtraError
from test.report.test_html import PLAN, analysis


def test_each_picture_becomes_a_png_file(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    found, recorder = analysis()
    files = found.save_png(tmp_path / "plots", recorder=recorder, prune_plan=PLAN)
    names = {Path(file).stem for file in files}
    assert names == {
        "sqnr",
        "sensitivity",
        "network",
        "histograms_1",
        "clips",
        "loss",
        "prune_plan",
    }
    for file in files:
        assert Path(file).read_bytes().startswith(b"\x89PNG")
        assert Path(file).stat().st_size > 3000


def test_without_matplotlib_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name.partition(".")[0] == "matplotlib":
            raise ModuleNotFoundError(name="matplotlib")
        return real(name, package)

    found, _ = analysis()
    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(MissingExtraError, match=r"pip install 'amct-fx\[report\]'"):
        found.save_png(tmp_path / "plots")
    assert not (tmp_path / "plots").exists()
