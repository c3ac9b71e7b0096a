"""The golden numbers hold (contract 1 of the design)."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from amct_fx.errors import CalibrationError
from amct_fx.observers import ARQFakeQuantize, IFMRObserver, ULQFakeQuantize, functional

from ..golden.reader import Case, ifmr_batches, load_cases


def _ran(folder: str) -> list[Case]:
    return [case for case in load_cases(folder) if not case["error"]]


def _geometry(case: Case) -> dict[str, int | None]:
    if case.arrays["scales0"].size == 1:  # AMCT: Linear is always per tensor
        return {"ch_axis": None, "groups": 1}
    if case["layer"] in ("ConvTranspose1d", "ConvTranspose2d"):
        return {"ch_axis": 1, "groups": case["groups"]}
    return {"ch_axis": 0, "groups": 1}  # AMCT: ConvTranspose3d too, where its shape allows


def _assert_gradient(actual: torch.Tensor, expected: float, g: torch.Tensor) -> None:
    tolerance = 1e-5 * abs(expected) + 1e-6 * g.abs().sum().item()
    assert abs(actual.item() - expected) <= tolerance


@pytest.mark.parametrize("case", _ran("a_ulq_act"), ids=str)
def test_ulq_matches_amct_bit_for_bit(case: Case) -> None:
    def scalar(name: str) -> torch.Tensor:
        return torch.tensor([float(case[name])])

    previous = scalar("clip_max_pre"), scalar("clip_min_pre")
    clip_max = scalar("clip_max").requires_grad_()
    clip_min = scalar("clip_min").requires_grad_()
    x = case.tensor("x").requires_grad_()
    settings = {"num_bits": case["num_bits"], "symmetric": not case["asymmetric"]}
    y = functional.ulq_fake_quantize(
        x, clip_max, clip_min, fixed_min=case["fixed_min"], previous=previous, **settings
    )
    y.backward(case.tensor("g"))
    upper, lower = functional.ulq_effective_clips(
        clip_max, clip_min, fixed_min=case["fixed_min"], previous=previous
    )
    scale, offset = functional.ulq_qparams(upper, lower, **settings)
    expected = dict(zip(("scale", "M", "m", "gM", "gm"), case.tensor("scalars"), strict=True))

    assert torch.equal(y, case.tensor("y"))
    assert torch.equal(x.grad, case.tensor("gx"))
    assert (scale, upper, lower) == (expected["scale"], expected["M"], expected["m"])
    assert offset.item() == int(case.arrays["offset"])
    _assert_gradient(clip_max.grad, expected["gM"].item(), case.tensor("g"))
    _assert_gradient(clip_min.grad, expected["gm"].item(), case.tensor("g"))


@pytest.mark.parametrize("case", _ran("a_ulq_act"), ids=str)
def test_the_module_computes_what_the_function_computes(case: Case) -> None:
    module = ULQFakeQuantize(
        num_bits=case["num_bits"],
        fixed_min=case["fixed_min"],
        symmetric=not case["asymmetric"],
        clip_max=1.0,
        clip_min=-1.0,
    )
    with torch.no_grad():
        module.clip_max.fill_(float(case["clip_max"]))
        module.clip_min.fill_(float(case["clip_min"]))
        module.clip_max_prev.fill_(float(case["clip_max_pre"]))
        module.clip_min_prev.fill_(float(case["clip_min_pre"]))
    before = module.calculate_qparams()
    y = module(case.tensor("x"))
    y.backward(case.tensor("g"))
    scale, upper, lower, grad_max, grad_min = case.tensor("scalars")

    assert torch.equal(y, case.tensor("y"))
    assert before[0] == module.scale == scale
    assert before[1] == module.zero_point == int(case.arrays["offset"])
    assert module.clip_max == module.clip_max_prev == upper
    assert module.clip_min == module.clip_min_prev == lower
    _assert_gradient(module.clip_max.grad, grad_max.item(), case.tensor("g"))
    _assert_gradient(module.clip_min.grad, grad_min.item(), case.tensor("g"))


@pytest.mark.parametrize("case", _ran("b_ifmr"), ids=str)
def test_ifmr_finds_the_range_of_amct(case: Case) -> None:
    found = functional.ifmr_search(
        ifmr_batches(case), num_bits=case["num_bits"], symmetric=not case["with_offset"]
    )
    scale, offset, clip_max, clip_min = case.tensor("out")

    assert torch.equal(found.candidates, case.tensor("cands"))
    losses = case.tensor("losses").double()
    floor = 1e-12 * found.candidates.double().square()  # exact fits leave float32 noise
    assert torch.all((found.losses - losses).abs() <= 1e-6 * losses + floor)
    assert found.index == case["best_index"]
    assert (found.scale, found.offset) == (scale, offset)
    assert (found.clip_max, found.clip_min) == (clip_max, clip_min)


@pytest.mark.parametrize("case", [c for c in _ran("b_ifmr") if not c["with_offset"]], ids=str)
def test_the_quantizer_starts_with_the_range_of_amct(case: Case) -> None:
    settings = {"num_bits": case["num_bits"], "batch_num": case["batch_num"]}
    module, observer = ULQFakeQuantize(**settings), IFMRObserver(**settings)
    for batch in ifmr_batches(case):
        assert not module.is_calibrated
        module(batch)
        observer(batch)
    scale, _, clip_max, clip_min = case.tensor("out")

    assert module.is_calibrated
    assert (module.clip_max, module.clip_min) == (clip_max, clip_min)
    assert observer.calculate_clips() == (clip_max, clip_min)
    assert observer.calculate_qparams() == (scale, 0)


@pytest.mark.parametrize("case", [c for c in load_cases("b_ifmr") if c["error"]], ids=str)
def test_ifmr_refuses_what_amct_refuses(case: Case) -> None:
    assert case["error"] == "RuntimeError"
    bad = torch.tensor([1.0, {"inf": math.inf, "nan": math.nan}[case["name"]]])
    with pytest.raises(RuntimeError, match="NaN or infinity"):
        functional.ifmr_range(bad)
    with pytest.raises(CalibrationError, match="layer 'conv1'"):
        ULQFakeQuantize(layer_name="conv1")(bad)


@pytest.mark.parametrize("case", _ran("c_arq"), ids=str)
def test_arq_matches_amct_bit_for_bit(case: Case) -> None:
    settings = {"num_bits": case["num_bits"], **_geometry(case)}
    weight = case.tensor("w").requires_grad_()
    y = functional.arq_fake_quantize(weight, **settings)
    y.backward(case.tensor("g0"))

    assert torch.equal(functional.arq_qparams(weight, **settings), case.tensor("scales0"))
    assert torch.equal(y, case.tensor("y0"))
    assert torch.equal(weight.grad, case.tensor("g0"))


@pytest.mark.parametrize("case", [c for c in load_cases("c_arq") if c["error"]], ids=str)
def test_arq_works_where_amct_fails(case: Case) -> None:
    # AMCT fails on per-channel ConvTranspose3d and Linear; the weights are not stored.
    geometry = {"ch_axis": 0, "groups": 1}
    if "Transpose" in case["layer"]:
        geometry = {"ch_axis": 1, "groups": case["groups"]}
    weight = torch.randn(case["weight_shape"])
    module = ARQFakeQuantize(
        num_bits=case["num_bits"], num_channels=case["out_channels"], **geometry
    )
    rows = functional.to_output_major(weight, **geometry)
    expected = functional.arq_fake_quantize(rows, num_bits=case["num_bits"], ch_axis=0)
    assert torch.equal(functional.to_output_major(module(weight), **geometry), expected)


def _amct_count(case: Case) -> float:
    """Elements of a row as AMCT counts them over ours."""
    rows = case["out_channels"]
    ours = math.prod(case["weight_shape"]) // rows
    plain = case["layer"] in ("Conv2d", "Linear")
    return (ours if plain else case["weight_shape"][1]) / ours


@pytest.mark.parametrize("case", _ran("d_wts_ulq"), ids=str)
@pytest.mark.parametrize("step", [0, 1, 2])
def test_weight_ulq_matches_amct(case: Case, step: int) -> None:
    transposed = "Transpose" in case["layer"]
    geometry = {"ch_axis": 1 if transposed else 0, "groups": case["groups"] if transposed else 1}
    weight = case.tensor("w" if step == 0 else f"w_after{step - 1}").requires_grad_()
    scale = case.tensor(f"scales{step}").requires_grad_()
    g = case.tensor(f"g{step}")
    y = functional.ulq_weight_fake_quantize(weight, scale, num_bits=case["num_bits"], **geometry)
    y.backward(g)

    assert torch.equal(y, case.tensor(f"y{step}"))
    assert torch.equal(weight.grad, g)
    expected = case.tensor(f"gs{step}") * math.sqrt(_amct_count(case))
    rows = functional.to_output_major(g, **geometry).abs().flatten(1).sum(1)
    magnitude = rows if scale.numel() > 1 else rows.sum()
    assert torch.all((scale.grad - expected).abs() <= 1e-5 * expected.abs() + 1e-6 * magnitude)


@pytest.mark.parametrize("case", _ran("d_wts_ulq"), ids=str)
def test_weight_ulq_starts_with_the_scale_of_arq(case: Case) -> None:
    settings = {"num_bits": case["num_bits"], **_geometry(case)}
    scale = functional.arq_qparams(case.tensor("w"), **settings)
    assert torch.equal(scale, case.tensor("scales0"))


@pytest.mark.parametrize("case", load_cases("d_wts_ulq_func"), ids=str)
def test_weight_ulq_of_recurrent_gates_and_reciprocal_scales(case: Case) -> None:
    # LSTM and GRU: one start scale per gate, here as one tensor each (the recorder stored scales
    # of a later step). Convolutions: AMCT's scale was the reciprocal.
    weight, y = case.tensor("w"), case.tensor("y0")
    settings = {"num_bits": case["num_bits"]}
    if case["s_rec_flag"]:
        scale = functional.arq_qparams(weight, ch_axis=0, **settings)
        torch.testing.assert_close(1 / case.tensor("scales0"), scale, rtol=1e-6, atol=0)
        ours = functional.ulq_weight_fake_quantize(weight, scale, ch_axis=0, **settings)
        torch.testing.assert_close(ours, y, rtol=1e-6, atol=1e-9)
        return
    gates = zip(weight.chunk(case["group"]), y.chunk(case["group"]), strict=True)
    for part, expected in gates:
        scale = functional.arq_qparams(part, **settings)
        ours = functional.ulq_weight_fake_quantize(part, scale, **settings)
        np.testing.assert_array_equal(ours.numpy(), expected.numpy())
