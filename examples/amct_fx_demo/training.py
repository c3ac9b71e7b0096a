"""An ordinary PyTorch training loop; the float and the quantization-aware training share it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from .data import Split

__all__ = ["Progress", "accuracy", "correct_share", "fit"]

BATCH_SIZE = 64

# Called with how much is done, and how much there is to do.
Progress = Callable[[int, int], None]


def fit(model: nn.Module, split: Split, *, epochs: int, max_lr: float, progress: Progress) -> None:
    """Train ``model`` in place with AdamW and a one-cycle learning rate."""
    batches = DataLoader(TensorDataset(*split), BATCH_SIZE, shuffle=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=max_lr, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr, total_steps=epochs * len(batches)
    )
    model.train()
    for epoch in range(epochs):
        progress(epoch, epochs)
        for images, labels in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()
            schedule.step()
    progress(epochs, epochs)


@torch.no_grad()
def accuracy(model: nn.Module, split: Split) -> float:
    """Return the share of images that ``model``, in eval mode, puts into the right class."""
    model.eval()
    return correct_share(model(split.images), split.labels)


def correct_share(logits: Tensor, labels: Tensor) -> float:
    """Return the share of rows of ``logits`` ``[N, classes]`` whose largest entry is the label.

    Example:
        >>> correct_share(torch.tensor([[0.1, 0.9], [0.8, 0.2]]), torch.tensor([1, 1]))
        0.5
    """
    return (logits.argmax(dim=1) == labels).double().mean().item()
