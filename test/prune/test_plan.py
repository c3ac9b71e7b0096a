"""The plan as an object: printing, JSON, other choices, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch

from amct_fx.errors import ModelError, PruneError
from amct_fx.prune import PrunePlan, remove_channels
from test.prune import networks as nets
from test.prune.helpers import assert_exact, kept, plan_for

IMAGE = nets.golden_input(2, 3, 16, 16)


@pytest.fixture
def model() -> nets.Net:
    return nets.golden_weights(nets.residual())  # type: ignore[return-value]


@pytest.fixture
def plan(model: nets.Net) -> PrunePlan:
    return plan_for(model, IMAGE)


def test_it_reads_as_a_table(plan: PrunePlan) -> None:
    assert str(plan).splitlines() == [
        "stem: 8 of 16 -> c1, p",
        "c1: 16 of 32 -> c2",
        "c2, p: 16 of 32 -> out",
        "stays out: graph_output: it is an output of the model",
        "parameters 16,228 -> 4,532, MACs 4,075,520 -> 1,120,256",
    ]


def test_another_choice_is_exact_and_costs_what_it_says(model: nets.Net, plan: PrunePlan) -> None:
    edited = plan.with_kept("c2", range(20)).with_kept("stem", [3])
    assert kept(edited)["p"] == list(range(20))
    assert_exact(model, edited, IMAGE)
    remove_channels(model, edited)
    assert edited.parameters_after == sum(p.numel() for p in model.parameters())
    assert model.c1.weight.shape[1] == 1


def test_rows_may_be_given_as_masks_or_indices(plan: PrunePlan) -> None:
    mask = torch.zeros(32, dtype=torch.uint8)
    mask[:10] = 1
    edited = plan.with_rows({"c2": mask, "p": mask.bool(), "stem": torch.arange(4)})
    assert kept(edited)["c2"] == list(range(10))
    assert kept(edited)["stem"] == list(range(4))
    assert edited["c1"].kept == plan["c1"].kept


def test_a_choice_that_does_not_fit_is_refused(plan: PrunePlan) -> None:
    with pytest.raises(PruneError, match="at least one stays"):
        plan.with_kept("stem", [])
    with pytest.raises(PruneError, match="units 0 to 15"):
        plan.with_kept("stem", [16])
    with pytest.raises(PruneError, match="share channels but keep different ones"):
        plan.with_rows({"c2": torch.arange(8), "p": torch.arange(9)})
    with pytest.raises(PruneError, match="'out' has no output channels that may be cut"):
        plan.with_rows({"out": torch.arange(2)})
    with pytest.raises(PruneError, match="has 16 output channels, the mask 4"):
        plan.with_rows({"stem": torch.ones(4, dtype=torch.bool)})
    with pytest.raises(KeyError):
        plan["out"]
    assert issubclass(PruneError, (ModelError, RuntimeError))


def test_blocks_must_keep_equal_counts() -> None:
    plan = plan_for(nets.golden_weights(nets.grouped()), IMAGE)
    with pytest.raises(PruneError, match="each of its 4 blocks"):
        plan.with_kept("c0", range(16))


def test_a_plan_for_another_model_changes_nothing(model: nets.Net, plan: PrunePlan) -> None:
    del model
    other = nets.golden_weights(nets.WithOutput())
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(PruneError, match=r"does not fit|cannot lose"):
        remove_channels(other, plan_for(nets.golden_weights(nets.residual()), IMAGE))
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_differences_are_listed(model: nets.Net, plan: PrunePlan) -> None:
    assert plan.diff(plan) == ""
    assert plan.diff(plan.with_kept("stem", [0, 1])).startswith("~ stem: keeps [")
    skipped = plan_for(model, IMAGE, skip=("stem",))
    assert "- stem: 8 of 16 -> c1, p" in plan.diff(skipped)


def test_json_and_pickle_hold_everything(model: nets.Net, plan: PrunePlan) -> None:
    text = plan.to_json(indent=1)
    content = json.loads(text)
    assert content["groups"][2]["producers"] == ["c2", "p"]
    assert content["macs_after"] == plan.macs_after
    for again in (PrunePlan.from_json(text), pickle.loads(pickle.dumps(plan)), copy.deepcopy(plan)):
        assert again == plan
        small = copy.deepcopy(model)
        remove_channels(small, again)
        assert small(IMAGE).shape == (2, 4, 16, 16)


def test_other_json_is_refused() -> None:
    for text in ("", "{}", "[]", '{"version": 7}', '{"version": 1, "groups": 3}'):
        with pytest.raises(PruneError):
            PrunePlan.from_json(text)


def test_removal_says_what_stayed(model: nets.Net, plan: PrunePlan) -> None:
    momentum = torch.randn_like(model.c2.weight)
    indices = remove_channels(model, plan)["c2.weight"]
    for axis, index in indices.items():
        momentum = momentum.index_select(axis, index)
    assert momentum.shape == model.c2.weight.shape


def test_a_pruned_model_can_be_pruned_again(model: nets.Net, plan: PrunePlan) -> None:
    remove_channels(model, plan)
    again = plan_for(model, IMAGE)
    assert again["stem"].channels == 8
    assert_exact(model, again, IMAGE)
