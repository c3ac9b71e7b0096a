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
from amct_fx_demo.data import digits
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


def latencies(paths: Sequence[Path], images: Tensor, *, repeats: int = 40) -> list[float]:
    """Return the milliseconds of one batch in onnxruntime on one thread, the fewest of several.

    The files take turns, so that whatever else the machine does meets all of them.
    """
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    files = [str(path) for path in paths]
    sessions = [ort.InferenceSession(f, options, ["CPUExecutionProvider"]) for f in files]
    shortest = [float("inf")] * len(sessions)
    for _ in range(repeats):
        for index, session in enumerate(sessions):
            start = time.perf_counter()
            session.run(None, {session.get_inputs()[0].name: np.asarray(images)})
            shortest[index] = min(shortest[index], 1000 * (time.perf_counter() - start))
    return shortest


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

    print(amct_fx.prune_plan(model, CONFIG, images[:2]))
    pruned = amct_fx.prepare_qat_amct(model, CONFIG, images[:2])
    fit_classes(pruned, *train_set, epochs=options.epochs, lr=1e-3, decay=True)
    pruned = amct_fx.convert_amct(pruned)
    amct_fx.export_onnx(pruned, images, options.output)

    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / "float.onnx", Path(options.output)]
        torch.onnx.export(model.eval(), (images,), paths[0], external_data=False, dynamo=True)
        times = latencies(paths, test_set.images[:64])
        sizes = [path.stat().st_size for path in paths]
    rows = [
        {
            "model": name,
            "accuracy": share_right(network, *test_set),
            "file, KiB": f"{size / 1024:.1f}",
            "latency, ms": f"{took:.2f}",
        }
        for name, network, size, took in zip(
            ("float", "pruned INT8"), (model, pruned), sizes, times, strict=True
        )
    ]
    print_table("Held-out digits; onnxruntime, one thread", rows)


if __name__ == "__main__":
    main()
