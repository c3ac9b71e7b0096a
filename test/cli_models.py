"""Models, data and metrics as a user would name them on the command line."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from amct_fx import prepare_qat_amct
from test.networks import Net, example

validation = [(example(4), torch.tensor([0, 1, 2, 3])), (example(2), torch.tensor([3, 0]))]
number = 5


def make() -> nn.Module:
    torch.manual_seed(0)
    return Net().eval()


def make_prepared() -> nn.Module:
    prepared = prepare_qat_amct(make())
    prepared(example(4))
    return prepared


def make_something_else() -> list[int]:
    return [1]


def make_trouble() -> nn.Module:
    message = "no such dataset"
    raise RuntimeError(message)


def loader() -> list[Any]:
    return validation


def wrong_shape() -> list[Any]:
    return [torch.randn(2, 5, 8, 8)]


def accuracy(output: Tensor, batch: Any) -> Tensor:
    return (output.argmax(1) == batch[1]).double().mean()


def broken_metric(output: Tensor, batch: Any) -> Tensor:
    message = "labels are missing"
    raise KeyError(message)
