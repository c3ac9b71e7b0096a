"""The digits that ship inside scikit-learn: 1797 grey 8x8 images, ten classes."""

from __future__ import annotations

from typing import NamedTuple

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import Tensor

__all__ = ["Digits", "Split", "digits"]


class Split(NamedTuple):
    """Images ``[N, 1, 8, 8]`` float32 in [0, 1], labels ``[N]`` int64."""

    images: Tensor
    labels: Tensor


class Digits(NamedTuple):
    """Two thirds to train on, one third held out."""

    train: Split
    held_out: Split


def digits() -> Digits:
    """Return the digits, split the same way every time, each class in proportion."""
    pixels, labels = load_digits(return_X_y=True)
    train, held_out = train_test_split(
        range(len(labels)), test_size=1 / 3, stratify=labels, random_state=0
    )
    images = torch.from_numpy(pixels / 16).float().view(-1, 1, 8, 8)
    targets = torch.from_numpy(labels).long()
    return Digits(
        train=Split(images[train], targets[train]),
        held_out=Split(images[held_out], targets[held_out]),
    )
