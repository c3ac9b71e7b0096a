"""Small helpers of the tests of ULQFakeQuantize."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from amct_fx.observers import ULQFakeQuantize


def state(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def assert_same_state(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert list(left) == list(right)
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


def clips(module: ULQFakeQuantize) -> tuple[float, float]:
    return module.clip_max.item(), module.clip_min.item()


def calibrated(**kwargs: Any) -> ULQFakeQuantize:
    module = ULQFakeQuantize(**kwargs)
    for _ in range(module.batch_num):
        module(torch.randn(64))
    return module
