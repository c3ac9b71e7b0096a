"""Rows of the table of spec/pruning.md section 3.1 that no other file here covers, native mode.

The others: layers, depthwise, grouped, transposed, batch norms, heads, flatten, shared and tied
layers, attention: ``test_models``. Functions of one element, pools, pads, resizes, parts, shuffles,
what runs over the channels: ``test_ops``. Heads and concatenations: ``test_variants``. Parameters:
``test_parameter_forms``. Functions on parameters, products: ``test_functional_forms``. Parts:
``test_parts``. Norms over channels: ``test_norm_axis``. Python parts, 2:4, graph outputs:
``test_safety``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.prune import networks as nets
from test.prune.helpers import assert_exact, kept, plan_for

IMAGE, TOKENS = nets.golden_input(2, 3, 6, 6), nets.golden_input(2, 5, 6)
Forward = Callable[[Any, Tensor], Tensor]


def one_axis(forward: Forward, **layers: nn.Module) -> tuple[nn.Module, Tensor]:
    own = {"a": nn.Conv1d(5, 8, 3, padding=1), "b": nn.Conv1d(8, 4, 1)}
    return nets.Net(forward, **own, **layers), TOKENS


def two_axes(forward: Forward, **layers: nn.Module) -> tuple[nn.Module, Tensor]:
    own = {"a": nets.conv(3, 8), "c": nets.conv(3, 8), "b": nets.conv(8, 4)}
    return nets.Net(forward, **own, **layers), IMAGE


def three_axes(forward: Forward, **layers: nn.Module) -> tuple[nn.Module, Tensor]:
    own = {"a": nn.Conv3d(2, 8, 3, padding=1), "b": nn.Conv3d(8, 4, 1)}
    return nets.Net(forward, **own, **layers), nets.golden_input(2, 2, 4, 4, 4)


def tokens(forward: Forward, **layers: nn.Module) -> tuple[nn.Module, Tensor]:
    own = {"a": nn.Linear(6, 8), "c": nn.Linear(6, 8), "b": nn.Linear(8, 4)}
    return nets.Net(forward, **own, **layers), TOKENS


def through(m: Any, x: Tensor) -> Tensor:
    return m.b(F.gelu(m.n(m.a(x))))


PRUNED: dict[str, tuple[tuple[nn.Module, Tensor], set[str]]] = {
    "sync batch norm": (two_axes(through, n=nn.SyncBatchNorm(8)), {"a"}),
    "instance norm 1d": (one_axis(through, n=nn.InstanceNorm1d(8, affine=True)), {"a"}),
    "instance norm 3d": (three_axes(through, n=nn.InstanceNorm3d(8, affine=True)), {"a"}),
    "transposed 1d": (one_axis(through, n=nn.ConvTranspose1d(8, 8, 2, 2)), {"a", "n"}),
    "transposed 3d": (three_axes(through, n=nn.ConvTranspose3d(8, 8, 2, 2)), {"a", "n"}),
    "transposed depthwise": (two_axes(through, n=nn.ConvTranspose2d(8, 8, 2, groups=8)), {"a"}),
    "transposed groups 4": (
        two_axes(through, n=nn.ConvTranspose2d(8, 8, 2, groups=4)),
        {"a", "n"},
    ),
    "depthwise 1d": (one_axis(through, n=nn.Conv1d(8, 8, 3, groups=8)), {"a"}),
    "minimum": (two_axes(lambda m, x: m.b(torch.minimum(m.a(x), m.c(x)))), {"a", "c"}),
    "power of a tensor": (
        two_axes(lambda m, x: m.b(m.a(x).sigmoid() ** m.c(x).sigmoid())),
        {"a", "c"},
    ),
    "where of three": (
        two_axes(lambda m, x: m.b(torch.where(m.a(x) > m.c(x), m.a(x), m.c(x)))),
        {"a", "c"},
    ),
    "gate of space": (
        two_axes(lambda m, x: m.b(m.a(x) * m.n(m.a(x)).sigmoid()), n=nets.conv(8, 1)),
        {"a"},
    ),
    "bmm of activations": (
        tokens(lambda m, x: m.n(torch.bmm(m.a(x), m.c(x).transpose(1, 2))), n=nn.Linear(5, 2)),
        {"a", "c"},
    ),
    "reduction over tokens": (tokens(lambda m, x: m.b(m.a(x).logsumexp(1))), {"a"}),
    "softmax over tokens": (tokens(lambda m, x: m.b(m.a(x).softmax(1))), {"a"}),
    "swapped axes": (
        tokens(lambda m, x: m.b(m.a(x).transpose(1, 2).contiguous().mT)),
        {"a"},
    ),
}
KEPT: dict[str, tuple[nn.Module, Tensor]] = {
    "attention as a layer": tokens(
        lambda m, x: m.b(m.n(m.a(x), m.a(x), m.a(x))[0]), n=nn.MultiheadAttention(8, 2)
    ),
    "gru": tokens(lambda m, x: m.b(m.n(m.a(x))[0]), n=nn.GRU(8, 8, batch_first=True)),
    "encoder layer": tokens(
        lambda m, x: m.b(m.n(m.a(x))),
        n=nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True),
    ),
    "reduction over channels": tokens(lambda m, x: m.b(m.a(x) - m.a(x).amax(-1, keepdim=True))),
    "convolution over features": two_axes(
        lambda m, x: m.n(m.a(x).permute(0, 3, 2, 1)), n=nets.conv(6, 4)
    ),
    "data-dependent shape": tokens(lambda m, x: m.b(m.a(x)[m.a(x).sum((1, 2)) > -1e9])),
    "unknown function": tokens(lambda m, x: m.b(torch.fft.ifft(torch.fft.fft(m.a(x))).real)),
}


@pytest.mark.parametrize("row", PRUNED)
def test_a_row_that_prunes(row: str) -> None:
    (model, example), expected = PRUNED[row]
    plan = plan_for(nets.golden_weights(model), example)
    assert set(kept(plan)) == expected
    assert_exact(model, plan, example)


@pytest.mark.parametrize("row", KEPT)
def test_a_row_that_keeps_the_channels_and_says_why(row: str) -> None:
    model, example = KEPT[row]
    plan = plan_for(nets.golden_weights(model), example)
    assert "a" not in kept(plan)
    reasons = {layer.name: layer.text for layer in plan.pinned}
    assert reasons["a"]
    assert_exact(model, plan, example)
