"""Arguments by name: an operation is followed however its input is passed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.prune.helpers import assert_exact, plan_for

Form = Callable[[Any, Tensor, Tensor], Tensor]


class Net(nn.Module):
    """Two branches, a form that joins them, and a layer that reads the result."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.a, self.c = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(3, 16, 1)
        self.o = nn.LazyConv2d(4, 1)
        self.bn, self.pr = nn.BatchNorm2d(16), nn.PReLU(16)
        self.gn, self.gn4 = nn.GroupNorm(16, 16), nn.GroupNorm(4, 16)
        self.norm = nn.InstanceNorm2d(16, affine=True)
        self.dw, self.g = nn.Conv2d(16, 16, 1, groups=16), nn.Conv2d(16, 16, 1, groups=2)
        self.up, self.shuffle = nn.ConvTranspose2d(16, 16, 1), nn.PixelShuffle(2)
        self.act, self.pool, self.soft = nn.SiLU(), nn.AvgPool2d(3, 1, 1), nn.Softmax(dim=3)
        self.weight = nn.Parameter(torch.rand(4, 16, 1, 1))
        self.gamma, self.beta = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        """Run on ``[N, 3, 8, 8]``."""
        y: Tensor = self.o(self.form(self, self.a(x), self.c(x)))
        return y


MODULES = ("bn", "pr", "gn", "gn4", "norm", "dw", "g", "up", "shuffle", "act", "pool", "soft")


def of_module(name: str) -> tuple[Form, Form]:
    def plain(net: Any, x: Tensor, y: Tensor) -> Tensor:
        z: Tensor = getattr(net, name)(x)
        return z

    def named(net: Any, x: Tensor, y: Tensor) -> Tensor:
        z: Tensor = getattr(net, name)(input=x)
        return z

    return plain, named


FORMS: dict[str, tuple[Form, Form]] = {name: of_module(name) for name in MODULES} | {
    "cat": (
        lambda n, x, y: torch.cat([x, y], 1),
        lambda n, x, y: torch.cat(tensors=(x, y), dim=1),
    ),
    "narrow": (
        lambda n, x, y: torch.narrow(x, 1, 2, 8),
        lambda n, x, y: torch.narrow(input=x, dim=1, start=2, length=8),
    ),
    "split": (
        lambda n, x, y: torch.split(x, 4, 1)[1],
        lambda n, x, y: torch.split(tensor=x, split_size_or_sections=4, dim=1)[1],
    ),
    "chunk": (
        lambda n, x, y: torch.chunk(x, 2, 1)[0],
        lambda n, x, y: torch.chunk(input=x, chunks=2, dim=1)[0],
    ),
    "reshape": (
        lambda n, x, y: torch.reshape(x, (2, 16, 64, 1)),
        lambda n, x, y: torch.reshape(input=x, shape=(2, 16, 64, 1)),
    ),
    "unflatten": (
        lambda n, x, y: torch.unflatten(x, 1, (4, 4)).flatten(1, 2),
        lambda n, x, y: torch.unflatten(input=x, dim=1, sizes=(4, 4)).flatten(1, 2),
    ),
    "transpose": (
        lambda n, x, y: torch.transpose(x, 2, 3),
        lambda n, x, y: torch.transpose(input=x, dim0=2, dim1=3),
    ),
    "mean": (
        lambda n, x, y: torch.mean(x, (2, 3), True),
        lambda n, x, y: torch.mean(input=x, dim=(2, 3), keepdim=True),
    ),
    "softmax": (
        lambda n, x, y: F.softmax(x, 3),
        lambda n, x, y: F.softmax(input=x, dim=3),
    ),
    "add": (
        lambda n, x, y: torch.add(x, y, alpha=2),
        lambda n, x, y: torch.add(input=x, other=y, alpha=2),
    ),
    "relu": (
        lambda n, x, y: F.relu(x, True),
        lambda n, x, y: F.relu(input=x, inplace=True),
    ),
    "conv2d": (
        lambda n, x, y: F.conv2d(x, n.weight),
        lambda n, x, y: F.conv2d(input=x, weight=n.weight),
    ),
    "group_norm": (
        lambda n, x, y: F.group_norm(x, 4, n.gamma, n.beta),
        lambda n, x, y: F.group_norm(input=x, num_groups=4, weight=n.gamma, bias=n.beta),
    ),
    "batch_norm": (
        lambda n, x, y: F.batch_norm(x, None, None, n.gamma, n.beta, True),
        lambda n, x, y: F.batch_norm(
            input=x, running_mean=None, running_var=None, weight=n.gamma, training=True
        ),
    ),
    "prelu": (
        lambda n, x, y: F.prelu(x, n.gamma),
        lambda n, x, y: F.prelu(input=x, weight=n.gamma),
    ),
}


def made(form: Form) -> nn.Module:
    torch.manual_seed(0)
    net = Net(form)
    net(torch.ones(2, 3, 8, 8))
    return net


@pytest.mark.parametrize("name", FORMS)
def test_channels_are_followed_through_arguments_by_name(name: str) -> None:
    x = torch.randn(2, 3, 8, 8)
    plain, named = (plan_for(made(form), x) for form in FORMS[name])
    assert len(plain["a"].kept) < 16
    assert [group.kept for group in named.groups] == [group.kept for group in plain.groups]
    assert_exact(made(FORMS[name][1]), named, x)
