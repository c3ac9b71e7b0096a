"""What the examples share: a table at the end, a loop for generated data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

__all__ = ["fit_classes", "print_table", "share_right"]


def print_table(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Print rows with equal keys as a table; numbers with four decimals."""
    table = Table(title=title, title_justify="left")
    for key in rows[0]:
        table.add_column(key)
    for row in rows:
        cells = (f"{value:.4f}" if isinstance(value, float) else value for value in row.values())
        table.add_row(*map(str, cells))
    Console().print(table)


def fit_classes(
    model: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    epochs: int,
    lr: float,
    batch: int = 64,
    decay: bool = False,
) -> None:
    """Train a classifier in place with AdamW; knows nothing of pruning and quantization.

    Args:
        model: Returns logits ``[N, classes]``.
        inputs: ``[N, ...]``.
        labels: ``[N]``.
        epochs: How often it sees each sample.
        lr: Learning rate of the first epoch.
        batch: Samples of a step.
        decay: Bring the learning rate down to 0, by a cosine over the epochs.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    end = 0.0 if decay else lr
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(epochs, 1), end)
    model.train()
    for _ in range(epochs):
        for part in torch.randperm(len(inputs)).split(batch):
            optimizer.zero_grad()
            F.cross_entropy(model(inputs[part]), labels[part]).backward()
            optimizer.step()
        schedule.step()


@torch.no_grad()
def share_right(model: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    """Return the share of right classes in eval mode."""
    return float((model.eval()(inputs).argmax(dim=-1) == labels).double().mean())
