"""An interrupted distillation goes on at the last finished group."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import amct_fx
from amct_fx.distillation import history_of
from amct_fx.errors import CheckpointError

from .models import Chain, images, same_state, state_of, trained_norms
from .test_distill import CLIPS


class StopsAt:
    """A loss that behaves like Ctrl-C at some call."""

    def __init__(self, call: int) -> None:
        self.left = call

    def __call__(self, y: Tensor, target: Tensor) -> Tensor:
        self.left -= 1
        if self.left == 0:
            raise KeyboardInterrupt
        return (y - target).square().mean()


def loader() -> DataLoader[Tensor]:
    return DataLoader(torch.cat(images()), batch_size=4, shuffle=True)  # type: ignore[arg-type]


def run(teacher: nn.Module, student: nn.Module, file: Path | None, stop: int = -1) -> nn.Module:
    return amct_fx.distill(
        teacher, student, loader(), epochs=2, loss=StopsAt(stop), checkpoint=file
    )


@pytest.mark.parametrize("stop", [3, 40, 60])
def test_the_result_is_that_of_a_run_without_interruption(stop: int, tmp_path: Path) -> None:
    teacher = trained_norms(Chain())
    torch.manual_seed(3)
    expected = run(teacher, amct_fx.prepare_distill_amct(teacher), None)
    student = amct_fx.prepare_distill_amct(teacher)
    before = state_of(student)
    file = tmp_path / "progress.pt"
    torch.manual_seed(3)
    with pytest.raises(KeyboardInterrupt):
        run(teacher, student, file, stop)
    assert same_state(student, before)
    torch.manual_seed(77)
    again = run(teacher, amct_fx.prepare_distill_amct(teacher), file)
    for key, value in expected.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key
    ours, theirs = history_of(again), history_of(expected)
    assert [g.steps for g in ours.groups] == [g.steps for g in theirs.groups]
    assert list(tmp_path.iterdir()) == []


def test_a_finished_group_is_not_trained_again(tmp_path: Path) -> None:
    teacher = trained_norms(Chain())
    file = tmp_path / "progress.pt"
    student = amct_fx.prepare_distill_amct(teacher)
    counting = StopsAt(-1)
    amct_fx.distill(teacher, student, images(), loss=counting)
    total = -counting.left
    with pytest.raises(KeyboardInterrupt):
        amct_fx.distill(
            teacher,
            amct_fx.prepare_distill_amct(teacher),
            images(),
            loss=StopsAt(total - 5),
            checkpoint=file,
        )
    rest = StopsAt(-1)
    student = amct_fx.prepare_distill_amct(teacher)
    amct_fx.distill(teacher, student, images(), loss=rest, checkpoint=file)
    assert -rest.left < total * 0.6


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"no file of torch", "cannot be read"),
        ({"a": 1}, "was not written by distill"),
        (None, "other groups or epochs"),
    ],
)
def test_a_file_of_something_else_is_refused(content: Any, text: str, tmp_path: Path) -> None:
    teacher = trained_norms(Chain())
    file = tmp_path / "progress.pt"
    if isinstance(content, bytes):
        file.write_bytes(content)
    elif content is not None:
        torch.save(content, file)
    else:
        with pytest.raises(KeyboardInterrupt):
            run(teacher, amct_fx.prepare_distill_amct(teacher), file, 60)
    kept = file.read_bytes()
    student = amct_fx.prepare_distill_amct(teacher)
    state = state_of(student)
    with pytest.raises(CheckpointError, match=text):
        amct_fx.distill(teacher, student, images(), epochs=3, checkpoint=file)
    assert file.read_bytes() == kept
    assert same_state(student, state)


ULQ = "distill_weight_quant_config {{ ulq_distill {{ dst_type: {} }} }}"
FIRST = ULQ.format("INT8")


def another(teacher: nn.Module, cfg: str) -> nn.Module:
    return amct_fx.prepare_distill_amct(teacher, cfg)


@pytest.mark.filterwarnings("ignore:INT4 weights become INT8")
@pytest.mark.parametrize(
    "make",
    [
        lambda teacher: another(trained_norms(Chain()), FIRST),
        lambda teacher: another(teacher, ULQ.format("INT4")),
        lambda teacher: another(teacher, FIRST.replace("ulq", "arq")),
        lambda teacher: another(teacher, FIRST + CLIPS),
        lambda teacher: another(teacher, FIRST + "distill_data_quant_config "
            "{ ulq_quantize { fixed_min: true } }"),
    ],
    ids=["weights", "width", "algorithm", "clips", "fixed_min"],
)  # fmt: skip
def test_a_file_of_another_student_is_refused(
    make: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    """Its state would replace the one of the student that is given."""
    teacher = trained_norms(Chain())
    file = tmp_path / "progress.pt"
    with pytest.raises(KeyboardInterrupt):
        run(teacher, another(teacher, FIRST), file, 60)
    kept = file.read_bytes()
    student = make(teacher)
    state = state_of(student)
    with pytest.raises(CheckpointError, match="of another student, with other weights, ranges or"):
        run(teacher, student, file)
    assert file.read_bytes() == kept
    assert same_state(student, state)
    run(teacher, another(teacher, FIRST), file)
    assert list(tmp_path.iterdir()) == []
