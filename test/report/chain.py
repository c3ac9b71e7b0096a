"""A chain of layers, prepared and in float, for the tests of analyze."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amct_fx import analyze, control, prepare_qat_amct
from test.networks import example

if TYPE_CHECKING:
    from amct_fx.report import Analysis


class Chain(nn.Module):
    """Four layers in a row with activations that work in place; no two share a quantizer."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 8, 3, padding=1)
        self.c = nn.Conv2d(8, 8, 1)
        self.d = nn.Linear(8, 4)
        self.act = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.a(x))
        x = self.act(self.b(x)).add_(x)
        x = self.act(self.c(x))
        return self.d(x.mean((2, 3)))


def prepared_and_float(cls: type[nn.Module] = Chain, **options: Any) -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    model = cls().eval()
    prepared = prepare_qat_amct(model, **options)
    prepared(example(4))
    return prepared, model


def quiet(*args: Any, **kwargs: Any) -> Analysis:
    return analyze(*args, progress=False, **kwargs)


def mse(a: Tensor, b: Tensor) -> float:
    return float(F.mse_loss(a, b).detach())


@torch.no_grad()
def with_only(prepared: nn.Module, names: list[str], x: Tensor) -> Tensor:
    """Run with some layers quantized, by the switches of the quantizers."""
    model = copy.deepcopy(prepared).eval()
    control.disable_fake_quant(model)
    for name in names:
        control.enable_fake_quant(model, name)
    return model(x)


NAMES = ["a", "b", "c", "d"]


def loss(output: Tensor, batch: Any) -> Tensor:
    return F.cross_entropy(output, batch[1])


def accuracy(output: Tensor, batch: Any) -> Tensor:
    return (output.argmax(1) == batch[1]).double().mean()
