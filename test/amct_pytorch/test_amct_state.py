"""Checkpoints of AMCT, translated for a prepared model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amct_fx import prepare_qat_amct
from amct_fx.amct_pytorch._amct_state import from_amct_state, is_amct_state
from amct_fx.amct_pytorch._pth import load_state
from amct_fx.errors import CheckpointError
from test.golden import networks
from test.golden.reader import FINAL_STATES, FinalState, load_final_state


def prepared(final: FinalState) -> nn.Module:
    return prepare_qat_amct(getattr(networks, final.network)(), final.cfg)


def imported(final: FinalState, state: dict[str, Tensor] | None = None) -> Any:
    model = prepared(final)
    load_state(model, state or final.state, "amct.pth")
    return model


@pytest.fixture(params=FINAL_STATES)
def final(request: pytest.FixtureRequest) -> FinalState:
    return load_final_state(request.param)


def test_the_model_computes_what_amcts_model_computed(final: FinalState) -> None:
    model = imported(final).eval()
    with torch.no_grad():
        output = model(final.x)
    step = 2 * float(final.y.abs().max()) / 255
    assert (output - final.y).abs().max() <= step
    assert all(m.is_calibrated for m in model.modules() if hasattr(m, "is_calibrated"))


def test_the_prefix_of_ddp_is_taken_away() -> None:
    final = load_final_state("tiny_default")
    wrapped = {f"module.{key}": value for key, value in final.state.items()}
    ours, plain = imported(final, wrapped).state_dict(), imported(final).state_dict()
    assert all(torch.equal(ours[key], value) for key, value in plain.items())


def test_training_goes_on_without_another_calibration(final: FinalState) -> None:
    model = imported(final).train()
    clips = {k: v.clone() for k, v in model.state_dict().items() if "clip" in k}
    model(100 * final.x.repeat(2, 1, 1, 1))
    after = model.state_dict()
    assert all(torch.allclose(after[key], value, atol=1e-5) for key, value in clips.items())


def test_learned_weight_scales_come_along() -> None:
    final = load_final_state("tiny_weight_ulq_small_lr")
    model = imported(final)
    for layer in ("c1", "c2", "c3", "fc"):
        expected = final.state[f"{layer}.quant_module.wts_scales"]
        assert torch.equal(model.get_submodule(layer).weight_scale().detach(), expected)


def test_a_range_that_amct_had_not_found_is_searched_anew() -> None:
    final = load_final_state("tiny_batch_num2")
    states = []
    for change in ({"cur_batch": 1.0}, {"acts_clip_max": float("nan")}):
        state = dict(final.state)
        for field, value in change.items():
            state[f"c2.quant_module.{field}"] = torch.tensor(value)
        states.append(state)
    for state in states:
        model = imported(final, state)
        assert not model.c2.input_fake_quant.is_calibrated
        assert model.c1.input_fake_quant.is_calibrated


def test_a_layer_that_the_model_does_not_quantize_is_named() -> None:
    final = load_final_state("tiny_default")
    model = prepare_qat_amct(getattr(networks, final.network)(), 'skip_layers: "c2"')
    with pytest.raises(CheckpointError, match="quantizes layer 'c2', the prepared model does not"):
        from_amct_state(final.state, model)


@pytest.mark.filterwarnings("ignore::amct_fx.errors.AmctWarning")
def test_masks_come_along() -> None:
    final = load_final_state("compressed_m4n2_quant")
    model = imported(final).eval()
    with torch.no_grad():
        output = model(final.x)
    assert (output - final.y).abs().max() <= 2 * float(final.y.abs().max()) / 255
    for name in ("c1", "c2", "c3", "fc"):
        layer = model.get_submodule(name)
        mask = final.state[f"{name}.quant_module.wts_mask"]
        weight = final.state[f"{name}.quant_module.replaced_module.weight"]
        assert torch.equal(layer.weight, weight * mask)
        assert torch.equal(layer.parametrizations.weight.original, weight)


def test_a_layer_that_the_model_does_not_prune_is_named() -> None:
    final = load_final_state("compressed_m4n2_quant")
    model = prepare_qat_amct(getattr(networks, final.network)())
    with pytest.raises(CheckpointError, match="prunes layer 'c1', the prepared model does not"):
        from_amct_state(final.state, model)


def test_other_checkpoints_are_told_apart() -> None:
    final = load_final_state("tiny_default")
    assert is_amct_state(final.state)
    assert not is_amct_state(prepared(final).state_dict())
