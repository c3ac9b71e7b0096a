"""An LSTM on generated signals: which of four frequencies is it?

    python examples/lstm.py --epochs 15

Input and hidden state of the LSTM have a range each; its weights become int8 codes.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence

import torch
from example_tools import fit_classes, print_table, share_right
from torch import Tensor, nn

import amct_fx

STEPS, CLASSES = 24, 4


class Listener(nn.Module):
    """Classifies signals ``[N, STEPS]``; returns logits ``[N, CLASSES]``."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 24, batch_first=True)
        self.head = nn.Linear(24, CLASSES)

    def forward(self, signal: Tensor) -> Tensor:
        """Return logits from the last hidden state."""
        _, (hidden, _) = self.lstm(signal.unsqueeze(-1))
        logits: Tensor = self.head(hidden[-1])
        return logits


def signals(count: int) -> tuple[Tensor, Tensor]:
    """Return noisy sines of random phase, and the class of their frequency."""
    labels = torch.arange(count) % CLASSES
    frequency = (labels + 1)[:, None] / STEPS
    phase = torch.rand(count, 1)
    clean = torch.sin(2 * math.pi * (frequency * torch.arange(STEPS) + phase))
    return clean + 0.3 * torch.randn(count, STEPS), labels


def main(arguments: Sequence[str] | None = None) -> None:
    """Train in float, train on with quantization, convert, export."""
    parser = argparse.ArgumentParser(description="Quantize an LSTM.")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--output", default="lstm.onnx", help="the INT8 ONNX file")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    train_set, test_set = signals(2000), signals(1000)
    model = Listener()
    fit_classes(model, *train_set, epochs=options.epochs, lr=5e-3)
    prepared = amct_fx.prepare_qat_amct(model)
    fit_classes(prepared, *train_set, epochs=max(1, options.epochs // 3), lr=5e-4)
    converted = amct_fx.convert_amct(prepared)
    inputs = (test_set[0][:1],)
    torch.onnx.export(converted, inputs, options.output, dynamo=False, opset_version=17)

    print(amct_fx.summarize(prepared))
    stages = {"float": model, "prepared": prepared, "converted": converted}
    rows = [{"model": name, "right": share_right(m, *test_set)} for name, m in stages.items()]
    print_table(f"Share of signals put into the right class; file {options.output}", rows)


if __name__ == "__main__":
    main()
