"""The fifteen networks of spec/pruning.md section 14, with the indices of appendix A."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx.config import FilterPruneConfig
from amct_fx.prune import PrunePlan, remove_channels
from test.prune import networks as nets
from test.prune.helpers import assert_exact, kept, numbers, plan_for, settings_for, without

S = "2 4 6 8 9 11 13 15"
T = "1 3 5 7 8 10 12 15 17 19 21 24 26 28 30 31"
U = "0 1 3 5 8 10 12 14 15 16 17 19 21 24 26 31"
E64 = f"{U} 35 37 40 42 44 46 47 49 51 53 55 56 58 60 62 63"
C24 = "1 4 6 8 10 11 13 15 17 19 20 22"
R8 = "0 1 3 5 8 10 12 15"
F1 = "1 3 5 8 10 12 14 15 17 19 21 23 24 26 28 31"
G6 = "1 2 4 6 9 11 13 15 18 19 20 22"
CP = "1 3 4 6 8 10 11 13 15 17 20 22 24 27 29 31"
G4 = "1 2 4 6 9 11 13 15 18 19 20 22 25 27 29 31"
G64 = f"{F1} 32 33 35 40 42 44 46 47 49 51 53 55 56 58 60 63"
IMAGE = (2, 3, 16, 16)
TOKENS = (2, 5, 16)


@dataclass(frozen=True)
class Case:
    """One row of appendix A."""

    name: str
    build: Callable[[], nn.Module]
    mode: str
    expected: dict[str, str]
    importance: str = "first"
    shape: tuple[int, ...] = IMAGE
    skip: tuple[str, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.name}-{self.mode}-{self.importance}"


M1 = "1 4 6 7 8 10 11 13 15 16 20 23 24 27 29 31"
M2 = "1 2 4 5 7 9 11 14"
M6 = "2 4 6 7 9 11 13 15"
M9 = "1 2 4 5 8 9 12 15 18 19 20 21"
N5 = "2 4 6 8 9 11 13 15 18 20 22 24 25 27 29 31"
N8F = "2 4 6 8 9 10 11 13 15 18 20 22 25 27 29 31"
N8M = "2 4 6 9 11 13 15 18 20 21 22 25 27 29 30 31"
M13 = "1 2 8 9 10 11 12 15"
F14 = "1 3 6 8 10 12 13 15 17 19 22 24 26 28 29 31"
V14 = "1 4 6 8 10 11 13 15"
CASES = [
    Case("1", nets.residual, "amct", {"stem": S, "c1": T, "c2": CP, "p": CP}),
    Case("2", nets.identity_blocks, "amct", {"stem": S, "c2": S, "c4": S, "c1": T, "c3": C24}),
    Case("3", nets.dense, "amct", {"c0": S, "c1": "0 2 5 7", "c2": "1 3 5 7"}),
    Case("4", nets.concat, "amct", {"b": R8}, skip=("a",)),
    Case("5", nets.shufflenet, "amct", {"c1": U}),
    Case("6", nets.inverted, "amct", {"c0": S, "p": S, "e": E64}),
    Case("7", nets.depthwise2, "amct", {}),
    Case("8", nets.squeeze_excite, "amct", {"r": R8}),
    Case("9", nets.grouped, "amct", {"c0": G4, "g": G64}),
    Case("9b", nets.grouped_add, "amct", {"g1": G6, "g2": G6}, shape=(2, 6, 16, 16)),
    Case("10", nets.unet, "amct", {"c1": S, "c3": V14}),
    Case(
        "10-cut",
        nets.unet,
        "amct",
        {"c1": S, "c2": T, "c3": V14},
        options={"deconv_consumer": "cut"},
    ),
    Case("11", nets.flattened, "amct", {"f1": F1}),
    Case("11b", lambda: nets.flattened(bias=False), "amct", {}),
    Case("12", nets.TwoHeads, "amct", {"c1": S}),
    Case("13", nets.shared, "amct", {}),
    Case("13-tied", nets.tied, "amct", {}),
    Case("14", nets.transformer, "amct", {}, shape=TOKENS),
    Case("14b", nets.feed_forward, "amct", {"f1": U}, shape=TOKENS),
    Case("15", nets.WithOutput, "amct", {"c2": "1 3 5 7 8 10 12 15"}),
    Case("1", nets.residual, "amct", {"stem": S, "c1": T, "c2": M1, "p": M1}, "mean"),
    Case(
        "2",
        nets.identity_blocks,
        "amct",
        {"stem": M2, "c2": M2, "c4": M2, "c1": T, "c3": C24},
        "mean",
    ),
    Case("6", nets.inverted, "amct", {"c0": M6, "p": M6, "e": E64}, "mean"),
    Case("9b", nets.grouped_add, "amct", {"g1": M9, "g2": M9}, "mean", (2, 6, 16, 16)),
    Case("5", nets.shufflenet, "native", {"c0": N5, "c1": U, "c2": "1 3 4 6 8 11 13 15"}),
    Case("7", nets.depthwise2, "native", {"c0": S}),
    Case("8", nets.squeeze_excite, "native", {"c0": N8F, "e": N8F, "r": R8}),
    Case("8", nets.squeeze_excite, "native", {"c0": N8M, "e": N8M, "r": R8}, "mean"),
    Case(
        "10", nets.unet, "native", {"c1": S, "c2": T, "up": "1 2 5 6 7 9 10 13", "c3": V14}, "mean"
    ),
    Case("11", nets.flattened, "native", {"c1": S, "f1": F1}, "mean"),
    Case("11b", lambda: nets.flattened(bias=False), "native", {"c1": S, "f1": F1}, "mean"),
    Case("13", nets.shared, "native", {"c0": S, "sh": S}),
    Case("13", nets.shared, "native", {"c0": M13, "sh": M13}, "mean"),
    Case(
        "14",
        nets.transformer,
        "native",
        {"q": "0 1 3 5 8 10 14 15", "k": "0 1 3 5 8 10 14 15", "v": V14, "f1": F14},
        "first",
        TOKENS,
    ),
    Case(
        "14",
        nets.transformer,
        "native",
        {"q": "0 1 5 8 9 10 14 15", "k": "0 1 5 8 9 10 14 15", "v": V14, "f1": F14},
        "mean",
        TOKENS,
    ),
]


def planned(case: Case) -> tuple[nn.Module, Tensor, PrunePlan]:
    model = nets.golden_weights(case.build())
    example = nets.golden_input(*case.shape)
    plan = plan_for(
        model,
        example,
        mode=case.mode,
        importance=case.importance,
        skip=case.skip,
        **case.options,
    )
    return model, example, plan


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kept_channels_are_those_of_appendix_a(case: Case) -> None:
    _, _, plan = planned(case)
    assert kept(plan) == {name: numbers(text) for name, text in case.expected.items()}


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_pruned_model_computes_what_the_masked_one_does(case: Case) -> None:
    model, example, plan = planned(case)
    assert_exact(model, plan, example)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_attributes_match_tensors_and_a_second_copy_loads_the_state(case: Case) -> None:
    model, example, plan = planned(case)
    before = copy.deepcopy(model.state_dict())
    first, second = copy.deepcopy(model), copy.deepcopy(model)
    remove_channels(first, plan)
    remove_channels(second, plan)
    for module in first.modules():
        if isinstance(module, nn.modules.conv._ConvNd):
            assert_conv(module)
        elif isinstance(module, nn.Linear):
            assert tuple(module.weight.shape) == (module.out_features, module.in_features)
        elif isinstance(module, nn.modules.batchnorm._BatchNorm):
            assert module.running_mean is not None
            assert module.running_mean.numel() == module.num_features
    second.load_state_dict(first.state_dict())
    assert torch.equal(leaf(first(example)), leaf(second(example)))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def assert_conv(module: nn.modules.conv._ConvNd) -> None:
    own, other = module.out_channels, module.in_channels // module.groups
    if module.transposed:
        own, other = module.in_channels, module.out_channels // module.groups
    assert tuple(module.weight.shape[:2]) == (own, other)
    assert module.bias is None or module.bias.numel() == module.out_channels


def leaf(value: Any) -> Tensor:
    return value[-1] if isinstance(value, tuple) else value


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_plan_is_the_same_again_and_as_json(case: Case) -> None:
    _, _, plan = planned(case)
    assert planned(case)[2] == plan
    assert PrunePlan.from_json(plan.to_json()) == plan
    assert plan.diff(planned(case)[2]) == ""


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_enabled_layer_is_in_a_group_or_has_a_reason(case: Case) -> None:
    model, _, plan = planned(case)
    enabled = set(settings_for(model, case.mode, 0.5, False, case.skip))
    grouped = {name for group in plan.groups for name in group.producers}
    tied = {m.layer for g in plan.groups for m in g.members if m.role == "row"}
    assert enabled == (grouped | tied | {layer.name for layer in plan.pinned}) & enabled
    assert all(layer.code and layer.text for layer in plan.pinned)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_costs_are_those_of_the_pruned_model(case: Case) -> None:
    model, example, plan = planned(case)
    small = copy.deepcopy(model)
    remove_channels(small, plan)
    assert plan.parameters_after == sum(p.numel() for p in small.parameters())
    again = plan_for(small, example, mode=case.mode, settings={})
    assert plan.macs_after == again.macs


def test_the_least_ratio_of_a_group_counts() -> None:
    model = nets.golden_weights(nets.residual())
    settings = settings_for(model, "amct", 0.5, False)
    settings["p"] = FilterPruneConfig(0.25, False)
    plan = plan_for(
        model, nets.golden_input(*IMAGE), mode="amct", importance="first", settings=settings
    )
    assert kept(plan)["p"] == without(32, "0 2 7 9 16 18 23 25")
    mean = plan_for(model, nets.golden_input(*IMAGE), mode="amct", settings=settings)
    assert kept(mean)["c2"] == without(32, "0 5 9 12 14 18 21 30")


@pytest.mark.parametrize("mode", ["amct", "native"])
def test_a_skipped_branch_keeps_the_other_branch_of_the_add(mode: str) -> None:
    model = nets.golden_weights(nets.residual())
    plan = plan_for(model, nets.golden_input(*IMAGE), mode=mode, skip=("p",))
    assert set(kept(plan)) == {"stem", "c1"}
    reasons = {layer.name: layer.code for layer in plan.pinned}
    assert reasons == {"c2": "coupled_to_skipped", "out": "graph_output"}


def test_columns_after_a_shuffle_are_reordered() -> None:
    model = nets.golden_weights(nets.shufflenet())
    plan = plan_for(model, nets.golden_input(*IMAGE), importance="first")
    columns = remove_channels(model, plan)["out.weight"][1]
    assert columns.tolist() == numbers("4 3 8 7 12 9 16 13 18 17 22 23 26 27 30 31")


def test_filters_of_a_depthwise_multiplier_follow_their_channel() -> None:
    model = nets.golden_weights(nets.depthwise2())
    kept_indices = remove_channels(model, plan_for(model, nets.golden_input(*IMAGE)))
    wanted = numbers("4 5 8 9 12 13 16 17 18 19 22 23 26 27 30 31")
    assert kept_indices["dw.weight"][0].tolist() == wanted
    assert kept_indices["out.weight"][1].tolist() == wanted
    assert (model.dw.groups, tuple(model.dw.weight.shape)) == (8, (16, 1, 3, 3))


def test_alignment_keeps_multiples_of_16_or_the_whole_layer() -> None:
    model = nets.golden_weights(nets.chain40())
    plan = plan_for(model, nets.golden_input(*IMAGE), mode="amct", importance="first", asc=True)
    assert kept(plan) == {"a": without(40, "0 5 7 14 16 23 32 39")}
    narrow = nets.Net(lambda m, x: m.b(F.relu(m.a(x))), a=nets.conv(3, 12), b=nets.conv(12, 4))
    plan = plan_for(narrow, nets.golden_input(*IMAGE), asc=True)
    assert kept(plan) == {}
    assert plan["a"].note == "aligned_away"


def test_constant_weights_lose_the_lowest_indices() -> None:
    model = nets.chain40()
    nn.init.constant_(model.a.weight, 0.1)
    assert kept(plan_for(model, nets.golden_input(*IMAGE)))["a"] == list(range(20, 40))


@pytest.mark.parametrize("mode", ["amct", "native"])
def test_two_grouped_layers_in_series(mode: str) -> None:
    model = nets.golden_weights(nets.grouped_series())
    example = nets.golden_input(2, 6, 16, 16)
    plan = plan_for(model, example, mode=mode)
    assert set(kept(plan)) == ({"g2"} if mode == "amct" else {"g1", "g2"})
    if mode == "native":
        assert plan["g1"].balance == 6
    assert_exact(model, plan, example)


@pytest.mark.parametrize("mode", ["amct", "native"])
def test_a_grouped_layer_behind_a_concatenation(mode: str) -> None:
    model = nets.golden_weights(nets.grouped_concat())
    example = nets.golden_input(*IMAGE)
    plan = plan_for(model, example, mode=mode)
    assert set(kept(plan)) == ({"g"} if mode == "amct" else {"a", "b", "g"})
    assert_exact(model, plan, example)


@pytest.mark.parametrize("groups", [4, 32])
def test_grouped_and_depthwise_transposed_convolutions(groups: int) -> None:
    model = nets.golden_weights(nets.unet(groups))
    example = nets.golden_input(*IMAGE)
    plan = plan_for(model, example)
    assert {"c1", "c2", "c3"} <= set(kept(plan))
    assert_exact(model, plan, example)
    remove_channels(model, plan)
    assert model.up.groups == (4 if groups == 4 else 16)


@pytest.mark.parametrize(("heads", "fused"), [(1, True), (2, False), (2, True)])
def test_heads_lose_equally_many_channels_and_keep_their_scale(heads: int, fused: bool) -> None:
    model = nets.golden_weights(nets.transformer(heads, fused))
    example = nets.golden_input(*TOKENS)
    plan = plan_for(model, example)
    assert plan["q"].producers == ("q", "k")
    assert plan["q"].balance == heads
    assert {"q", "k", "v", "f1"} == set(kept(plan))
    assert_exact(model, plan, example)


def test_tied_weights_are_cut_once() -> None:
    model = nets.golden_weights(nets.tied())
    example = nets.golden_input(*IMAGE)
    plan = plan_for(model, example)
    assert_exact(model, plan, example)
    remove_channels(model, plan)
    assert model.s1.weight is model.s2.weight
    assert tuple(model.s1.weight.shape) == (8, 8, 3, 3)


def test_one_input_channel_only_native_prunes() -> None:
    model = nets.Net(lambda m, x: m.b(F.relu(m.a(x))), a=nets.conv(1, 16), b=nets.conv(16, 4))
    example = nets.golden_input(2, 1, 16, 16)
    assert kept(plan_for(model, example, mode="amct")) == {}
    assert set(kept(plan_for(model, example))) == {"a"}


def test_convolutions_over_sequences_and_volumes() -> None:
    for kind, norm, shape in (
        (nn.Conv1d, nn.BatchNorm1d, (2, 3, 16)),
        (nn.Conv3d, nn.BatchNorm3d, (2, 3, 6, 6, 6)),
    ):
        model = nets.Net(
            lambda m, x: m.b(F.relu(m.n(m.a(x)))), a=kind(3, 16, 3), n=norm(16), b=kind(16, 4, 3)
        )
        example = nets.golden_input(*shape)
        plan = plan_for(model, example)
        assert set(kept(plan)) == {"a"}
        assert_exact(model, plan, example)
