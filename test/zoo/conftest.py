"""torchvision beside a PyTorch it was not built for, and when the slow tests of the zoo run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from .libraries import declare_torchvision_operators, is_installed

_HERE = Path(__file__).parent


def pytest_configure() -> None:
    """Let torchvision be imported, also through the other two libraries."""
    if is_installed("torchvision"):
        declare_torchvision_operators()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what is slow unless it is asked for."""
    if "slow" in (config.option.markexpr or "") or os.environ.get("AMCT_FX_ZOO") == "all":
        return
    skip = pytest.mark.skip(reason="slow; run it with -m slow")
    for item in items:
        if _HERE in item.path.parents and item.get_closest_marker("slow"):
            item.add_marker(skip)
