"""Train a small residual network and write it in every format, each checked against the model.

    python examples/export_formats.py --output exported

Prints one line for each file: its size, what it holds, and what ``verify_onnx`` found.
"""

from __future__ import annotations

import argparse
from collections import Counter
from pathlib import Path

import onnx
import torch
from example_tools import fit_classes, print_table, share_right
from torch import Tensor, nn

from amct_fx import export_onnx, prepare_qat_amct, verify_onnx


class Net(nn.Module):
    """A convolution, a residual block, a classifier."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU())
        self.branch = nn.Sequential(
            nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 1)
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(16, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[N, classes]`` of images ``[N, 3, H, W]``."""
        x = self.stem(x)
        x = torch.relu(self.branch(x) + x)
        logits: Tensor = self.head(self.pool(x).flatten(1))
        return logits


def make_data(count: int) -> tuple[Tensor, Tensor]:
    """Return images whose class is the quarter in which a bright spot lies."""
    images, labels = 0.3 * torch.randn(count, 3, 16, 16), torch.randint(0, 4, (count,))
    for image, label in zip(images, labels.tolist(), strict=True):
        row, column = divmod(label, 2)
        image[label % 3, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] += 1 + label
    return images, labels


def main() -> None:
    """Train, export, verify."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("exported"))
    arguments = parser.parse_args()
    torch.manual_seed(0)
    images, labels = make_data(512)

    model = prepare_qat_amct(Net(), fixed_min_rule="nonnegative")
    fit_classes(model, images, labels, epochs=arguments.epochs, lr=3e-3)
    print(f"accuracy with quantization in the loop: {share_right(model, images, labels):.3f}")

    rows = []
    for format in ("qdq", "qdq_full", "qdq_pairs", "ascend", "fake_quant"):
        path = arguments.output / f"{format}.onnx"
        data = [images[:64], images[64:128]] if format == "qdq_full" else None
        export_onnx(
            model,
            images[:2],
            path,
            format=format,
            dynamic_batch=True,
            calibration_data=data,
        )
        result = verify_onnx(path, model, images[:64])
        kinds = Counter(node.op_type for node in onnx.load(path).graph.node)
        kinds.pop("Constant", None)
        rows.append(
            {
                "format": format,
                "kB": path.stat().st_size // 1000,
                "verified": "yes" if result.passed else result.first_diverging,
                "output dB": round(result.output_sqnr, 1),
                "holds": ", ".join(f"{count} {kind}" for kind, count in kinds.most_common(3)),
            }
        )
    print_table(f"files in {arguments.output}", rows)


if __name__ == "__main__":
    main()
