"""The teacher's activations in memory and on disk, and what stays behind: nothing."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import amct_fx
from amct_fx.distillation.cache import ActivationCache, Folder, byte_size
from amct_fx.distillation.taps import GroupValues
from amct_fx.errors import DistillError

from .models import Chain, Residual, images, same_state, state_of, trained_norms

CPU = torch.device("cpu")


@pytest.fixture
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Let temporary folders be made in an empty one, and work in another."""
    (tmp_path / "tmp").mkdir()
    (tmp_path / "work").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    monkeypatch.chdir(tmp_path / "work")
    return tmp_path


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


class Watching:
    """A loss that looks at the files, and may raise."""

    def __init__(self, folder: Path, error: BaseException | None = None) -> None:
        self.folder, self.error = folder, error
        self.found: list[str] = []

    def __call__(self, y: Tensor, target: Tensor) -> Tensor:
        self.found = files(self.folder)
        if self.error is not None:
            raise self.error
        return (y - target).square().mean()


def test_data_dump_writes_the_files_of_amct_and_removes_them(scratch: Path) -> None:
    teacher = trained_norms(Chain())
    student = amct_fx.prepare_distill_amct(teacher, "data_dump: true")
    watching = Watching(scratch)
    amct_fx.distill(teacher, student, images(4), epochs=2, loss=watching)
    expected = {
        f"data_dump_{what}_{epoch}_{step}_cpu.npy"
        for epoch in range(2)
        for step in range(4)
        for what in (
            "input_model_input",
            *(f"{way}_{layer}" for way in ("input", "output") for layer in ("c1", "c2", "fc")),
        )
    }
    assert len(expected) == 56
    assert set(watching.found) == expected
    assert files(scratch) == []
    assert list((scratch / "tmp").glob("amct-fx*")) == []


@pytest.mark.parametrize("error", [RuntimeError("mine"), KeyboardInterrupt(), SystemExit(3)])
def test_nothing_stays_after_an_error_and_both_models_are_as_before(
    scratch: Path, error: BaseException
) -> None:
    teacher = trained_norms(Chain()).train()
    student = amct_fx.prepare_distill_amct(teacher, "data_dump: true").train()
    student.c1.weight.grad = torch.ones_like(student.c1.weight)
    states = state_of(teacher), state_of(student)
    modes = [part.training for model in (teacher, student) for part in model.modules()]
    watching = Watching(scratch, error)
    expected = DistillError if isinstance(error, Exception) else type(error)
    with pytest.raises(expected) as caught:
        amct_fx.distill(teacher, student, images(4), loss=watching)
    if isinstance(error, Exception):
        assert "the group [c1, b1, r1] cannot be distilled: RuntimeError: mine" in str(caught.value)
        assert caught.value.__cause__ is error
    assert len(watching.found) == 28
    assert list((scratch / "tmp").glob("amct-fx*")) == []
    assert same_state(teacher, states[0])
    assert same_state(student, states[1])
    assert [p.training for m in (teacher, student) for p in m.modules()] == modes
    assert student.c1.weight.grad.sum() == student.c1.weight.numel()
    assert not student.c1.input_fake_quant.is_calibrated
    amct_fx.distill(teacher, student, images(4))


def test_a_given_folder_stays_and_a_new_one_goes(scratch: Path) -> None:
    teacher = trained_norms(Chain())
    old, new = scratch / "old", scratch / "new" / "inner"
    old.mkdir()
    (old / "mine.txt").write_text("mine")
    for folder in (old, new):
        watching = Watching(folder)
        student = amct_fx.prepare_distill_amct(teacher)
        amct_fx.distill(teacher, student, images(2), cache="disk", dump_dir=folder, loss=watching)
        assert len([name for name in watching.found if name.endswith(".npy")]) == 14
    assert files(scratch) == ["mine.txt"]
    assert not (scratch / "new").exists()


def test_files_of_the_user_are_not_overwritten(scratch: Path) -> None:
    teacher = trained_norms(Chain())
    mine = scratch / "data_dump_output_c2_0_1_cpu.npy"
    mine.write_text("mine")
    student = amct_fx.prepare_distill_amct(teacher)
    with pytest.raises(DistillError, match=r"c2_0_1_cpu.npy exists already; give an empty"):
        amct_fx.distill(teacher, student, images(2), cache="disk", dump_dir=scratch)
    assert files(scratch) == [mine.name]
    assert mine.read_text() == "mine"


def test_a_full_disk_is_one_clear_error(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[int] = []

    def save(file: Any, array: Any, **_: Any) -> None:
        written.append(1)
        if len(written) > 5:
            raise OSError(28, "No space left on device")
        file.write(array.tobytes())

    monkeypatch.setattr(np, "save", save)
    teacher = trained_norms(Chain())
    student = amct_fx.prepare_distill_amct(teacher)
    state = state_of(student)
    with pytest.raises(DistillError, match=r"cannot be written .*No space left on device; free"):
        amct_fx.distill(teacher, student, images(2), cache="disk")
    assert list((scratch / "tmp").glob("amct-fx*")) == []
    assert same_state(student, state)


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_one_clear_error(scratch: Path) -> None:
    scratch.chmod(0o500)
    try:
        teacher = trained_norms(Chain())
        student = amct_fx.prepare_distill_amct(teacher)
        with pytest.raises(DistillError, match="cannot be written"):
            amct_fx.distill(teacher, student, images(2), cache="disk", dump_dir=scratch / "new")
    finally:
        scratch.chmod(0o700)


def test_memory_is_used_up_to_the_budget_and_then_the_disk(scratch: Path) -> None:
    x = torch.randn(2, 3)
    groups = [[GroupValues((x,), x * 2)]]
    size = byte_size([x, x * 2])
    with Folder() as folder:
        cache = ActivationCache(["c1"], folder, CPU, budget=2 * size)
        batches = [cache.add((x,), groups, epoch=0, step=step) for step in range(4)]
        assert files(scratch) == [
            f"data_dump_{what}_0_{step}_cpu.npy"
            for what in ("input_c1", "input_model_input", "output_c1")
            for step in (2, 3)
        ]
        assert cache.memory_left == 0
        for batch in batches:
            [values] = batch.group(0)
            assert torch.equal(batch.inputs()[0], x)
            assert torch.equal(values.inputs[0], x)
            assert torch.equal(values.output, x * 2)
    assert files(scratch) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int64])
def test_every_dtype_and_structure_survives_the_disk(dtype: torch.dtype, scratch: Path) -> None:
    x = (torch.randn(3, 4) * 50).to(dtype)
    values = GroupValues((x, 7, None, [x[0].t()]), (x.t(), {"a": x[:, ::2]}))
    with Folder() as folder:
        cache = ActivationCache(["c/1", "c/1", "model_input"], folder, CPU, budget=0)
        batch = cache.add((x, x[0]), [[values], [values, values], []], epoch=3, step=0)
        [found] = batch.group(0)
        assert found.inputs[1:3] == (7, None)
        assert torch.equal(found.inputs[3][0], x[0])
        assert found.output[0].dtype == dtype
        assert torch.equal(found.output[0], x.t())
        assert torch.equal(found.output[1]["a"], x[:, ::2])
        assert len(batch.group(1)) == 2
        assert batch.group(2) == []
        assert torch.equal(batch.inputs()[1], x[0])
        assert "data_dump_input_model_input_0_3_0_cpu.npy" in files(scratch)
    assert files(scratch) == []


def test_two_groups_that_begin_with_one_module_have_files_of_their_own(scratch: Path) -> None:
    teacher = trained_norms(Residual())
    student = amct_fx.prepare_distill_amct(teacher)
    watching = Watching(scratch)
    amct_fx.distill(teacher, student, images(1), cache="disk", loss=watching)
    assert len(watching.found) == len(set(watching.found)) == 1 + 2 * 6
