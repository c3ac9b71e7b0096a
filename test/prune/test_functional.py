"""Which channels and which weights stay: golden numbers, the table of the spec, properties."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from amct_fx.errors import AmctWarning, ConfigError, ModelError, ModelTypeError
from amct_fx.prune.functional import (
    balanced_l2_keep,
    combine_scores,
    filter_scores,
    keep_highest,
    m4n2_mask,
    remaining_channels,
)

from ..golden.reader import Case, load_cases


@pytest.mark.parametrize("case", load_cases("e_m4n2"), ids=str)
def test_masks_without_ties_are_those_of_amct(case: Case):
    mask = m4n2_mask(case.tensor("w"), axis=case["prune_axis"])
    assert torch.equal(mask, case.tensor("mask").bool())


@pytest.mark.parametrize("case", load_cases("f_bcp_func"), ids=str)
def test_kept_channels_are_those_of_amct(case: Case):
    weights = [case.tensor(f"t{i}").movedim(axis, 0) for i, axis in enumerate(case["axes"])]
    arguments = {
        "groups": case["prune_group"],
        "ascend_optimized": case["ascend_optimized"],
        "reduction": "first",
    }
    if case["error"] or weights[0].shape[0] % case["prune_group"]:
        with pytest.raises(ValueError, match=r"prune_ratio|equal groups"):
            balanced_l2_keep(weights, case["prune_ratio"], **arguments)
        return
    kept = balanced_l2_keep(weights, case["prune_ratio"], **arguments)
    assert kept.tolist() == case["kept"]
    assert kept.dtype == torch.int64


TABLE = [  # spec/pruning.md section 4.1, and what its steps give for more numbers
    (20, 0.25, False, 1, 15),
    (20, 0.25, True, 1, 16),
    (10, 0.5, True, 1, 10),
    (32, 0.3, True, 1, 32),
    (33, 0.5, True, 1, 32),
    (5, 0.5, False, 1, 3),
    (7, 0.5, False, 1, 3),
    (10, 0.35, False, 1, 6),
    (64, 0.99, True, 1, 16),
    (48, 0.5, True, 3, 30),
    (160, 0.3, True, 2, 112),
    (160, 0.3, False, 2, 112),
    (40, 0.5, True, 1, 32),
    (36, 0.5, True, 4, 32),
    (6, 0.9, False, 3, 3),
    (12, 0.9, False, 4, 4),
    (1, 0.9, False, 1, 1),
    (3, 0.9, False, 1, 1),
    (12, 0.5, True, 1, 12),
]


@pytest.mark.parametrize(("channels", "ratio", "asc", "groups", "expected"), TABLE)
def test_as_many_channels_remain_as_the_spec_says(channels, ratio, asc, groups, expected):
    found = remaining_channels(channels, ratio, groups=groups, ascend_optimized=asc)
    assert found == expected
    weight = torch.randn(channels, 3, generator=torch.Generator().manual_seed(channels))
    kept = balanced_l2_keep(weight, ratio, groups=groups, ascend_optimized=asc)
    assert len(kept) == expected


def test_the_float32_value_of_a_ratio_counts_as_its_decimal():
    as_read_from_protobuf = torch.tensor(0.35).item()
    assert as_read_from_protobuf != 0.35
    assert remaining_channels(10, as_read_from_protobuf, ascend_optimized=False) == 6


@given(
    blocks=st.integers(1, 12),
    groups=st.integers(1, 6),
    ratio=st.floats(0.01, 0.99),
    asc=st.booleans(),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=150, deadline=None)
def test_every_block_keeps_equally_many_and_those_with_the_largest_norm(
    blocks, groups, ratio, asc, seed
):
    weight = torch.randn(blocks * groups, 2, 3, generator=torch.Generator().manual_seed(seed))
    kept = balanced_l2_keep(weight, ratio, groups=groups, ascend_optimized=asc).tolist()
    assert kept == sorted(set(kept))
    per_block = [[i for i in kept if i // blocks == block] for block in range(groups)]
    assert len({len(block) for block in per_block}) == 1
    norms = weight.double().flatten(1).norm(dim=1)
    for number, block in enumerate(per_block):
        cut = set(range(number * blocks, (number + 1) * blocks)) - set(block)
        for a, b in itertools.product(block, cut):
            assert norms[a] >= norms[b] * (1 - 1e-6)


def test_of_equal_filters_the_lowest_are_cut():
    kept = balanced_l2_keep(torch.ones(8, 3), 0.5, groups=2, ascend_optimized=False)
    assert kept.tolist() == [2, 3, 6, 7]


def test_a_filter_that_is_nan_makes_all_filters_equal_with_a_warning():
    weight = torch.randn(4, 3)
    weight[1, 1] = torch.nan
    with pytest.warns(AmctWarning, match="NaN"):
        kept = balanced_l2_keep(weight, 0.5, ascend_optimized=False)
    assert kept.tolist() == [2, 3]


def test_the_mean_weighs_producers_of_any_scale_equally():
    a = torch.tensor([[1.0], [2], [3], [4]])
    b = torch.tensor([[400.0], [300], [100], [200]])
    assert combine_scores([filter_scores(a), filter_scores(b)]).tolist() == pytest.approx(
        [0.5, 0.5, 1 / 3, 2 / 3]
    )
    assert balanced_l2_keep([a, b], 0.5, ascend_optimized=False).tolist() == [1, 3]
    first = balanced_l2_keep([a, b], 0.5, ascend_optimized=False, reduction="first")
    assert first.tolist() == [2, 3]


def test_half_precision_weights_are_scored_in_their_own_dtype():
    weight = torch.randn(16, 8, 3, 3, dtype=torch.bfloat16)
    assert filter_scores(weight).dtype == torch.bfloat16
    assert len(balanced_l2_keep(weight, 0.5, ascend_optimized=False)) == 8


def test_the_input_is_not_changed_and_not_part_of_a_graph():
    weight = torch.randn(8, 4, requires_grad=True)
    before = weight.detach().clone()
    assert not balanced_l2_keep(weight, 0.5).requires_grad
    assert not m4n2_mask(weight).requires_grad
    assert torch.equal(weight, before)


TIES = [
    ("2111", (0, 3)),
    ("1211", (1, 3)),
    ("1101", (1, 3)),
    ("1110", (1, 2)),
    ("1111", (2, 3)),
    ("0000", (2, 3)),
    ("1121", (2, 3)),
    ("1112", (2, 3)),
    ("0111", (2, 3)),
    ("1011", (2, 3)),
]


@pytest.mark.parametrize(("digits", "kept"), TIES)
def test_among_equal_magnitudes_the_lower_index_is_cut(digits, kept):
    weight = torch.tensor([[float(digit) for digit in digits]])
    for signed in (weight, -weight):
        assert tuple(m4n2_mask(signed)[0].nonzero().flatten().tolist()) == kept


def test_every_pattern_of_ties_cuts_what_a_stable_sort_puts_first():
    for values in itertools.product(range(4), repeat=4):
        weight = torch.tensor([values], dtype=torch.float32)
        kept = sorted(sorted(range(4), key=lambda i: (values[i], i))[2:])
        assert m4n2_mask(weight)[0].nonzero().flatten().tolist() == kept


@pytest.mark.parametrize(
    ("length", "kept"), [(1, 1), (2, 2), (3, 2), (4, 2), (5, 3), (6, 4), (7, 4), (8, 4), (9, 5)]
)
def test_the_rest_of_the_axis_is_filled_with_places_that_are_cut_first(length, kept):
    mask = m4n2_mask(torch.zeros(2, length, 3))
    assert (mask.sum(1) == kept).all()


def test_nan_and_infinity_count_as_large():
    mask = m4n2_mask(torch.tensor([[1.0, torch.nan, 2.0, torch.inf]]))
    assert mask.tolist() == [[False, True, False, True]]


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_axis_dtype_and_layout_gives_the_same_mask(axis, dtype):
    weight = torch.randn(9, 12, 3, 6).to(dtype)
    mask = m4n2_mask(weight, axis=axis)
    assert mask.is_contiguous()
    assert torch.equal(m4n2_mask(weight.to(memory_format=torch.channels_last), axis=axis), mask)
    assert torch.equal(m4n2_mask(weight.movedim(axis, 1)), mask.movedim(axis, 1))
    assert torch.equal(m4n2_mask(weight.double(), axis=axis), mask)


def test_a_mask_chosen_twice_is_the_same():
    weight = torch.randn(8, 16)
    mask = m4n2_mask(weight)
    assert torch.equal(m4n2_mask(weight * mask) & mask, mask)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: m4n2_mask(torch.ones(2, 4, dtype=torch.int8)), ModelTypeError, "torch.int8"),
        (lambda: m4n2_mask([1.0]), ModelTypeError, "list"),
        (lambda: m4n2_mask(torch.ones(4)), ConfigError, r"\[4\] has no axis 1"),
        (lambda: balanced_l2_keep(torch.ones(4, 1), 1.0), ConfigError, "both excluded"),
        (lambda: balanced_l2_keep([], 0.5), ConfigError, "at least one"),
        (lambda: balanced_l2_keep([torch.ones(4, 1)], 0.5, groups=3), ConfigError, "3 equal"),
        (
            lambda: balanced_l2_keep([torch.ones(4, 1), torch.ones(3, 1)], 0.5),
            ModelError,
            r"\[4, 3\]",
        ),
        (
            lambda: balanced_l2_keep(torch.ones(4, 1), 0.5, reduction="max"),
            ConfigError,
            "'mean' or 'first', not 'max'",
        ),
    ],
)
def test_what_cannot_be_pruned_is_refused_by_name(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_the_last_of_equals_are_kept_in_order():
    assert keep_highest(torch.zeros(6), 4, groups=2).tolist() == [1, 2, 4, 5]
