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
        self.mixing, self.square = nn.Parameter(torch.rand(5, 5)), nn.Parameter(torch.rand(8, 8))
        self.slope = nn.Parameter(torch.rand(1))
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


NORMS: dict[str, Forward] = {
    "batch_norm": lambda m, x: m.out(
        F.batch_norm(m.a(x), m.mean, m.var, m.gamma, m.beta, m.training)
    ),
    "instance_norm": lambda m, x: m.out(F.instance_norm(m.a(x), weight=m.gamma, bias=m.beta)),
    "group_norm": lambda m, x: m.out(F.group_norm(m.a(x), 8, m.gamma, m.beta)),
    "group_norm_pairs": lambda m, x: m.out(F.group_norm(m.a(x), num_groups=4, weight=m.gamma)),
    "group_norm_plain": lambda m, x: m.out(torch.group_norm(m.a(x), 4)),
    "layer_norm_width": lambda m, x: m.out(F.layer_norm(m.a(x), (16,))),
    "rms_norm_width": lambda m, x: m.out(F.rms_norm(m.a(x), (16, 16))),
    "prelu": lambda m, x: m.out(F.prelu(m.a(x), m.gamma)),
    "prelu_method": lambda m, x: m.out(m.a(x).prelu(m.gamma)),
    "prelu_scalar": lambda m, x: m.out(F.prelu(m.a(x), m.slope)),
}
PRODUCTS: dict[str, Forward] = {
    "matmul": lambda m, x: m.a(x) @ m.input_weight,
    "matmul_turned": lambda m, x: torch.matmul(m.a(x), m.linear_weight.t()),
    "mm": lambda m, x: torch.mm(m.a(x)[:, 0], m.linear_weight.transpose(0, 1)),
    "from_the_left": lambda m, x: m.linear_weight @ m.a(x).relu().transpose(1, 2),
    "vector": lambda m, x: m.a(x) @ m.gamma,
    "linear_of_a_view": lambda m, x: F.linear(m.a(x), m.input_weight.t(), m.conv_bias),
    "einsum": lambda m, x: torch.einsum("btc,oc->bto", m.a(x), m.linear_weight),
    "einsum_dots": lambda m, x: torch.einsum("...c, oc -> o...", m.a(x).exp(), m.linear_weight),
    "einsum_of_three": lambda m, x: torch.einsum("btc,c,co->bto", m.a(x), m.gamma, m.input_weight),
    "einsum_without_result": lambda m, x: torch.einsum("btc,c", m.a(x), m.gamma),
    "scaled_weight": lambda m, x: m.a(x) @ (m.input_weight * m.gamma[:, None]),
}
CARRIED: dict[str, Forward] = {
    "tokens": lambda m, x: m.out(m.mixing @ m.a(x)),
    "einsum_tokens": lambda m, x: m.out(torch.einsum("st,btc->bsc", m.mixing, m.a(x))),
    "einsum_scale": lambda m, x: m.out(torch.einsum("btc,c->btc", m.a(x), m.gamma)),
    "einsum_order": lambda m, x: m.out(torch.einsum("btc->cbt", m.a(x)).permute(1, 2, 0)),
    "einsum_dots_unequal": lambda m, x: m.out(
        torch.einsum("...v,...t", m.square, m.a(x).transpose(1, 2)).sum(2).transpose(1, 2)
    ),
    "einsum_each": lambda m, x: m.out(torch.einsum("btc,st,c->bsc", m.a(x), m.mixing, m.beta)),
}
STAYS: dict[str, Forward] = {
    "sum": lambda m, x: torch.einsum("btc->bt", m.a(x)),
    "function_of_weight": lambda m, x: m.a(x) @ m.input_weight.exp(),
    "weight_read_again": lambda m, x: m.a(x) @ m.input_weight + m.input_weight.sum(),
    "logarithm": lambda m, x: (
        m.a(x) @ m.input_weight + m.out(m.a(x) * m.input_weight[:, 0].abs().log())
    ),
    "diagonal": lambda m, x: torch.einsum("btc,cc->bt", m.a(x), m.square),
    "standardized": lambda m, x: m.a(x) @ (m.input_weight - m.input_weight.mean(0)),
}
FORMS = {**IMAGES, **NORMS, **PRODUCTS, **CARRIED, **STAYS}


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


@pytest.mark.parametrize("form", NORMS)
def test_a_functional_norm_follows_the_channels(form: str) -> None:
    model, plan = planned(form)
    assert len(kept(plan)["a"]) == 4
    assert_trains_as_pruned(model, IMAGE)


@pytest.mark.parametrize("form", [*PRODUCTS, *CARRIED])
def test_products_with_parameters_end_or_carry_channels(form: str) -> None:
    model, plan = planned(form, tokens=True)
    assert len(kept(plan)["a"]) == 4
    assert plan.macs_after < plan.macs
    assert_trains_as_pruned(model, TOKENS)


def test_products_cost_what_the_layer_costs() -> None:
    plans = [planned(form, tokens=True)[1] for form in ("matmul", "einsum", "einsum_dots")]
    assert {plan.macs for plan in plans} == {5 * (6 * 8 + 8 * 4)}
    assert {plan.macs_after for plan in plans} == {5 * (6 * 4 + 4 * 4)}
    assert {plan.parameters - plan.parameters_after for plan in plans} == {4 * (6 + 1 + 4)}


@pytest.mark.parametrize("form", STAYS)
def test_other_products_keep_the_channels(form: str) -> None:
    assert kept(planned(form, tokens=True)[1]) == {}


def assert_trains_as_pruned(model: nn.Module, x: Tensor) -> None:
    """Train the masked model and the one that was cut first; both must stay equal."""
    model, x = copy.deepcopy(model).double(), x.double()
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
        net.eval()
    for again in (pickle.loads(pickle.dumps(masked)), copy.deepcopy(masked)):
        assert torch.equal(again(x), masked(x))
    expected = masked(x)
    converted = convert_amct(masked)
    assert (converted(x) - expected).abs().max() <= 1e-9 * expected.abs().max()
    assert (converted(x) - cut(x)).abs().max() <= 1e-9 * expected.abs().max()
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
