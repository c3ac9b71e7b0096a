"""Channels that AMCT kept, for 52 configurations of seven networks."""

from __future__ import annotations

import functools
import gzip
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from amct_fx import prune_plan
from amct_fx.prune.oracles import column_mask_oracle
from test.golden import networks

if TYPE_CHECKING:
    from amct_fx.prune import PrunePlan

_FOLDER = Path(__file__).parents[1] / "golden" / "f_bcp"
CASES = json.loads(gzip.decompress((_FOLDER / "bcp.json.gz").read_bytes()))


@functools.cache
def arrays() -> dict[str, Tensor]:
    with np.load(_FOLDER / "bcp_weights.npz") as file:
        return {key: torch.from_numpy(file[key]) for key in file}


def model_and_input(name: str) -> tuple[nn.Module, Tensor]:
    model = getattr(networks, name)()
    own = {
        key.removeprefix(f"{name}/"): value for key, value in arrays().items() if f"{name}/" in key
    }
    example = own.pop("__input__")
    model.load_state_dict(own)
    return model, example


def planned(case: dict[str, Any]) -> tuple[nn.Module, Tensor, PrunePlan]:
    model, example = model_and_input(case["model"])
    return model, example, prune_plan(model, case["cfg"], example, mode="amct", importance="first")


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['model']}: {case['tag']}")
def test_the_channels_are_those_that_amct_keeps(case: dict[str, Any]) -> None:
    model, example, plan = planned(case)
    rows = plan.kept_rows()
    follows = {m.layer: m for g in plan.groups for m in g.members if m.role == "attached"}
    for name, expected in case["kept"].items():
        if name not in follows:
            full = torch.arange(model.get_submodule(name).weight.shape[0])
            assert rows.get(name, full).tolist() == expected, name
    assert column_mask_oracle(model, plan, example).outputs < 1e-5
