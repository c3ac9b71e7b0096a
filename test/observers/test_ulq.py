"""ULQFakeQuantize: the start, learning, evaluation, and everything around real training."""

from __future__ import annotations

import copy
import io
import math
import pickle
import warnings
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.ao.quantization import disable_fake_quant, disable_observer, enable_fake_quant
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from amct_fx.errors import (
    AmctError,
    AmctWarning,
    CalibrationError,
    ConfigError,
    ModelStateError,
    ModelTypeError,
)
from amct_fx.observers import ULQFakeQuantize, functional
from test.versions import BEFORE_2_7


def state(module: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in module.state_dict().items()}


def assert_same_state(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert list(left) == list(right)
    for key, value in left.items():
        assert torch.equal(value, right[key]), key


def clips(module: ULQFakeQuantize) -> tuple[float, float]:
    return module.clip_max.item(), module.clip_min.item()


def calibrated(**kwargs: Any) -> ULQFakeQuantize:
    module = ULQFakeQuantize(**kwargs)
    for _ in range(module.batch_num):
        module(torch.randn(64))
    return module


# The start


def test_forwards_before_the_last_use_the_extremes_of_their_own_batch() -> None:
    module = ULQFakeQuantize(batch_num=3)
    for top in (2.0, 0.5):
        batch = torch.linspace(-1.0, top, 50)
        y = module(batch)
        extremes = torch.tensor([top]), torch.tensor([-1.0])
        assert torch.equal(y, functional.ulq_fake_quantize(batch, *extremes))
        assert clips(module) == (top, -1.0)
        assert (module.clip_max_prev.item(), module.clip_min_prev.item()) == (top, -1.0)
        assert not module.is_calibrated
        assert module.calibrated.item() == 0


@pytest.mark.parametrize("training", [True, False])
def test_the_last_forward_searches_over_all_batches(training: bool) -> None:
    batches = [torch.randn(40), torch.randn(2, 30), torch.randn(7)]
    module = ULQFakeQuantize(batch_num=3).train(training)
    y = [module(batch) for batch in batches][-1]
    expected = functional.ifmr_range(torch.cat([b.flatten() for b in batches]))

    assert clips(module) == (expected[0].item(), expected[1].item())
    assert module.is_calibrated
    assert module.calibrated.item() == 1
    assert torch.equal(y, functional.ulq_fake_quantize(batches[-1], *expected))


def test_train_and_eval_forwards_count_alike() -> None:
    module = ULQFakeQuantize(batch_num=2)
    module.train()(torch.randn(9))
    module.eval()(torch.randn(9))
    assert module.is_calibrated


def test_each_element_counts_once_when_the_last_batch_is_smaller() -> None:
    samples = torch.randn(19, 6)
    split, whole = ULQFakeQuantize(batch_num=3), ULQFakeQuantize(batch_num=1)
    for batch in samples.split(8):
        split(batch)
    whole(samples)
    assert clips(split) == clips(whole)


def test_the_collected_data_is_dropped_and_survives_changes_in_place() -> None:
    batch = torch.randn(50)
    first, second = batch.clone(), torch.randn(50)
    module = ULQFakeQuantize(batch_num=2)
    module(first)
    first.zero_()
    module(second)
    expected = functional.ifmr_range([batch, second])
    assert clips(module) == (expected[0].item(), expected[1].item())
    assert module._collector.batches == []


def test_the_first_step_of_a_layer_with_positive_inputs() -> None:
    module = ULQFakeQuantize(batch_num=2)
    module(torch.tensor([0.9923644662, 0.0664103478]))
    assert f"{module.scale.item():.7g}" == "0.003891625"
    assert module.zero_point.item() == -128
    assert module.clip_min.item() == pytest.approx(0.0664103478)


def test_fixed_min_forces_zero_in_every_forward() -> None:
    module = ULQFakeQuantize(batch_num=2, fixed_min=True)
    for _ in range(3):
        y = module(torch.randn(100))
        assert module.clip_min.item() == module.clip_min_prev.item() == 0
        assert y.min() == 0
        assert module.zero_point.item() == -128


def test_fixed_min_with_a_batch_without_positive_values_is_an_empty_range() -> None:
    module = ULQFakeQuantize(batch_num=2, fixed_min=True)
    y = module(torch.tensor([-3.0, -1.0, 0.0]))
    assert torch.equal(y, torch.zeros(3))


def test_explicit_clips_need_no_calibration() -> None:
    module = ULQFakeQuantize(clip_max=6.0, clip_min=-6.0, batch_num=4)
    assert module.is_calibrated
    module(torch.randn(10) * 100)
    assert clips(module) == (6.0, -6.0)
    assert module.zero_point.item() == 0


def test_clips_moved_by_the_optimizer_during_the_start_are_overwritten() -> None:
    module = ULQFakeQuantize(batch_num=3)
    first = torch.linspace(-1, 2, 20)
    module(first)
    with torch.no_grad():
        module.clip_max.fill_(99.0)
    module(first)
    assert clips(module) == (2.0, -1.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_bad_calibration_batch_is_refused_and_changes_nothing(bad: float) -> None:
    module, clean = ULQFakeQuantize(batch_num=2, layer_name="conv1"), ULQFakeQuantize(batch_num=2)
    batches = torch.randn(20), torch.randn(20)
    module(batches[0])
    before = state(module)
    with pytest.raises(CalibrationError, match=r"layer 'conv1'.*NaN or infinity"):
        module(torch.tensor([0.0, bad]))
    assert_same_state(before, state(module))
    module(batches[1])
    for batch in batches:
        clean(batch)
    assert_same_state(state(clean), state(module))


def test_nan_after_the_start_propagates_like_in_any_layer() -> None:
    y = calibrated()(torch.tensor([0.5, math.nan]))
    assert y.isnan().tolist() == [False, True]


@pytest.mark.parametrize(
    ("value", "expected"),
    [(3.3, (3.3, -3.32598424)), (-3.3, (3.2742188, -3.3)), (0.0, (127, -128)), (1e-6, (127, -128))],
)
def test_constant_calibration_data(value: float, expected: tuple[float, float]) -> None:
    module = ULQFakeQuantize()
    y = module(torch.full((10,), value))
    assert clips(module) == pytest.approx(expected, rel=1e-6)
    assert torch.isfinite(y).all()


def test_an_empty_batch_passes_and_does_not_count() -> None:
    module = ULQFakeQuantize(batch_num=1)
    empty = torch.empty(0, 3, requires_grad=True)
    assert module(empty).shape == (0, 3)
    assert not module.is_calibrated
    module(torch.randn(4, 3))
    y = module(empty)
    y.sum().backward()
    assert module.clip_max.grad.item() == 0
    assert empty.grad.shape == (0, 3)


def test_integer_input_is_a_type_error() -> None:
    module = ULQFakeQuantize(layer_name="embedding")
    with pytest.raises(TypeError, match=r"layer 'embedding'.*torch.int64.*\.float\(\)"):
        module(torch.arange(3))
    with pytest.raises(ModelTypeError, match="NoneType"):
        module(None)


def test_collecting_under_inference_mode_leaves_no_inference_tensor() -> None:
    module = ULQFakeQuantize(batch_num=2)
    with torch.inference_mode():
        module(torch.randn(30))
        assert not module._collector.batches[0].is_inference()
        module(torch.randn(30))
    for tensor in [*module.parameters(), *module.buffers()]:
        assert not tensor.is_inference()
    x = torch.randn(30, requires_grad=True)
    module(x).sum().backward()
    assert module.clip_max.grad is not None
    assert module.clip_min.grad is not None


def test_calibration_under_no_grad_is_respected() -> None:
    module = ULQFakeQuantize(batch_num=2)
    with torch.no_grad():
        assert not module(torch.randn(30)).requires_grad
        assert not module(torch.randn(30)).requires_grad
        assert not module(torch.randn(30)).requires_grad
    assert module(torch.randn(30)).requires_grad


def test_a_calibrating_forward_already_trains_the_clips() -> None:
    module = ULQFakeQuantize(batch_num=2)
    module(torch.randn(30)).sum().backward()
    assert module.clip_max.grad is not None


def test_the_symmetric_scheme_also_starts_with_ifmr() -> None:
    module, plain = ULQFakeQuantize(symmetric=True), ULQFakeQuantize()
    batch = torch.randn(100)
    module(batch)
    plain(batch)
    assert clips(module) == clips(plain)
    assert module.zero_point.item() == 0
    assert module.qscheme == torch.per_tensor_symmetric


# After the start


def test_training_forwards_write_the_clips_after_the_guard() -> None:
    module = calibrated()
    upper, lower = clips(module)
    with torch.no_grad():
        module.clip_max.fill_(-0.5)
    module(torch.randn(8))
    assert clips(module) == (upper, lower)
    with torch.no_grad():
        module.clip_min.fill_(0.5)
    module(torch.randn(8))
    assert clips(module) == (upper, lower)
    with torch.no_grad():
        module.clip_min.fill_(upper)
    module(torch.randn(8))
    assert clips(module) == (upper, lower)


def test_a_positive_lower_clip_is_not_replaced_by_the_clamp_of_the_range() -> None:
    module = ULQFakeQuantize(batch_num=5)
    module(torch.tensor([0.99, 0.066]))
    module(torch.tensor([0.99, 0.066]))
    assert module.clip_min.item() == pytest.approx(0.066)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_evaluation_writes_nothing(mode: Any) -> None:
    module = calibrated()
    module(torch.randn(5))
    with torch.no_grad():
        module.clip_max.sub_(10)  # the guard would act
    before = state(module)
    module.eval()
    with mode():
        for scale in (1.0, 100.0):
            y = module(torch.randn(50) * scale)
            assert torch.isfinite(y).all()
    assert_same_state(before, state(module))
    module.train()(torch.randn(5)).sum().backward()


def test_evaluation_uses_the_guard_without_writing() -> None:
    module = calibrated().eval()
    x = torch.randn(20)
    expected = module(x)
    with torch.no_grad():
        module.clip_max.fill_(-1.0)
    assert torch.equal(module(x), expected)


def test_forward_assigns_no_tensor_and_moves_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ULQFakeQuantize(batch_num=2)
    pointers = {k: v.data_ptr() for k, v in [*module.named_parameters(), *module.named_buffers()]}
    assigned: list[str] = []
    original = nn.Module.__setattr__

    def spy(self: nn.Module, name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            assigned.append(name)
        original(self, name, value)

    monkeypatch.setattr(nn.Module, "__setattr__", spy)
    for _ in range(4):
        module(torch.randn(10)).sum().backward()
    module.eval()(torch.randn(10))
    assert assigned == []
    for key, tensor in [*module.named_parameters(), *module.named_buffers()]:
        assert tensor.data_ptr() == pointers[key]


def test_parameters_exist_from_construction_and_one_step_moves_them() -> None:
    module = ULQFakeQuantize()
    before = [(name, id(p), p.shape) for name, p in module.named_parameters()]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    x = torch.cat([torch.linspace(-1, 1, 1000), torch.tensor([3.0])])
    module(x)
    after_start = clips(module)
    module(torch.tensor([9.0, -9.0])).square().sum().backward()
    optimizer.step()
    assert before == [(name, id(p), p.shape) for name, p in module.named_parameters()]
    assert before[0][2] == (1,)
    assert clips(module)[0] != after_start[0]
    assert clips(module)[1] != after_start[1]


def test_two_forwards_before_one_backward_equal_two_backwards() -> None:
    module = calibrated()
    x1, x2 = torch.randn(40) * 3, torch.randn(40) * 3
    (module(x1).square().sum() + module(x2).square().sum()).backward()
    together = [p.grad.clone() for p in module.parameters()]
    module.zero_grad(set_to_none=True)
    module(x1).square().sum().backward()
    module(x2).square().sum().backward()
    for parameter, expected in zip(module.parameters(), together, strict=True):
        torch.testing.assert_close(parameter.grad, expected)


def test_a_step_between_forward_and_backward_does_not_change_the_gradient() -> None:
    module, plain = calibrated(), None
    plain = copy.deepcopy(module)
    x = torch.randn(40) * 3
    loss, expected = module(x).square().sum(), plain(x).square().sum()
    with torch.no_grad():
        module.clip_max.mul_(0.5)
    loss.backward()
    expected.backward()
    assert torch.equal(module.clip_max.grad, plain.clip_max.grad)


def test_the_gradient_goes_to_the_original_clips_when_the_guard_replaced_them() -> None:
    module = calibrated(fixed_min=True)
    with torch.no_grad():
        module.clip_max.fill_(-1.0)
    module(torch.tensor([50.0, -50.0])).sum().backward()
    assert module.clip_max.grad.item() != 0
    assert module.clip_min.grad.item() != 0


def test_frozen_clips_still_quantize() -> None:
    module = calibrated().requires_grad_(False)
    x = torch.randn(10, requires_grad=True)
    module(x).sum().backward()
    assert module.clip_max.grad is None
    assert x.grad is not None


class NoHostReads(TorchDispatchMode):
    """Fails when a value is read from the device."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        assert func is not torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("training", [True, False])
def test_nothing_is_read_on_the_host_after_the_start(training: bool) -> None:
    module = ULQFakeQuantize()
    x = torch.randn(10, requires_grad=True)
    with pytest.raises(AssertionError), NoHostReads():
        module(x)
    module(x)
    module.train(training)
    with NoHostReads():
        module(x).sum().backward()


def test_set_clips_ends_the_calibration() -> None:
    module = ULQFakeQuantize(batch_num=3, fixed_min=True)
    module(torch.randn(10))
    module.set_clips(6.0, -2.0)
    assert module.is_calibrated
    assert clips(module) == (6.0, 0.0)
    assert module._collector.batches == []
    assert torch.equal(module.scale, module.calculate_qparams()[0])


# Switches


def test_torch_ao_switches_work() -> None:
    module = nn.Sequential(calibrated())
    x = torch.randn(20)
    quantized = module(x)
    module.apply(disable_fake_quant)
    assert module(x) is x
    assert module[0].fake_quant_enabled.item() == 0
    module.apply(enable_fake_quant)
    assert torch.equal(module(x), quantized)


def test_calibration_happens_while_fake_quant_is_off() -> None:
    module, reference = ULQFakeQuantize(batch_num=2), ULQFakeQuantize(batch_num=2)
    module.disable_fake_quant()
    for _ in range(2):
        x = torch.randn(20)
        assert module(x) is x
        reference(x)
    module.enable_fake_quant()
    assert module.is_calibrated
    assert_same_state(state(reference), state(module))


def test_without_observer_an_uncalibrated_quantizer_passes_its_input() -> None:
    module = ULQFakeQuantize()
    module.apply(disable_observer)
    x = torch.randn(20)
    assert module(x) is x
    assert not module.is_calibrated
    module.enable_observer()
    module(x)
    module.disable_observer()
    assert not torch.equal(module(x), x)


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


# Compilation and export


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_steps_equal_eager_steps(backend: str) -> None:
    torch._dynamo.reset()
    eager = calibrated()
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True, backend=backend)
    for step in range(9):
        x = torch.randn(60) * 2
        use = run if 3 <= step < 6 else compiled
        for module, forward in ((eager, eager), (compiled, use)):
            forward(x).square().sum().backward()
            with torch.no_grad():
                for parameter in module.parameters():
                    parameter.sub_(0.05 * parameter.grad)
                    parameter.grad = None
    for key, value in eager.state_dict().items():
        torch.testing.assert_close(compiled.state_dict()[key], value, rtol=1e-5, atol=1e-6)


def test_the_start_under_compile_runs_eagerly() -> None:
    torch._dynamo.reset()
    module, reference = ULQFakeQuantize(batch_num=2), ULQFakeQuantize(batch_num=2)
    run = torch.compile(module, backend="aot_eager")
    for _ in range(3):
        x = torch.randn(30)
        torch.testing.assert_close(run(x), reference(x))
    assert_same_state(state(reference), state(module))


def test_toggling_fake_quant_recompiles_once() -> None:
    torch._dynamo.reset()
    counter = CompileCounter()
    module = calibrated().eval()
    run = torch.compile(module, fullgraph=True, backend=counter)
    x = torch.randn(8)
    for _ in range(3):
        module.enable_fake_quant()
        run(x)
        module.disable_fake_quant()
        run(x)
    # PyTorch 2.6 also counts a graph without operations
    assert counter.frame_count <= (3 if BEFORE_2_7 else 2)


class Scaled(nn.Module):
    """An ``autograd.Function`` that has nothing to do with quantization."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
            ctx.save_for_backward(scale)
            return x * scale

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            return grads[0] * ctx.saved_tensors[0], None

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.Function.apply(x, self.scale)
        return y


@pytest.mark.parametrize("strict", [False, True])
def test_export_with_a_dynamic_batch(strict: bool) -> None:
    module = calibrated().eval()
    batch = torch.export.Dim("batch", min=1)
    try:
        torch.export.export(
            Scaled(), (torch.randn(4, 3),), dynamic_shapes=({0: batch},), strict=strict
        )
    except AssertionError as error:  # seen in 2.6 and 2.7
        reason = "with strict=True cannot export an ordinary autograd.Function with a dynamic shape"
        pytest.skip(f"PyTorch {torch.__version__} {reason}: {error}")
    program = torch.export.export(
        module, (torch.randn(4, 3),), dynamic_shapes=({0: batch},), strict=strict
    )
    for size in (1, 7):
        x = torch.randn(size, 3)
        assert torch.equal(program.module()(x), module(x))


def test_exporting_an_uncalibrated_quantizer_says_what_to_do() -> None:
    module = ULQFakeQuantize(layer_name="conv1").eval()
    with pytest.raises(ModelStateError, match=r"layer 'conv1'.*run calibration batches"):
        torch.export.export(module, (torch.randn(4),), strict=False)


# Arguments and looks


def test_a_misspelt_keyword_is_named_with_the_closest_match() -> None:
    message = "unexpected keyword argument 'num_bit'; did you mean 'num_bits'"
    with pytest.raises(TypeError, match=message):
        ULQFakeQuantize(num_bit=8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=message):
        ULQFakeQuantize.with_args(num_bit=8)
    with pytest.raises(TypeError, match="the keywords are num_bits, fixed_min"):
        ULQFakeQuantize.with_args(zzz=8)
    with pytest.raises(TypeError, match=message):
        ULQFakeQuantize.with_args(num_bits=4).with_args(num_bit=8)()


@pytest.mark.parametrize("bits", [0, 1, 17, 8.0, True, "8", None])
def test_bits_outside_the_range_are_refused(bits: Any) -> None:
    with pytest.raises(ConfigError, match="num_bits must be an integer from 2 to 16"):
        ULQFakeQuantize(num_bits=bits)


@pytest.mark.parametrize(
    ("clip_max", "clip_min"),
    [
        (1.0, None),
        (None, -1.0),
        (0.0, -1.0),
        (1.0, 0.0),
        (-1.0, -2.0),
        (math.inf, -1.0),
        (1.0, math.nan),
    ],
)
def test_wrong_explicit_clips_are_refused(clip_max: float | None, clip_min: float | None) -> None:
    with pytest.raises(ConfigError, match=r"layer 'conv1': .*clip_max"):
        ULQFakeQuantize(clip_max=clip_max, clip_min=clip_min, layer_name="conv1")


@pytest.mark.parametrize("count", [0, -1, 1.5, True])
def test_wrong_batch_numbers_are_refused(count: Any) -> None:
    with pytest.raises(AmctError, match="batch_num must be a positive integer"):
        ULQFakeQuantize(batch_num=count)


def test_with_args_builds_quantizers_of_a_qconfig() -> None:
    build = ULQFakeQuantize.with_args(num_bits=4).with_args(fixed_min=True)
    first, second = build(), build()
    assert first is not second
    assert (first.num_bits, first.fixed_min) == (4, True)
    assert (first.quant_min, first.quant_max) == (-8, 7)


def test_qparams_follow_the_current_clips_without_writing() -> None:
    module = calibrated()
    before = state(module)
    with torch.no_grad():
        module.clip_max.mul_(2)
    scale, zero_point = module.calculate_qparams()
    assert scale != before["scale"]
    assert torch.equal(module.scale, before["scale"])
    assert (scale.shape, scale.dtype, zero_point.dtype) == ((1,), torch.float32, torch.int32)
    module(torch.randn(4))
    assert torch.equal(module.scale, scale)
    assert torch.equal(module.zero_point, zero_point)


def test_repr_tells_the_state() -> None:
    module = ULQFakeQuantize(batch_num=2, num_bits=4, fixed_min=False)
    lines = [repr(module)]
    module(torch.tensor([-1.0, 2.0]))
    lines.append(repr(module))
    module(torch.tensor([-1.5, 3.0]))
    lines.append(repr(module))
    module.requires_grad_(False).disable_observer()
    lines.append(repr(module))
    module.disable_fake_quant()
    lines.append(repr(module))
    lines.append(repr(ULQFakeQuantize(symmetric=True, clip_max=1.5, clip_min=-0.9)))
    assert_expected_inline(
        "\n".join(lines),
        """\
ULQFakeQuantize(num_bits=4, fixed_min=False, calibrating 0/2)
ULQFakeQuantize(num_bits=4, fixed_min=False, calibrating 1/2)
ULQFakeQuantize(num_bits=4, fixed_min=False, clip_max=3.51, clip_min=-4.01143, scale=0.501429, zero_point=0, learning)
ULQFakeQuantize(num_bits=4, fixed_min=False, clip_max=3.51, clip_min=-4.01143, scale=0.501429, zero_point=0, frozen, observer=off)
ULQFakeQuantize(num_bits=4, fixed_min=False, clip_max=3.51, clip_min=-4.01143, scale=0.501429, zero_point=0, frozen, fake_quant=off, observer=off)
ULQFakeQuantize(num_bits=8, fixed_min=auto, symmetric=True, clip_max=1.5, clip_min=-0.9, scale=0.011811, zero_point=0, learning)""",  # noqa: E501
    )
