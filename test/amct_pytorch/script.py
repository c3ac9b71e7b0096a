"""A training script as AMCT's users write it; only the import line is ours.

``python -m test.amct_pytorch.script train FOLDER`` trains half of a recorded run and stops;
``python -m test.amct_pytorch.script resume FOLDER`` is another process that trains the rest and
saves. Prints one line of JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import amct_fx.amct_pytorch as amct
from test.golden.reader import Run, load_run


def train(model: nn.Module, run: Run, steps: range) -> list[float]:
    """Train, and look at the model every fifth step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr)
    losses = []
    for step in steps:
        if step and step % 5 == 0:  # the recorded run calibrates in a training step
            evaluate(model, run)
        model.train()
        optimizer.zero_grad()
        loss = F.cross_entropy(model(run.inputs[step]), run.targets[step])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def evaluate(model: nn.Module, run: Run) -> torch.Tensor:
    """Return the output in eval mode."""
    model.eval()
    with torch.no_grad():
        return model(run.x_fixed)


def main(stage: str, name: str, folder: str) -> dict[str, Any]:
    """Run one of the two processes."""
    torch.set_num_threads(1)
    run = load_run(name)
    model = run.build()
    config, record, pth = (f"{folder}/{file}" for file in ("config.json", "record.txt", "half.pth"))
    half, total = len(run.steps) // 2, len(run.steps)
    if stage == "train":
        definition = None
        if run.cfg is not None:
            definition = f"{folder}/quant.cfg"
            Path(definition).write_text(run.cfg)
        amct.create_quant_retrain_config(config, model, run.x_fixed, definition)
        model = amct.create_quant_retrain_model(config, model, record, run.x_fixed)
        losses = train(model, run, range(half))
        torch.save({"state_dict": model.state_dict(), "epoch": half}, pth)
        return {"losses": losses}
    model = amct.restore_quant_retrain_model(
        config, model, record, run.x_fixed, pth, state_dict_name="state_dict"
    )
    losses = train(model, run, range(half, total))
    prefix = f"{folder}/out/net"
    amct.save_quant_retrain_model(
        config, model, record, prefix, run.x_fixed, ["x"], ["y"], {"x": {0: "n"}, "y": {0: "n"}}
    )
    return {"losses": losses, "output": evaluate(model, run).tolist()}


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
