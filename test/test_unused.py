"""Layers of islands that are never called."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx import AmctWarning, ConvertError, convert_amct, prepare_qat_amct, summarize


class Attention(nn.Module):
    """Reads the weights of its layers without calling them, and cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.proj = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = F.linear(x, self.qkv.weight, self.qkv.bias).chunk(3, -1)
        if self.training:
            v = v + 0
        return F.linear(q * k.softmax(-1) * v, self.proj.weight, self.proj.bias)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), Attention(), nn.Linear(8, 4))


def test_layers_whose_weight_is_only_read_stay_float_with_a_warning():
    x = torch.randn(4, 8)
    prepared = prepare_qat_amct(network())
    prepared(x)
    with pytest.warns(AmctWarning, match=r"1\.qkv, 1\.proj stay float"):
        converted = convert_amct(prepared)
    assert type(converted[1].qkv) is nn.Linear
    assert torch.allclose(converted(x), prepared.eval()(x), atol=0.01)
    reasons = {row.name: row.reason for row in summarize(converted).rows}
    assert "never ran" in reasons["1.qkv"]
    assert not any("fake_quant" in key for key in converted.state_dict())


def test_a_model_that_never_ran_is_still_refused():
    with pytest.raises(ConvertError, match="never calibrated"):
        convert_amct(prepare_qat_amct(network()))
