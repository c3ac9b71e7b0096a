"""Plans, options and arguments that cannot be: one clear error, and nothing has changed."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx import AmctError, convert_amct, prepare_qat_amct, prune_plan
from amct_fx.prune import FilterNorm, PrunePlan, filter_norm, keep_zeros, m4n2, remove_channels

CFG = """prune_config { filter_pruner {
    balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }"""
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """A residual, a grouped convolution, and two Linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.c1, self.c2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 3, padding=1)
        self.g, self.l, self.o = nn.Conv2d(16, 32, 1, groups=4), nn.Linear(32, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Run on ``[N, 3, H, W]``."""
        x = self.c1(x)
        y: Tensor = self.o(F.relu(self.l(self.g(x + self.c2(x)).mean((2, 3)))))
        return y


PLAN = prune_plan(Net(), CFG, IMAGE)


def changed(**values: Any) -> str:
    """Return the plan as JSON with other values in its first group."""
    content = json.loads(PLAN.to_json())
    content["groups"][0] |= values
    return json.dumps(content)


def damaged() -> str:
    content = json.loads(PLAN.to_json())
    content["groups"][0]["members"][0] |= {"first": 5}
    return json.dumps(content)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (changed(kept="abc"), "the units that group 0 keeps must be a list of whole numbers"),
        (changed(kept=[0.5, 1]), r"must be a list of whole numbers, not \[0.5, 1\]"),
        (changed(kept=None), "must be a list of whole numbers, not None"),
        (changed(channels=9), "the plan is damaged: c1.weight does not fit the 9 units of group 0"),
        (damaged(), "the plan is damaged: c1.weight does not fit the 16 units of group 0"),
        (PLAN.to_json().replace('"parameters": ', '"parameters": "x'), "is no prune plan"),
    ],
)
def test_a_damaged_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(AmctError, match=message):
        PrunePlan.from_json(text)


def test_a_plan_may_name_units_in_any_order_and_twice() -> None:
    plan = PrunePlan.from_json(changed(kept=[13, 0, 4, 8, 12, 1, 5, 9, 0]))
    assert plan.groups[0].kept == (0, 1, 4, 5, 8, 9, 12, 13)


@pytest.mark.parametrize(
    ("group", "kept", "message"),
    [
        (99, [0], "the plan has 3 groups, numbered from 0, and none is 99"),
        (-1, [0], "none is -1"),
        ("c", [0], "'c' has no output channels that may be cut; did you mean 'c[12]' or"),
        ("o", [0], "'o' has no output channels that may be cut: graph_output"),
        (0, "ab", "the units that group 0 keeps must be a list of whole numbers, not 'ab'"),
        ("l", None, "the units that group 'l' keeps must be a list of whole numbers, not None"),
    ],
)
def test_another_choice_names_groups_and_units_that_exist(
    group: Any, kept: Any, message: str
) -> None:
    with pytest.raises(AmctError, match=message):
        PLAN.with_kept(group, kept)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"row_masks": "yes"}, "row_masks must be True or False, not 'yes'"),
        ({"count_eval": "no"}, "count_eval must be True or False, not 'no'"),
        ({"straight_through": "x"}, "straight_through must be None or a number of at least 0"),
        ({"straight_through": -1.0}, "of at least 0, not -1.0"),
        ({"straight_through": float("nan")}, "of at least 0, not nan"),
    ],
)
def test_an_option_has_only_its_values(options: dict[str, Any], message: str) -> None:
    for call in (prepare_qat_amct, prune_plan):
        with pytest.raises(ValueError, match=message):
            call(Net(), CFG, IMAGE, **options)  # type: ignore[operator]


def test_weights_without_values_cannot_be_ranked() -> None:
    model = Net().to("meta")
    for call in (prepare_qat_amct, prune_plan):
        with pytest.raises(AmctError, match=r"'c1' is on the meta device.*load the weights first"):
            call(model, CFG, IMAGE.to("meta"))  # type: ignore[operator]


def pruned() -> nn.Module:
    model = Net()
    remove_channels(model, PLAN)
    return model


REMOVALS: list[tuple[Callable[[], nn.Module], str]] = [
    (pruned, r"made for another model: c1.weight .* has shape \(8, 3, 3, 3\) there"),
    (lambda: nn.Conv2d(3, 8, 1), "made for another model: c1.weight .* has no such tensor"),
    (lambda: prepare_qat_amct(Net(), CFG, IMAGE), "c1.weight is masked .* convert_amct removes"),
    (lambda: convert_amct(prepare_qat_amct(Net(), CFG, IMAGE)), "made for another model"),
]


@pytest.mark.parametrize(("make", "message"), REMOVALS)
def test_channels_are_taken_only_out_of_the_model_of_the_plan(
    make: Callable[[], nn.Module], message: str
) -> None:
    model = make()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(AmctError, match=message):
        remove_channels(model, PLAN)
    assert before.keys() == model.state_dict().keys()
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_masks_by_hand_fit_their_parameter() -> None:
    layer = nn.Linear(8, 4)
    with pytest.raises(AmctError, match="a Linear has no parameter 'weigth'; did you mean 'weight"):
        filter_norm(layer, "weigth", torch.ones(4, 1))
    with pytest.raises(AmctError, match=r"of shape \[5\] does not broadcast to weight \[4, 8\]"):
        filter_norm(layer, "weight", torch.ones(5))
    with pytest.raises(AmctError, match="a ReLU has no parameter 'weight'"):
        m4n2(nn.ReLU())
    assert type(layer) is nn.Linear
    m4n2(layer)
    filter_norm(layer, "weight", torch.ones(4, 1))
    with pytest.raises(AmctError, match="weight of the Linear has a 2:4 mask already"):
        m4n2(layer)
    assert isinstance(layer.parametrizations.weight[1], FilterNorm)  # type: ignore[index, union-attr]


def test_keep_zeros_takes_an_optimizer() -> None:
    model: Any = nn.Linear(8, 4)
    with pytest.raises(TypeError, match="keep_zeros takes an optimizer and a model, not a Linear"):
        keep_zeros(model, torch.optim.SGD(model.parameters(), lr=0.1))  # type: ignore[arg-type]


def test_a_model_without_prunable_layers_says_why() -> None:
    model = nn.Sequential(nn.Conv1d(3, 8, 1), nn.Conv1d(8, 2, 1))
    with pytest.raises(ValueError, match=r"can be pruned .'0': filter pruning is for Conv2d, Lin"):
        prune_plan(model, CFG, torch.ones(1, 3, 4), mode="amct")
