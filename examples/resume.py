"""Stop in the middle of a training, go on in a new process: the losses are the same to the bit.

    python examples/resume.py --steps 12

The second half runs in another Python, which has the float network's class and one file.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from amct_fx_demo.data import digits
from amct_fx_demo.network import DigitsNet
from example_tools import print_table
from torch import nn
from torch.nn import functional as F

import amct_fx

CONFIG = "batch_num: 2 retrain_weight_quant_config { ulq_retrain {} }"


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Run the steps from ``first`` to ``last``; return their losses."""
    images, labels = digits().train
    losses = []
    model.train()
    for step in range(first, last):
        torch.manual_seed(step)  # dropout draws the same, whoever runs the step
        part = slice(step % 16 * 64, step % 16 * 64 + 64)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(images[part]), labels[part])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def float_model() -> nn.Module:
    """Return the network with the same weights in every process."""
    torch.manual_seed(0)
    return DigitsNet()


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """Return an optimizer that lets no range decay."""
    return torch.optim.AdamW(amct_fx.param_groups(model, weight_decay=0.01), lr=1e-3)


def resume(checkpoint: str, first: int, last: int) -> None:
    """Load the checkpoint, train on and print the losses; what the new process does."""
    model, extra = amct_fx.load_checkpoint(checkpoint, float_model())
    optimizer = optimizer_of(model)
    optimizer.load_state_dict(extra["optimizer"])
    print(*(loss.hex() for loss in train(model, optimizer, first, last)))


def main(arguments: Sequence[str] | None = None) -> None:
    """Train once without a break, once with one; compare."""
    parser = argparse.ArgumentParser(description="Resume a quantization-aware training.")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--resume", nargs=2, metavar=("FILE", "STEP"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)  # so that sums have the same order in both processes
    if options.resume:
        resume(options.resume[0], int(options.resume[1]), options.steps)
        return

    half = options.steps // 2
    model = amct_fx.prepare_qat_amct(float_model(), CONFIG)
    optimizer = optimizer_of(model)
    whole = train(model, optimizer, 0, half)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = Path(folder) / "qat.pt"
        extra = {"optimizer": optimizer.state_dict()}
        amct_fx.save_checkpoint(model, checkpoint, extra=extra)
        command = [sys.executable, __file__, "--steps", str(options.steps)]
        result = subprocess.run(
            [*command, "--resume", str(checkpoint), str(half)],
            check=True,
            capture_output=True,
            text=True,
        )
    resumed = [float.fromhex(text) for text in result.stdout.split()]
    whole += train(model, optimizer, half, options.steps)

    pairs = list(zip(whole[half:], resumed, strict=True))
    rows = [
        {"step": half + index, "without a break": f"{one:.9f}", "resumed": f"{two:.9f}"}
        for index, (one, two) in enumerate(pairs)
    ]
    print_table("Loss of each step", rows)
    if any(one != two for one, two in pairs):
        sys.exit("the losses differ")


if __name__ == "__main__":
    main()
