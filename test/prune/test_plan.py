"""The plan as an object: printing, JSON, other choices, and what is refused."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amct_fx import convert_amct, prepare_qat_amct, prune_plan
from amct_fx.errors import ModelError, PruneError
from amct_fx.prune import PrunePlan, remove_channels
from test.prune import networks as nets
from test.prune.helpers import assert_exact, kept, plan_for

IMAGE = nets.golden_input(2, 3, 16, 16)
CFG = """prune_config { filter_pruner {
    balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }"""


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


BAD_PLANS: list[tuple[Any, type[Exception], str]] = [
    ({"stm": torch.arange(8)}, PruneError, "plan names 'stm', which is no layer .* mean 'stem'"),
    ({"out": torch.arange(2)}, PruneError, "'out' has no output channels .* it is an output of"),
    ({"b1": torch.arange(2)}, PruneError, "'b1' has no output channels that may be cut"),
    ({"stem": torch.rand(16)}, PruneError, "'stem' takes a mask of its output channels, or the"),
    ({"stem": "0, 1"}, PruneError, "'stem' takes a mask of its output channels, or the"),
    ({"stem": [16]}, PruneError, "'stem' has output channels 0 to 15"),
    ("plan.json", TypeError, "plan must be a PrunePlan, .* not str; PrunePlan.from_json reads"),
    (3, TypeError, "plan must be a PrunePlan, .* not int"),
]


@pytest.mark.parametrize(("given", "error", "text"), BAD_PLANS)
@pytest.mark.parametrize("apply", ["convert", "prepare"])
def test_what_is_no_plan_is_refused_and_the_model_stays(
    given: Any, error: type[Exception], text: str, apply: Any, model: nets.Net
) -> None:
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(error, match=text):
        prepare_qat_amct(model, CFG, IMAGE, plan=given, apply=apply, inplace=True)
    assert type(model) is nets.Net
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_file_with_units_that_do_not_exist_is_refused(model: nets.Net, plan: PrunePlan) -> None:
    edited = PrunePlan.from_json(plan.to_json().replace('"kept": [', '"kept": [99, ', 1))
    with pytest.raises(PruneError, match="'stem' has units 0 to 15"):
        prepare_qat_amct(model, CFG, IMAGE, plan=edited)


def test_indices_may_be_a_list(model: nets.Net) -> None:
    prepared = prepare_qat_amct(model, CFG, IMAGE, plan={"stem": [0, 3, 5]})
    assert prepared.stem.kept_channels.nonzero().flatten().tolist() == [0, 3, 5]


def test_blocks_must_keep_equal_counts() -> None:
    plan = plan_for(nets.golden_weights(nets.grouped()), IMAGE)
    with pytest.raises(PruneError, match="each of its 4 blocks"):
        plan.with_kept("c0", range(16))


def test_a_plan_for_another_model_changes_nothing(model: nets.Net, plan: PrunePlan) -> None:
    del model
    other = nets.golden_weights(nets.WithOutput())
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(PruneError, match=r"made for another model: stem\.weight"):
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


class Named(nn.Module):
    """Takes inputs that a file of a plan does not describe: a flag, and tensors by name."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.o = nn.Linear(4, 8), nn.Linear(6, 8), nn.Linear(8, 2)

    def forward(self, left: Tensor, right: Tensor, *, scaled: bool = False) -> Tensor:
        """Run on ``[N, 4]`` and ``[N, 6]``."""
        y = self.a(left) + self.b(right)
        z: Tensor = self.o((2 * y if scaled else y).relu())
        return z


def test_a_plan_from_a_file_is_used_with_the_example_inputs_of_prepare() -> None:
    model, cfg = Named(), CFG.replace("0.5", "0.25")
    inputs = {"left": torch.randn(3, 4), "right": torch.randn(3, 6), "scaled": True}
    plan = PrunePlan.from_json(prune_plan(model, cfg, inputs).to_json()).with_kept("a", [1, 5])
    prepared = prepare_qat_amct(model, cfg, inputs, plan=plan).eval()
    converted: Any = convert_amct(prepared).eval()
    assert converted.b.out_features == 2
    assert torch.allclose(converted(**inputs), prepared(**inputs), atol=1e-6)
