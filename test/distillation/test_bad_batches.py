"""Batches and losses that cannot be used: named, and everything as before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import amct_fx
from amct_fx import prepare_distill_amct
from amct_fx.errors import ArgumentError, DistillError

from .models import Chain, images, same_state, state_of, trained_norms


def spoilt(count: int, bad: int, value: float) -> list[Tensor]:
    batches = images(count)
    batches[bad][0, 0, 0, 0] = value
    return batches


def refused(loader: list[Any], error: type[Exception], text: str, **options: Any) -> None:
    """Distil in vain; teacher and student stay as they are."""
    teacher = trained_norms(Chain())
    student = prepare_distill_amct(teacher)
    states = state_of(teacher), state_of(student)
    with pytest.raises(error, match=text):
        amct_fx.distill(teacher, student, loader, **options)
    assert same_state(teacher, states[0])
    assert same_state(student, states[1])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("options", [{}, {"keep_best": False}, {"cache": "none"}])
@pytest.mark.parametrize(("count", "bad"), [(4, 2), (20, 18)])
def test_a_batch_that_is_not_finite_is_named(
    value: float, options: dict[str, Any], count: int, bad: int
) -> None:
    text = rf"\[c1, b1, r1\].*loss of batch {bad} is (nan|inf).*NaN or infinity in that batch"
    refused(spoilt(count, bad, value), DistillError, text, **options)


class TurnsBad:
    """A loss that is NaN from some call on."""

    def __init__(self, call: int) -> None:
        self.left = call

    def __call__(self, y: Tensor, target: Tensor) -> Tensor:
        self.left -= 1
        loss = (y - target).square().mean()
        return loss if self.left > 0 else loss * float("nan")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (1, r"\[c1, b1, r1\]: the loss of batch 0 is nan.*what the loss function returns"),
        (7, r"\[c1, b1, r1\], epoch 1: the loss of batch 2 is nan"),
    ],
)
@pytest.mark.parametrize("keep_best", [True, False])
def test_a_loss_that_is_not_finite_is_an_error(call: int, text: str, keep_best: bool) -> None:
    refused(images(), DistillError, text, loss=TurnsBad(call), keep_best=keep_best)


@pytest.mark.parametrize("cache", ["ram", "none"])
@pytest.mark.parametrize("place", [0, 2])
def test_a_batch_without_rows_is_refused(cache: Any, place: int) -> None:
    batches = images()
    batches[place] = batches[place][:0]
    text = rf"batch {place} of the loader is empty, its shape is \(0, 3, 8, 8\); leave it out"
    refused(batches, ArgumentError, text, cache=cache)


@pytest.mark.parametrize("cache", ["ram", "none"])
@pytest.mark.parametrize("place", [0, 2])
def test_a_batch_of_another_shape_is_named(cache: Any, place: int) -> None:
    batches = images()
    batches[place] = torch.ones(2, 5, 8, 8)
    text = rf"cannot compute batch {place} of the loader \(\(2, 5, 8, 8\) .*: .*5 channels"
    refused(batches, DistillError, text, cache=cache)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda x: x.long(), r"batch 0 of the loader .*torch.int64\).*should be the same"),
        (lambda x: (x, x), r"batch 0 of the loader .*, \(4, 3, 8, 8\).*takes"),
    ],
)
def test_samples_of_the_wrong_kind_are_named(make: Callable[[Tensor], Any], text: str) -> None:
    batches = [make(x) for x in images(2)]
    refused(batches, RuntimeError, text, sample_fn=lambda batch: batch)
