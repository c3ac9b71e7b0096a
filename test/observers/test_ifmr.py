"""The observers: they look, they do not touch."""

from __future__ import annotations

import copy
import math
import pickle
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch.ao.quantization import FakeQuantize, ObserverBase

from amct_fx.errors import CalibrationError, ConfigError
from amct_fx.observers import IFMRObserver, MinMaxObserver, functional

OBSERVERS = [IFMRObserver, MinMaxObserver]


@pytest.mark.parametrize("observer", OBSERVERS)
def test_the_input_passes_untouched(observer: Any) -> None:
    x = torch.randn(5, requires_grad=True)
    module = observer()
    assert module(x) is x
    assert isinstance(module, ObserverBase)
    assert module.is_calibrated


@pytest.mark.parametrize("symmetric", [True, False])
def test_the_search_runs_over_all_batches_and_drops_them(symmetric: bool) -> None:
    batches = [torch.randn(8, 3), torch.randn(8, 3), torch.randn(3, 3)]
    observer = IFMRObserver(batch_num=3, symmetric=symmetric)
    for batch in batches:
        assert not observer.is_calibrated
        observer(batch)
    found = functional.ifmr_search(batches, symmetric=symmetric)
    assert observer.is_calibrated
    assert observer._collector.batches == []
    for _ in range(2):
        assert observer.calculate_clips() == (found.clip_max, found.clip_min)
        assert observer.calculate_qparams() == (found.scale, found.offset)
    observer(torch.randn(10) * 100)
    assert observer.calculate_clips() == (found.clip_max, found.clip_min)


def test_a_range_is_there_before_the_last_batch_on_request() -> None:
    observer, batch = IFMRObserver(batch_num=2), torch.randn(20)
    observer(batch)
    assert observer.calculate_clips() == functional.ifmr_range(batch)
    assert not observer.is_calibrated
    observer(batch)
    assert observer.is_calibrated


def test_the_extremes_of_all_batches() -> None:
    observer = MinMaxObserver()
    for batch in ([1.5, 0.2], [-0.9, 0.1]):
        observer(torch.tensor(batch))
    clips = observer.calculate_clips()
    assert clips == (torch.tensor([1.5]), torch.tensor([-0.9]))
    assert observer.calculate_qparams() == functional.ulq_qparams(*clips)
    assert observer.calculate_qparams()[1].item() == -32


@pytest.mark.parametrize("observer", OBSERVERS)
def test_no_data_is_an_error(observer: Any) -> None:
    module = observer()
    module(torch.empty(0, 3))
    for call in (module.calculate_clips, module.calculate_qparams):
        with pytest.raises(CalibrationError, match="has seen no data"):
            call()


@pytest.mark.parametrize("observer", OBSERVERS)
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_values_that_are_not_finite_change_nothing(observer: Any, bad: float) -> None:
    module = observer()
    with pytest.raises(CalibrationError, match="NaN or infinity"):
        module(torch.tensor([1.0, bad]))
    assert not module.is_calibrated
    module(torch.tensor([1.0, -2.0]))
    assert module.calculate_clips()[0].item() < 3


@pytest.mark.parametrize("observer", OBSERVERS)
def test_state_and_copies(observer: Any) -> None:
    module = observer()
    shapes = {k: v.shape for k, v in module.state_dict().items()}
    module(torch.randn(50))
    assert shapes == {k: v.shape for k, v in module.state_dict().items()}
    loaded = observer()
    loaded.load_state_dict(module.state_dict())
    for clone in (loaded, copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert clone.calculate_clips() == module.calculate_clips()
        assert clone.calculate_qparams() == module.calculate_qparams()


def test_copies_in_the_middle_keep_collecting() -> None:
    first, second = torch.randn(20), torch.randn(20)
    observer = IFMRObserver(batch_num=2)
    observer(first)
    clone = pickle.loads(pickle.dumps(copy.deepcopy(observer)))
    clone(second)
    assert clone.calculate_clips() == functional.ifmr_range([first, second])
    assert not observer.is_calibrated


@pytest.mark.parametrize("observer", OBSERVERS)
def test_they_drive_the_fake_quantize_of_torch_ao(observer: Any) -> None:
    fake_quant = FakeQuantize(observer=observer)
    x = torch.randn(50)
    y = fake_quant(x)
    scale, _ = fake_quant.calculate_qparams()
    assert (y - x).abs().median() <= scale * 0.51


@pytest.mark.parametrize("observer", OBSERVERS)
def test_arguments_are_checked(observer: Any) -> None:
    with pytest.raises(TypeError, match="'num_bit'; did you mean 'num_bits'"):
        observer(num_bit=8)
    with pytest.raises(TypeError, match="'num_bit'; did you mean 'num_bits'"):
        observer.with_args(num_bit=8)
    assert observer.with_args(num_bits=4)().quant_max == 7
    with pytest.raises(ConfigError, match="num_bits must be"):
        observer(num_bits=99)
    with pytest.raises(TypeError, match="floating point"):
        observer()(torch.arange(3))


def test_integers_and_wrong_batch_numbers() -> None:
    with pytest.raises(ConfigError, match="batch_num must be a positive integer"):
        IFMRObserver(batch_num=0)


def test_repr() -> None:
    modules = [IFMRObserver(batch_num=2), MinMaxObserver(num_bits=4)]
    lines = [repr(module) for module in modules]
    for module in modules:
        module(torch.tensor([-1.0, 2.0]))
    lines += [repr(module) for module in modules]
    modules[0](torch.tensor([0.5]))
    lines.append(repr(modules[0]))
    assert_expected_inline(
        "\n".join(lines),
        """\
IFMRObserver(num_bits=8, symmetric=True, batches 0/2)
MinMaxObserver(num_bits=4, symmetric=False, no data)
IFMRObserver(num_bits=8, symmetric=True, batches 1/2)
MinMaxObserver(num_bits=4, symmetric=False, clip_max=2, clip_min=-1)
IFMRObserver(num_bits=8, symmetric=True, clip_max=2.54, clip_min=-2.56)""",
    )
