"""One operation between two convolutions, in both modes (spec/pruning.md section 3.2)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from test.prune import networks as nets
from test.prune.helpers import assert_exact, kept, plan_for
from test.versions import fx_cats_results

Op = Callable[[Tensor], Tensor] | nn.Module
MODULES_THAT_PASS = {
    "relu": nn.ReLU(),
    "relu6": nn.ReLU6(),
    "hardtanh": nn.Hardtanh(),
    "leaky_relu": nn.LeakyReLU(),
    "celu": nn.CELU(),
    "identity": nn.Identity(),
    "dropout": nn.Dropout(0.0),
    "dropout2d": nn.Dropout2d(0.0),
    "max_pool": nn.MaxPool2d(2),
    "avg_pool_padded": nn.AvgPool2d(3, padding=1),
    "global_pool": nn.AdaptiveAvgPool2d(1),
    "zero_pad": nn.ZeroPad2d(1),
    "reflection_pad": nn.ReflectionPad2d(1),
    "replication_pad": nn.ReplicationPad2d(1),
    "batch_norm": nn.BatchNorm2d(16),
    "upsample": nn.Upsample(scale_factor=2, mode="bilinear"),
    "depthwise": nn.Conv2d(16, 16, 3, groups=16),
}
FUNCTIONS_THAT_PASS: dict[str, Callable[[Tensor], Tensor]] = {
    "F_relu": F.relu,
    "method_relu": lambda x: x.relu(),
    "in_place": lambda x: x.relu_(),
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "abs": torch.abs,
    "ceil": torch.ceil,
    "round": torch.round,
    "pow": lambda x: x.pow(2),
    "power": lambda x: x**2,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "asinh": torch.asinh,
    "atan": torch.atan,
    "F_pad": lambda x: F.pad(x, (1, 1, 1, 1)),
    "F_pad_value": lambda x: F.pad(x, (1, 0, 2, 0), value=0.5),
    "interpolate_scale": lambda x: F.interpolate(x, scale_factor=2.0, mode="bilinear"),
    "x_plus_x": lambda x: x + x,
    "permute_and_back": lambda x: x.permute(0, 2, 3, 1).permute(0, 3, 1, 2),
    "whole_slice": lambda x: x[:, :],
    "clone": lambda x: x.clone(),
    "cast": lambda x: x.to(x.dtype).type_as(x),
    "double": lambda x: x.double().to(x.dtype),
    "contiguous": lambda x: x.contiguous(),
}
MODULES_THAT_PIN = {
    "sigmoid": nn.Sigmoid(),
    "tanh": nn.Tanh(),
    "silu": nn.SiLU(),
    "gelu": nn.GELU(),
    "elu": nn.ELU(),
    "selu": nn.SELU(),
    "softplus": nn.Softplus(),
    "mish": nn.Mish(),
    "hardswish": nn.Hardswish(),
    "hardsigmoid": nn.Hardsigmoid(),
    "prelu": nn.PReLU(16),
    "prelu_scalar": nn.PReLU(),
    "instance_norm": nn.InstanceNorm2d(16, affine=True),
    "group_norm": nn.GroupNorm(16, 16),
    "group_norm_4": nn.GroupNorm(4, 16),
    "adaptive_max_pool": nn.AdaptiveMaxPool2d(1),
    "adaptive_pool_4": nn.AdaptiveAvgPool2d(4),
    "upsample_size": nn.Upsample(size=(8, 8)),
    "layer_norm_width": nn.LayerNorm(16),
    "pixel_unshuffle": nn.Sequential(nn.PixelUnshuffle(2), nn.PixelShuffle(2)),
    "channel_shuffle": nn.ChannelShuffle(4),
}
FUNCTIONS_THAT_PIN: dict[str, Callable[[Tensor], Tensor]] = {
    "times_2": lambda x: x * 2,
    "plus_1": lambda x: x + 1,
    "minus": lambda x: 1 - x,
    "divided": lambda x: x / 3,
    "neg": torch.neg,
    "exp": torch.exp,
    "erf": torch.erf,
    "sin": torch.sin,
    "sqrt_of_square": lambda x: (x * x + 1).sqrt(),
    "x_times_x": lambda x: x * x,
    "x_minus_relu": lambda x: x - F.relu(x),
    "where": lambda x: torch.where(x > 0, x, 0.1 * x),
    "maximum": lambda x: torch.maximum(x, 0.5 * x),
    "interpolate_size": lambda x: F.interpolate(x, size=(8, 8)),
    "mean": lambda x: x.mean((2, 3), keepdim=True),
    "amax": lambda x: x.amax((2, 3), keepdim=True),
    "chunk_cat": lambda x: torch.cat(x.chunk(2, 1), 1),
    "chunk_swapped": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "split_cat": lambda x: torch.cat(x.split([4, 12], 1), 1),
    "slices_cat": lambda x: torch.cat([x[:, :8], x[:, 8:]], 1),
    "spatial_slice": lambda x: x[:, :, 1:-1, 1:-1],
    "flip": lambda x: x.flip(3),
    "flip_channels": lambda x: x.flip(1),
    "batch_cat": lambda x: torch.cat([x, x], 0),
    "unsqueeze_squeeze": lambda x: x.unsqueeze(1).squeeze(1),
    "same_view": lambda x: x.view(x.shape),
    "view_numbers": lambda x: x.view(x.size(0), 4, 4, 16, 16).view(-1, 16, 16, 16),
    "shuffle": lambda x: nets.shuffle(x, 4),
    "flatten_unflatten": lambda x: x.flatten(2).unflatten(2, (16, 16)),
    "softmax_space": lambda x: F.softmax(x, 3),
    "sort_space": lambda x: x.sort(3)[0],
    "topk_space": lambda x: x.topk(4, dim=2)[0],
    "cummax_space": lambda x: torch.cummax(x, -1).values + x.cumsum(2),
    "pool_with_indices": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "divided_by_width": lambda x: x / x.shape[1],
    "glu_like": lambda x: torch.cat([x, x], 1)[:, :16] * torch.sigmoid(x),
    "stack_sum": lambda x: torch.stack([x, 2 * x], 0).sum(0),
    "expanded": lambda x: x.mean((2, 3), keepdim=True).expand(-1, 16, 8, 8),
    "expand_as": lambda x: x * torch.sigmoid(x.mean((2, 3), keepdim=True)).expand_as(x),
    "spatial_gate": lambda x: x * torch.sigmoid(x[:, :, :1]),
}
ALWAYS_PINNED: dict[str, Op] = {
    "softmax": nn.Softmax(1),
    "log_softmax": nn.LogSoftmax(1),
    "F_softmax": lambda x: F.softmax(x, dim=1),
    "local_response_norm": nn.LocalResponseNorm(3),
    "normalize": lambda x: F.normalize(x, dim=1),
    "layer_norm": nn.LayerNorm([16, 16, 16]),
    "group_norm_1": nn.GroupNorm(1, 16),
    "channel_mean": lambda x: x - x.mean(1, keepdim=True),
    "cumsum": lambda x: x.cumsum(1),
    "sort": lambda x: x.sort(1)[0],
    "topk": lambda x: x.topk(16, 1)[0],
    "roll_added": lambda x: x + x.roll(1, 1),
    "one_channel": lambda x: x * x[:, 3:4],
    "every_second": lambda x: torch.cat([x[:, ::2], x[:, 1::2]], 1),
    "indexed": lambda x: x[:, torch.arange(16)],
    "noise": lambda x: x + torch.ones(16, 16, 16),
    "norm": lambda x: x / x.norm(dim=1, keepdim=True),
}


class Between(nn.Module):
    def __init__(self, op: Op) -> None:
        super().__init__()
        self.first, self.second = nets.conv(3, 16), nets.conv(16, 8, 1)
        self.op = op if isinstance(op, nn.Module) else nn.Identity()
        self._function = None if isinstance(op, nn.Module) else op

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = self.op(x) if self._function is None else self._function(x)
        return self.second(x)


CATS_OF_RESULTS = [FUNCTIONS_THAT_PIN[name] for name in ("chunk_cat", "chunk_swapped", "split_cat")]


def width(op: Op, mode: str) -> int:
    if op in CATS_OF_RESULTS and not fx_cats_results():
        pytest.skip("fx of this PyTorch does not trace torch.cat of what one call returned")
    model = nets.golden_weights(Between(op))
    example = nets.golden_input(2, 3, 16, 16)
    plan = plan_for(model, example, mode=mode)
    assert_exact(model, plan, example)
    return len(kept(plan).get("first", range(16)))


def table(*tables: dict[str, Op]) -> object:
    ops = {name: op for table in tables for name, op in table.items()}
    return pytest.mark.parametrize("op", ops.values(), ids=ops.keys())


@table(MODULES_THAT_PASS, FUNCTIONS_THAT_PASS)
def test_these_pass_in_mode_amct(op: Op) -> None:
    assert width(op, "amct") == 8


@table(MODULES_THAT_PIN, FUNCTIONS_THAT_PIN, ALWAYS_PINNED)
def test_these_stop_amct(op: Op) -> None:
    assert width(op, "amct") == 16


@table(MODULES_THAT_PASS, FUNCTIONS_THAT_PASS, MODULES_THAT_PIN, FUNCTIONS_THAT_PIN)
def test_native_mode_prunes_through_these(op: Op) -> None:
    assert width(op, "native") == 8


@table(ALWAYS_PINNED)
def test_native_mode_stops_at_these(op: Op) -> None:
    assert width(op, "native") == 16


def test_a_list_of_parts_reaches_a_function_as_it_is() -> None:
    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nets.conv(3, 16), nets.conv(32, 8, 1)

        def forward(self, x: Tensor) -> Tensor:
            parts = self.first(x).chunk(2, 1)
            return self.second(torch.cat(parts + parts, 1))

    model = nets.golden_weights(Halves())
    example = nets.golden_input(2, 3, 16, 16)
    plan = plan_for(model, example)
    assert_exact(model, plan, example)


def test_pixel_shuffle_removes_whole_blocks_of_channels() -> None:
    model = nets.Net(
        lambda m, x: m.b(F.pixel_shuffle(F.relu(m.a(x)), 2)), a=nets.conv(3, 32), b=nets.conv(8, 4)
    )
    nets.golden_weights(model)
    example = nets.golden_input(2, 3, 16, 16)
    plan = plan_for(model, example)
    assert plan["a"].channels == 8
    rows = kept(plan)["a"]
    assert len(rows) == 16
    assert all(row // 4 == rows[i // 4 * 4] // 4 for i, row in enumerate(rows))
    assert_exact(model, plan, example)
