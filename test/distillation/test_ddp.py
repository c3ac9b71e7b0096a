"""Two gloo ranks distil the same student, and that of one process on the joined batches."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import amct_fx
from amct_fx.distillation import history_of
from amct_fx.distillation.sync import average_tensors

from .models import Chain, images, trained_norms
from .test_distill import CLIPS

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning"),
]


def run(rank: int, job: Callable[[int, Path], None], folder: Path) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    try:
        job(rank, folder)
    finally:
        dist.destroy_process_group()


def on_two_ranks(job: Callable[[int, Path], None], folder: Path) -> list[Any]:
    """Run ``job`` on two ranks; return what each of them saved."""
    mp.start_processes(run, (job, folder), nprocs=2, start_method="fork")
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def teacher() -> nn.Module:
    torch.manual_seed(0)
    return trained_norms(Chain())


def settings(student: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(student.parameters(), lr=0.05, momentum=0.9)
    return {"epochs": 2, "optimizer": optimizer}


def with_sgd(rank: int, folder: Path) -> None:
    model = teacher()
    wrapped = DistributedDataParallel(amct_fx.prepare_distill_amct(model, CLIPS))
    halves = [batch[2 * rank : 2 * rank + 2] for batch in images()]
    student = amct_fx.distill(
        DistributedDataParallel(model), wrapped, halves, CLIPS, **settings(wrapped)
    )
    assert student is wrapped.module
    torch.save((student.state_dict(), history_of(student).to_dict()), folder / f"{rank}.pt")


def test_two_ranks_equal_one_process_on_the_joined_batches(tmp_path: Path) -> None:
    (first, history), (second, _) = on_two_ranks(with_sgd, tmp_path)
    model = teacher()
    student = amct_fx.prepare_distill_amct(model, CLIPS)
    start = {key: value.clone() for key, value in student.state_dict().items()}
    amct_fx.distill(model, student, images(), **settings(student))
    assert any(g.kept_epoch for g in history_of(student).groups)
    for key, value in student.state_dict().items():
        assert torch.equal(first[key], second[key])
        if value.is_floating_point():
            moved = (value - start[key]).abs().max()
            assert (first[key] - value).abs().max() <= 1e-3 * moved + 1e-6, key
            torch.testing.assert_close(first[key], value, rtol=1e-4, atol=1e-8)
    ours = history_of(student).to_dict()["groups"]
    for one, two in zip(ours, history["groups"], strict=True):
        assert one["before"] == pytest.approx(two["before"], rel=1e-4)
        assert one["kept_epoch"] == two["kept_epoch"]


def with_calibration(rank: int, folder: Path) -> None:
    model = teacher()
    student = amct_fx.prepare_distill_amct(model)
    mine = [batch * (1 + rank) for batch in images()]
    amct_fx.distill(model, student, mine, epochs=2, bn_mode="train", cache="disk")
    torch.save(student.state_dict(), folder / f"{rank}.pt")


def test_ranges_parameters_and_statistics_are_equal_on_all_ranks(tmp_path: Path) -> None:
    first, second = on_two_ranks(with_calibration, tmp_path)
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


def uneven(rank: int, folder: Path) -> None:
    model = teacher()
    student = amct_fx.prepare_distill_amct(model)
    try:
        amct_fx.distill(model, student, images(2 + rank))
    except ValueError as error:
        torch.save(str(error), folder / f"{rank}.pt")


def test_ranks_with_different_numbers_of_batches_are_refused_together(tmp_path: Path) -> None:
    for message in on_two_ranks(uneven, tmp_path):
        assert "the loaders of the ranks give [2, 3] batches" in message


def spoilt(rank: int, folder: Path) -> None:
    model = teacher()
    student = amct_fx.prepare_distill_amct(model)
    batches = images()
    if rank == 1:
        batches[2][0] = float("nan")
    try:
        amct_fx.distill(model, student, batches)
    except RuntimeError as error:
        torch.save(str(error), folder / f"{rank}.pt")


def test_a_loss_that_is_not_finite_ends_all_ranks(tmp_path: Path) -> None:
    first, second = on_two_ranks(spoilt, tmp_path)
    assert "[c1, b1, r1]: the loss of another rank is nan" in first
    assert "[c1, b1, r1]: the loss of batch 2 is nan" in second


def test_one_process_averages_nothing() -> None:
    x: Tensor = torch.ones(2)
    average_tensors([x])
    assert x.sum() == 2
