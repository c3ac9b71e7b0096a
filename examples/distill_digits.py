"""Quantize with 256 images and no labels: calibration alone, and distillation.

    python examples/distill_digits.py --epochs 5 --plot losses.png

4-bit weights make the difference visible; with ``--bits 8`` both are close to the float model.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

import torch
from amct_fx_demo.data import digits
from example_tools import fit_classes, print_table, share_right
from torch import nn

import amct_fx
from amct_fx.distillation import distillation_of, history_of

CONFIG = """
    batch_num: 2
    group_size: {group_size}
    distill_weight_quant_config {{ arq_distill {{ dst_type: INT{bits} }} }}
"""


def make_model() -> nn.Sequential:
    """Return a small CNN for images ``[N, 1, 8, 8]``."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 4 * 4, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Train in float, calibrate one student, distil another, compare on held-out images."""
    parser = argparse.ArgumentParser(description="Distil a small CNN on the digits.")
    parser.add_argument("--epochs", type=int, default=5, help="for each group")
    parser.add_argument("--bits", type=int, choices=(4, 8), default=4, help="of the weights")
    parser.add_argument("--group-size", type=int, default=1)
    parser.add_argument("--plot", help="write the losses of the groups into this file")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore", amct_fx.AmctWarning)  # one input channel is too odd for INT4
    torch.manual_seed(0)
    data = digits()
    held_out = data.held_out.images

    teacher = make_model()
    fit_classes(teacher, data.train.images, data.train.labels, epochs=8, lr=3e-3)
    teacher.eval()

    config = CONFIG.format(bits=options.bits, group_size=options.group_size)
    samples = list(data.train.images[:256].split(32))
    calibrated = amct_fx.prepare_distill_amct(teacher, config).eval()
    with torch.no_grad():
        for batch in samples[:2]:
            calibrated(batch)
    student = amct_fx.prepare_distill_amct(teacher, config)
    print(distillation_of(student))
    amct_fx.distill(teacher, student, samples, epochs=options.epochs)
    print(history_of(student))
    if options.plot:
        history_of(student).plot().savefig(options.plot)

    rows = []
    models = {"float": teacher, "calibrated": calibrated, "distilled": student}
    with torch.no_grad():
        wanted = teacher(held_out)
        for name, model in models.items():
            found = model(held_out)
            rows.append(
                {
                    "model": name,
                    "error": float((found - wanted).square().mean()),
                    "as the teacher": float((found.argmax(1) == wanted.argmax(1)).double().mean()),
                    "right": share_right(model, held_out, data.held_out.labels),
                }
            )
    print_table(f"INT8 inputs, {options.bits}-bit weights, held-out images", rows)


if __name__ == "__main__":
    main()
