"""ULQFakeQuantize: the start, what comes after it, its switches."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import disable_fake_quant, disable_observer, enable_fake_quant
from torch.utils._python_dispatch import TorchDispatchMode

from amct_fx.errors import (
    CalibrationError,
    ModelTypeError,
)
from amct_fx.observers import ULQFakeQuantize, functional
from test.observers.ulq import assert_same_state, calibrated, clips, state

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
