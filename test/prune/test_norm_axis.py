"""``norm_axis="mask_aware"``: norms over the channels count those that stay."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx import convert_amct, prepare_qat_amct, prune_plan
from amct_fx.errors import ConfigError
from amct_fx.prune import PrunePlan, remove_channels
from amct_fx.prune.masked_norms import kept_statistics
from test.prune import networks as nets
from test.prune.helpers import assert_exact, kept, plan_for

CFG = """prune_config { filter_pruner {
    balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }"""
IMAGE, TOKENS = nets.golden_input(2, 3, 8, 8), nets.golden_input(2, 5, 6)
Forward = Callable[[Any, Tensor], Tensor]


class LayerNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class TracedNorm2d(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(
            x.permute(0, 2, 3, 1), self.normalized_shape, self.weight, self.bias, self.eps
        )
        return y.permute(0, 3, 1, 2)


class Normed(nn.Module):
    """A layer, a norm over its 16 channels, a layer."""

    def __init__(self, form: str, tokens: bool) -> None:
        super().__init__()
        self.a = nn.Linear(6, 16) if tokens else nets.conv(3, 16)
        self.b = nn.Linear(16, 4) if tokens else nets.conv(16, 4)
        self.layer, self.rms = nn.LayerNorm(16), nn.RMSNorm(16)
        self.plain = nn.LayerNorm(16, elementwise_affine=False, eps=1e-3)
        self.over_all = nn.LayerNorm([16, 8, 8])
        self.one, self.four = nn.GroupNorm(1, 16), nn.GroupNorm(4, 16)
        self.of_timm = LayerNorm2d(16) if form == "of_timm" else None
        self.traced = TracedNorm2d(16)
        self.gamma, self.beta = nn.Parameter(torch.rand(16)), nn.Parameter(torch.rand(16))
        self.form = form

    def forward(self, x: Tensor) -> Tensor:
        return FORMS[self.form](self, x)


LayerNorm2d.__module__ = "timm.layers.norm"
IMAGES: dict[str, Forward] = {
    "over_all": lambda m, x: m.b(m.over_all(m.a(x))),
    "one_group": lambda m, x: m.b(F.gelu(m.one(m.a(x)))),
    "four_groups": lambda m, x: m.b(m.four(m.a(x).sigmoid())),
    "four_groups_called": lambda m, x: m.b(F.group_norm(m.a(x), 4, m.gamma, m.beta)),
    "one_group_called": lambda m, x: m.b(F.group_norm(m.a(x), num_groups=1)),
    "channels_last": lambda m, x: m.b(m.layer(m.a(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)),
    "of_timm": lambda m, x: m.b(m.of_timm(m.a(x))),
    "traced": lambda m, x: m.b(m.traced(m.a(x))),
    "residual": lambda m, x: residual(m, m.a(x)),
}
SEQUENCES: dict[str, Forward] = {
    "layer": lambda m, x: m.b(m.layer(m.a(x))),
    "plain": lambda m, x: m.b(m.plain(m.a(x))),
    "rms": lambda m, x: m.b(m.rms(m.a(x))),
    "called": lambda m, x: m.b(F.layer_norm(m.a(x), (16,), m.gamma, m.beta, 1e-6)),
    "called_by_names": lambda m, x: m.b(
        F.layer_norm(input=m.a(x), normalized_shape=[16], bias=m.beta)
    ),
    "called_by_shape": lambda m, x: by_shape(m, m.a(x)),
    "rms_called": lambda m, x: m.b(F.rms_norm(m.a(x), (16,), m.gamma)),
    "twice": lambda m, x: m.b(m.layer(F.relu(m.layer(m.a(x))))),
    "parameter": lambda m, x: m.b(m.layer(m.a(x) + m.gamma)),
}
FORMS = {**IMAGES, **SEQUENCES}


def residual(m: Normed, y: Tensor) -> Tensor:
    return m.b(y + m.one(F.relu(y)))


def by_shape(m: Normed, y: Tensor) -> Tensor:
    return m.b(F.layer_norm(y, y.shape[-1:]))


def model_of(form: str) -> tuple[nn.Module, Tensor]:
    tokens = form in SEQUENCES
    return nets.golden_weights(Normed(form, tokens)), TOKENS if tokens else IMAGE


@pytest.mark.parametrize("form", FORMS)
def test_a_norm_over_the_channels_counts_those_that_stay(form: str) -> None:
    model, example = model_of(form)
    plan = plan_for(model, example, norm_axis="mask_aware")
    assert len(kept(plan)["a"]) == 8
    assert_exact(model, plan, example)
    assert "a" not in kept(plan_for(model, example)) or form.startswith("four")


@pytest.mark.parametrize("form", [form for form in FORMS if form != "twice"])
def test_the_masked_model_trains_as_the_pruned_one(form: str) -> None:
    model, x = model_of(form)
    model, x = model.double(), x.double()
    masked = prepare_qat_amct(model, CFG, x, norm_axis="mask_aware")
    cut = prepare_qat_amct(model, CFG, x, norm_axis="mask_aware", apply="prepare")
    for net in (masked.train(), cut.train()):
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            net(x).square().mean().backward()
            optimizer.step()
        net.eval()
    expected = masked(x)
    largest = expected.abs().max()
    assert torch.equal(copy.deepcopy(masked)(x), expected)
    if form != "of_timm":
        assert torch.equal(pickle.loads(pickle.dumps(masked))(x), expected)
    converted = convert_amct(masked)
    assert type(converted.layer) is nn.LayerNorm
    assert not [key for key in converted.state_dict() if "kept" in key]
    for other in (converted(x), cut(x)):
        assert (other - expected).abs().max() <= 1e-9 * largest


def test_attributes_follow_and_a_second_size_runs() -> None:
    for form, name, wanted in (
        ("layer", "layer", {"normalized_shape": (8,)}),
        ("rms", "rms", {"normalized_shape": (8,)}),
        ("traced", "traced", {"normalized_shape": (8,)}),
        ("of_timm", "of_timm", {"normalized_shape": (8,)}),
        ("over_all", "over_all", {"normalized_shape": (8, 8, 8)}),
        ("four_groups", "four", {"num_channels": 8, "num_groups": 4}),
    ):
        model, example = model_of(form)
        remove_channels(model, plan_for(model, example, norm_axis="mask_aware"))
        norm: Any = model.get_submodule(name)
        assert {key: getattr(norm, key) for key in wanted} == wanted
        if form != "over_all":
            model(torch.cat([example, example], 1 if form in SEQUENCES else 2))


def test_groups_keep_equal_counts() -> None:
    model, example = model_of("four_groups")
    plan = plan_for(model, example, norm_axis="mask_aware", ratio=0.25)
    rows = kept(plan)["a"]
    assert [sum(row // 4 == group for row in rows) for group in range(4)] == [3, 3, 3, 3]


def test_a_checkpoint_has_the_channels_that_norms_count() -> None:
    model, x = model_of("layer")
    masked = prepare_qat_amct(model, CFG, x, norm_axis="mask_aware")
    assert masked.layer.kept.tolist() == masked.a.kept_channels.tolist()
    other = copy.deepcopy(model)
    nn.init.normal_(other.a.weight)
    again = prepare_qat_amct(other, CFG, x, norm_axis="mask_aware")
    again.load_state_dict(masked.state_dict())
    assert torch.equal(again.eval()(x), masked.eval()(x))
    assert torch.allclose(convert_amct(again)(x), masked(x), rtol=1e-4, atol=1e-5)


def test_masked_norms_compile_and_run_in_half_precision() -> None:
    model, x = model_of("layer")
    masked = prepare_qat_amct(model, CFG, x, norm_axis="mask_aware").eval()
    exported = torch.export.export(masked, (x,)).module()
    assert torch.allclose(exported(x), masked(x), atol=1e-6)
    half = prepare_qat_amct(model.bfloat16(), CFG, x.bfloat16(), norm_axis="mask_aware").eval()
    assert half(x.bfloat16()).dtype == torch.bfloat16
    assert torch.allclose(half(x.bfloat16()).float(), masked(x), atol=0.2, rtol=0.1)


def test_a_plan_as_json_keeps_what_norms_count() -> None:
    model, x = model_of("called")
    plan = prune_plan(model, CFG, x, norm_axis="mask_aware")
    again = PrunePlan.from_json(plan.to_json())
    assert [norm.call for norm in again.norm_masks()] == ["layer_norm"]
    assert_exact(model, again, x)


def test_channels_on_several_axes_and_softmax_stay() -> None:
    def heads(m: Any, x: Tensor) -> Tensor:
        return m.b(F.layer_norm(m.a(x).unflatten(-1, (4, 4)), (4, 4)).flatten(-2))

    def soft(m: Any, x: Tensor) -> Tensor:
        return m.b(m.a(x).softmax(-1))

    for forward in (heads, soft):
        model = nets.golden_weights(Normed("layer", tokens=True))
        model.form = "own"
        FORMS["own"] = forward
        assert "a" not in kept(plan_for(model, TOKENS, norm_axis="mask_aware"))


@pytest.mark.parametrize("norm", ["layer", "plain", "rms", "pairs"])
def test_a_norm_that_also_reads_whole_channels_stays(norm: str) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Linear(16, 16), nn.Linear(16, 4), nn.Linear(16, 16)
            norms = {"layer": nn.LayerNorm(16), "rms": nn.RMSNorm(16)}
            norms |= {"plain": nn.LayerNorm(16, elementwise_affine=False)}
            norms |= {"pairs": nn.GroupNorm(8, 16, affine=False)}
            self.norm = norms[norm]

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.b(self.norm(self.a(x))), self.norm(x)

    class Both(Shared):
        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.norm(self.a(x))) + self.b(self.norm(F.relu(self.c(x))))

    x = nets.golden_input(6, 16)
    for axis in ("pin", "mask_aware"):
        model = nets.golden_weights(Shared())
        plan = plan_for(model, x, norm_axis=axis)
        assert kept(plan) == {}
        assert_exact(model, plan, x)
        model = nets.golden_weights(Both())
        plan = plan_for(model, x, norm_axis=axis)
        assert ("a" in kept(plan)) is (axis == "mask_aware" or norm == "pairs")
        assert_exact(model, plan, x)


def test_the_reason_names_the_option_and_a_wrong_value_is_refused() -> None:
    model, x = model_of("layer")
    (layer,) = [layer for layer in plan_for(model, x).pinned if layer.name == "a"]
    assert layer.code == "norm_statistics"
    assert "norm_axis='mask_aware'" in layer.text
    with pytest.raises(ConfigError, match="norm_axis"):
        plan_for(model, x, norm_axis="ignore")


def test_statistics_are_those_of_what_stays() -> None:
    x, kept_ones = torch.randn(3, 12, 5), torch.tensor([1, 0, 1] * 4)
    y = kept_statistics(x, kept_ones.reshape(12, 1), [-2, -1], 1e-5)
    wanted = F.layer_norm(x[:, kept_ones.bool()], (8, 5))
    assert torch.allclose(y[:, kept_ones.bool()], wanted, atol=1e-5)
    assert (y[:, ~kept_ones.bool()] == 0).all()
