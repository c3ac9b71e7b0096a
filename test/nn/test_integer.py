"""Integer weights: batch-norm folding, bias codes, dead channels."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from amct_fx import convert_amct, prepare_qat_amct
from amct_fx.errors import ConvertError
from amct_fx.nn.integer import batch_norm_affine, integer_weight
from amct_fx.observers.functional import arq_qparams

S_X = torch.tensor(0.00941176526)


def conv1x1(weight: list[list[float]], bias: list[float] | None) -> nn.Conv2d:
    layer = nn.Conv2d(len(weight[0]), len(weight), 1, bias=bias is not None)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor(weight)[:, :, None, None])
        if bias is not None and layer.bias is not None:
            layer.bias.copy_(torch.tensor(bias))
    return layer


def scale_of(layer: nn.Module, ch_axis: int | None = 0) -> torch.Tensor:
    return arq_qparams(layer.weight.detach(), ch_axis=ch_axis)


def test_batch_norm_folding_gives_the_golden_numbers_of_the_specification():
    layer = conv1x1([[0.5, -1, 0.25, 0.1], [1, -1, 0.3, 0.7]], [0.02, -0.04])
    affine = batch_norm_affine(
        torch.tensor([0.1, -0.2]),
        torch.tensor([0.25, 4.0]),
        torch.tensor([0.8, -1.5]),
        torch.tensor([0.05, 0.3]),
        1e-5,
    )
    assert torch.allclose(affine.factor, torch.tensor([1.599968, -0.7499991]), rtol=1e-6)
    result = integer_weight(
        layer, weight_scale=scale_of(layer), num_bits=8, input_scale=S_X, batch_norm=affine
    )
    assert torch.allclose(result.scale, torch.tensor([0.0124997497, 0.0059055048]), rtol=1e-6)
    assert result.codes.flatten(1).tolist() == [[64, -128, 32, 13], [-127, 127, -38, -89]]
    assert result.bias_codes.tolist() == [-663, 3239]
    assert (result.codes.dtype, result.bias_codes.dtype) == (torch.int8, torch.int32)


def test_a_dead_channel_keeps_its_bias():
    layer = conv1x1([[0.5, -1.0], [0.0, 0.0], [0.0, 0.0]], [0.1, 0.013, 0.0])
    s_x = torch.tensor(0.0266)
    result = integer_weight(layer, weight_scale=scale_of(layer), num_bits=8, input_scale=s_x)
    restored = result.bias_codes * result.bias_scale
    assert abs(restored[1] - 0.013) <= 1e-6 * 0.013
    assert restored[2] == 0
    assert result.scale[2] == 1
    assert torch.isfinite(result.scale).all()


@pytest.mark.parametrize("gamma", [0.0, 1e-30, -1e-30])
def test_a_channel_that_batch_norm_switches_off_becomes_its_shift(gamma):
    layer = conv1x1([[0.5, -1.0]], None)
    affine = batch_norm_affine(
        torch.zeros(1), torch.ones(1), torch.tensor([gamma]), torch.tensor([0.3]), 1e-5
    )
    result = integer_weight(
        layer, weight_scale=scale_of(layer), num_bits=8, input_scale=S_X, batch_norm=affine
    )
    assert result.codes.abs().max() == 0
    assert torch.allclose(result.bias_codes * result.bias_scale, torch.tensor([0.3]), rtol=1e-6)


def test_a_negative_factor_turns_code_minus_128_into_127():
    layer = conv1x1([[-1.0, 0.5]], None)
    affine = batch_norm_affine(torch.zeros(1), torch.ones(1), -torch.ones(1), None, 0.0)
    result = integer_weight(
        layer, weight_scale=scale_of(layer), num_bits=8, input_scale=S_X, batch_norm=affine
    )
    assert result.codes.flatten().tolist() == [127, -64]


def test_a_per_tensor_scale_stays_one_value_without_batch_norm():
    layer = conv1x1([[0.5, -1.0], [1.0, 0.25]], [0.1, 0.2])
    result = integer_weight(layer, weight_scale=scale_of(layer, None), num_bits=8, input_scale=S_X)
    assert result.scale.shape == (1,)
    assert result.bias_scale.shape == (2,)


def test_a_per_tensor_scale_becomes_one_per_channel_with_batch_norm():
    layer = conv1x1([[0.5, -1.0], [1.0, 0.25]], [0.1, 0.2])
    ones = torch.ones(2)
    affine = batch_norm_affine(0 * ones, ones, torch.tensor([1.0, 2.0]), None, 0.0)
    result = integer_weight(
        layer, weight_scale=scale_of(layer, None), num_bits=8, input_scale=S_X, batch_norm=affine
    )
    assert torch.allclose(result.scale[1], 2 * result.scale[0])


def test_an_absent_bias_stays_absent():
    layer = conv1x1([[0.5, -1.0]], None)
    result = integer_weight(layer, weight_scale=scale_of(layer), num_bits=8, input_scale=S_X)
    assert result.bias_codes is None
    assert result.bias_scale is None


def test_a_bias_outside_int32_is_refused_with_layer_and_channel():
    layer = conv1x1([[0.5], [1e-4]], [0.0, 1e5])
    with pytest.raises(ConvertError, match=r"block\.conv: the bias of output channel 1.*int32"):
        integer_weight(
            layer, weight_scale=scale_of(layer), num_bits=8, input_scale=S_X, name="block.conv"
        )


@pytest.mark.parametrize("which", ["weight", "bias"])
def test_non_finite_parameters_are_refused(which):
    layer = conv1x1([[0.5, 1.0]], [0.0])
    with torch.no_grad():
        getattr(layer, which).flatten()[0] = float("nan")
    with pytest.raises(ConvertError, match=rf"c: the {which} holds NaN"):
        integer_weight(layer, weight_scale=torch.ones(1), num_bits=8, input_scale=S_X, name="c")


def test_a_batch_norm_without_statistics_has_no_arithmetic():
    assert batch_norm_affine(None, None, torch.ones(1), None, 1e-5) is None


def test_a_batch_norm_that_is_not_finite_says_so():
    affine = batch_norm_affine(torch.tensor([float("inf")]), torch.ones(1), None, None, 1e-5)
    assert not affine.is_finite


@pytest.mark.parametrize(("dst_type", "bits"), [("INT4", 4), ("INT8", 8)])
def test_the_converted_layer_knows_the_bits_of_its_weight(dst_type: str, bits: int) -> None:
    text = f"retrain_weight_quant_config {{ arq_retrain {{ dst_type: {dst_type} }} }}"
    prepared = prepare_qat_amct(nn.Sequential(nn.Linear(4, 2)), text)
    prepared(torch.randn(8, 4))
    layer = convert_amct(prepared)[0]
    assert layer.weight_bits == bits
    assert f"weight=int{bits} per tensor" in repr(layer)
