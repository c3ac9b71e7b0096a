"""Functions on parameters: they end channels as the layers of the same kind do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx import convert_amct, prepare_qat_amct
from amct_fx.prune import keep_zeros
from test.prune import networks as nets
from test.prune.helpers import assert_exact, kept, plan_for

CFG = """prune_config { filter_pruner {
    balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }"""
IMAGE, TOKENS = nets.golden_input(2, 3, 16, 16), nets.golden_input(2, 5, 6)
Forward = Callable[[Any, Tensor], Tensor]


class Holder(nn.Module):
    """Parameters of a module that is no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(4, 8, 3, 3)), nn.Parameter(torch.rand(4))


class Functional(nn.Module):
    """Owns weights and norm parameters itself."""

    def __init__(self, form: str, tokens: bool = False) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8) if tokens else nets.conv(3, 8)
        self.out = nn.Linear(8, 4) if tokens else nets.conv(8, 4)
        self.conv_weight = nn.Parameter(torch.rand(4, 8, 3, 3))
        self.conv_bias = nn.Parameter(torch.rand(4))
        self.depthwise_weight = nn.Parameter(torch.rand(8, 1, 3, 3))
        self.grouped_weight = nn.Parameter(torch.rand(4, 4, 1, 1))
        self.deconv_weight = nn.Parameter(torch.rand(8, 4, 2, 2))
        self.linear_weight = nn.Parameter(torch.rand(4, 8))
        self.input_weight = nn.Parameter(torch.rand(8, 4))
        self.gamma, self.beta = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))
        self.register_buffer("mean", torch.rand(8))
        self.register_buffer("var", torch.rand(8) + 1)
        self.holder = Holder()
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return FORMS[self.form](self, x)


IMAGES: dict[str, Forward] = {
    "conv": lambda m, x: F.conv2d(F.gelu(m.a(x)), m.conv_weight, m.conv_bias, padding=1),
    "conv_names": lambda m, x: F.conv2d(input=m.a(x), weight=m.conv_weight),
    "conv_of_a_part": lambda m, x: F.conv2d(m.a(x), m.holder.weight, m.holder.bias),
    "grouped": lambda m, x: F.conv2d(m.a(x).sigmoid(), m.grouped_weight, groups=2),
    "depthwise": lambda m, x: m.out(
        F.conv2d(m.a(x), m.depthwise_weight, m.beta, padding=1, groups=8)
    ),
    "deconv": lambda m, x: F.conv_transpose2d(m.a(x), m.deconv_weight, m.conv_bias, stride=2),
    "linear": lambda m, x: F.linear(m.a(x).mean((2, 3)), m.linear_weight, m.conv_bias),
    "two_uses": lambda m, x: F.conv2d(
        F.conv2d(m.a(x), m.conv_weight).repeat(1, 2, 1, 1) + m.a(x)[:, :, 1:-1, 1:-1], m.conv_weight
    ),
}


FORMS = {**IMAGES}


def planned(form: str, tokens: bool = False) -> tuple[nn.Module, Any]:
    model = nets.golden_weights(Functional(form, tokens))
    example = TOKENS if tokens else IMAGE
    plan = plan_for(model, example)
    assert_exact(model, plan, example)
    return model, plan


@pytest.mark.parametrize("form", IMAGES)
def test_channels_end_at_a_function_on_a_parameter(form: str) -> None:
    model, plan = planned(form)
    if form == "two_uses":
        assert kept(plan) == {}
        return
    assert len(kept(plan)["a"]) == 4
    assert_trains_as_pruned(model, IMAGE)


def assert_trains_as_pruned(model: nn.Module, x: Tensor) -> None:
    """Train the masked model and the one that was cut first; both must stay equal."""
    masked = prepare_qat_amct(model, CFG, x)
    cut = prepare_qat_amct(model, CFG, x, apply="prepare")
    for net in (masked, cut):
        net.train()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, weight_decay=0.01)
        handle = keep_zeros(optimizer, net)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        handle.remove()
    for again in (pickle.loads(pickle.dumps(masked)), copy.deepcopy(masked)):
        assert torch.equal(again(x), masked(x))
    expected = masked.eval()(x)
    converted = convert_amct(masked)
    assert (converted(x) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert (converted(x) - cut.eval()(x)).abs().max() <= 1e-5 * expected.abs().max()
    shapes = {name: p.shape for name, p in converted.named_parameters()}
    assert shapes == {name: p.shape for name, p in convert_amct(cut).named_parameters()}


def test_masks_of_a_traced_part_are_in_its_state_and_leave_at_convert() -> None:
    model, _ = planned("conv")
    masked = prepare_qat_amct(model, CFG, IMAGE)
    (key,) = [key for key in masked.state_dict() if key.startswith("conv_weight_mask")]
    assert masked.state_dict()[key].shape == (1, 8, 1, 1)
    again = prepare_qat_amct(nets.golden_weights(Functional("conv")), CFG, IMAGE)
    again.load_state_dict(masked.state_dict())
    assert torch.equal(again(IMAGE), masked(IMAGE))
    float_state = model.state_dict()
    _, unexpected = again.load_state_dict(float_state, strict=False)
    assert not unexpected
    converted = convert_amct(masked)
    assert not [key for key in converted.state_dict() if "mask" in key]
    assert converted.conv_weight.shape == (4, 4, 3, 3)
