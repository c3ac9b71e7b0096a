"""Parts of tensors: along the channels their bounds follow, along other axes nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amct_fx.graph import fx_graph_of
from amct_fx.prune import remove_channels
from test.prune import networks as nets
from test.prune.helpers import assert_exact, kept, plan_for

IMAGE = nets.golden_input(2, 3, 16, 16)
Forward = Callable[[Any, Tensor], Tensor]


class Parts(nn.Module):
    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.a, self.b = nets.conv(3, 16), nets.conv(16, 4)
        self.wide = nets.conv(3, 10)
        self.ten, self.six = nets.conv(10, 4), nets.conv(6, 4)
        self.register_buffer("order", torch.tensor([3, 1, 0, 2]))
        self.register_buffer("grid", torch.tensor([[0, 1], [2, 3]]))
        self.run = forward

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self, x)


def planned(forward: Forward) -> tuple[nn.Module, Any]:
    model = nets.golden_weights(Parts(forward))
    plan = plan_for(model, IMAGE)
    assert_exact(model, plan, IMAGE)
    return model, plan


PASS: dict[str, Forward] = {
    "narrow": lambda m, x: m.six(m.a(x).narrow(1, 2, 6)),
    "narrow_function": lambda m, x: m.ten(torch.narrow(m.a(x), -3, 6, 10)),
    "narrow_last": lambda m, x: m.six(m.a(x).narrow(1, -6, 6)),
    "narrow_all": lambda m, x: m.b(m.a(x).narrow(1, 0, 16)),
    "slice_all": lambda m, x: m.b(m.a(x)[:, 0:16]),
    "narrow_rows": lambda m, x: m.b(m.a(x).narrow(2, 0, x.size(2) // 2)),
    "tensor_split": lambda m, x: m.b(torch.cat(m.a(x).tensor_split(2, 1)[::-1], 1)),
    "tensor_split_thirds": lambda m, x: sum_of(m, torch.tensor_split(m.a(x), 3, dim=1)),
    "tensor_split_places": lambda m, x: m.b(
        torch.cat([part.relu() for part in places(m.a(x).tensor_split((4, 5), 1))], 1)
    ),
    "chunk_unequal": lambda m, x: m.b(
        torch.cat([part.relu() for part in places(m.a(x).chunk(3, 1))], 1)
    ),
    "chunk_function": lambda m, x: m.b(
        torch.cat([part.relu() for part in places(torch.chunk(m.a(x), chunks=3, dim=1))], 1)
    ),
    "select_row": lambda m, x: m.b(m.a(x).select(2, 3).unsqueeze(2)),
    "select_function": lambda m, x: m.b(torch.select(m.a(x), -1, 0).unsqueeze(-1)),
    "every_second_row": lambda m, x: m.b(m.a(x)[:, :, ::2, 1::2]),
    "some_rows": lambda m, x: m.b(m.a(x)[:, :, [0, 3, 5]]),
    "rows_by_buffer": lambda m, x: m.b(m.a(x)[:, :, m.order]),
    "columns_by_buffer": lambda m, x: m.b(m.a(x)[..., m.order]),
    "rows_by_grid": lambda m, x: m.b(m.a(x)[:, :, m.grid].flatten(2, 3)),
    "examples_by_buffer": lambda m, x: m.b(m.a(x)[m.order[:2] % 2]),
    "index_select": lambda m, x: m.b(m.a(x).index_select(2, m.order)),
    "chunks_below_each_other": lambda m, x: m.b(torch.cat(m.a(x).chunk(2, 2)[::-1], 2)),
    "unbind_rows": lambda m, x: m.b(torch.stack(torch.unbind(m.a(x), 2)[:3], 2)),
}
STAYS: dict[str, Forward] = {
    "empty_part": lambda m, x: m.b(m.a(x).tensor_split((16,), 1)[0]),
    "select_channel": lambda m, x: m.b(m.a(x) * m.a(x).select(1, 3).unsqueeze(1)),
    "channels_by_buffer": lambda m, x: m.b(m.a(x)[:, m.order.repeat(4)]),
    "some_channels": lambda m, x: m.six(m.a(x)[:, [0, 3, 5, 7, 9, 11]]),
    "index_select_channels": lambda m, x: m.b(m.a(x).index_select(1, m.order.repeat(4))),
    "two_tensors": lambda m, x: m.b(m.a(x)[:, :, m.grid, m.grid]),
}


def places(parts: Any) -> list[Tensor]:
    return [parts[0], parts[1], parts[2]]


def sum_of(m: Parts, parts: Any) -> Tensor:
    """Tensors of 6, 5 and 5 channels."""
    return m.six(parts[0]) + m.ten(torch.cat([parts[2], parts[1]], 1))


@pytest.mark.parametrize("form", PASS)
def test_channels_pass_parts(form: str) -> None:
    _, plan = planned(PASS[form])
    assert 8 <= len(kept(plan)["a"]) < 16


@pytest.mark.parametrize("form", STAYS)
def test_parts_of_channels_with_gaps_keep_all(form: str) -> None:
    _, plan = planned(STAYS[form])
    assert "a" not in kept(plan)


def test_unequal_chunks_become_the_split_that_is_left() -> None:
    model, plan = planned(PASS["chunk_unequal"])
    remove_channels(model, plan)
    targets = [node.target for node in fx_graph_of(model).nodes]
    assert "split" in targets
    assert "chunk" not in targets
