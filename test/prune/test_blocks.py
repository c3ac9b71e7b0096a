"""Blocks of channels that are mixed, gated, repeated or padded, as known networks do it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx import convert_amct, prepare_qat_amct
from test.prune.helpers import assert_exact, kept, plan_for

CFG = """prune_config { filter_pruner {
    balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }"""
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
TOKENS = torch.randn(2, 5, 6, generator=torch.Generator().manual_seed(1))


class SplitAttention(nn.Module):
    """Weighs two branches channel by channel, as ResNeSt does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.n = nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32)
        self.f, self.g, self.o = nn.Conv2d(16, 8, 1), nn.Conv2d(8, 32, 1), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.n(self.a(x)))
        b, c, h, w = x.shape
        x = x.reshape(b, 2, c // 2, h, w)
        g = self.g(F.relu(self.f(F.adaptive_avg_pool2d(x.sum(1), 1))))
        g = F.softmax(g.view(b, 2, -1), dim=1).view(b, 2, c // 2, 1, 1)
        y: Tensor = self.o((x * g).sum(dim=1))
        return y


class SelectiveKernel(nn.Module):
    """Chooses between two kernels, as SKNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(3, 16, 5, padding=2)
        self.f, self.g, self.o = nn.Linear(16, 8), nn.Linear(8, 32), nn.Conv2d(16, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        u = torch.stack([self.a(x), self.b(x)], 1)
        z = self.g(F.relu(self.f(u.sum(1).mean((2, 3))))).view(-1, 2, 16).softmax(1)
        y: Tensor = self.o((u * z[..., None, None]).sum(1))
        return y


class Unpooled(nn.Module):
    """Puts values back to where a pooling found them, as SegNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 4, 3, padding=1)
        self.pool, self.back = nn.MaxPool2d(2, return_indices=True), nn.MaxUnpool2d(2)

    def forward(self, x: Tensor) -> Tensor:
        a = self.a(x)
        y, places = self.pool(F.relu(a))
        z: Tensor = self.b(self.back(y, places, output_size=a.size()))
        return z


class Gated(nn.Module):
    """A gated linear unit over the channels, as a module and as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.gate, self.d = nn.Conv2d(3, 32, 1), nn.GLU(1), nn.Conv2d(16, 16, 1, groups=16)
        self.l, self.o = nn.Linear(16, 20), nn.Linear(10, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.o(F.glu(self.l(self.d(self.gate(self.a(x))).mean((2, 3)))))
        return y


class GroupedQueries(nn.Module):
    """Two heads of keys and values for four of queries."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(6, 16), nn.Linear(6, 8), nn.Linear(6, 8)
        self.o, self.form = nn.Linear(16, 3), form

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (f(x).view(b, t, -1, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.form == "repeated":
            k, v = k.repeat_interleave(2, dim=1), torch.repeat_interleave(v, 2, 1)
        y = F.scaled_dot_product_attention(q, k, v, enable_gqa=self.form == "option")
        z: Tensor = self.o(y.transpose(1, 2).reshape(b, t, -1))
        return z


class RepeatedChannels(nn.Module):
    """Every channel twice in a row, and blocks of channels repeated along their own axis."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Conv2d(3, 8, 1), nn.Conv2d(16, 8, 1), nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.b(self.a(x).repeat_interleave(2, dim=1))
        n, c, h, w = x.shape
        blocks = x.view(n, 2, c // 2, h, w).repeat_interleave(2, 1)
        y: Tensor = self.o(blocks.reshape(n, 2 * c, h, w))
        return y


class Patches(nn.Module):
    """A Linear over the windows of a map."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.l, self.o = nn.Conv2d(3, 8, 1), nn.Linear(72, 12), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = F.unfold(F.relu(self.a(x)), 3, padding=1).transpose(1, 2)
        z: Tensor = self.o(F.relu(self.l(y)).mean(1))
        return z


class Warped(nn.Module):
    """A spatial transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.p, self.o = nn.Conv2d(3, 12, 1), nn.Linear(12, 6), nn.Conv2d(12, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        theta = self.p(y.mean((2, 3))).view(-1, 2, 3)
        grid = F.affine_grid(theta, y.size(), align_corners=False)
        z: Tensor = self.o(F.grid_sample(y, grid, align_corners=False))
        return z


class PaddedShortcut(nn.Module):
    """Shortcuts without a weight between stages of different width, as in ResNets for CIFAR."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.o = nn.Conv2d(3, 8, 3, padding=1), nn.Linear(24, 4)
        self.first = nn.ModuleList([nn.Conv2d(8, 8, 1), nn.Conv2d(8, 16, 1), nn.Conv2d(16, 24, 1)])
        self.second = nn.ModuleList([nn.Conv2d(n, n, 1) for n in (8, 16, 24)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for first, second in zip(self.first, self.second, strict=True):
            y = second(F.relu(first(x)))
            extra = (y.shape[1] - x.shape[1]) // 2
            x = F.relu(y + F.pad(x, (0, 0, 0, 0, extra, extra), "constant", 0))
        z: Tensor = self.o(x.mean((2, 3)))
        return z


class ZerosBeside(nn.Module):
    """The shortcut is widened by zeros, and later by places that nothing is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 12, 1), nn.Conv2d(15, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        x = self.b(F.relu(x)) + torch.cat([x, torch.zeros_like(x[:, :4])], 1)
        y: Tensor = self.o(F.pad(x, (0, 0, 0, 0, 1, 2), value=1.0))
        return y


CASES: list[tuple[Any, Tensor, dict[str, int]]] = [
    (SplitAttention, IMAGE, {"a": 16, "g": 16, "f": 4}),
    (SelectiveKernel, IMAGE, {"a": 8, "b": 8, "g": 16, "f": 4}),
    (Unpooled, IMAGE, {"a": 6}),
    (Gated, IMAGE, {"a": 16, "l": 10}),
    (lambda: GroupedQueries("option"), TOKENS, {"q": 8, "k": 4, "v": 4}),
    (lambda: GroupedQueries("repeated"), TOKENS, {"q": 8, "k": 4, "v": 4}),
    (RepeatedChannels, IMAGE, {"a": 4, "b": 4}),
    (Patches, IMAGE, {"a": 4, "l": 6}),
    (Warped, IMAGE, {"a": 6}),
    (
        PaddedShortcut,
        IMAGE,
        {"stem": 4, "first.1": 8, "second.0": 4, "second.1": 8, "second.2": 12},
    ),
    (ZerosBeside, IMAGE, {"a": 4, "b": 6}),
]


@pytest.mark.parametrize(("make", "x", "counts"), CASES)
def test_channels_go_from_all_blocks_together(make: Any, x: Tensor, counts: dict[str, int]) -> None:
    torch.manual_seed(0)
    model = make()
    plan = plan_for(model, x)
    left = {name: len(rows) for name, rows in kept(plan).items()}
    assert {name: left[name] for name in counts} == counts
    assert_exact(model, plan, x)
    assert_exact(model, plan_for(model, x, ratio=0.3), x)
    prepared = prepare_qat_amct(model, CFG, x).eval()
    assert torch.allclose(convert_amct(prepared).eval()(x), prepared(x), atol=1e-5)


@pytest.mark.parametrize(("make", "x", "counts"), CASES)
def test_mode_amct_stops_there(make: Any, x: Tensor, counts: dict[str, int]) -> None:
    del counts
    model = make()
    assert_exact(model, plan_for(model, x, mode="amct"), x)
    blocks = {"GroupedQueries": "q k v", "Gated": "a", "Unpooled": "a", "ZerosBeside": "a"}
    assert not set(blocks.get(type(model).__name__, "").split()) & set(
        kept(plan_for(model, x, mode="amct"))
    )


def test_padding_that_copies_channels_stops_them() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.o = nn.Conv1d(3, 8, 1), nn.Conv1d(10, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = F.pad(self.a(x).unsqueeze(0), (0, 0, 1, 1), mode="replicate")
            z: Tensor = self.o(y.squeeze(0))
            return z

    model = Net()
    plan = plan_for(model, torch.ones(2, 3, 4))
    assert kept(plan) == {}
    assert plan.pinned[0].code == "reduction_over_axis"
