"""torchvision beside a PyTorch it was not built for."""

from __future__ import annotations

from .libraries import declare_torchvision_operators, is_installed


def pytest_configure() -> None:
    """Let torchvision be imported, also through the other two libraries."""
    if is_installed("torchvision"):
        declare_torchvision_operators()
