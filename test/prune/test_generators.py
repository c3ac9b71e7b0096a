"""A Linear whose outputs become a map: what one channel of the next layer reads goes together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx.prune import remove_channels
from test.prune import networks as nets
from test.prune.helpers import assert_exact, kept, plan_for

CODES = nets.golden_input(3, 5)
Forward = Callable[[Any, Tensor], Tensor]


class Generator(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.fc = nn.Linear(5, 8 * 4 * 3)
        self.norm, self.flat_norm = nn.BatchNorm2d(8), nn.BatchNorm1d(96)
        self.groups = nn.GroupNorm(4, 8)
        self.shape = nn.Unflatten(1, (8, 4, 3))
        self.up = nn.ConvTranspose2d(8, 6, 2, stride=2)
        self.conv, self.grouped = nets.conv(8, 6), nets.conv(8, 6, groups=2)
        self.small = nn.Conv2d(2, 4, 1)
        self.out = nets.conv(6, 2)
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


FORMS: dict[str, Forward] = {
    "view": lambda m, x: m.out(m.up(F.relu(m.fc(x)).view(-1, 8, 4, 3))),
    "view_of_size": lambda m, x: m.out(m.up(m.fc(x).view(x.size(0), 8, 4, 3).relu())),
    "reshape_free_channels": lambda m, x: m.out(m.conv(m.fc(x).reshape(3, -1, 4, 3))),
    "unflatten": lambda m, x: m.out(m.up(m.shape(m.fc(x)))),
    "unflatten_method": lambda m, x: m.out(m.up(m.fc(x).unflatten(-1, (8, 4, 3)))),
    "norm": lambda m, x: m.out(m.up(F.relu(m.norm(m.fc(x).view(-1, 8, 4, 3))))),
    "norm_before": lambda m, x: m.out(m.up(F.relu(m.flat_norm(m.fc(x))).view(-1, 8, 4, 3))),
    "group_norm": lambda m, x: m.out(m.up(m.groups(m.fc(x).view(-1, 8, 4, 3)))),
    "grouped": lambda m, x: m.out(m.grouped(m.fc(x).view(-1, 8, 4, 3))),
    "channels_last": lambda m, x: m.out(m.up(m.fc(x).view(-1, 4, 3, 8).permute(0, 3, 1, 2))),
}


def by_hand(m: Generator, y: Tensor) -> Tensor:
    """Two channels of 2 x 2 blocks on a 4 x 3 grid of twice the size."""
    blocks = y.view(-1, 2, 2, 2, 4, 3).permute(0, 1, 4, 2, 5, 3)
    return m.small(blocks.reshape(-1, 2, 8, 6))


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_a_linear_go_by_channel(form: str) -> None:
    model = nets.golden_weights(Generator(FORMS[form]))
    plan = plan_for(model, CODES)
    rows = kept(plan)["fc"]
    assert plan["fc"].channels == (4 if form == "group_norm" else 8)
    assert len(rows) == 48
    assert_exact(model, plan, CODES)
    remove_channels(model, plan)
    assert model.fc.out_features == 48


def test_a_pixel_shuffle_by_hand_keeps_whole_blocks() -> None:
    def forward(m: Generator, x: Tensor) -> Tensor:
        return by_hand(m, m.fc(x))

    model = nets.golden_weights(Generator(forward))
    plan = plan_for(model, CODES)
    assert plan["fc"].channels == 2
    assert len(kept(plan)["fc"]) == 48
    assert_exact(model, plan, CODES)


@pytest.mark.parametrize("first", ["fc", "x"])
def test_an_unflatten_that_also_reads_something_whole_keeps_the_rows(first: str) -> None:
    def forward(m: Generator, x: Tensor) -> Tensor:
        if first == "fc":
            y, z = m.shape(m.fc(x)), m.shape(x.repeat(1, 20)[:, :96])
        else:
            z, y = m.shape(x.repeat(1, 20)[:, :96]), m.shape(m.fc(x))
        return m.out(m.up(y)) + z.sum()

    model = nets.golden_weights(Generator(forward))
    plan = plan_for(model, CODES)
    assert set(kept(plan)) == {"up"}
    assert_exact(model, plan, CODES)


def test_heads_still_lose_channels_inside() -> None:
    model = nets.golden_weights(nets.transformer())
    tokens = nets.golden_input(2, 5, 16)
    assert {"q", "k", "v"} <= set(kept(plan_for(model, tokens)))
