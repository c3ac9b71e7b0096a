"""What every test shares: one thread, a fixed seed, hypothesis without a deadline; what is slow."""

from __future__ import annotations

import os
from pathlib import Path

import hypothesis
import pytest
import torch

# Tests work on small tensors, where more threads only wait for each other; and the golden runs were
# recorded with one.
torch.set_num_threads(1)

# The first call of a torch operator can take a second; a deadline would only measure that.
hypothesis.settings.register_profile("amct_fx", deadline=None, print_blob=True)
hypothesis.settings.load_profile("amct_fx")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is slow unless it is asked for."""
    if "slow" in (config.option.markexpr or "") or os.environ.get("AMCT_FX_ZOO") == "all":
        return
    skip = pytest.mark.skip(reason="slow; run it with -m slow")
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def _fixed_seed() -> None:
    """Start each test from the same random state."""
    torch.manual_seed(0)


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path
