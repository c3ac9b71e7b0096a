"""ULQFakeQuantize: checkpoints, copies, activation checkpointing."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amct_fx.errors import (
    AmctWarning,
    ModelStateError,
)
from amct_fx.observers import ULQFakeQuantize, functional
from test.observers.ulq import assert_same_state, calibrated, clips, state

# Checkpoints


def make_steps(module: ULQFakeQuantize, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05)
    for _ in range(count):
        x = torch.randn(50, generator=generator) * 2
        optimizer.zero_grad()
        module(x).square().sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    "kwargs", [{}, {"batch_num": 3}, {"clip_max": 1.5, "clip_min": -0.5}, {"fixed_min": True}]
)
def test_resuming_from_a_state_dict_equals_not_stopping(kwargs: dict[str, Any]) -> None:
    whole, first, second = (ULQFakeQuantize(**kwargs) for _ in range(3))
    make_steps(whole, 5, seed=1)
    make_steps(first, 5, seed=1)
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    assert second.is_calibrated
    make_steps(whole, 5, seed=2)
    make_steps(second, 5, seed=2)
    assert_same_state(state(whole), state(second))


def test_a_checkpoint_taken_right_after_an_optimizer_step_keeps_the_raw_clips() -> None:
    first, second = calibrated(), ULQFakeQuantize()
    with torch.no_grad():
        first.clip_max.fill_(-2.0)
    second.load_state_dict(first.state_dict())
    assert second.clip_max.item() == -2
    x = torch.randn(10)
    assert torch.equal(first(x), second(x))


def test_a_checkpoint_from_the_middle_of_the_start_collects_again() -> None:
    first, second = ULQFakeQuantize(batch_num=3), ULQFakeQuantize(batch_num=3)
    first(torch.randn(10))
    second(torch.randn(10))
    second(torch.randn(10))
    with pytest.warns(AmctWarning, match="collect their batches again") as caught:
        second.load_state_dict(first.state_dict())
    assert len(caught) == 1
    assert second._collector.batches == []
    assert "calibrating 0/3" in repr(second)
    batches = [torch.randn(10) for _ in range(3)]
    for batch in batches:
        assert not second.is_calibrated
        second(batch)
    assert clips(second) == tuple(c.item() for c in functional.ifmr_range(batches))


def test_a_fresh_checkpoint_loads_without_a_warning() -> None:
    module = ULQFakeQuantize(batch_num=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module.load_state_dict(ULQFakeQuantize(batch_num=3).state_dict())


def test_shapes_and_keys_are_final_from_construction() -> None:
    module = ULQFakeQuantize()
    before = {key: (value.shape, value.dtype) for key, value in module.state_dict().items()}
    module(torch.randn(10))
    assert before == {k: (v.shape, v.dtype) for k, v in module.state_dict().items()}
    assert_expected_inline(
        "\n".join(f"{key} {tuple(shape)} {dtype}" for key, (shape, dtype) in before.items()),
        """\
clip_max (1,) torch.float32
clip_min (1,) torch.float32
clip_max_prev (1,) torch.float32
clip_min_prev (1,) torch.float32
scale (1,) torch.float32
zero_point (1,) torch.int32
calibrated (1,) torch.float32
_extra_state (4,) torch.int64""",
    )


def test_switches_travel_with_the_state_dict() -> None:
    first, second = calibrated(), ULQFakeQuantize()
    first.disable_fake_quant()
    second.load_state_dict(first.state_dict())
    x = torch.randn(5)
    assert second(x) is x
    assert second.fake_quant_enabled.item() == 0


def test_a_state_dict_without_extra_state_loads_strictly() -> None:
    first, second = calibrated(batch_num=2), ULQFakeQuantize(batch_num=2)
    saved = {k: v for k, v in first.state_dict().items() if not k.endswith("_extra_state")}
    second.load_state_dict(saved)
    assert second.is_calibrated
    assert clips(second) == clips(first)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_dict_with_float_zero_points_loads_by_casting(assign: bool) -> None:
    first, second = calibrated(), ULQFakeQuantize()
    saved = first.state_dict()
    saved["zero_point"] = saved["zero_point"].double()
    second.load_state_dict(saved, assign=assign)
    assert second.zero_point.dtype == torch.int32
    assert second.zero_point.item() == first.zero_point.item()
    assert saved["zero_point"].dtype == torch.float64


def test_a_float_checkpoint_leaves_the_quantizer_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), ULQFakeQuantize(batch_num=2))
    model(torch.randn(3, 4))
    model.load_state_dict(nn.Sequential(nn.Linear(4, 4)).state_dict(), strict=False)
    model(torch.randn(3, 4))
    assert model[1].is_calibrated


def test_a_checkpoint_of_a_newer_format_is_refused() -> None:
    module = ULQFakeQuantize(layer_name="conv1")
    saved = module.state_dict()
    saved["_extra_state"][0] = 99
    with pytest.raises(ModelStateError, match=r"layer 'conv1'.*version 99.*update amct_fx"):
        module.load_state_dict(saved)


# Copies


def test_a_deepcopy_is_independent_also_in_the_middle_of_the_start() -> None:
    module = ULQFakeQuantize(batch_num=2)
    first, second = torch.randn(20), torch.randn(20)
    module(first)
    clone = copy.deepcopy(module)
    module(torch.randn(20) * 100)
    clone(second)
    expected = functional.ifmr_range([first, second])
    assert clips(clone) == (expected[0].item(), expected[1].item())
    optimizer = torch.optim.SGD(clone.parameters(), lr=0.1)
    before = clips(module)
    clone(torch.randn(20) * 9).sum().backward()
    optimizer.step()
    assert clips(module) == before
    assert clips(clone) != (expected[0].item(), expected[1].item())


def test_pickle_keeps_the_calibration_going() -> None:
    module = ULQFakeQuantize(batch_num=2, layer_name="conv1")
    first, second = torch.randn(20), torch.randn(20)
    module(first)
    clone = pickle.loads(pickle.dumps(module))
    clone(second)
    module(second)
    assert_same_state(state(module), state(clone))
    assert repr(clone) == repr(module)


@pytest.mark.parametrize("use_ema", [False, True])
def test_an_averaged_copy_made_before_the_start_does_not_start_again(use_ema: bool) -> None:
    module = ULQFakeQuantize(batch_num=2)
    average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.5) if use_ema else None
    averaged = torch.optim.swa_utils.AveragedModel(module, multi_avg_fn=average, use_buffers=True)
    for _ in range(4):
        module(torch.randn(100))
        averaged.update_parameters(module)
    copied = averaged.module
    assert copied.is_calibrated
    expected = clips(copied)
    y = copied.eval()(torch.randn(100) * 50)
    assert clips(copied) == expected
    scale = copied.calculate_qparams()[0].item()
    assert y.max().item() == pytest.approx(expected[0], abs=scale)
    assert y.min().item() == pytest.approx(expected[1], abs=scale)


def test_a_handwritten_ema_over_float_entries_works() -> None:
    module = ULQFakeQuantize()
    ema = copy.deepcopy(module)
    for _ in range(3):
        module(torch.randn(100))
        source = module.state_dict()
        for key, value in ema.state_dict().items():
            if value.is_floating_point():
                value.mul_(0.9).add_(source[key], alpha=0.1)
    before = clips(ema)
    ema.eval()(torch.randn(10))
    assert ema.is_calibrated
    assert clips(ema) == before


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.bfloat16, nn.Module.double])
def test_casting_the_model_keeps_the_clips_in_float32(convert: Any) -> None:
    module = convert(nn.Sequential(nn.Linear(2, 2), calibrated()))
    assert module[0].weight.dtype != torch.float32
    for tensor in module[1].state_dict().values():
        assert tensor.dtype in (torch.float32, torch.int32, torch.int64)


def test_construction_on_meta_and_loading() -> None:
    source = calibrated()
    with torch.device("meta"):
        module = ULQFakeQuantize()
    assert module.clip_max.is_meta
    assert "meta" in repr(
        ULQFakeQuantize(clip_max=1.0, clip_min=-1.0, factory_kwargs={"device": "meta"})
    )
    module.to_empty(device="cpu")
    module.load_state_dict(source.state_dict())
    x = torch.randn(10)
    assert torch.equal(module.eval()(x), source.eval()(x))


# Activation checkpointing


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("fixed_min", [True, False])
def test_a_recomputed_forward_counts_and_collects_nothing(
    use_reentrant: bool, fixed_min: bool
) -> None:
    def train(recompute: bool) -> tuple[dict[str, Tensor], list[float]]:
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Linear(6, 6), ULQFakeQuantize(batch_num=2, fixed_min=fixed_min), nn.Linear(6, 3)
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        losses = []
        for _ in range(4):
            x = torch.randn(20, 6, requires_grad=True)
            y = checkpoint(model, x, use_reentrant=use_reentrant) if recompute else model(x)
            loss = y.square().sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return state(model), losses

    (plain, plain_losses), (recomputed, losses) = train(False), train(True)
    assert losses == plain_losses
    assert_same_state(plain, recomputed)
