"""What cannot be distilled: one clear exception, and everything as before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel

import amct_fx
from amct_fx import distill, prepare_distill_amct

from .models import Chain, Residual, calibrated, images, same_state, state_of, trained_norms
from .test_blocks import GROUP

HEAD = {"version": 1, "batch_num": 1, "group_size": 1, "data_dump": False}


def json_of(groups: list[list[str]], **layers: Any) -> dict[str, Any]:
    return {**HEAD, "distill_group": groups, **(layers or {"fc": {}})}


class Frozen(nn.Module):
    """Refuses to be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)

    def __deepcopy__(self, memo: Any) -> Any:
        message = "no copies"
        raise TypeError(message)


def quantized() -> nn.Module:
    return amct_fx.prepare_qat_amct(Chain())


PREPARE: dict[str, tuple[Callable[[], Any], Any, type[Exception], str]] = {
    "no module": (lambda: 3, None, TypeError, "must be a torch.nn.Module, not int"),
    "prepared": (quantized, None, RuntimeError, "already prepared; give prepare_distill_amct the"),
    "converted": (lambda: amct_fx.convert_amct(calibrated(Chain(), None, images(1))), None,
        RuntimeError, "already converted; give prepare_distill_amct the float model"),
    "misspelt": (Chain, "group_sise: 2", ValueError, "'group_sise'; did you mean 'group_size'"),
    "no colon": (Chain, "group_size = 2", ValueError, "expected ':' after group_size, found '='"),
    "empty start": (Chain, GROUP.format("", "c2"), ValueError, "start_layer_name is empty"),
    "gap": (Chain, json_of([["c1", "c2"]]), ValueError, "'b1' lies between its modules"),
    "one layer": (lambda: nn.Linear(2, 2), None, RuntimeError, "single Linear, which has no name"),
    "no copy": (Frozen, None, RuntimeError, "cannot be copied: TypeError: no copies"),
    "no layer": (lambda: nn.Sequential(nn.ReLU()), None, ValueError, "no layer that can be"),
    "all skipped": (Chain, 'quant_skip_layer_types: "Conv2d" quant_skip_layers: "fc"', ValueError,
        "all are skipped"),
    "missing file": (Chain, "nowhere.cfg", FileNotFoundError, "no such configuration file"),
    "wrong type": (Chain, 3, TypeError, "a path, a text, a dict or None"),
    "unknown module": (Chain, json_of([["c11"]]), ValueError, "no module 'c11'; did you mean"),
    "unknown layer": (Chain, json_of([["c1"]], c11={}), ValueError, "'c11'.*did you mean"),
    "wrong order": (Chain, json_of([["b1", "c1"]]), ValueError, "'c1' is listed in the wrong"),
    "twice": (Chain, json_of([["c1"], ["c1", "b1"]]), ValueError, "have 'c1' in common"),
    "not connected": (Residual, json_of([["c1", "side"]], last={}), ValueError, "not connected"),
    "two ways": (Residual, GROUP.format("stem", "head"), ValueError, "2 ways lead from 'stem'"),
    "reversed": (Chain, GROUP.format("c2", "c1"), ValueError, "only the other way round"),
    "no such start": (Chain, GROUP.format("c3", "c2"), ValueError, "no module 'c3'"),
    "overlap": (Chain, GROUP.format("c1", "c2") + GROUP.format("b2", "fc")
        + GROUP.format("r1", "c2"), ValueError, "in common"),
    "negative": (Chain, {**json_of([["c1"]]), "batch_num": 0}, ValueError, "at least 1"),
    "missing key": (Chain, {"version": 1}, ValueError, "'batch_num' is missing"),
    "activation INT4": (Chain,
        "distill_data_quant_config { ulq_quantize { dst_type: INT4 } }", ValueError, "INT4"),
}  # fmt: skip


@pytest.mark.parametrize("case", list(PREPARE))
def test_what_cannot_be_prepared(case: str) -> None:
    make, cfg, error, text = PREPARE[case]
    model = make()
    state = state_of(model) if isinstance(model, nn.Module) else {}
    with pytest.raises(error, match=text) as caught:
        prepare_distill_amct(model, cfg)
    assert isinstance(caught.value, amct_fx.AmctError)
    if isinstance(model, nn.Module):
        assert same_state(model, state)


DISTILL: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "teacher no module": ({"teacher": 3}, TypeError, "teacher must be a torch.nn.Module, not int"),
    "student no module": ({"student": None}, TypeError, "student must be a torch.nn.Module"),
    "quantized teacher": ({"teacher": quantized()}, RuntimeError, r"teacher is quantized \(c1"),
    "float student": ({"student": Chain()}, RuntimeError, "not prepared; call prepare_distill_a"),
    "data parallel": ({"teacher": DataParallel(Chain())}, TypeError, "DataParallel"),
    "another model": ({"teacher": Residual()}, RuntimeError, "not prepared from this teacher: of"),
    "another width": ({"teacher": Chain(6)}, RuntimeError, r"has \(6, 3, 3, 3\) and the student"),
    "empty loader": ({"loader": []}, ValueError, "the loader is empty"),
    "empty generator": ({"loader": iter([])}, ValueError, "empty; an iterator can be read only"),
    "no loader": ({"loader": 3}, TypeError, "a DataLoader or a list of batches, not int"),
    "a tensor": ({"loader": torch.ones(2)}, TypeError, "not Tensor"),
    "empty sample": ({"loader": [()]}, ValueError, "empty sample"),
    "no tensor": ({"loader": [{"x": 1}]}, ValueError, "a dict, which is no tensor.*sample_fn"),
    "nested": ({"loader": [[[1]]]}, ValueError, "a list of list"),
    "wrong sample_fn": ({"sample_fn": 3}, TypeError, "sample_fn must be a function"),
    "sample_fn of None": ({"sample_fn": lambda batch: None}, ValueError, "not a NoneType"),
    "epochs float": ({"epochs": 1.0}, TypeError, "epochs must be int, not float"),
    "epochs bool": ({"epochs": True}, TypeError, "epochs must be int, not bool"),
    "no epoch": ({"epochs": 0}, ValueError, "epochs must be at least 1"),
    "lr text": ({"lr": "1"}, TypeError, "lr must be a real number"),
    "lr negative": ({"lr": -1.0}, ValueError, "lr must be finite and not negative"),
    "lr nan": ({"lr": float("nan")}, ValueError, "lr must be finite"),
    "clip_lr": ({"clip_lr": "x"}, TypeError, "clip_lr must be a real number"),
    "loss": ({"loss": 3}, TypeError, "loss must be a torch.nn loss or a function"),
    "loss class": ({"loss": nn.MSELoss}, TypeError, r"not the class MSELoss: MSELoss\(\)"),
    "optimizer": ({"optimizer": "SGD"}, TypeError, "optimizer must be a torch.optim.Optimizer"),
    "factory": ({"optimizer_factory": 3}, TypeError, "optimizer_factory must be a function"),
    "cache": ({"cache": "rom"}, ValueError, "cache must be 'ram' or .*did you mean"),
    "bn_mode": ({"bn_mode": "off"}, ValueError, "bn_mode must be"),
    "dump_dir": ({"dump_dir": 3}, TypeError, "dump_dir must be a path"),
    "dump_dir number": ({"dump_dir": 1.5}, TypeError, "dump_dir must be a path, not float"),
    "checkpoint": ({"checkpoint": 3}, TypeError, "checkpoint must be a path, not int"),
    "no device": ({"device": "foo"}, ValueError, "device 'foo' cannot be used .*leave it out"),
    "absent device": ({"device": "xpu:7"}, ValueError, "device 'xpu:7' cannot be used"),
    "device number": ({"device": 1.5}, TypeError, "device must be a name such as .*, not float"),
    "cache_bytes": ({"cache_bytes": 1e9}, TypeError, "cache_bytes must be int, not float"),
    "cache_bytes bool": ({"cache_bytes": True}, TypeError, "cache_bytes must be int, not bool"),
    "cache_bytes below 0": ({"cache_bytes": -1}, ValueError, "cache_bytes must not be negative"),
    "allow_branches": ({"allow_branches": "no"}, TypeError, "allow_branches must be True or Fal"),
    "keep_best": ({"keep_best": 1}, TypeError, r"keep_best must be True or False, not int \(1\)"),
    "progress": ({"progress": 1}, TypeError, "progress must be True, False or None, not int"),
    "weight_step": ({"weight_step": -1}, ValueError, "weight_step must be finite and not"),
    "clip_headroom": ({"clip_headroom": "x"}, TypeError, "clip_headroom must be a real number"),
    "schedule": ({"schedule": "cos"}, ValueError, "schedule must be 'cosine' or .*did you mean"),
    "scheduler": ({"scheduler_factory": 3}, TypeError, "scheduler_factory must be a function"),
    "misspelt cfg": ({"cfg": "group_sise: 2"}, ValueError, "'group_sise'; did you mean 'group_si"),
    "missing cfg": ({"cfg": "nowhere.json"}, FileNotFoundError, "nowhere.json"),
    "unknown group": ({"cfg": json_of([["c9"]])}, ValueError, "no module 'c9'"),
    "loss of many": ({"loss": lambda y, t: y - t}, RuntimeError, r"\[c1.*must return one number"),
    "loss None": ({"loss": lambda y, t: None}, RuntimeError, "not NoneType"),
    "nan data": ({"loader": [torch.full((2, 3, 8, 8), float("nan"))]}, RuntimeError, "'c1'.*NaN"),
    "wrong shape": ({"loader": [torch.ones(2, 5, 8, 8)]}, RuntimeError, "channels"),
}


@pytest.mark.parametrize("case", list(DISTILL))
def test_what_cannot_be_distilled(case: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    changed, error, text = DISTILL[case]
    teacher = trained_norms(Chain())
    given = {
        "teacher": teacher,
        "student": prepare_distill_amct(teacher),
        "loader": images(2),
        **changed,
    }
    models = [given["teacher"], given["student"]]
    states = [state_of(model) for model in models if isinstance(model, nn.Module)]
    with pytest.raises(error, match=text):
        distill(
            given.pop("teacher"),
            given.pop("student"),
            given.pop("loader"),
            given.pop("cfg", None),
            **given,
        )
    found = [model for model in models if isinstance(model, nn.Module)]
    assert all(same_state(model, state) for model, state in zip(found, states, strict=True))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["allow_branches", "linear_channel_wise"])
def test_switches_of_the_preparation_are_true_or_false(name: str) -> None:
    with pytest.raises(TypeError, match=rf"{name} must be True or False, not str \('yes'\)"):
        prepare_distill_amct(Chain(), **{name: "yes"})  # type: ignore[arg-type]


def test_other_shapes_in_the_student_are_named() -> None:
    class Doubles(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(4, 4)
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x) * self.scale

    teacher = Net()
    student = prepare_distill_amct(teacher)
    loss_shapes: list[tuple[int, ...]] = []

    def loss(y: Tensor, t: Tensor) -> Tensor:
        loss_shapes.append(tuple(t.shape))
        return (y - t).square().mean()

    distill(teacher, student, [torch.randn(3, 4)], loss=loss)
    assert set(loss_shapes) == {(3, 4)}


def test_both_kinds_of_optimizer_at_once_are_refused() -> None:
    teacher = trained_norms(Chain())
    student = prepare_distill_amct(teacher)
    with pytest.raises(ValueError, match="not both"):
        distill(
            teacher,
            student,
            images(1),
            optimizer=torch.optim.SGD(student.parameters(), lr=0.1),
            optimizer_factory=torch.optim.SGD,
        )


def test_an_optimizer_that_cannot_take_groups_is_named() -> None:
    teacher = trained_norms(Chain())
    student = prepare_distill_amct(teacher)
    given = torch.optim.LBFGS(student.parameters())
    with pytest.raises(RuntimeError, match=r"the group \[c1, b1, r1\] cannot be distilled"):
        distill(teacher, student, images(1), optimizer=given)
