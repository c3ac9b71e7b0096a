"""Find the layer that loses accuracy by quantization, and leave it float.

    python examples/analyze_digits.py --epochs 5 --report report.html

One layer of a small CNN on the digits of scikit-learn gets weights of four bits. ``analyze`` finds
out which one it is and what it costs, before any quantization-aware training; the page also shows
the training that follows.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from amct_fx_demo.data import digits
from example_tools import print_table
from torch import Tensor, nn
from torch.nn import functional as F
from train_digits import make_model, train

import amct_fx
from amct_fx.report import TrainingRecorder

INT4 = """
    override_layer_configs {
      layer_name: "3"
      retrain_weight_quant_config { arq_retrain { dst_type: INT4 channel_wise: false } }
    }
"""


def loss(output: Tensor, batch: Any) -> Tensor:
    """Return the loss; a batch is ``(images, labels)``."""
    return F.cross_entropy(output, batch[1])


def fine_tune(model: nn.Module, images: Tensor, labels: Tensor, *, steps: int) -> TrainingRecorder:
    """Train a prepared model, and return the history of loss and clips."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    recorder = TrainingRecorder(model, every=2)
    model.train()
    for _ in range(steps):
        chosen = torch.randint(len(images), (64,))
        error = loss(model(images[chosen]), (images[chosen], labels[chosen]))
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        recorder.step(error)
    return recorder


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, prepare, calibrate, analyze; then train on."""
    parser = argparse.ArgumentParser(description="Find the layers that lose accuracy.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=60, help="quantization-aware steps")
    parser.add_argument("--report", default="report.html", help="the page to write")
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    (images, labels), held_out = digits()
    validation = list(zip(*(tensor.split(300) for tensor in held_out), strict=True))

    float_model = make_model()
    train(float_model, images, labels, epochs=options.epochs, lr=3e-3)
    prepared = amct_fx.prepare_qat_amct(float_model.eval(), INT4)
    with torch.no_grad():
        prepared(images[:128])  # finds the ranges

    found = amct_fx.analyze(prepared, float_model, validation, metric=loss, greater_is_better=False)
    found.show()

    recorder = fine_tune(prepared, images, labels, steps=options.steps)
    found.save_html(options.report, recorder=recorder, title="Digits with four-bit weights")
    trained = amct_fx.analyze(
        prepared, None, validation, metric=loss, greater_is_better=False, max_skips=0
    )
    print(f"wrote {options.report}; most harmful layer: {found.ranking[0]}")
    rows = [
        {"model": "float", "loss": found.float_value},
        {"model": "calibrated only", "loss": found.quantized_value},
        *(
            {"model": f"without layer {', '.join(item.layers)}", "loss": item.value}
            for item in found.suggestions
        ),
        {"model": f"after {options.steps} steps of training", "loss": trained.quantized_value},
    ]
    print_table("Digits, layer 3 with INT4 weights", rows)


if __name__ == "__main__":
    main()
