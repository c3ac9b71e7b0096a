"""A transformer encoder on a generated task: at which place is the largest number?

    python examples/transformer.py --epochs 8

The projections inside ``nn.MultiheadAttention`` are not layers of their own and stay float; the
feed-forward parts and the head are trained with INT8.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from example_tools import fit_classes, print_table, share_right
from torch import Tensor, nn

import amct_fx

LENGTH, WIDTH = 10, 32
#: 256 codes cannot tell apart numbers that are very close, so the first layer reads them in float.
CONFIG = 'skip_layers: "lift"'


class Finder(nn.Module):
    """Scores every place of sequences ``[N, LENGTH]``; returns ``[N, LENGTH]``."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(1, WIDTH)
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, dim_feedforward=64, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.score = nn.Linear(WIDTH, 1)

    def forward(self, numbers: Tensor) -> Tensor:
        """Return one score for each number."""
        values: Tensor = self.score(self.encoder(self.lift(numbers.unsqueeze(-1))))
        return values.squeeze(-1)


def sequences(count: int) -> tuple[Tensor, Tensor]:
    """Return random numbers and the place of the largest."""
    numbers = torch.rand(count, LENGTH)
    return numbers, numbers.argmax(dim=1)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train in float, train on with quantization, convert."""
    parser = argparse.ArgumentParser(description="Quantize a transformer encoder.")
    parser.add_argument("--epochs", type=int, default=8)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    train_set, test_set = sequences(4000), sequences(1000)
    model = Finder()
    fit_classes(model, *train_set, epochs=options.epochs, lr=2e-3)
    prepared = amct_fx.prepare_qat_amct(model, CONFIG, train_set[0][:2])
    fit_classes(prepared, *train_set, epochs=options.epochs, lr=5e-4)
    converted = amct_fx.convert_amct(prepared)

    print(amct_fx.summarize(prepared))
    stages = {"float": model, "prepared": prepared, "converted": converted}
    rows = [{"model": name, "right": share_right(m, *test_set)} for name, m in stages.items()]
    print_table("Share of sequences whose largest number was found", rows)


if __name__ == "__main__":
    main()
