"""Groups cut out of the graph compute what the whole model computes there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amct_fx
from amct_fx.copying import shadow_model
from amct_fx.distillation import choose_inputs, distillation_of
from amct_fx.distillation.cuts import Block, float_graph
from amct_fx.distillation.frontier import Frontier, FrontierModel
from amct_fx.distillation.lessons import Teacher
from amct_fx.distillation.taps import TappedModel
from amct_fx.graph import fx_graph_of, regions
from amct_fx.graph.runtime_guard import OPEN
from test.networks import NetWithIsland

from .models import BasicBlock, Chain, Pairs, Residual, calibrated, images, trained_norms

GROUP = 'distill_group {{ start_layer_name: "{}" end_layer_name: "{}" }}\n'


def cases() -> dict[str, tuple[nn.Module, str | None, Tensor]]:
    return {
        "chain": (Chain(), None, images()[0]),
        "chain of two": (Chain(), "group_size: 2", images()[0]),
        "residual": (Residual(), None, images()[0]),
        "user group": (Residual(), GROUP.format("c1", "head"), images()[0]),
        "norm first": (Chain(), GROUP.format("b1", "c2"), images()[0]),
        "inplace first": (Chain(), GROUP.format("r1", "c2"), images()[0]),
        "whole blocks": (
            nn.Sequential(nn.Conv2d(3, 4, 1), BasicBlock(4, 4), BasicBlock(4, 6)),
            GROUP.format("1.conv1", "1.relu") + GROUP.format("2.conv1", "2.relu"),
            images()[0],
        ),
        "tuple": (Pairs(), GROUP.format("a", "pool"), torch.randn(2, 5, 6)),
        "attention": (Pairs(), GROUP.format("attend", "attend"), torch.randn(2, 5, 6)),
        "two inputs": (Pairs(), GROUP.format("join", "b"), torch.randn(2, 5, 6)),
    }


@pytest.mark.parametrize("name", list(cases()))
def test_a_block_equals_the_same_slice_of_the_whole_forward(name: str) -> None:
    model, cfg, x = cases()[name]
    teacher = trained_norms(model)
    student = calibrated(teacher, cfg, [x])
    cuts = distillation_of(student).cuts
    shadow = shadow_model(student, share_buffers=True).eval()
    tapped = shadow_model(student, share_buffers=True).eval()
    graphs = {part: fx_graph_of(region) for part, region in regions(tapped)}
    taps = TappedModel(tapped, graphs, cuts, dict.fromkeys(graphs, OPEN), with_outputs=True)
    moving = FrontierModel(shadow, dict(enumerate(cuts)))  # type: ignore[arg-type]
    frontier = Frontier(None, (x,))
    given = x.clone()
    with torch.no_grad():
        for number, [values] in enumerate(taps.values_of_all([x])[0]):
            entering = moving.inputs(frontier, number)
            assert_equal(entering, values.inputs)
            assert_equal(
                Block(shadow, cuts[number])(choose_inputs(entering, entering)), values.output
            )
            [partly] = taps.values_of(number, [x])
            assert_equal(partly, values)
        assert torch.equal(taps.model(x), student(x))
    assert torch.equal(x, given)


def assert_equal(ours: Any, theirs: Any) -> None:
    left = torch.utils._pytree.tree_leaves(vars(ours) if hasattr(ours, "inputs") else ours)
    right = torch.utils._pytree.tree_leaves(vars(theirs) if hasattr(theirs, "inputs") else theirs)
    assert len(left) == len(right) > 0
    assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("name", list(cases()))
def test_the_float_graph_is_the_one_that_was_traced(name: str) -> None:
    model, cfg, x = cases()[name]
    teacher = trained_norms(model)
    student = amct_fx.prepare_distill_amct(teacher, cfg)
    [(_, region)] = regions(student)
    runs = torch.fx.GraphModule(teacher, float_graph(region))
    assert torch.equal(runs(x.clone()), teacher(x.clone()))


def test_the_teacher_gives_the_values_of_its_own_modules() -> None:
    teacher = trained_norms(Chain())
    student = amct_fx.prepare_distill_amct(teacher)
    x = images()[0]
    runs = Teacher(teacher.train(), student, distillation_of(student).cuts)
    first, second, third = (values for [values] in runs.values_of_all([x])[0])
    teacher.eval()
    with torch.no_grad():
        a = torch.relu(teacher.b1(teacher.c1(x)))  # type: ignore[operator]
        b = teacher.b2(teacher.c2(a))  # type: ignore[operator]
    assert torch.equal(first.inputs[0], x)
    assert torch.equal(first.output, a)
    assert torch.equal(second.output, b)
    assert torch.equal(third.inputs[0], torch.clamp(b, 0, 6).mean((2, 3)))


def test_a_region_inside_an_island_gives_one_item_for_each_call() -> None:
    model = NetWithIsland().eval()
    student = amct_fx.prepare_distill_amct(model)
    cuts = distillation_of(student).cuts
    number = [cut.region for cut in cuts].index("middle.tail")
    runs = Teacher(model, student, cuts)
    large, small = torch.randn(4, 3, 8, 8), torch.randn(2, 3, 8, 8)
    assert len(runs.values_of_all([large])[0][number]) == 1
    assert runs.values_of_all([small])[0][number] == []


def test_groups_are_ordered_as_they_run_also_inside_of_islands() -> None:
    student = amct_fx.prepare_distill_amct(NetWithIsland())
    names = [cut.names[0] for cut in distillation_of(student).cuts]
    assert names == ["stem", "middle.tail.0", "head"]


def test_a_shared_quantizer_is_trained_by_the_first_group_that_reads_it() -> None:
    teacher = trained_norms(Residual())
    student = calibrated(teacher, None, images(1))
    cuts = distillation_of(student).cuts
    by_name = {cut.names[0]: Block(student, cut) for cut in cuts}
    quantizer = student.c1.input_fake_quant  # type: ignore[union-attr]
    assert "side.input_fake_quant" not in dict(student.named_modules())
    trained = by_name["c1"].trained_parameters()
    assert any(parameter is quantizer.clip_max for parameter in trained)
    assert quantizer in by_name["side"].quantizers()
    others = by_name["side"].trained_parameters()
    assert not any(parameter is quantizer.clip_max for parameter in others)
    assert "shared with an earlier layer" in by_name["side"].frozen


def test_parameters_that_serve_elsewhere_are_not_trained() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.b = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(torch.relu(self.b(self.a(x))))

    cfg = GROUP.format("b", "b")
    with pytest.warns(amct_fx.AmctWarning, match="several times"):
        student = amct_fx.prepare_distill_amct(Twice(), cfg)
    plan = distillation_of(student)
    assert [layer.group for layer in plan.layers] == [None, 0]
    assert "called 2 times" in plan.layers[0].reason


@pytest.mark.parametrize(
    ("distance", "taken"), [(0.49, "student"), (0.5, "student"), (0.51, "teacher")]
)
def test_the_input_choice(distance: float, taken: str) -> None:
    """With the smaller mean square 1, the threshold is a mean squared difference of 0.5."""
    teacher = torch.tensor([1.0, 1.0, 1.0, 1.0])
    student = teacher + torch.tensor([1.0, 1.0, 1.0, 1.0]) * distance**0.5
    if taken == "student" and distance == 0.5:
        student = teacher + torch.tensor([1.0, 1.0, 0.0, 0.0])
    [chosen] = choose_inputs([teacher], [student])
    assert torch.equal(chosen, {"student": student, "teacher": teacher}[taken])


def test_the_first_input_decides_for_all_and_nothing_is_shared() -> None:
    near, far = torch.ones(3), torch.full((3,), 9.0)
    same = choose_inputs([near, near], [near, far])
    assert [t.tolist() for t in same] == [near.tolist(), far.tolist()]
    other = choose_inputs([near, near, 7], [far, near, 7])
    assert other[2] == 7
    assert [t.tolist() for t in other[:2]] == [near.tolist(), near.tolist()]
    same[0].zero_()
    assert near.sum() == 3
