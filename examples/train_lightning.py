"""Quantization-aware training in Lightning: an ordinary module and one callback.

python -m pip install 'amct-fx[lightning]'
python examples/train_lightning.py --epochs 5
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import torch
from amct_fx_demo.data import digits
from example_tools import print_table, share_right
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from train_digits import make_model

import amct_fx
from amct_fx.callbacks.lightning import QATCallback
from amct_fx.control import QATSchedule


class Digits(LightningModule):
    """A classifier; nothing in it knows of quantization."""

    def __init__(self, lr: float) -> None:
        super().__init__()
        self.model: nn.Module = make_model()
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss."""
        images, labels = batch
        return F.cross_entropy(self.model(images), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the accuracy."""
        images, labels = batch
        right = (self.model(images).argmax(dim=1) == labels).float().mean()
        self.log("accuracy", right, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return the optimizer; the callback has prepared the model before."""
        return torch.optim.AdamW(self.model.parameters(), lr=self.lr)


def loaders() -> tuple[DataLoader[Any], DataLoader[Any]]:
    """Return the digits of scikit-learn for training and validation."""
    train, test = (TensorDataset(*split) for split in digits())
    return DataLoader(train, 64, shuffle=True), DataLoader(test, 512)


def fit(module: Digits, epochs: int, callbacks: list[Any], folder: str) -> float:
    """Train, and return the accuracy."""
    train, test = loaders()
    trainer = Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=callbacks,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, train, test)
    return float(trainer.callback_metrics["accuracy"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Train in float, train on with quantization, convert."""
    parser = argparse.ArgumentParser(description="Quantize a small CNN in Lightning.")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        module = Digits(lr=3e-3)
        floating = fit(module, options.epochs, [], folder)
        module.lr = 3e-4
        schedule = QATSchedule(freeze_bn_epoch=max(1, options.epochs - 1))
        callback = QATCallback("batch_num: 2", attribute="model", schedule=schedule, record_every=5)
        prepared = fit(module, options.epochs, [callback], folder)
    converted = amct_fx.convert_amct(module.model)
    rows = [
        {"model": "float", "accuracy": floating},
        {"model": "prepared", "accuracy": prepared},
        {"model": "converted", "accuracy": share_right(converted, *digits().held_out)},
    ]
    print(callback.recorder)
    print_table("Digits in Lightning", rows)


if __name__ == "__main__":
    main()
