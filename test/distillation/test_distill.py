"""The loop: what is trained, what stays, what it costs."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import amct_fx
from amct_fx.distillation import distillation_of, history_of
from amct_fx.nn.qat import QATLayer
from test.networks import NetWithIsland

from .models import (
    Chain,
    Pairs,
    Residual,
    calibrated,
    images,
    mse,
    same_state,
    state_of,
    trained_norms,
)
from .test_blocks import GROUP

pytestmark = pytest.mark.filterwarnings("ignore:INT4 weights become INT8")

A8W4 = "distill_weight_quant_config { arq_distill { dst_type: INT4 } }"
ULQ = "distill_weight_quant_config { ulq_distill { } }"
CLIPS = (
    "distill_data_quant_config { ulq_quantize { clip_max_min { clip_max: 6.0 clip_min: -6.0 } } }"
)


def distilled(model: nn.Module, cfg: Any = None, **options: Any) -> nn.Module:
    """Distil on four batches."""
    student = amct_fx.prepare_distill_amct(model, cfg)
    return amct_fx.distill(model, student, images(), **options)


@pytest.mark.parametrize("cfg", [None, A8W4, ULQ, "group_size: 2", "batch_num: 3", CLIPS])
@pytest.mark.parametrize("network", [Chain, Residual])
def test_no_configuration_makes_the_student_worse(network: type, cfg: str | None) -> None:
    teacher = trained_norms(network())
    count = 3 if cfg == "batch_num: 3" else 1
    before = mse(calibrated(teacher, cfg, images(count)), teacher, images())
    student = distilled(teacher, cfg, epochs=4)
    after = mse(student, teacher, images())
    history = history_of(student)
    assert after <= before
    assert history.model_before == pytest.approx(before, rel=1e-4)
    assert history.model_after == pytest.approx(after, rel=1e-4)


@pytest.mark.parametrize("cfg", [None, A8W4])
def test_no_group_ends_worse_than_it_began(cfg: str | None) -> None:
    history = history_of(distilled(trained_norms(Residual()), cfg, epochs=2, lr=0.3, clip_lr=0.5))
    assert history.groups
    for group in history.groups:
        assert group.before is not None
        assert group.after is not None
        assert group.after <= group.before
        assert group.after == min(group.before, *group.measured)


def test_without_keep_best_the_last_state_stays() -> None:
    history = history_of(
        distilled(trained_norms(Chain()), epochs=2, lr=0.3, schedule="constant", keep_best=False)
    )
    assert [group.kept_epoch for group in history.groups] == [2, 2, 2]
    assert any(group.after > group.before for group in history.groups)  # type: ignore[operator]


def test_the_kept_losses_are_those_of_the_returned_student() -> None:
    """The last group ends the model, so its loss is the error of the whole student."""
    teacher = trained_norms(Chain())
    student = distilled(teacher, epochs=2)
    last = history_of(student).groups[-1].after
    assert last == pytest.approx(mse(student, teacher, images()), rel=1e-5)


def test_a_group_that_gets_no_better_is_trained_again_with_smaller_steps() -> None:
    history = history_of(distilled(trained_norms(Chain()), lr=3e-3, clip_lr=1e-4))
    again = [group for group in history.groups if len(group.losses) > 1]
    assert again
    assert any(group.kept_epoch == 1 for group in again)


def test_the_teacher_is_the_same_afterwards() -> None:
    teacher = trained_norms(Chain()).train()
    teacher.r1.eval()
    calls: list[int] = []
    teacher.c1.register_forward_hook(lambda *_: calls.append(1))
    teacher.register_forward_pre_hook(lambda *_: calls.append(2))
    state, modes = state_of(teacher), [part.training for part in teacher.modules()]
    hooks = [dict(part._forward_hooks) for part in teacher.modules()]
    attributes = [sorted(vars(part)) for part in teacher.modules()]
    clean = trained_norms(Chain())
    clean.load_state_dict(state)
    student = amct_fx.prepare_distill_amct(clean)
    amct_fx.distill(teacher, student, images(), epochs=2)
    assert same_state(teacher, state)
    assert [part.training for part in teacher.modules()] == modes
    assert [dict(part._forward_hooks) for part in teacher.modules()] == hooks
    assert [sorted(vars(part)) for part in teacher.modules()] == attributes
    assert all(parameter.grad is None for parameter in teacher.parameters())
    assert calls.count(1) == calls.count(2) == 8


def test_the_student_is_the_given_object_in_eval_mode_without_gradients() -> None:
    teacher = trained_norms(Chain())
    student = amct_fx.prepare_distill_amct(teacher).train()
    result = amct_fx.distill(teacher, student, images())
    assert result is student
    assert not any(part.training for part in student.modules())
    assert all(parameter.grad is None for parameter in student.parameters())
    assert all(parameter.requires_grad for parameter in student.parameters())
    assert not any(key.startswith("teacher") for key in student.state_dict())
    amct_fx.convert_amct(student)


@pytest.mark.parametrize("mode", ["eval", "train"])
def test_batch_norms_keep_their_statistics_unless_asked(mode: Any) -> None:
    teacher = trained_norms(Chain())
    mean = teacher.b1.running_mean.clone()
    student = distilled(teacher, bn_mode=mode, keep_best=False)
    assert torch.equal(student.b1.running_mean, mean) is (mode == "eval")
    assert not torch.equal(student.b1.weight, teacher.b1.weight)


def test_a_skipped_layer_stays_float_and_is_trained() -> None:
    teacher = trained_norms(Chain())
    student = amct_fx.prepare_distill_amct(teacher, 'quant_skip_layers: "c2"')
    assert not isinstance(student.c2, QATLayer)
    amct_fx.distill(teacher, student, images(), keep_best=False)
    assert not torch.equal(student.c2.weight, teacher.c2.weight)


@pytest.mark.parametrize(
    ("cfg", "branches"),
    [
        (GROUP.format("c1", "head"), False),
        (GROUP.format("stem", "head"), True),
        (GROUP.format("drop", "c2") + GROUP.format("head", "last"), False),
    ],
)
def test_functions_dropout_and_skips_are_part_of_a_group(cfg: str, branches: bool) -> None:
    teacher = trained_norms(Residual())
    student = amct_fx.prepare_distill_amct(teacher, cfg, allow_branches=branches)
    for cut in distillation_of(student).cuts:
        assert all(isinstance(name, str) for name in cut.names)
    x = images(1)[0]
    before = copy.deepcopy(student).eval()
    with torch.no_grad():
        before(x)
        expected = before(x)
    amct_fx.distill(teacher, student, [x], lr=0.0, clip_lr=0.0)
    with torch.no_grad():
        assert torch.equal(student(x), expected)


@pytest.mark.parametrize("cfg", [GROUP.format("a", "attend"), GROUP.format("join", "b")])
def test_tuples_and_several_inputs(cfg: str) -> None:
    teacher = Pairs().eval()
    batches = [torch.randn(8, 5, 6) for _ in range(4)]
    student = amct_fx.prepare_distill_amct(teacher, cfg)
    amct_fx.distill(teacher, student, batches, epochs=5)
    for group in history_of(student).groups:
        assert group.after < group.before  # type: ignore[operator]


@pytest.mark.parametrize(("start", "end"), [("b1", "c2"), ("r1", "c2")])
def test_user_groups_win_over_automatic_units(start: str, end: str) -> None:
    student = amct_fx.prepare_distill_amct(Chain(), GROUP.format(start, end))
    groups = [cut.names for cut in distillation_of(student).cuts]
    user = next(names for names in groups if names[0] == start)
    assert user[-1] == end
    others = [name for names in groups if names != user for name in names]
    assert set(others).isdisjoint(user)
    assert "c1" in others


def test_each_quantized_layer_is_listed_with_its_group() -> None:
    student = amct_fx.prepare_distill_amct(Residual(), 'quant_skip_layers: "head"')
    plan = distillation_of(student)
    assert {layer.name for layer in plan.layers} == {
        name for name, part in student.named_modules() if isinstance(part, (nn.Conv2d, nn.Linear))
    }
    assert all(layer.group is not None for layer in plan.layers)
    text = str(plan)
    assert "head   Linear  float    4 [head]  (the configuration does not quantize it)" in text
    assert text.endswith("5 of 6 layers quantized, 6 groups, 0 quantized layers in no group")


def test_configured_clips_are_not_calibrated() -> None:
    student = distilled(trained_norms(Chain()), CLIPS, lr=0.0, clip_lr=0.0)
    quantizer = student.c1.input_fake_quant
    assert (quantizer.clip_max.item(), quantizer.clip_min.item()) == (6.0, -6.0)


@pytest.mark.parametrize("cache", ["ram", "disk"])
def test_the_teacher_runs_once_per_batch_for_all_groups(cache: Any) -> None:
    teacher = trained_norms(Chain())
    student = amct_fx.prepare_distill_amct(teacher)
    calls: list[int] = []
    teacher.register_forward_hook(lambda *_: calls.append(1))
    amct_fx.distill(teacher, student, images(), epochs=3, cache=cache)
    assert len(calls) == history_of(student).teacher_passes == 12


def test_the_student_runs_once_per_batch_for_all_groups() -> None:
    teacher = trained_norms(Chain())
    student = amct_fx.prepare_distill_amct(teacher)
    calls: list[Tensor] = []
    student.b1.register_forward_hook(lambda *args: calls.append(args[2]))
    student = amct_fx.prepare_distill_amct(teacher)
    student.c1.weight.register_hook(lambda grad: calls.append(grad))
    amct_fx.distill(teacher, student, images(), epochs=3)
    assert len(calls) == 12  # backwards of the first block, and none through it later


@pytest.mark.parametrize("options", [{"cache": "none"}, {"cache": "disk"}, {"cache_bytes": 0}])
def test_every_cache_gives_the_same_student(options: dict[str, Any]) -> None:
    teacher = trained_norms(Residual())
    expected = distilled(teacher, epochs=2).state_dict()
    found = distilled(teacher, epochs=2, **options).state_dict()
    assert all(torch.equal(found[key], value) for key, value in expected.items())


def test_a_loader_with_labels_and_an_own_sample_function() -> None:
    teacher = trained_norms(Chain())
    plain = distilled(teacher).state_dict()
    pairs = [(x, torch.zeros(4)) for x in images()]
    dicts = [{"image": x} for x in images()]
    for loader, sample_fn in ((pairs, None), (dicts, lambda sample: [sample["image"]])):
        student = amct_fx.prepare_distill_amct(teacher)
        amct_fx.distill(teacher, student, loader, sample_fn=sample_fn)
        assert all(torch.equal(student.state_dict()[key], plain[key]) for key in plain)


def test_a_shuffling_loader_gives_new_batches_each_epoch() -> None:
    teacher = trained_norms(Chain())
    student = amct_fx.prepare_distill_amct(teacher)
    loader = DataLoader(torch.cat(images()), batch_size=4, shuffle=True)  # type: ignore[arg-type]
    amct_fx.distill(teacher, student, loader, epochs=2, lr=0.0, clip_lr=0.0)
    steps = history_of(student).groups[0].steps
    assert steps[:4] != steps[4:8]


def test_batch_num_beyond_the_loader_reads_it_again() -> None:
    teacher = trained_norms(Chain())
    for cache in ("ram", "none"):
        student = amct_fx.prepare_distill_amct(teacher, "batch_num: 6")
        amct_fx.distill(teacher, student, images(4), cache=cache)  # type: ignore[arg-type]
        assert student.c1.input_fake_quant.is_calibrated


def test_a_calibrated_student_is_not_calibrated_again() -> None:
    """So a state saved after the calibration gives the same student."""
    teacher = trained_norms(Chain())
    state = calibrated(teacher, None, images(1)).state_dict()
    student = amct_fx.prepare_distill_amct(teacher)
    student.load_state_dict(state)
    amct_fx.distill(teacher, student, images())
    expected = distilled(teacher).state_dict()
    for key, value in expected.items():
        if not key.endswith("_extra_state"):
            assert torch.equal(student.state_dict()[key], value)


def test_islands_are_distilled_where_their_parts_can_be_traced() -> None:
    teacher = NetWithIsland().eval()
    student = amct_fx.prepare_distill_amct(teacher)
    amct_fx.distill(teacher, student, images(3), epochs=3)
    history = history_of(student)
    assert [group.names[0] for group in history.groups] == ["stem", "middle.tail.0", "head"]
    assert all(group.after < group.before for group in history.groups)  # type: ignore[operator]
    reasons = {layer.name: layer.reason for layer in distillation_of(student).layers}
    assert "cannot be traced" in reasons["middle.conv"]


@pytest.mark.parametrize("sizes", [(4, 2, 4), (2, 4, 4), (4, 4, 2)])
@pytest.mark.parametrize("cache", ["ram", "none"])
def test_a_group_is_trained_on_the_batches_that_reach_it(
    sizes: tuple[int, ...], cache: Any
) -> None:
    teacher = NetWithIsland().eval()
    student = amct_fx.prepare_distill_amct(teacher)
    batches = [torch.randn(size, 3, 8, 8) for size in sizes]
    options: dict[str, Any] = {"epochs": 2, "cache": cache, "keep_best": False}
    amct_fx.distill(teacher, student, batches, **options)
    steps = {group.names[0]: len(group.steps) for group in history_of(student).groups}
    assert steps == {"stem": 6, "middle.tail.0": 4, "head": 6}


def test_a_group_that_no_batch_reaches_is_reported() -> None:
    teacher = NetWithIsland().eval()
    student = amct_fx.prepare_distill_amct(teacher)
    with pytest.warns(amct_fx.AmctWarning, match=r"no batch reaches the group \[middle.tail.0"):
        amct_fx.distill(teacher, student, images(2, batch=2))
    notes = {group.names[0]: group.note for group in history_of(student).groups}
    assert notes["middle.tail.0"] == "no batch reaches it"


def test_a_group_without_parameters_is_left_out_with_a_warning() -> None:
    teacher = trained_norms(Chain())
    config = {
        "version": 1,
        "batch_num": 1,
        "group_size": 1,
        "data_dump": False,
        "distill_group": [["r1"], ["fc"]],
        "fc": {},
    }
    student = amct_fx.prepare_distill_amct(teacher, config)
    with pytest.warns(amct_fx.AmctWarning, match=r"the group \[r1\] has nothing to train"):
        amct_fx.distill(teacher, student, images())
    assert history_of(student).groups[0].note == "nothing to train"


def test_no_groups_means_calibration_only() -> None:
    teacher = trained_norms(Chain())
    config = {
        "version": 1,
        "batch_num": 1,
        "group_size": 1,
        "data_dump": False,
        "distill_group": [],
        "fc": {},
    }
    with pytest.warns(amct_fx.AmctWarning, match="calibrated, and not trained"):
        student = amct_fx.prepare_distill_amct(teacher, config)
    amct_fx.distill(teacher, student, images())
    assert student.fc.input_fake_quant.is_calibrated
    assert torch.equal(student.c1.weight, teacher.c1.weight)


def test_a_student_of_prepare_qat_can_be_distilled() -> None:
    teacher = trained_norms(Chain())
    student = amct_fx.prepare_qat_amct(teacher)
    amct_fx.distill(teacher, student, images(), "group_size: 2", epochs=2)
    assert [group.names for group in history_of(student).groups] == [
        ("c1", "b1", "r1", "c2", "b2"),
        ("fc",),
    ]


def test_a_student_survives_copy_pickle_and_checkpoint(tmp_path: Path) -> None:
    teacher = trained_norms(Chain())
    student = distilled(teacher, A8W4)
    x = images(1)[0]
    with torch.no_grad():
        for other in (copy.deepcopy(student), pickle.loads(pickle.dumps(student))):
            assert torch.equal(other(x), student(x))
            assert str(history_of(other)) == str(history_of(student))
        amct_fx.save_checkpoint(student, tmp_path / "student.pt")
        restored, _ = amct_fx.load_checkpoint(tmp_path / "student.pt", Chain())
        assert torch.equal(restored.eval()(x), student(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_the_call(dtype: torch.dtype) -> None:
    teacher = trained_norms(Chain())
    student = amct_fx.prepare_distill_amct(teacher)
    with torch.autocast("cpu", dtype=dtype):
        amct_fx.distill(teacher, student, images(), epochs=2)
    for group in history_of(student).groups:
        assert group.after <= group.before  # type: ignore[operator]
    assert student.c1.weight.dtype == torch.float32


def test_bfloat16_models() -> None:
    teacher = trained_norms(Chain()).bfloat16()
    student = amct_fx.prepare_distill_amct(teacher)
    for cache in ("ram", "disk"):
        batches = [x.bfloat16() for x in images()]
        amct_fx.distill(teacher, student, batches, cache=cache)  # type: ignore[arg-type]
    assert student.c1.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_the_callers_gradient_mode_does_not_matter(context: Any) -> None:
    teacher = trained_norms(Chain())
    expected = distilled(teacher).state_dict()
    student = amct_fx.prepare_distill_amct(teacher)
    with context():
        amct_fx.distill(teacher, student, images())
    assert all(torch.equal(student.state_dict()[key], value) for key, value in expected.items())


def test_hooks_on_the_student_do_not_change_the_groups() -> None:
    teacher = trained_norms(Chain())
    student = amct_fx.prepare_distill_amct(teacher)
    student.c1.register_forward_hook(lambda *_: None)
    amct_fx.distill(teacher, student, images())
    assert len(history_of(student).groups) == 3
    assert len(student.c1._forward_hooks) == 1


def test_the_history_is_plain_data_and_a_plot() -> None:
    matplotlib = pytest.importorskip("matplotlib.figure")
    history = history_of(distilled(trained_norms(Chain()), epochs=2))
    again = type(history).from_dict(history.to_dict())
    assert again == history
    assert isinstance(history.plot(), matplotlib.Figure)
    assert str(history).count("\n") == 5


def test_a_progress_bar_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    distilled(trained_norms(Chain()), progress=True)
    assert capsys.readouterr().out == ""


def test_nothing_warns() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        distilled(trained_norms(Chain()), epochs=2)
