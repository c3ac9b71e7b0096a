"""Which modules are distilled together."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx.backend_config import is_layer
from amct_fx.config.distill import DistillGroup, load_distill_config
from amct_fx.distillation import Group, distill_facts, find_groups, groups_of_names
from amct_fx.errors import ConfigError, ModelError
from amct_fx.graph import capture
from test.golden import networks
from test.golden.networks import PlainChain, ReusedModule
from test.networks import NetWithIsland

from .models import BasicBlock


def conv(inputs: int = 3, outputs: int = 3) -> nn.Conv2d:
    return nn.Conv2d(inputs, outputs, 1)


def found(model: nn.Module, cfg: str | None = None, **options: Any) -> list[Group]:
    config = load_distill_config(cfg)
    captured = capture(model, is_layer)
    return find_groups(
        model,
        captured,
        distill_facts(model, captured),
        user_groups=config.groups,
        group_size=config.group_size,
        **options,
    )


def names(model: nn.Module, cfg: str | None = None, **options: Any) -> list[list[str]]:
    return [list(group.names) for group in found(model, cfg, **options)]


def listed(model: nn.Module, groups: list[list[str]]) -> list[Group]:
    return groups_of_names(model, capture(model, is_layer), groups)


def user(start: str, end: str) -> str:
    return f'distill_group {{ start_layer_name: "{start}" end_layer_name: "{end}" }}\n'


def sequence(**modules: nn.Module) -> nn.Sequential:
    model = nn.Sequential()
    for name, module in modules.items():
        model.add_module(name, module)
    return model


def chain() -> nn.Sequential:
    """conv1-bn1, conv2-relu1, conv3-bn2-relu2."""
    return sequence(
        conv1=conv(),
        bn1=nn.BatchNorm2d(3),
        conv2=conv(),
        relu1=nn.ReLU(),
        conv3=conv(),
        bn2=nn.BatchNorm2d(3),
        relu2=nn.ReLU(),
    )


def two_blocks() -> nn.Sequential:
    return sequence(
        conv1=conv(),
        bn=nn.BatchNorm2d(3),
        relu=nn.ReLU(),
        conv2=conv(),
        bn2=nn.BatchNorm2d(3),
        relu2=nn.ReLU(),
    )


class Residual(nn.Module):
    """A stem and one block whose skip goes around two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.c1, self.c2, self.c3 = (conv() for _ in range(4))
        self.r1, self.r2 = nn.ReLU(), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = self.r2(self.c2(self.r1(self.c1(x))) + x)
        return self.c3(x)


class SharedRelu(nn.Module):
    """One ReLU behind two convolutions, one batch norm behind two more."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2, self.c3, self.c4 = (conv() for _ in range(4))
        self.r, self.bn = nn.ReLU(), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.r(self.c2(self.r(self.c1(x))))
        return self.bn(self.c4(self.bn(self.c3(x))))


class Functional(nn.Module):
    """Functions and shapes between the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2, self.c3 = conv(), conv(), conv()
        self.norm, self.drop = nn.BatchNorm2d(3), nn.Dropout()
        self.fc = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.c1(x))
        x = torch.tanh(self.norm(self.c2(x)))
        x = self.drop(self.c3(x))
        x = x.view(x.size(0), -1)
        return self.fc(x).softmax(1)


def test_a_unit_is_a_layer_with_its_batch_norm_and_activation() -> None:
    assert names(two_blocks()) == [["conv1", "bn", "relu"], ["conv2", "bn2", "relu2"]]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (1, [["conv1", "bn1"], ["conv2", "relu1"], ["conv3", "bn2", "relu2"]]),
        (2, [["conv1", "bn1", "conv2", "relu1"], ["conv3", "bn2", "relu2"]]),
        (3, [["conv1", "bn1", "conv2", "relu1", "conv3", "bn2", "relu2"]]),
        (100, [["conv1", "bn1", "conv2", "relu1", "conv3", "bn2", "relu2"]]),
    ],
)
def test_units_in_a_row_are_joined(size: int, expected: list[list[str]]) -> None:
    assert names(chain(), f"group_size: {size}") == expected


@pytest.mark.parametrize("size", [2, 100])
def test_pooling_and_flatten_end_a_group(size: int) -> None:
    expected = [["c1", "b1", "r1", "c2", "b2", "r2"], ["c3", "r3"], ["fc"]]
    assert names(PlainChain(), f"group_size: {size}") == expected


def test_an_add_ends_a_group() -> None:
    expected = [["stem"], ["c1", "r1", "c2"], ["c3"]]
    assert names(Residual(), "group_size: 9") == expected


@pytest.mark.parametrize(
    "activation", [nn.ReLU(inplace=True), nn.LeakyReLU(), nn.Sigmoid(), nn.Tanh(), nn.Softmax(1)]
)
def test_these_activations_belong_to_a_unit(activation: nn.Module) -> None:
    assert names(sequence(c=conv(), a=activation)) == [["c", "a"]]
    assert names(sequence(c=conv(), b=nn.BatchNorm2d(3), a=activation)) == [["c", "b", "a"]]


@pytest.mark.parametrize("activation", [nn.ReLU6(), nn.PReLU(), nn.Hardswish(), nn.GELU()])
def test_other_activations_do_not(activation: nn.Module) -> None:
    assert names(sequence(c=conv(), a=activation)) == [["c"]]
    assert names(sequence(c=conv(), b=nn.BatchNorm2d(3), a=activation)) == [["c", "b"]]


class OwnNorm(nn.BatchNorm2d):
    """A subclass may compute something else."""


@pytest.mark.parametrize("norm", [nn.SyncBatchNorm(3), OwnNorm(3), nn.InstanceNorm2d(3)])
def test_another_norm_ends_the_unit(norm: nn.Module) -> None:
    assert names(sequence(c=conv(), n=norm, r=nn.ReLU())) == [["c"]]


def test_so_does_a_one_dimensional_norm_behind_a_linear() -> None:
    assert names(sequence(l=nn.Linear(4, 4), n=nn.BatchNorm1d(4), r=nn.ReLU())) == [["l"]]


def test_a_relu_behind_two_layers_belongs_to_both_and_a_norm_to_none() -> None:
    model = SharedRelu()
    assert names(model) == [["c1", "r"], ["c2", "r"], ["c3"], ["c4"]]
    assert names(model, "group_size: 3") == [["c1", "r", "c2", "r", "c3"], ["c4"]]


def test_functions_are_part_of_a_unit_and_have_no_name() -> None:
    model = Functional()
    assert names(model) == [["c1"], ["c2", "norm"], ["c3"], ["fc"]]
    nodes = [[str(node) for node in group.nodes] for group in found(model)]
    assert nodes == [["c1", "relu"], ["c2", "norm", "tanh"], ["c3"], ["fc", "softmax"]]
    assert names(model, "group_size: 3") == [["c1", "c2", "norm", "c3"], ["fc"]]


def test_dropout_and_identity_are_crossed() -> None:
    model = sequence(
        c1=conv(), d=nn.Dropout(), r=nn.ReLU(), i=nn.Identity(), c2=conv(), e=nn.Dropout()
    )
    assert names(model) == [["c1", "r"], ["c2"]]
    assert names(model, "group_size: 2") == [["c1", "r", "c2"]]
    assert "d" in [str(node) for node in found(model)[0].nodes]
    assert names(model, user("c1", "c2")) == [["c1", "r", "c2"]]


def test_a_linear_takes_its_relu_on_any_rank_and_a_tensor_read_twice_ends_a_unit() -> None:
    assert names(sequence(l=nn.Linear(4, 4), r=nn.ReLU())) == [["l", "r"]]
    assert names(Residual())[0] == ["stem"]


@pytest.mark.parametrize(
    ("start", "end", "expected"),
    [
        ("c1", "c2", [["c1", "b1", "r1", "c2"], ["c3", "r3"], ["fc"]]),
        ("c1", "r2", [["c1", "b1", "r1", "c2", "b2", "r2"], ["c3", "r3"], ["fc"]]),
        ("b1", "c2", [["c1"], ["b1", "r1", "c2"], ["c3", "r3"], ["fc"]]),
        ("r1", "c2", [["c1", "b1"], ["r1", "c2"], ["c3", "r3"], ["fc"]]),
        ("c2", "c2", [["c1", "b1", "r1"], ["c2"], ["c3", "r3"], ["fc"]]),
        ("c3", "fc", [["c1", "b1", "r1"], ["c2", "b2", "r2"], ["c3", "r3", "gap", "fc"]]),
    ],
)
def test_a_group_of_the_user_wins(start: str, end: str, expected: list[list[str]]) -> None:
    assert names(PlainChain(), user(start, end)) == expected
    limited = names(PlainChain(), "group_size: 1\n" + user(start, end))
    assert limited == expected


def test_groups_of_the_user_are_sorted_into_the_graph() -> None:
    text = user("c3", "r3") + user("c1", "r1")
    assert names(PlainChain(), text) == [
        ["c1", "b1", "r1"],
        ["c2", "b2", "r2"],
        ["c3", "r3"],
        ["fc"],
    ]


def test_an_add_with_an_input_from_outside_may_be_inside() -> None:
    assert names(Residual(), user("c1", "c3")) == [["stem"], ["c1", "r1", "c2", "r2", "c3"]]


def test_a_closed_residual_needs_allow_branches() -> None:
    with pytest.raises(ConfigError, match="2 ways lead from 'stem' to 'c3'"):
        names(Residual(), user("stem", "c3"))
    groups = names(Residual(), user("stem", "c3"), allow_branches=True)
    assert groups == [["stem", "c1", "r1", "c2", "r2", "c3"]]


class Leaking(Residual):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.stem(x)
        y = self.c1(x)
        return self.c3(self.c2(self.r1(y)) + x), y


def test_branches_must_stay_inside() -> None:
    with pytest.raises(ConfigError, match=r"2 ways.*'c1' is also read outside"):
        names(Leaking(), user("stem", "c3"), allow_branches=True)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (user("c2", "c1"), ["no way leads from 'c2' to 'c1'", "swap start and end"]),
        (user("c11", "c2"), ["no module 'c11'", "did you mean 'c1'"]),
        (user("c1", "zz"), ["no module 'zz'"]),
        (user("c1", "c2") + user("c2", "r2"), [":2:1", "'c1' … 'c2'", "'c2' … 'r2'", "'c2'"]),
        (user("c1", "r1") + user("c1", "r1"), ["have 'c1' in common"]),
        (user("", "c1"), [":1:17: start_layer_name is empty", "write the name of a module"]),
        (user("c1", ""), ["end_layer_name is empty"]),
    ],
)
def test_a_group_that_does_not_fit_is_an_error(text: str, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        names(PlainChain(), text)
    for message in messages:
        assert message in str(caught.value)


def test_modules_that_are_called_twice_fit_no_group() -> None:
    with pytest.raises(ConfigError, match="module 'r' is called 2 times"):
        names(SharedRelu(), user("r", "c2"))
    with pytest.raises(ConfigError, match="batch norm 'bn' is called 2 times"):
        names(SharedRelu(), user("c3", "c4"))
    assert names(SharedRelu(), user("c2", "r"))[:2] == [["c1", "r"], ["c2", "r"]]


@pytest.mark.parametrize("outputs", [3, 4])
def test_a_block_whose_only_relu_is_called_twice_is_a_group_up_to_its_end(outputs: int) -> None:
    model = sequence(stem=conv(), first=BasicBlock(3, outputs), second=BasicBlock(outputs, outputs))
    text = user("first.conv1", "first.relu") + user("second.conv1", "second.relu")
    expected = [
        [f"{block}.{name}" for name in ("conv1", "bn1", "relu", "conv2", "bn2", "relu")]
        for block in ("first", "second")
    ]
    groups = found(model, text)
    assert [list(group.names) for group in groups if len(group.names) > 1] == expected
    spans = [[str(node) for node in group.nodes] for group in groups if len(group.names) > 1]
    assert [span[-1] for span in spans] == ["first_relu_1", "second_relu_1"]
    again = listed(model, expected)
    assert [[str(node) for node in group.nodes] for group in again] == spans


def test_of_a_relu_for_all_blocks_the_last_call_that_one_way_leads_to_is_the_end() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c1, self.c2, self.c3 = conv(), conv(), conv()
            self.r = nn.ReLU()

        def forward(self, x: Tensor) -> Tensor:
            x = self.r(self.c2(self.r(self.c1(x))) + x)
            return self.r(self.c3(x) + x)

    assert names(Shared(), user("c1", "r"))[0] == ["c1", "r", "c2", "r"]
    wide = names(Shared(), user("c1", "r"), allow_branches=True)
    assert wide == [["c1", "r", "c2", "r", "c3", "r"]]


def test_two_routes_without_an_add_are_two_ways() -> None:
    class Routes(Residual):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.c3(torch.cat([self.c1(x), self.c2(x)], 1))

    with pytest.raises(ConfigError, match="2 ways lead from 'stem' to 'c3'"):
        names(Routes(), user("stem", "c3"))


def test_a_container_is_not_called_itself() -> None:
    model = sequence(block=chain(), last=conv())
    with pytest.raises(ConfigError, match=r"'block' cannot.*first and the last module inside"):
        names(model, user("block", "last"))
    assert names(model, user("block.conv1", "last"))[0][0] == "block.conv1"


def test_layers_inside_of_untraced_code_are_in_no_group() -> None:
    model = NetWithIsland()
    captured = capture(model, is_layer)
    reasons = {item.name: item.reason for item in distill_facts(model, captured).layers}
    assert "cannot be traced" in (reasons["middle.conv"] or "")
    groups = names(model)
    assert ["stem"] in groups
    assert ["head"] in groups
    assert not any("middle.conv" in group for group in groups)


def test_a_layer_that_is_called_twice_is_in_no_group() -> None:
    assert names(ReusedModule()) == [["c1", "r"], ["c2"]]


def test_without_any_group_there_is_nothing_to_distil() -> None:
    with pytest.raises(ModelError, match="no group of layers"):
        found(nn.Sequential(nn.Conv1d(3, 3, 1)))


@pytest.mark.parametrize(
    "model", [PlainChain, Residual, SharedRelu, Functional, chain, NetWithIsland], ids=str
)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_groups_are_found_again_by_their_names(model: Any, size: int) -> None:
    network = model()
    groups = found(network, f"group_size: {size}")
    again = listed(network, [list(group.names) for group in groups])
    assert [group.names for group in again] == [group.names for group in groups]
    spans = [[str(node) for node in group.nodes] for group in groups]
    assert [[str(node) for node in group.nodes] for group in again] == spans


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([["c1", "zz"]], "no module 'zz'"),
        ([["c2", "c1"]], "'c1' is listed in the wrong order"),
        ([["c1", "r1", "b1", "c2"]], "'b1' is listed in the wrong order"),
        ([["c1", "b1", "r1"], ["r1", "c2"]], "have 'r1' in common"),
        ([["c1", "b1", "c2"], ["r1"]], "have 'r1' in common"),
        ([["c1", "r1"]], "'b1' lies between its modules and is not listed"),
        ([["c1", "b1", "r1", "c3"]], "'c2', 'b2' lies between .* list all .* or make two groups"),
    ],
)
def test_a_list_that_does_not_fit_is_an_error(groups: list[list[str]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        listed(PlainChain(), groups)


def test_what_holds_no_parameters_may_be_left_out_of_a_list() -> None:
    groups = listed(PlainChain(), [["c1", "b1", "c2"]])
    assert [str(node) for node in groups[0].nodes] == ["c1", "b1", "r1", "c2"]


def test_a_layer_on_a_branch_inside_must_be_listed_too() -> None:
    class Branches(Residual):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.c3(self.c1(x) + self.c2(x))

    with pytest.raises(ConfigError, match="'c2' lies between"):
        listed(Branches(), [["stem", "c1", "c3"]])
    assert listed(Branches(), [["stem", "c1", "c2", "c3"]])


def test_modules_on_two_branches_are_not_connected() -> None:
    class Branches(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return self.c3(self.c1(x) + self.c2(x))

    with pytest.raises(ConfigError, match="'c2' is not connected"):
        listed(Branches(), [["c1", "c2"]])
    with pytest.raises(ConfigError, match="'c2' is not connected"):
        listed(Branches(), [["c1", "c2", "c3"]])


def test_finding_groups_changes_nothing() -> None:
    model = Residual()
    before = copy.deepcopy(model.state_dict())
    found(model)
    assert type(model) is Residual
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_groups_may_be_given_as_objects() -> None:
    model = PlainChain()
    captured = capture(model, is_layer)
    facts = distill_facts(model, captured)
    groups = find_groups(model, captured, facts, user_groups=[DistillGroup("c1", "r2")])
    assert groups[0].names == ("c1", "b1", "r1", "c2", "b2", "r2")


NETWORKS = [
    name
    for name in vars(networks)
    if hasattr(getattr(networks, name), "SHAPE") and name != "NoLayers"
]


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("size", [1, 2, 100])
def test_what_holds_for_every_model(name: str, size: int) -> None:
    model = networks.build(name)
    captured = capture(model, is_layer)
    facts = distill_facts(model, captured)
    eligible = [layer.name for layer in facts.layers if layer.eligible]
    if not eligible:
        with pytest.raises(ModelError, match="no group of layers"):
            find_groups(model, captured, facts, group_size=size)
        return
    groups = find_groups(model, captured, facts, group_size=size)
    layers = [[item for item in group.names if item in eligible] for group in groups]
    assert sorted(name for found in layers for name in found) == sorted(eligible)
    assert all(1 <= len(found) <= size for found in layers)
    nodes = [node for group in groups for node in group.nodes]
    assert len(set(nodes)) == len(nodes)
    assert [group.nodes[0] for group in groups] == sorted(group.nodes[0] for group in groups)
    for group in groups:
        inside = set(group.nodes)
        for node in group.nodes[1:]:
            assert inside.issuperset(node.all_input_nodes)
        for node in group.nodes[:-1]:
            assert inside.issuperset(node.users)
