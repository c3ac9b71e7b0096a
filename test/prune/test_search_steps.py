"""The search where groups depend on each other, lands between steps, or meets bad data."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx import (
    AmctWarning,
    convert_amct,
    prepare_qat_amct,
    prune_plan,
    search_channel_pruning,
)
from amct_fx.prune import PrunePlan
from test.prune import networks as nets
from test.prune.families import FAMILIES
from test.prune.test_search import FREE, Plain, data, macs, model


def targets_of(network: nn.Module, count: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 3, 16, 16, generator=generator)
    with torch.no_grad():
        y = copy.deepcopy(network).eval()(x)
    return [x, y + torch.randn(y.shape, generator=generator)]


def split() -> nets.Net:
    """Return a network whose first layer is read by two others, half by half."""

    def forward(m: nets.Net, x: Tensor) -> Tensor:
        y = F.relu(m.a(x))
        left: Tensor = m.b(y[:, :12]) + m.c(y[:, 12:])
        return left

    return nets.Net(forward, a=nets.conv(3, 32), b=nets.conv(12, 4), c=nets.conv(20, 4))


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "plain": Plain,
    "residual": nets.residual,
    "depthwise": nets.inverted,
    "dense": nets.dense,
    "unit with a shuffle": nets.shufflenet,
    "shuffle": FAMILIES["shuffle"],
    "split": split,
}


@pytest.mark.filterwarnings("ignore:the ratio that can be reached:amct_fx.AmctWarning")
@pytest.mark.parametrize("metric", ["macs", "params"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_converted_model_is_as_cheap_as_the_search_says(name: str, metric: Any) -> None:
    network = model(NETWORKS[name])
    samples = targets_of(network)
    for target in (1.3, 2.0):
        found = search_channel_pruning(
            network, f"compress_ratio: {target} {FREE}", samples, metric=metric
        )
        assert found.ratio >= target
        x = samples[0][:1]
        small = convert_amct(prepare_qat_amct(network, found.config, x, plan=found.plan))
        before, after = (
            (macs(network, x), macs(small, x)) if metric == "macs" else map(size, (network, small))
        )
        assert before / after == pytest.approx(found.ratio)
        again = prune_plan(network, found.config, x)  # the ratios in the file give these counts
        assert counts(again) == counts(found.plan)


def size(network: nn.Module) -> int:
    return sum(parameter.numel() for parameter in network.parameters())


def counts(plan: PrunePlan) -> dict[str, int]:
    return {name: len(rows) for name, rows in plan.kept_rows().items()}


def test_it_lands_within_two_percent_where_the_cheapest_step_would_not() -> None:
    network = model(nets.residual)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmctWarning)
        for target in (1.2, 1.5, 3.0):
            config = f"compress_ratio: {target} {FREE}"
            found = search_channel_pruning(network, config, targets_of(network))
            assert target <= found.ratio <= target * 1.02
            assert found.steps[-1].ratio == pytest.approx(found.ratio)


def test_what_alignment_makes_impossible_is_said() -> None:
    network = model(nets.dense)
    with pytest.warns(AmctWarning, match="reached is 1, not 2; ascend_optimized: false allows"):
        search_channel_pruning(network, "compress_ratio: 2", targets_of(network))


def test_groups_that_a_shuffle_ties_are_chosen_together() -> None:
    network = model(nets.shufflenet).eval()
    x = targets_of(network)[0]
    cfg = "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 "
    plan = prune_plan(network, cfg + "ascend_optimized: false } } }", x)
    assert PrunePlan.from_json(plan.to_json()).levels == plan.levels != ()
    uneven = plan.with_kept("c2", range(12))
    text = "'view' needs equally many channels.* 8 of 'c0', 12 of 'c2'; choose these groups toge"
    with pytest.raises(RuntimeError, match=text):
        prepare_qat_amct(network, cfg + "} } }", x, plan=uneven)  # not after the training
    with pytest.raises(RuntimeError, match="choose these groups together"):
        plan.with_rows({"c2": torch.arange(12)})
    even = uneven.with_kept("c0", [*range(12), *range(16, 28)])
    small = convert_amct(prepare_qat_amct(network, cfg + "} } }", x, plan=even))
    assert small.c2.out_channels == 12


def nan_target() -> list[Tensor]:
    x, y = data()
    return [x, y * float("nan")]


BAD_DATA: list[tuple[Callable[[], Any], str]] = [
    (lambda: [data()[0], data()[1][:3]], "data holds 4 inputs, but 3 targets"),
    (nan_target, "the loss of sample 0 is nan"),
    (lambda: [data()[0], torch.ones(4, 7)], "loss of sample 0 cannot be computed .* pass loss="),
]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(("given", "text"), BAD_DATA)
def test_bad_samples_are_named(given: Callable[[], Any], text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        search_channel_pruning(model(), "compress_ratio: 2", given())


@pytest.mark.filterwarnings("ignore:the ratio that can be reached:amct_fx.AmctWarning")
def test_a_loader_is_read_only_as_far_as_it_is_needed() -> None:
    read = []

    def endless() -> Iterator[tuple[Tensor, Tensor]]:
        for number in itertools.count():
            read.append(number)
            yield tuple(data(1))  # type: ignore[misc]

    search_channel_pruning(model(), f"compress_ratio: 1.3 test_iteration: 3 {FREE}", endless())
    assert read == [0, 1, 2]


@pytest.mark.filterwarnings("ignore:the ratio that can be reached:amct_fx.AmctWarning")
def test_targets_of_a_teacher_leave_no_gradients_in_it() -> None:
    teacher = model()
    x = data()[0]
    search_channel_pruning(
        model(), f"compress_ratio: 1.3 test_iteration: 2 {FREE}", [x, teacher(x) + 0.1]
    )
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_objects_and_files_are_checked_before_the_search(tmp_path: Any) -> None:
    class Nothing:
        pass

    class Short:
        def setup_initialization(self, *_args: Any) -> None:
            pass

        def get_sensitivity(self, groups: Any) -> list[list[float]]:
            return [[1.0]] * len(groups)

    class Undefined(Short):
        def get_sensitivity(self, groups: Any) -> list[list[float]]:
            return [[float("nan")] * group.channels for group in groups]

    def search(**options: Any) -> None:
        search_channel_pruning(model(), "compress_ratio: 2", data(), **options)

    with pytest.raises(ValueError, match="an object with channel_prune_search, not"):
        search(search_alg=Nothing())
    with pytest.raises(ValueError, match="an object with get_sensitivity, not"):
        search(sensitivity=3)
    with pytest.raises(RuntimeError, match="one score for each unit"):
        search(sensitivity=Short())
    with pytest.raises(RuntimeError, match="sensitivity of a is not finite"):
        search(sensitivity=Undefined())
    with pytest.raises(ValueError, match="output_cfg must name a file"):
        search(output_cfg=tmp_path)
    with pytest.raises(ValueError, match="output_cfg and output_plan are the same file"):
        search(output_cfg=tmp_path / "a", output_plan=tmp_path / "a")
    with pytest.raises(ValueError, match=r"bits names 'outt'.*did you mean 'out'"):
        search(metric="bitops", bits={"outt": (4, 8)})
    assert list(tmp_path.iterdir()) == []
