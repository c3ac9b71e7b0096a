"""The four lines that amct_fx adds to a training script, on the digits of scikit-learn.

    python examples/train_digits.py --epochs 5 --output digits.onnx

``amct-fx demo`` does more: it compares every stage and runs the file in onnxruntime.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from amct_fx_demo.data import digits
from example_tools import print_table, share_right
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import amct_fx

CONFIG = """
    batch_num: 2
    skip_layers: "0"
    override_layer_types {
      layer_type: "Linear"
      retrain_data_quant_config { ulq_quantize { fixed_min: true } }
    }
"""


def make_model() -> nn.Sequential:
    """Return a small CNN for images ``[N, 1, 8, 8]``."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 10),
    )


def train(model: nn.Module, images: Tensor, labels: Tensor, *, epochs: int, lr: float) -> None:
    """Train ``model`` in place; knows nothing of quantization."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model.train()
    for _ in range(epochs):
        for batch, target in DataLoader(TensorDataset(images, labels), 64, shuffle=True):
            optimizer.zero_grad()
            F.cross_entropy(model(batch), target).backward()
            optimizer.step()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train in float, train on with quantization, convert, export."""
    parser = argparse.ArgumentParser(description="Quantize a small CNN on the digits.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--output", default="digits.onnx", help="the INT8 ONNX file")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    train_set, test_set = digits()
    model: nn.Module = make_model()
    train(model, *train_set, epochs=options.epochs, lr=3e-3)
    float_accuracy = share_right(model, *test_set)

    model = amct_fx.prepare_qat_amct(model, CONFIG)
    train(model, *train_set, epochs=options.epochs, lr=3e-4)
    model = amct_fx.convert_amct(model)
    torch.onnx.export(
        model, (train_set.images[:2],), options.output, external_data=False, dynamo=True
    )

    rows = [
        {"model": "float", "accuracy": float_accuracy},
        {"model": "INT8", "accuracy": share_right(model, *test_set)},
    ]
    print_table(f"Digits, held-out third; the file is {options.output}", rows)


if __name__ == "__main__":
    main()
