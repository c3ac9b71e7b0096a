"""What prepare says of pruning, and what the quantizers of results see."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from amct_fx import convert_amct, prepare_qat_amct, prune_plan
from amct_fx.report.preparation import preparation_of

PRUNE = """prune_config {{ filter_pruner {{ balanced_l2_norm_filter_prune {{
    prune_ratio: 0.5 ascend_optimized: false }} }} }} {skip}"""
BOTH = PRUNE.format(skip="") + "retrain_data_quant_config { ulq_quantize { } }"
BOTH += " retrain_weight_quant_config { arq_retrain { channel_wise: true } }"


class Pooled(nn.Module):
    """Two convolutions, the first with two channels of large values that pruning takes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 4, 1)
        self.conv2 = nn.Conv2d(4, 2, 1)
        nn.init.constant_(self.conv1.weight, 0.5)
        nn.init.constant_(self.conv1.weight[:2], 0.01)
        nn.init.zeros_(self.conv1.bias)
        with torch.no_grad():
            self.conv1.bias[:2] = 100.0

    def forward(self, x: Tensor) -> Tensor:
        """Run on ``[N, 3, H, W]``; a pooling reads the result of the first."""
        y: Tensor = self.conv2(nn.functional.avg_pool2d(self.conv1(x), 2))
        return y


def test_the_plan_of_prepare_lists_settings_that_reach_no_layer_as_prune_plan_does() -> None:
    cfg = PRUNE.format(skip='regular_prune_skip_layers: "0"')
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1))
    images = torch.ones(1, 3, 4, 4)
    preparation = preparation_of(prepare_qat_amct(model, cfg, images))
    assert preparation is not None
    assert preparation.plan is not None
    listed = preparation.plan.pinned
    assert listed == prune_plan(model, cfg, images).pinned
    assert "not_enabled" in {layer.code for layer in listed}


def test_a_quantizer_of_results_calibrates_on_the_channels_that_stay() -> None:
    images = torch.rand(2, 3, 4, 4)
    prepared: Any = prepare_qat_amct(
        Pooled(), BOTH, images, outputs="quantize", row_masks=False
    ).train()
    quantizer = prepared.conv1.output_fake_quant
    assert quantizer.kept_channels.tolist() == [0, 0, 1, 1]
    prepared(images)
    assert quantizer.clip_max.item() < 10
    assert convert_amct(prepared).eval()(images).shape == (2, 2, 2, 2)
