"""Prune 30 % of the channels of a CNN on the digits of scikit-learn, and quantize it to INT8.

    python examples/prune_qat_digits.py --epochs 10 --output pruned.onnx

The configuration asks for both, so one preparation and one fine-tuning do. The script prints
accuracy, size of the ONNX files and their latency in onnxruntime, before and after.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from amct_fx_demo.data import Split, digits
from example_tools import fit_classes, print_table, share_right
from torch import Tensor, nn

import amct_fx

CONFIG = """
    batch_num: 4
    retrain_data_quant_config { ulq_quantize { } }
    prune_config { filter_pruner {
      balanced_l2_norm_filter_prune { prune_ratio: 0.3 ascend_optimized: false }
    } }
"""


class Block(nn.Module):
    """Two convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """Run on ``[N, C, H, W]``."""
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


def make_model() -> nn.Sequential:
    """Return a small residual network for images ``[N, 1, 8, 8]``."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        Block(32, 64, 1),
        Block(64, 96, 2),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(96, 10),
    )


def latency(path: Path, images: Tensor, *, repeats: int = 20) -> float:
    """Return the milliseconds of one batch in onnxruntime on one thread, the fewest of several."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1  # more would wait for each other on a busy machine
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feed = {session.get_inputs()[0].name: np.asarray(images)}
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        session.run(None, feed)
        times.append(time.perf_counter() - start)
    return 1000 * min(times)


def measured(name: str, model: nn.Module, path: Path, test: Split) -> dict[str, object]:
    """Return accuracy, size and latency of a model and its file, a row of the table."""
    return {
        "model": name,
        "accuracy": share_right(model, *test),
        "file, KiB": f"{path.stat().st_size / 1024:.1f}",
        "latency, ms": f"{latency(path, test.images[:64]):.2f}",
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Train in float, prune and quantize, fine-tune, convert, export, compare."""
    parser = argparse.ArgumentParser(description="Prune and quantize a small CNN on the digits.")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--output", default="pruned.onnx", help="the pruned INT8 ONNX file")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    train_set, test_set = digits()
    images = train_set.images[:64]
    model = make_model()
    fit_classes(model, *train_set, epochs=options.epochs, lr=3e-3, decay=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "float.onnx"
        torch.onnx.export(model.eval(), (images,), path, external_data=False, dynamo=True)
        rows = [measured("float", model, path, test_set)]

    print(amct_fx.prune_plan(model, CONFIG, images[:2]))
    pruned = amct_fx.prepare_qat_amct(model, CONFIG, images[:2])
    fit_classes(pruned, *train_set, epochs=options.epochs, lr=1e-3, decay=True)
    pruned = amct_fx.convert_amct(pruned)
    amct_fx.export_onnx(pruned, images, options.output)
    rows.append(measured("pruned INT8", pruned, Path(options.output), test_set))
    print_table("Digits, held-out third; batches of 64 in onnxruntime, one thread", rows)


if __name__ == "__main__":
    main()
