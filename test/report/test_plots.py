"""The PNG files, and what is said without matplotlib."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from amct_fx import AmctNotADirectoryError, MissingExtraError
from amct_fx.report import History
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
        "clips_1",
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


def test_many_quantizers_are_spread_over_pictures_that_can_be_shown(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    found, _ = analysis()
    names = [f"layer{index}" for index in range(30)]
    clips = {name: [1.0, 2.0] for name in names}
    history = History(steps=[1, 2], clip_max=clips, clip_min=clips)
    tall = replace(found, graph=replace(found.graph, height=3000.0))
    files = [Path(file) for file in tall.save_png(tmp_path, recorder=history)]
    assert sum(file.stem.startswith("clips_") for file in files) == 3
    network = (tmp_path / "network.png").read_bytes()
    assert int.from_bytes(network[20:24], "big") <= 32_000  # the height, in the header of a PNG


def test_a_file_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    (tmp_path / "plots").write_text("")
    with pytest.raises(AmctNotADirectoryError, match="this is a file, not a folder"):
        analysis()[0].save_png(tmp_path / "plots")
