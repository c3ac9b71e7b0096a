"""Quantization-aware training of a small text classifier in Hugging Face's Trainer.

    python -m pip install 'amct-fx[transformers]'
    python examples/train_transformers.py --epochs 4

The model is a BERT of two layers with fresh weights; it learns which of two letters occurs more
often in a line. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from example_tools import print_table
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

import amct_fx
from amct_fx.callbacks.transformers import QATCallback
from amct_fx.control import QATSchedule

LENGTH = 15


def make_data(number: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return lines of the letters 1 and 2, and which one occurs more often."""
    generator = torch.Generator().manual_seed(seed)
    lines = torch.randint(1, 3, (number, LENGTH), generator=generator)
    labels = ((lines == 2).sum(dim=1) > LENGTH // 2).long()
    return [{"input_ids": a, "labels": b} for a, b in zip(lines, labels, strict=True)]


def make_model() -> torch.nn.Module:
    """Return the classifier."""
    config = BertConfig(
        vocab_size=3,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        num_labels=2,
        attn_implementation="eager",
    )
    model: torch.nn.Module = BertForSequenceClassification(config)
    return model


def accuracy(prediction: Any) -> dict[str, float]:
    """Return the share of right answers."""
    right = np.argmax(prediction.predictions, axis=1) == prediction.label_ids
    return {"accuracy": float(right.mean())}


def fit(model: torch.nn.Module, epochs: int, lr: float, callbacks: list[Any]) -> float:
    """Train, and return the accuracy."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            num_train_epochs=epochs,
            per_device_train_batch_size=32,
            learning_rate=lr,
            save_strategy="no",
            logging_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = Trainer(
            model,
            arguments,
            train_dataset=make_data(1024, seed=0),
            eval_dataset=make_data(256, seed=1),
            compute_metrics=accuracy,
            callbacks=callbacks,
        )
        trainer.train()
        return float(trainer.evaluate()["eval_accuracy"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Train in float, then with quantization in the loop."""
    parser = argparse.ArgumentParser(description="Quantize a small BERT in a Trainer.")
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    model = make_model()
    floating = fit(model, options.epochs, 1e-3, [])
    prepared = amct_fx.prepare_qat_amct(model)
    callback = QATCallback(QATSchedule(freeze_ranges_epoch=options.epochs), record_every=4)
    rows = [
        {"model": "float", "accuracy": floating},
        {"model": "prepared", "accuracy": fit(prepared, options.epochs, 2e-4, [callback])},
    ]
    print(callback.recorder)
    print(amct_fx.summarize(prepared).totals)
    print_table("BERT in a Trainer", rows)


if __name__ == "__main__":
    main()
