"""What a plan says of layers that stay, and what it leaves at the model: nothing."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx import convert_amct, prepare_qat_amct, prune_plan
from amct_fx.prune import PrunePlan, remove_channels
from amct_fx.prune.oracles import column_mask_oracle

CFG = """prune_config { filter_pruner {
    balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }"""
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def reasons(plan: PrunePlan) -> dict[str, str]:
    return {layer.name: f"{layer.code}: {layer.text}" for layer in plan.pinned}


class Branching(nn.Module):
    """Decides by its data, so that it stays Python."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Run on ``[N, 8, H, W]``."""
        y: Tensor = self.b(F.relu(self.a(x))) if x.sum() > 0 else x
        return y


def test_a_layer_in_python_code_says_which_code_and_why() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Branching(), nn.Conv2d(8, 2, 1))
    found = reasons(prune_plan(model, CFG, IMAGE))
    for name in ("1.a", "1.b"):
        assert found[name].startswith("unknown_op: 1 is not traced: it cannot be traced: symbolic")
    alone = reasons(prune_plan(Branching(), CFG, torch.ones(1, 8, 2, 2)))
    assert alone["a"].startswith("unknown_op: the model is not traced: it cannot be traced")
    prepared: Any = prepare_qat_amct(model, CFG, IMAGE)
    assert "1 is not traced" in str(prune_plan(model, CFG, IMAGE))
    assert prepared(IMAGE).shape == (2, 2, 8, 8)


def test_a_layer_with_a_computed_weight_says_so() -> None:
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 8, 1))
    found = reasons(prune_plan(nn.Sequential(normed, nn.Conv2d(8, 2, 1)), CFG, IMAGE))
    assert found["0"].startswith("functional_weight: its weight is computed")


class Twice(nn.Module):
    """Calls one layer twice."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.h, self.o = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Run on ``[N, 4]``."""
        y: Tensor = self.o(F.relu(self.h(F.relu(self.h(self.i(x))))))
        return y


def test_mode_amct_names_every_layer_that_it_cannot_prune() -> None:
    plan = prune_plan(Twice(), CFG, torch.ones(1, 4), mode="amct")
    assert reasons(plan).keys() == {"i", "h", "o"}
    assert "it is called 2 times in one forward" in reasons(plan)["h"]
    skipped = prune_plan(Twice(), CFG + ' regular_prune_skip_layers: "i"', torch.ones(1, 4))
    assert "i" in reasons(skipped)
    only = 'override_layer_configs { layer_name: "o" ' + CFG + "}"
    assert reasons(prune_plan(Twice(), only, torch.ones(1, 4), mode="amct")).keys() == {"o"}


class Constant(nn.Module):
    """Makes a constant tensor while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Run on ``[N, 3, 8, 8]``."""
        y: Tensor = self.b((self.a(x).flatten(2) @ torch.ones(64, 4)).unsqueeze(3))
        return y


def test_planning_leaves_no_constants_at_the_model() -> None:
    model = Constant()
    before = set(vars(model))
    first, second = prune_plan(model, CFG, IMAGE), prune_plan(model, CFG, IMAGE)
    assert set(vars(model)) == before
    assert len(first["a"].kept) == 8
    assert str(first) == str(second)
    assert column_mask_oracle(model, first, IMAGE, train=True).worst < 1e-5
    with pytest.raises(ValueError, match="prune_ratio"):
        prepare_qat_amct(model, CFG.replace("0.5", "2.0"), IMAGE, inplace=True)
    assert set(vars(model)) == before


@pytest.mark.parametrize("apply", ["convert", "prepare"])
def test_a_prepared_model_keeps_the_constants_of_its_graph(apply: Any) -> None:
    model = Constant().eval()
    for cfg in (CFG, None):
        prepared = prepare_qat_amct(model, cfg, IMAGE, apply=apply)
        prepared(IMAGE)  # chooses the ranges
        expected = prepared.eval()(IMAGE)
        converted = convert_amct(copy.deepcopy(prepared)).eval()(IMAGE)
        assert torch.allclose(converted, expected, atol=0.05 if cfg is None else 1e-5)


class Turned(nn.Module):
    """Meets buffers that follow the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 1), nn.Conv2d(16, 2, 1)
        self.register_buffer("scale", torch.rand(16, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        """Run on ``[N, 3, 8, 8]``."""
        y: Tensor = self.b(self.a(x) * self.scale)
        return y


def test_buffers_that_follow_channels_are_no_parameters_of_the_plan() -> None:
    model = Turned()
    plan = prune_plan(model, CFG, IMAGE)
    again = PrunePlan.from_json(plan.to_json())
    remove_channels(model, plan)
    left = sum(parameter.numel() for parameter in model.parameters())
    assert (plan.parameters_after, again.with_costs().parameters_after) == (left, left)
    assert model.scale.shape == (8, 8, 8)


class Asking(nn.Module):
    """Adds the input of a layer that makes as many channels as it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.o = nn.Conv2d(3, 8, 1), nn.Conv2d(8, 2, 1)
        self.layers = nn.ModuleList([nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)])

    def forward(self, x: Tensor) -> Tensor:
        """Run on ``[N, 3, H, W]``."""
        x = self.i(x)
        inner: Any = self.layers[0]
        y = self.layers[1](F.relu(inner(x)))
        z: Tensor = self.o(x + y if inner.in_channels == inner.out_channels else y)
        return z


def test_code_that_asks_a_layer_for_its_sizes_runs_as_it_was_traced() -> None:
    model, cfg = Asking(), CFG + ' regular_prune_skip_layers: "i"'
    plan = prune_plan(model, cfg, IMAGE)
    assert plan["layers.0"].channels == 8  # the residual stays, the layer inside is halved
    assert column_mask_oracle(model, plan, IMAGE, train=True).worst < 1e-5
