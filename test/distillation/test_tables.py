"""Rows of the specification's tables that no other file tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

import amct_fx
from amct_fx import amct_pytorch as amct
from amct_fx import prepare_distill_amct
from amct_fx.errors import DistillError

from .models import Chain, images, same_state, state_of, trained_norms
from .test_blocks import GROUP


class Behind(nn.Module):
    """A layer with a ReLU in front, one behind a Dropout behind a ReLU, and one with neither."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.d = nn.Linear(4, 4)
        self.drop = nn.Dropout()

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.a(x))
        x = self.drop(torch.relu(self.b(x)))
        return self.d(torch.sigmoid(self.c(x)))


@pytest.mark.parametrize(
    ("rule", "expected"),
    [("relu", [False, True, True, False]), ("nonnegative", [False, True, True, True])],
)
def test_a_range_starts_at_zero_behind_a_relu(rule: Any, expected: list[bool]) -> None:
    """Section 2: fixed_min absent."""
    student = prepare_distill_amct(Behind(), fixed_min_rule=rule)
    layers = [student.a, student.b, student.c, student.d]
    assert [layer.input_fake_quant.fixed_min for layer in layers] == expected
    for fixed in ("true", "false"):
        text = f"distill_data_quant_config {{ ulq_quantize {{ fixed_min: {fixed} }} }}"
        student = prepare_distill_amct(Behind(), text, fixed_min_rule=rule)
        assert student.b.input_fake_quant.fixed_min is (fixed == "true")


def test_outputs_of_other_sizes_are_named_with_their_shapes() -> None:
    """Section 9.3: numel(y) != numel(t_out)."""
    teacher = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Upsample(scale_factor=2), nn.Conv2d(4, 2, 1))
    student = prepare_distill_amct(teacher, GROUP.format("0", "1"))
    teacher[1].scale_factor = 3.0
    state = state_of(student)
    shapes = r"\(4, 4, 16, 16\) in the student and \(4, 4, 24, 24\) in the teacher"
    with pytest.raises(DistillError, match=rf"the group \[0, 1\] returns shape {shapes}"):
        amct_fx.distill(teacher, student, images(1))
    assert same_state(student, state)


def test_an_error_inside_of_a_group_is_chained() -> None:
    """Section 9.3, last line."""

    def loss(y: Tensor, target: Tensor) -> Tensor:
        raise ZeroDivisionError

    teacher = trained_norms(Chain())
    student = prepare_distill_amct(teacher)
    with pytest.raises(RuntimeError, match=r"\[c1, b1, r1\] cannot be .* ZeroDiv") as caught:
        amct_fx.distill(teacher, student, images(1), loss=loss)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_student_in_data_parallel_is_refused() -> None:
    """Section 11."""
    teacher = trained_norms(Chain())
    student = DataParallel(prepare_distill_amct(teacher))
    with pytest.raises(TypeError, match="the student is in DataParallel; use Distributed"):
        amct_fx.distill(teacher, student, images(1))


CREATE: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no module": ({"model": 3}, TypeError, "model must be a torch.nn.Module, not int"),
    "no data": ({"input_data": 3}, TypeError, "a tensor or a tuple of tensors, not int"),
    "a list": ({"input_data": [1]}, TypeError, "a tensor or a tuple of tensors, not list"),
    "config type": ({"config_file": 3}, TypeError, "config_file must be str, not int"),
    "config empty": ({"config_file": ""}, ValueError, "config_file"),
}  # fmt: skip


@pytest.mark.parametrize("create", [amct.create_distill_config, amct.create_distill_model])
@pytest.mark.parametrize("case", list(CREATE))
def test_wrong_arguments_of_the_functions_that_create(
    case: str, create: Callable[..., Any], tmp_path: Path
) -> None:
    """Section 12, the rows for all calls."""
    changed, error, text = CREATE[case]
    path = str(tmp_path / "a.json")
    if create is amct.create_distill_model:
        amct.create_distill_config(path, Chain(), images(1)[0])
    given = {"config_file": path, "model": Chain(), "input_data": images(1)[0]} | changed
    with pytest.raises(error, match=text):
        create(**given)


@pytest.mark.parametrize("create", [amct.create_distill_config, amct.create_distill_model])
def test_a_model_with_quantizers_is_refused_by_the_name_of_the_call(
    create: Callable[..., Any], tmp_path: Path
) -> None:
    """Section 12, row 3."""
    path = str(tmp_path / "a.json")
    if create is amct.create_distill_model:
        amct.create_distill_config(path, Chain(), images(1)[0])
    prepared = prepare_distill_amct(Chain())
    with pytest.raises(RuntimeError, match=f"already prepared; give {create.__name__} the float"):
        create(path, prepared, images(1)[0])


def test_missing_files_of_the_functions_that_create(tmp_path: Path) -> None:
    """Section 12, row 2."""
    path, missing = str(tmp_path / "a.json"), str(tmp_path / "b.cfg")
    with pytest.raises(FileNotFoundError, match=r"b\.cfg"):
        amct.create_distill_config(path, Chain(), images(1)[0], missing)
    with pytest.raises(FileNotFoundError, match=r"a\.json"):
        amct.create_distill_model(path, Chain(), images(1)[0])


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_scales_that_are_not_finite_are_named_and_nothing_is_written(
    value: float, tmp_path: Path
) -> None:
    """Section 12: saving."""
    teacher = trained_norms(Chain())
    student = amct_fx.distill(teacher, prepare_distill_amct(teacher), images(1))
    with torch.no_grad():
        student.c2.input_fake_quant.clip_max.fill_(value)
    with pytest.raises(RuntimeError, match="c2"):
        amct.save_distill_model(student, f"{tmp_path}/net", images(1)[0])
    assert list(tmp_path.iterdir()) == []
