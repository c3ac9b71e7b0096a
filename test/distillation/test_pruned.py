"""Students that are pruned as well: their masks stay."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import amct_fx
from amct_fx.distillation import history_of
from amct_fx.errors import ModelStateError

INT8 = "retrain_data_quant_config { ulq_quantize { } }"
SPARSE = "prune_config { n_out_of_m_pruner { l1_selective_prune { n_out_of_m_type: M4N2 %s } } }"
FILTERS = "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 } } }"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()),
        *(nn.Conv2d(32, 32, 3, padding=1), nn.ReLU()),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 8)),
    ).eval()


def zeros(student: nn.Module) -> list[Tensor]:
    return [
        (layer.weight == 0).clone()
        for layer in student.modules()
        if isinstance(layer, (nn.Conv2d, nn.Linear))
    ]


@pytest.mark.parametrize(
    "pruning", [SPARSE % "", SPARSE % "update_freq: 1", FILTERS], ids=["2:4", "often", "filters"]
)
def test_masks_stay_and_the_error_falls(pruning: str) -> None:
    teacher = network()
    samples = [torch.randn(8, 3, 8, 8) for _ in range(4)]
    student = amct_fx.prepare_qat_amct(teacher, f"{INT8} {pruning}", samples[0])
    before = zeros(student)
    assert any(bool(mask.any()) for mask in before)
    amct_fx.distill(teacher, student, samples, epochs=2)
    assert all(torch.equal(a, b) for a, b in zip(zeros(student), before, strict=True))
    history = history_of(student)
    assert history.model_before is not None
    assert history.model_after is not None
    assert history.model_after < history.model_before
    converted = amct_fx.convert_amct(student)
    with torch.no_grad():
        assert converted(samples[0]).shape == (8, 8)


def test_a_student_that_is_only_pruned_has_no_quantizers() -> None:
    teacher = network()
    student = amct_fx.prepare_qat_amct(teacher, SPARSE % "")
    with pytest.raises(ModelStateError, match=r"no quantizers.*configuration that quantizes as"):
        amct_fx.distill(teacher, student, [torch.randn(2, 3, 8, 8)])
