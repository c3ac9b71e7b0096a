"""The first loss of the first group is the one that AMCT's tool had.

Later losses differ on purpose: AMCT writes quantized weights back into the master weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

import amct_fx
from amct_fx.distillation import history_of
from test.golden import networks

FOLDER = Path(__file__).parents[1] / "golden" / "i_distill"
RUNS = json.loads((FOLDER / "runs.json").read_text("utf-8"))


@pytest.mark.parametrize("name", list(RUNS))
def test_the_first_loss_is_that_of_the_recorded_run(name: str) -> None:
    run = RUNS[name]
    with np.load(FOLDER / "runs.npz") as archive:
        start = f"{name}/w0/"
        state = {
            key.removeprefix(start): torch.from_numpy(archive[key])
            for key in archive.files
            if key.startswith(start)
        }
        batches = torch.from_numpy(archive[f"{name}/X"]).split(8)
    teacher = getattr(networks, run["model"])().eval()
    teacher.load_state_dict(state)
    student = amct_fx.prepare_distill_amct(teacher)
    amct_fx.distill(teacher, student, list(batches))
    first = history_of(student).groups[0]
    assert list(first.names) == run["group"]
    assert first.steps[0] == pytest.approx(run["first_loss"], rel=1e-4)
