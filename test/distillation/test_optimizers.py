"""What trains a group: optimizers, their rates and limits, losses; and what comes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import amct_fx
from amct_fx.distillation import distillation_of, history_of
from amct_fx.distillation.cuts import Block, fewest_bits
from amct_fx.distillation.optim import (
    WEIGHT_STEP,
    Trained,
    default_optimizer,
    rebuilt_optimizer,
)
from amct_fx.observers import ULQWeightFakeQuantize

from .models import Chain, calibrated, images, mse, trained_norms
from .test_distill import A8W4, CLIPS, ULQ, distilled

pytestmark = pytest.mark.filterwarnings("ignore:INT4 weights become INT8")


def test_learned_weight_scales_are_learned() -> None:
    teacher = trained_norms(Chain())
    start = calibrated(teacher, ULQ, images(1))
    student = distilled(teacher, ULQ, epochs=2, keep_best=False)
    scales = [part for part in student.modules() if isinstance(part, ULQWeightFakeQuantize)]
    assert len(scales) == 3
    for name, part in student.named_modules():
        if isinstance(part, ULQWeightFakeQuantize):
            assert not torch.equal(part.scale, start.get_submodule(name).scale)
    arq = history_of(distilled(teacher, epochs=2)).groups[0]
    assert history_of(student).groups[0].steps != arq.steps
    converted = amct_fx.convert_amct(student)
    expected = student.fc.weight_fake_quant.scale
    assert torch.equal(converted.fc.weight_scale, expected.detach())


def test_small_updates_accumulate_in_the_master_weights() -> None:
    teacher = trained_norms(Chain())
    student = amct_fx.prepare_distill_amct(teacher)
    options = {"lr": 1e-6, "schedule": "constant", "keep_best": False}
    amct_fx.distill(teacher, student, images(), epochs=13, **options)  # type: ignore[arg-type]
    moved = (student.c1.weight - teacher.c1.weight).abs()
    assert 1e-6 < moved.max() < 60e-6
    codes = student.c1.weight / student.c1.weight_scale().view(-1, 1, 1, 1)
    assert (codes - codes.round()).abs().mean() > 0.1


def test_the_hyper_parameters_of_the_users_optimizer_survive() -> None:
    made: list[torch.optim.Optimizer] = []

    class Watched(torch.optim.SGD):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    teacher = trained_norms(Chain())
    student = amct_fx.prepare_distill_amct(teacher)
    given = Watched(student.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-3)
    amct_fx.distill(teacher, student, images(1), optimizer=given, lr=77.0)
    assert len(made) == 4
    assert made.pop(0) is given
    for optimizer in made:
        rest, clips = optimizer.param_groups
        assert (rest["lr"], rest["momentum"], rest["weight_decay"]) == (0.01, 0.9, 1e-3)
        assert (clips["lr"], clips["momentum"], clips["weight_decay"]) == (0.01, 0.9, 0.0)
        assert {id(p) for p in clips["params"]} <= {
            id(p) for n, p in student.named_parameters() if "fake_quant" in n
        }


SETTINGS: dict[str, dict[str, Any]] = {
    "AdamW": {"betas": (0.7, 0.8), "eps": 1e-6, "weight_decay": 0.3, "amsgrad": True},
    "Adam": {"betas": (0.7, 0.8), "eps": 1e-6},
    "NAdam": {"betas": (0.7, 0.8), "momentum_decay": 0.1},
    "RMSprop": {"alpha": 0.5, "momentum": 0.3, "centered": True},
    "Adagrad": {"lr_decay": 0.1, "initial_accumulator_value": 0.2},
    "SGD": {"momentum": 0.9, "nesterov": True},
    "Rprop": {"etas": (0.4, 1.1), "step_sizes": (1e-7, 1e-3)},
}


@pytest.mark.parametrize("kind", list(SETTINGS))
def test_every_optimizer_of_torch_can_be_rebuilt(kind: str) -> None:
    """Also one whose values were changed after construction, as by a scheduler."""
    teacher = trained_norms(Chain())
    student = amct_fx.prepare_distill_amct(teacher)
    given = getattr(torch.optim, kind)(student.parameters(), lr=1e-4, **SETTINGS[kind])
    given.param_groups[0]["lr"] = 5e-5
    trained = Trained.of(student, student.parameters())
    rest, ranges = rebuilt_optimizer(given, trained).param_groups
    expected = {key: value for key, value in given.param_groups[0].items() if key != "params"}
    assert expected.items() <= rest.items()
    assert {**expected, "weight_decay": 0.0}.items() <= {"weight_decay": 0.0, **ranges}.items()
    amct_fx.distill(teacher, student, images(1), optimizer=given, lr=77.0)
    assert history_of(student).groups[0].steps


def test_the_default_optimizer_does_not_decay_clips() -> None:
    student = calibrated(trained_norms(Chain()), ULQ, images(1))
    trained = Trained.of(student, student.parameters())
    optimizer = default_optimizer(trained, 1e-3, 0.1, weight_step=None)
    rates = {id(p): g for g in optimizer.param_groups for p in g["params"]}
    quantizer = student.c1.input_fake_quant
    clip, scale = rates[id(quantizer.clip_max)], rates[id(student.c1.weight_fake_quant.scale)]
    weight = rates[id(student.c1.weight)]
    assert [(g["lr"], g["weight_decay"]) for g in (clip, scale, weight)] == [
        (0.1, 0.0),
        (1e-4, 0.0),
        (1e-3, 0.01),
    ]
    relative = default_optimizer(trained, 1e-3, None)
    rates = {id(p): g for g in relative.param_groups for p in g["params"]}
    span = (quantizer.clip_max - quantizer.clip_min).item()
    assert rates[id(quantizer.clip_max)]["lr"] == pytest.approx(min(0.1, 0.01 * span))
    layers = [student.c1, student.c2, student.fc]
    quantum = min(float(layer.weight_scale().mean()) for layer in layers)
    assert rates[id(student.c1.weight)]["lr"] == pytest.approx(min(1e-3, WEIGHT_STEP * quantum))
    assert rates[id(student.c1.weight)]["lr"] < 1e-3
    largest = rates[id(student.c1.weight_fake_quant.scale)]["lr"] * 128
    assert largest == pytest.approx(WEIGHT_STEP * quantum)


def test_factories_of_optimizer_and_scheduler() -> None:
    rates: list[float] = []

    def scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
        rates.append(optimizer.param_groups[0]["lr"])
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    distilled(
        trained_norms(Chain()),
        optimizer_factory=lambda groups: torch.optim.SGD(groups, lr=0.25),
        scheduler_factory=scheduler,
    )
    assert rates == [0.25] * 3


def test_a_loss_of_the_users_is_used() -> None:
    seen: list[tuple[int, ...]] = []

    def loss(y: Tensor, target: Tensor) -> Tensor:
        assert y.shape == target.shape
        assert not target.requires_grad
        seen.append(tuple(y.shape))
        return (y - target).abs().mean()

    distilled(trained_norms(Chain()), loss=loss)
    assert (4, 4) in seen


def test_no_clip_is_tightened_to_what_the_samples_hold() -> None:
    teacher = trained_norms(Chain())
    student = distilled(teacher, CLIPS, epochs=20, lr=0.0)
    largest = float(torch.cat(images()).max())
    assert largest * 1.1 <= student.c1.input_fake_quant.clip_max.item() + 1e-6 < 6.0
    free = distilled(teacher, CLIPS, epochs=20, lr=0.0, clip_headroom=None, keep_best=False)
    assert free.c1.input_fake_quant.clip_max < student.c1.input_fake_quant.clip_max


@pytest.mark.parametrize(("cfg", "bits"), [(None, 8), (A8W4, 4)])
def test_one_step_moves_no_weight_further_than_a_share_of_the_distance_of_codes(
    cfg: str | None, bits: int
) -> None:
    teacher = trained_norms(Chain())
    options: dict[str, Any] = {"lr": 1.0, "keep_best": False, "clip_lr": 0.0}
    for share in (0.02, 0.1):
        student = amct_fx.prepare_distill_amct(teacher, cfg)
        scale = float(teacher.fc.weight.detach().abs().max()) / 2 ** (bits - 1)
        amct_fx.distill(teacher, student, images(1), weight_step=share, **options)
        moved = (student.fc.weight - teacher.fc.weight).abs().max()
        assert 0.5 * share * scale < moved < 1.2 * share * scale
    free = amct_fx.prepare_distill_amct(teacher, cfg)
    amct_fx.distill(teacher, free, images(1), weight_step=None, **options)
    assert (free.fc.weight - teacher.fc.weight).abs().max() > 0.9


def test_behind_coarser_weights_a_group_may_take_larger_steps() -> None:
    text = (
        'distill_override_layers { layer_name: "c2" distill_weight_quant_config '
        "{ arq_distill { dst_type: INT4 } } }"
    )
    student = amct_fx.prepare_distill_amct(trained_norms(Chain()), text)
    cuts = distillation_of(student).cuts
    assert fewest_bits(student, cuts) == [8, 4, 4]
    own = [Trained.of(Block(student, cut).module, ()).quantum for cut in cuts]
    assert own[0] == pytest.approx(float(student.c1.weight_scale().mean()))
    behind = [
        Trained.of(Block(student, cut).module, (), bits).quantum
        for cut, bits in zip(cuts, fewest_bits(student, cuts), strict=True)
    ]
    assert behind == pytest.approx([own[0], own[1], 16 * own[2]])


@pytest.fixture(scope="module")
def trained() -> tuple[nn.Module, Any]:
    """Return a trained teacher in eval mode, and the data."""
    from amct_fx_demo.data import digits

    data = digits()
    torch.manual_seed(0)
    teacher = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )
    optimizer = torch.optim.AdamW(teacher.parameters(), lr=5e-3)
    for _ in range(4):
        for part in torch.randperm(len(data.train.images)).split(64):
            optimizer.zero_grad()
            scores = teacher(data.train.images[part])
            nn.functional.cross_entropy(scores, data.train.labels[part]).backward()
            optimizer.step()
    return teacher.eval(), data


def test_a_trained_network_comes_closer_on_data_that_nobody_has_seen(
    trained: tuple[nn.Module, Any],
) -> None:
    teacher, data = trained
    samples = list(data.train.images[:512].split(32))
    held_out, _ = data.held_out
    with torch.no_grad():
        wanted = teacher(held_out).argmax(1)
    for cfg, factor in ((None, 1.0), (A8W4, 0.5)):
        before = calibrated(teacher, cfg, samples[:1])
        student = amct_fx.prepare_distill_amct(teacher, cfg)
        amct_fx.distill(teacher, student, samples, epochs=5)
        assert mse(student, teacher, [held_out]) < factor * mse(before, teacher, [held_out])
        with torch.no_grad():
            # Agreement with the teacher, which is what it learns; against the labels a calibrated
            # network may be ahead of its own teacher by a few lucky answers.
            agreement = [
                float((model(held_out).argmax(1) == wanted).double().mean())
                for model in (student, before)
            ]
        assert agreement[0] >= agreement[1] - 0.005
        for group in history_of(student).groups:
            assert group.after <= group.before  # type: ignore[operator]


def test_few_samples_and_one_epoch_do_no_harm_on_data_that_nobody_has_seen(
    trained: tuple[nn.Module, Any],
) -> None:
    teacher, data = trained
    held_out, _ = data.held_out
    ratios = []
    for draw in range(4):
        torch.manual_seed(draw)
        chosen = torch.randperm(len(data.train.images))[:32]
        samples = list(data.train.images[chosen].split(4))
        before = mse(calibrated(teacher, "batch_num: 2", samples[:2]), teacher, [held_out])
        student = amct_fx.prepare_distill_amct(teacher, "batch_num: 2")
        amct_fx.distill(teacher, student, samples)
        ratios.append(mse(student, teacher, [held_out]) / before)
    assert max(ratios) < 0.9  # with weight_step=None: 1.13
