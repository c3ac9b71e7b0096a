"""AMCT's four functions of distillation: signatures, files, errors, and one whole run."""

from __future__ import annotations

import inspect
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import amct_fx
from amct_fx import amct_pytorch as amct
from amct_fx.config.distill import load_distill_config
from amct_fx.config.distill_json import load_distill_json
from amct_fx.record.message import read_record_message

from .distillation.models import Chain, images, mse, same_state, state_of, trained_norms

X = images(1)[0]


def loader(**options: Any) -> DataLoader[Tensor]:
    return DataLoader(torch.cat(images()), batch_size=4, **options)  # type: ignore[arg-type]


def made(folder: Path, model: nn.Module, cfg: str | None = None) -> str:
    """Write a JSON for a model."""
    definition = None
    if cfg is not None:
        definition = str(folder / "distill.cfg")
        Path(definition).write_text(cfg)
    target = str(folder / "config.json")
    amct.create_distill_config(target, model, X, definition)
    return target


@pytest.mark.parametrize(
    ("function", "signature"),
    [
        (amct.create_distill_config, "(config_file, model, input_data, config_defination=None)"),
        (amct.create_distill_model, "(config_file, model, input_data)"),
        (
            amct.distill,
            "(model, compress_model, config_file, train_loader, epochs=1, lr=0.001, "
            "sample_instance=None, loss=None, optimizer=None)",
        ),
        (
            amct.save_distill_model,
            "(model, save_path, input_data, record_file=None, input_names=None, "
            "output_names=None, dynamic_axes=None)",
        ),
    ],
)
def test_the_signatures_are_those_of_amct(function: Any, signature: str) -> None:
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty)
        for parameter in inspect.signature(function).parameters.values()
        if parameter.kind is not inspect.Parameter.KEYWORD_ONLY
    ]
    assert str(inspect.Signature(parameters)) == signature


def test_an_empty_cfg_and_none_give_the_same_json(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first = made(tmp_path / "a", Chain())
    assert Path(first).read_bytes() == Path(made(tmp_path / "b", Chain(), "")).read_bytes()


def test_a_whole_run_in_the_words_of_amct(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    monkeypatch.chdir(tmp_path)
    teacher = trained_norms(Chain()).train()
    teacher.eval()
    config = made(tmp_path, teacher)
    student = amct.create_distill_model(config, teacher, X)
    assert amct.distill(teacher, student, config, loader(), 3, 1e-3) is student
    calibrated = amct_fx.prepare_distill_amct(teacher, config).eval()
    calibrated(X)
    assert mse(student, teacher, images()) < mse(calibrated, teacher, images())
    state = state_of(student)
    amct.save_distill_model(
        student, "out/net", X, input_names=["image"], output_names=["scores"],
        dynamic_axes={"image": {0: "batch"}},
    )  # fmt: skip
    assert same_state(student, state)
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "net_deploy_model.onnx",
        "net_fake_quant_model.onnx",
    ]
    assert "c1" in Path("amct_log/scale_offset_record.txt").read_text()
    session = onnxruntime.InferenceSession("out/net_fake_quant_model.onnx")
    x = torch.cat(images()[:2])
    [found] = session.run(["scores"], {"image": x.numpy()})
    with torch.no_grad():
        expected = amct_fx.convert_amct(student)(x).numpy()
    np.testing.assert_allclose(found, expected, atol=2e-3)


def test_the_prefix_may_be_empty_and_the_record_elsewhere(tmp_path: Path) -> None:
    teacher = trained_norms(Chain())
    student = amct_fx.distill(teacher, amct_fx.prepare_distill_amct(teacher), images())
    record = tmp_path / "record" / "scales.txt"
    amct.save_distill_model(student, f"{tmp_path}/", X, str(record))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"deploy_model.onnx", "fake_quant_model.onnx", "record"}
    assert record.read_text().count("record {") == 3


def test_the_saved_scales_are_the_learned_ones(tmp_path: Path) -> None:
    teacher = trained_norms(Chain())
    text = "distill_weight_quant_config { ulq_distill { } }"
    config = made(tmp_path, teacher, text)
    student = amct.create_distill_model(config, teacher, X)
    start = {
        name: getattr(student, name).weight_fake_quant.scale.detach().clone()
        for name in ("c1", "c2", "fc")
    }
    amct.distill(teacher, student, config, loader(), 3)
    record = tmp_path / "record.txt"
    amct.save_distill_model(student, f"{tmp_path}/net", X, str(record))
    saved = {entry.key: entry.value for entry in read_record_message(record).record}
    for name, before in start.items():
        layer = getattr(student, name)
        learned = layer.weight_fake_quant.scale.detach()
        assert not torch.equal(learned, before)
        norm = {"c1": student.b1, "c2": student.b2}.get(name)
        if norm is not None:  # folded
            learned = learned * norm.weight.abs() * (norm.running_var + norm.eps).rsqrt()
        found = torch.tensor(saved[name].scale_w)
        torch.testing.assert_close(found, learned.detach().reshape(-1), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("kind", ["json", "cfg", "config", "plan"])
def test_every_form_of_a_configuration_is_taken(kind: str, tmp_path: Path) -> None:
    teacher = trained_norms(Chain())
    path = made(tmp_path, teacher, "group_size: 2")
    given: Any = {
        "json": path,
        "cfg": str(tmp_path / "distill.cfg"),
        "config": load_distill_config(tmp_path / "distill.cfg"),
        "plan": load_distill_json(path),
    }[kind]
    student = amct.create_distill_model(given, teacher, X)
    amct.distill(teacher, student, given, loader())
    groups = json.loads(Path(path).read_text())
    from amct_fx.distillation import history_of

    assert [list(g.names) for g in history_of(student).groups] == groups["distill_group"]


def test_a_layer_that_the_json_does_not_list_is_not_quantized(tmp_path: Path) -> None:
    path = Path(made(tmp_path, Chain()))
    config = json.loads(path.read_text())
    del config["c2"]
    path.write_text(json.dumps(config))
    student = amct.create_distill_model(str(path), Chain(), X)
    assert type(student.c2) is nn.Conv2d
    assert type(student.c1) is not nn.Conv2d


class FromDict(amct.DistillSampleBase):
    """Takes the image out of a dict."""

    def get_model_input_data(self, samples: Any) -> Any:
        return [samples["image"]]


class Dicts(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"image": torch.cat(images())[index]}


def test_a_sample_instance_gives_the_inputs(tmp_path: Path) -> None:
    teacher = trained_norms(Chain())
    config = made(tmp_path, teacher)
    student = amct.create_distill_model(config, teacher, X)
    data = DataLoader(Dicts(), batch_size=4)
    amct.distill(teacher, student, config, data, sample_instance=FromDict())


CALLS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "loader": ({"train_loader": images()}, TypeError, "train_loader must be a DataLoader"),
    "epochs": ({"epochs": "1"}, TypeError, "epochs must be int"),
    "lr": ({"lr": None}, TypeError, "lr must be a real number"),
    "int lr": ({"lr": 1, "epochs": 0}, ValueError, "epochs must be at least 1"),
    "sample": ({"sample_instance": 3}, RuntimeError, "subclass of DistillSampleBase"),
    "sample type": ({"sample_instance": FromDict}, TypeError, "subclass of DistillSampleBase"),
    "both": (
        {"sample_instance": FromDict(), "sample_fn": lambda s: s},
        ValueError,
        "not both",
    ),
    "loss": ({"loss": "mse"}, TypeError, "loss must be"),
    "optimizer": ({"optimizer": 3}, TypeError, "optimizer must be"),
    "config type": ({"config_file": 3}, TypeError, "config_file must be str, not int"),
    "config empty": ({"config_file": ""}, ValueError, "config_file is empty"),
    "config missing": ({"config_file": "nowhere.json"}, FileNotFoundError, "nowhere.json"),
    "teacher": ({"model": 3}, TypeError, "must be a torch.nn.Module"),
    "student": ({"compress_model": Chain()}, RuntimeError, "not prepared"),
}


@pytest.mark.parametrize("case", list(CALLS))
def test_wrong_arguments_of_distill(case: str, tmp_path: Path) -> None:
    changed, error, text = CALLS[case]
    teacher = trained_norms(Chain())
    config = made(tmp_path, teacher)
    given = {
        "model": teacher,
        "compress_model": amct.create_distill_model(config, teacher, X),
        "config_file": config,
        "train_loader": loader(),
        **changed,
    }
    with pytest.raises(error, match=text):
        amct.distill(**given)


def test_a_json_of_another_model_is_refused(tmp_path: Path) -> None:
    other = made(tmp_path, nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1)))
    teacher = trained_norms(Chain())
    with pytest.raises(ValueError, match="'0'"):
        amct.create_distill_model(other, teacher, X)
    student = amct_fx.prepare_distill_amct(teacher)
    with pytest.raises(ValueError, match="no module '0'"):
        amct.distill(teacher, student, other, loader())


@pytest.mark.parametrize(
    ("model", "arguments", "error", "text"),
    [
        (lambda: 3, ("net", X), TypeError, "must be a torch.nn.Module"),
        (Chain, ("net", X), RuntimeError, "not prepared"),
        (lambda: amct_fx.prepare_distill_amct(Chain()), ("net", X), RuntimeError, "calibrated"),
        (lambda: amct_fx.prepare_distill_amct(Chain()), (3, X), TypeError, "save_path must be str"),
        (lambda: amct_fx.prepare_distill_amct(Chain()), ("net", 3), TypeError, "input_data"),
        (lambda: amct_fx.prepare_distill_amct(Chain()), ("net", X, 3), TypeError, "record_file"),
    ],
)
def test_wrong_arguments_of_save(
    model: Any, arguments: Any, error: Any, text: str, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=text):
        amct.save_distill_model(model(), *arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_scale_that_is_not_finite_cannot_be_saved(tmp_path: Path) -> None:
    teacher = trained_norms(Chain())
    student = amct_fx.distill(teacher, amct_fx.prepare_distill_amct(teacher), images())
    with torch.no_grad():
        student.c2.weight.fill_(float("inf"))
    with pytest.raises(RuntimeError, match="c2"):
        amct.save_distill_model(student, f"{tmp_path}/net", X)
    assert list(tmp_path.iterdir()) == []
