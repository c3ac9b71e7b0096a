"""ULQWeightFakeQuantize: a scale that starts as ARQ, learns, and never leaves the valid range."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

from amct_fx.errors import CalibrationError, ConfigError, ModelError, ModelStateError
from amct_fx.observers import ULQWeightFakeQuantize, functional


def started(weight: torch.Tensor, **kwargs: Any) -> ULQWeightFakeQuantize:
    module = ULQWeightFakeQuantize(**kwargs)
    module.initialize(weight)
    return module


def test_the_scale_is_a_parameter_from_construction_and_starts_as_arq() -> None:
    weight = torch.randn(3, 4)
    module = ULQWeightFakeQuantize(ch_axis=0, num_channels=3)
    before = [(n, id(p), p.shape, p.data_ptr()) for n, p in module.named_parameters()]
    y = module(weight)
    assert before == [(n, id(p), p.shape, p.data_ptr()) for n, p in module.named_parameters()]
    assert torch.equal(module.scale, functional.arq_qparams(weight, ch_axis=0))
    assert torch.equal(y, functional.arq_fake_quantize(weight, ch_axis=0))


@pytest.mark.parametrize("training", [True, False])
def test_the_first_forward_starts_it_in_train_and_eval(training: bool) -> None:
    module = ULQWeightFakeQuantize().train(training)
    module(torch.ones(2, 2))
    assert module.is_calibrated
    scale = module.scale.clone()
    module(torch.ones(2, 2) * 7)
    assert torch.equal(module.scale, scale)


def test_initialising_at_prepare_equals_initialising_at_the_first_forward() -> None:
    weight = torch.randn(3, 4)
    early, late = started(weight, ch_axis=0, num_channels=3), None
    late = ULQWeightFakeQuantize(ch_axis=0, num_channels=3)
    assert torch.equal(early(weight), late(weight))
    assert torch.equal(early.scale, late.scale)


def test_the_gradient_has_the_shape_and_value_of_the_function() -> None:
    weight, g = torch.randn(4, 3, 2, 2), torch.randn(4, 3, 2, 2)
    module = started(weight, ch_axis=1, groups=2, num_channels=6)
    module(weight).backward(g)
    scale = module.scale.detach().clone().requires_grad_()
    functional.ulq_weight_fake_quantize(weight, scale, ch_axis=1, groups=2).backward(g)
    assert torch.equal(module.scale.grad, scale.grad)
    assert module.scale.grad.shape == (6,)


def test_one_scale_for_a_transposed_weight_counts_rows_by_output_channel() -> None:
    weight, g = torch.randn(4, 3, 2, 2), torch.randn(4, 3, 2, 2)
    one = started(weight, ch_axis=1, groups=2, num_channels=1)
    rows = functional.to_output_major(weight, ch_axis=1, groups=2)
    plain = started(rows)
    one(weight).backward(g)
    plain(rows).backward(functional.to_output_major(g, ch_axis=1, groups=2))
    torch.testing.assert_close(one.scale.grad, plain.scale.grad)
    assert one.scale.shape == (1,)
    assert one.qscheme == torch.per_tensor_symmetric


@pytest.mark.parametrize("make", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose2d])
@pytest.mark.parametrize("per_channel", [True, False])
def test_three_steps_at_a_large_rate_leave_valid_scales(make: Any, per_channel: bool) -> None:
    layer = make(4, 4, 2, groups=2)
    transposed = isinstance(layer, nn.ConvTranspose2d)
    module = started(
        layer.weight,
        ch_axis=1 if transposed else 0,
        groups=2 if transposed else 1,
        num_channels=4 if per_channel else 1,
    )
    optimizer = torch.optim.SGD([*layer.parameters(), *module.parameters()], lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        y = module(layer.weight)
        (y * 100).square().sum().backward()
        optimizer.step()
        y = module(layer.weight)
        assert torch.isfinite(y).all()
        assert (module.scale >= functional.EPS).all()
        assert (module.scale != 1).all()


@pytest.mark.parametrize("raw", [-0.02, 0.0, 1e-9, math.nan, math.inf])
def test_an_invalid_scale_means_the_same_everywhere(raw: float) -> None:
    weight = torch.randn(2, 6)
    module = started(weight, ch_axis=0, num_channels=2)
    with torch.no_grad():
        module.scale[1] = raw
    evaluated = copy.deepcopy(module).eval()
    loaded = ULQWeightFakeQuantize(ch_axis=0, num_channels=2)
    loaded.load_state_dict(module.state_dict())
    effective = module.calculate_qparams(weight)[0]
    outputs = [m(weight) for m in (module, evaluated, loaded)]
    for y in outputs:
        assert torch.equal(y, outputs[0])
        codes = y / effective[:, None]
        torch.testing.assert_close(codes, codes.round(), atol=1e-4, rtol=0)
    assert torch.isfinite(effective).all()
    assert torch.equal(module.scale, effective)  # written back in training
    assert not torch.equal(evaluated.scale, effective)  # not in evaluation
    with pytest.raises(ModelStateError, match=r"calculate_qparams\(weight\)"):
        evaluated.calculate_qparams()


def test_the_restart_leaves_a_gradient_and_training_goes_on() -> None:
    weight = torch.randn(2, 6)
    module = started(weight, ch_axis=0, num_channels=2)
    with torch.no_grad():
        module.scale.fill_(-1.0)
    module(weight).square().sum().backward()
    assert (module.scale.grad != 0).all()


def test_two_forwards_before_one_backward() -> None:
    module = started(torch.randn(2, 6))
    w1, w2 = torch.randn(2, 6), torch.randn(2, 6)
    with torch.no_grad():
        module.scale.fill_(0.01)
    (module(w1).square().sum() + module(w2).square().sum()).backward()
    together = module.scale.grad.clone()
    module.zero_grad()
    module(w1).square().sum().backward()
    module(w2).square().sum().backward()
    torch.testing.assert_close(module.scale.grad, together)


def test_resume_is_bit_equal() -> None:
    def steps(module: ULQWeightFakeQuantize, weight: torch.Tensor, count: int) -> None:
        optimizer = torch.optim.SGD(module.parameters(), lr=1e-4)
        for _ in range(count):
            optimizer.zero_grad()
            module(weight).square().sum().backward()
            optimizer.step()

    weight = torch.randn(3, 5)
    settings = {"ch_axis": 0, "num_channels": 3}
    whole, first, second = (ULQWeightFakeQuantize(**settings) for _ in range(3))
    steps(whole, weight, 6)
    steps(first, weight, 3)
    second.load_state_dict(first.state_dict())
    assert second.is_calibrated
    steps(second, weight, 3)
    assert torch.equal(whole.scale, second.scale)
    assert not torch.equal(first.scale, second.scale)


def test_an_averaged_copy_keeps_its_averaged_scale() -> None:
    weight = torch.randn(3, 5)
    module = ULQWeightFakeQuantize()
    averaged = torch.optim.swa_utils.AveragedModel(module, use_buffers=True)
    for _ in range(3):
        module(weight)
        averaged.update_parameters(module)
    scale = averaged.module.scale.clone()
    averaged.module.eval()(weight * 50)
    assert torch.equal(averaged.module.scale, scale)


def test_switches() -> None:
    weight = torch.randn(2, 3)
    module = ULQWeightFakeQuantize()
    module.disable_observer()
    assert module(weight) is weight
    assert not module.is_calibrated
    module.enable_observer()
    module.disable_fake_quant()
    assert module(weight) is weight
    assert module.is_calibrated


def test_bad_weights_and_arguments() -> None:
    with pytest.raises(ConfigError, match=r"layer 'c': .*needs num_channels"):
        ULQWeightFakeQuantize(ch_axis=0, layer_name="c")
    with pytest.raises(TypeError, match="did you mean 'num_channels'"):
        ULQWeightFakeQuantize.with_args(num_channel=3)
    module = ULQWeightFakeQuantize(ch_axis=0, num_channels=3, layer_name="c")
    with pytest.raises(ModelError, match=r"layer 'c': .*2 output channels.*num_channels=3"):
        module(torch.randn(2, 3))
    with pytest.raises(CalibrationError, match=r"layer 'c': .*NaN or infinity"):
        module(torch.full((3, 2), math.nan))
    assert not module.is_calibrated
    assert module.scale.tolist() == [1, 1, 1]
    module(torch.randn(3, 2))
    with pytest.raises(ModelError, match="4 output channels"):
        module(torch.randn(4, 2))


def test_qparams_before_the_start_are_those_of_arq() -> None:
    weight = torch.randn(3, 4)
    module = ULQWeightFakeQuantize(ch_axis=0, num_channels=3)
    scale, zero_point = module.calculate_qparams(weight)
    assert torch.equal(scale, functional.arq_qparams(weight, ch_axis=0))
    assert (zero_point.dtype, zero_point.shape) == (torch.int32, (3,))
    assert not module.is_calibrated
    with pytest.raises(ModelStateError):
        module.calculate_qparams()
    module.initialize(weight)
    assert torch.equal(module.calculate_qparams()[0], scale)


def test_copies() -> None:
    weight = torch.randn(3, 4)
    module = started(weight, ch_axis=0, num_channels=3)
    for clone in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(clone(weight), module(weight))
        assert clone.scale.data_ptr() != module.scale.data_ptr()


def test_compiled_steps_equal_eager_steps() -> None:
    torch._dynamo.reset()
    weight = torch.randn(3, 4)
    eager = started(weight, ch_axis=0, num_channels=3)
    other = copy.deepcopy(eager)
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for module, forward in ((eager, eager), (other, compiled)):
        for _ in range(3):
            forward(weight).square().sum().backward()
            with torch.no_grad():
                module.scale.sub_(0.01 * module.scale.grad)
                module.scale.grad = None
    torch.testing.assert_close(eager.scale, other.scale)


def test_repr() -> None:
    weight = torch.randn(6, 4)
    module = ULQWeightFakeQuantize(ch_axis=0, num_channels=6)
    lines = [repr(module)]
    module(weight)
    lines.append(repr(module))
    module.requires_grad_(False).disable_fake_quant()
    lines += [repr(module), repr(ULQWeightFakeQuantize(ch_axis=1, groups=2, num_channels=1))]
    assert_expected_inline(
        "\n".join(lines),
        """\
ULQWeightFakeQuantize(num_bits=8, ch_axis=0, num_channels=6, not initialised)
ULQWeightFakeQuantize(num_bits=8, ch_axis=0, num_channels=6, learning)
ULQWeightFakeQuantize(num_bits=8, ch_axis=0, num_channels=6, frozen, fake_quant=off)
ULQWeightFakeQuantize(num_bits=8, ch_axis=1, groups=2, num_channels=1, not initialised)""",
    )
