"""What a configuration given to ``distill`` may say of the layers of its student."""

from __future__ import annotations

from typing import Any

import pytest

import amct_fx
from amct_fx import prepare_distill_amct
from amct_fx.config.distill_json import load_distill
from amct_fx.distillation import history_of
from amct_fx.errors import ConfigError

from .models import Chain, images, same_state, state_of, trained_norms

A8W4 = "distill_weight_quant_config { arq_distill { dst_type: INT4 } }"
CLIPS = (
    "distill_data_quant_config { ulq_quantize { clip_max_min { clip_max: 6.0 clip_min: -6.0 } } }"
)
LEARNED = "distill_weight_quant_config { ulq_distill { dst_type: INT8 } }"
FROM_ZERO = "distill_data_quant_config { ulq_quantize { fixed_min: true } }"
WHOLE = "distill_weight_quant_config { arq_distill { channel_wise: false } }"


def json_of(**layers: Any) -> dict[str, Any]:
    head = {"version": 1, "batch_num": 1, "group_size": 1, "data_dump": False}
    return {**head, "distill_group": [["c1", "b1", "r1"]], **layers}


def by_name(name: str, inner: str) -> str:
    return f'distill_override_layers {{ layer_name: "{name}" {inner} }}'


CONTRADICTIONS: dict[str, tuple[Any, Any, str]] = {
    "width": (None, A8W4, "'c2': dst_type is INT4 in the configuration and INT8 in the student"),
    "width of one": (None, by_name("c2", A8W4), ":1:.* 'c2': dst_type is INT4"),
    "other width": (A8W4, by_name("c2", "distill_weight_quant_config { arq_distill { } }"),
        "'c2': dst_type is INT8 in the configuration and INT4"),
    "algorithm": (None, LEARNED, "'c1': algo is ulq_distill in the .* and arq_distill in"),
    "scales": (None, WHOLE, "'c1': channel_wise is False in the configuration and True"),
    "clips": (None, CLIPS, "'c1': clip_max is 6.0 in the configuration and found from data"),
    "no clips": (CLIPS, "distill_data_quant_config { ulq_quantize { } }",
        "'c1': clip_max is found from data in the configuration and 6.0"),
    "start": (None, FROM_ZERO, "'c1': fixed_min is True in the configuration and False"),
    "skip": (None, 'quant_skip_layers: "c2"', "'c2': quant_enable is False in the .* and True"),
    "skipped": ('quant_skip_layers: "c2"', by_name("c2", WHOLE), "'c2': quant_enable is True"),
    "json": (None, json_of(c1={}, c2={}), "'fc': quant_enable is False"),
    "json width": (A8W4, json_of(c1={}, c2={}, fc={}), "'c2': dst_type is INT8 .* and INT4"),
    "batches": ("batch_num: 2", "batch_num: 3", "batch_num is 3 in the configuration and 2 in"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CONTRADICTIONS))
@pytest.mark.filterwarnings("ignore::amct_fx.AmctWarning")
def test_settings_that_the_student_does_not_have_are_refused(case: str) -> None:
    prepared, given, message = CONTRADICTIONS[case]
    teacher = trained_norms(Chain())
    student = prepare_distill_amct(teacher, prepared)
    before = state_of(student)
    with pytest.raises(ConfigError, match=message) as caught:
        amct_fx.distill(teacher, student, images(1), given)
    assert "prepare the student with this configuration" in str(caught.value)
    assert same_state(student, before)


@pytest.mark.parametrize(
    ("prepared", "given"),
    [
        (A8W4, "group_size: 2"),
        (A8W4, f"group_size: 2 {A8W4}"),
        (f"{CLIPS} {LEARNED}", f"data_dump: true {CLIPS}"),
        ('quant_skip_layers: "c2"', "group_size: 2"),
        ("batch_num: 2", "group_size: 2"),
        (FROM_ZERO, FROM_ZERO),
        (by_name("fc", WHOLE), by_name("fc", WHOLE)),
        (json_of(c1={}, c2={"quant_enable": False}), json_of(c1={}, c2={"quant_enable": False})),
    ],
)
@pytest.mark.filterwarnings("ignore::amct_fx.AmctWarning")
def test_other_groups_for_the_same_settings_are_taken(prepared: Any, given: Any) -> None:
    teacher = trained_norms(Chain())
    student = prepare_distill_amct(teacher, prepared)
    amct_fx.distill(teacher, student, images(2), load_distill(given))
    assert history_of(student).groups


@pytest.mark.filterwarnings("ignore::amct_fx.AmctWarning")
def test_a_student_of_prepare_qat_is_checked_too() -> None:
    teacher = trained_norms(Chain())
    student = amct_fx.prepare_qat_amct(teacher)
    with pytest.raises(ConfigError, match="'c2': dst_type is INT4"):
        amct_fx.distill(teacher, student, images(1), A8W4)
