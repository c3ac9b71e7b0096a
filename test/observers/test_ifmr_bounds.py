"""The histogram never rules out the candidate that wins."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from amct_fx.observers import _ifmr, functional
from amct_fx.observers._ifmr_bounds import Candidates, survivors

SIZE = 70_001


def _spikes() -> Tensor:
    x = torch.randn(SIZE) * 0.1
    x[::7001] = 40.0
    return x


DATA: dict[str, Callable[[], Tensor]] = {
    "normal": lambda: torch.randn(SIZE),
    "behind a relu": lambda: torch.relu(torch.randn(SIZE)),
    "negative": lambda: -torch.rand(SIZE) - 0.5,
    "far from zero": lambda: torch.rand(SIZE) + 100,
    "heavy tails": lambda: torch.randn(SIZE) / torch.rand(SIZE).clamp_min(1e-3),
    "spikes": _spikes,
    "uniform": lambda: torch.rand(SIZE) * 2 - 1,
    "constant": lambda: torch.full((SIZE,), 3.3),
    "zeros": lambda: torch.zeros(SIZE),
    "two values": lambda: torch.tensor([1.0, -0.5]).repeat(SIZE),
    "on a grid": lambda: torch.randint(-127, 128, (SIZE,)) / 127,
    "tiny": lambda: torch.randn(SIZE) * 1e-6,
    "huge": lambda: torch.randn(SIZE) * 1e30,
    "half precision": lambda: torch.randn(SIZE).to(torch.bfloat16),
}


@pytest.mark.parametrize("name", DATA)
@pytest.mark.parametrize("num_bits", [8, 4, 16])
def test_the_winner_is_that_of_the_full_search(name: str, num_bits: int) -> None:
    torch.manual_seed(len(name))
    x = DATA[name]()
    found = functional.ifmr_search(x, num_bits=num_bits)
    assert functional.ifmr_range(x, num_bits=num_bits) == (found.clip_max, found.clip_min)


def test_also_over_batches_with_elements_beyond_the_percentile() -> None:
    torch.manual_seed(0)
    batches = [torch.randn(n) for n in (1_300_000, 900_000, 11)]
    batches[1][5:9] = torch.tensor([50.0, -60.0, 70.0, -80.0])
    found = functional.ifmr_search(batches)
    assert functional.ifmr_range(batches) == (found.clip_max, found.clip_min)
    joined = functional.ifmr_search(torch.cat(batches))
    assert (joined.index, joined.clip_max) == (found.index, found.clip_max)


def test_the_asymmetric_search_too() -> None:
    torch.manual_seed(1)
    x = torch.randn(SIZE).add_(0.5)
    found = functional.ifmr_search(x, symmetric=False)
    clips = functional.ifmr_range(x, symmetric=False)
    assert clips == (found.clip_max, found.clip_min)


def test_most_candidates_are_ruled_out() -> None:
    torch.manual_seed(2)
    quick = _ifmr._search([torch.randn(SIZE)], 8, True, every_loss=False)
    assert 1 <= torch.isfinite(quick.losses).sum() <= 12
    assert math.isfinite(quick.losses[quick.index])


def test_the_true_losses_lie_within_the_bounds() -> None:
    """Whoever is ruled out is worse than the winner by more than rounding."""
    torch.manual_seed(3)
    for x in (torch.randn(SIZE), torch.relu(torch.randn(SIZE)), _spikes()):
        found = functional.ifmr_search(x)
        limits = (found.candidates * 127 / found.candidates).round()
        candidates = Candidates(found.candidates, -limits, limits)
        top, bottom = x.max().reshape(1), x.min().reshape(1)
        left = set(survivors([x], candidates, top, bottom))
        ruled_out = [loss for i, loss in enumerate(found.losses.tolist()) if i not in left]
        assert found.index in left
        assert all(loss > found.losses[found.index] for loss in ruled_out)


@pytest.mark.parametrize("size", [5, 4096, 5000, 3_000_000])
@pytest.mark.parametrize("k", [1, 2, 5])
def test_the_extreme_elements_are_those_of_a_sort(size: int, k: int) -> None:
    x = torch.randn(size)
    ordered = x.sort().values
    assert torch.equal(_ifmr._extreme_elements(x, k, largest=False), ordered[:k])
    assert torch.equal(_ifmr._extreme_elements(x, k, largest=True), ordered[-k:].flip(0))
