"""Which of the model libraries can be imported."""

from __future__ import annotations

import importlib.util

import torch

__all__ = ["declare_torchvision_operators", "is_installed"]

_OPERATORS = ("nms", "qnms")


def is_installed(library: str) -> bool:
    """Say whether ``library`` can be imported, without importing it."""
    return importlib.util.find_spec(library) is not None


def declare_torchvision_operators() -> None:
    """Declare the two compiled operators that ``import torchvision`` registers kernels for.

    With them torchvision imports beside any build of PyTorch. They compute nothing; no model of
    the zoo calls them.
    """
    for name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
            torch.library.define(f"torchvision::{name}", schema)
