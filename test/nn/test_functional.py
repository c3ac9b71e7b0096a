"""Quantize and dequantize: exact rounding, and Q/DQ in both exporters."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amct_fx.nn.functional import (
    QParams,
    dequantize_per_channel,
    dequantize_per_tensor,
    quantize_per_tensor,
)
from amct_fx.nn.quantized import Dequantize, Quantize, collect_codes

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def qparams(scale: float, zero_point: int, dtype: torch.dtype = torch.int8) -> QParams:
    tensors = torch.tensor(scale), torch.tensor(zero_point, dtype=dtype)
    return QParams(*tensors, float(tensors[0]), zero_point)


def test_ties_go_to_the_even_code_before_the_zero_point_is_added():
    codes = quantize_per_tensor(torch.tensor([0.5, 1.5, 2.5, -0.5]), qparams(1.0, 1))
    assert codes.tolist() == [1, 3, 3, 1]


def test_codes_saturate():
    assert quantize_per_tensor(torch.tensor([1e9, -1e9]), qparams(0.1, 5)).tolist() == [127, -128]


def test_int16_codes():
    codes = quantize_per_tensor(torch.tensor([100.0]), qparams(0.01, 0, torch.int16))
    assert codes.dtype == torch.int16
    assert codes.item() == 10000


@given(
    scale=st.floats(2.0**-20, 1024.0, width=32),
    zero_point=st.integers(-128, 127),
    codes=st.lists(st.integers(-128, 127), min_size=1, max_size=20),
)
def test_every_code_survives_dequantize_and_quantize(scale, zero_point, codes):
    params = qparams(scale, zero_point)
    given_codes = torch.tensor(codes, dtype=torch.int8)
    values = dequantize_per_tensor(given_codes, params)
    assert torch.equal(quantize_per_tensor(values, params), given_codes)


@given(scale=st.floats(2.0**-20, 1024.0, width=32), rows=st.integers(1, 5))
def test_per_channel_with_equal_scales_is_per_tensor_bit_for_bit(scale, rows):
    codes = torch.randint(-128, 128, (rows, 4), dtype=torch.int8)
    scales = torch.full((rows,), scale)
    expected = dequantize_per_tensor(codes, qparams(scale, 0))
    assert torch.equal(dequantize_per_channel(codes, scales, 0), expected)


def test_half_precision_inputs_are_computed_in_float32():
    x = torch.tensor([1.0, 2.0], dtype=torch.bfloat16)
    assert quantize_per_tensor(x, qparams(0.1, 0)).tolist() == [10, 20]
    quantize = Quantize(0.1, 0)
    assert Dequantize(quantize, torch.bfloat16)(quantize(x)).dtype == torch.bfloat16


def test_quantize_and_dequantize_share_their_buffers():
    quantize = Quantize(0.5, 3)
    dequantize = Dequantize(quantize)
    quantize.load_state_dict(Quantize(0.25, -1).state_dict())
    assert dequantize.scale.item() == 0.25


def test_a_loaded_state_dict_also_renews_the_numbers_for_export():
    quantize = Quantize(0.5, 3)
    quantize.load_state_dict(Quantize(0.25, -1).state_dict())
    assert quantize.qparams[2:] == (0.25, -1)


def test_collect_codes_removes_its_hooks_after_an_error():
    model = torch.nn.Sequential(Quantize(0.5, 0))

    with pytest.raises(KeyError), collect_codes(model):
        raise KeyError
    assert not model[0]._forward_hooks


@pytest.mark.parametrize("dynamo", [True, False])
def test_codes_equal_onnxruntime_also_at_ties(tmp_path, dynamo):
    quantize = Quantize(0.03, 7)
    codes = torch.arange(-120, 120)
    x = torch.cat([(codes + 0.5) * quantize.scale, torch.linspace(-5, 5, 4001)])
    path = tmp_path / "q.onnx"
    torch.onnx.export(quantize, (x,), path, dynamo=dynamo, input_names=["x"], verbose=False)
    (result,) = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})
    assert torch.equal(torch.from_numpy(result), quantize(x))
    # PyTorch before 2.8 may write scale and zero point as nodes.
    kinds = {node.op_type for node in onnx.load(path).graph.node}
    assert kinds - {"Constant"} == {"QuantizeLinear"}
