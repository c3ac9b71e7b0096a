"""The rows of the error table of spec/pruning.md section 12, for every function of pruning."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amct_fx import amct_pytorch as amct
from amct_fx import prepare_qat_amct
from amct_fx.errors import AmctError
from test.amct_pytorch.test_prune import FILTER, INT8, Net, config, fresh, images

CREATES = [amct.create_prune_retrain_model, amct.create_compressed_retrain_model]
RESTORES = [amct.restore_prune_retrain_model, amct.restore_compressed_retrain_model]


class Uncopyable(Net):
    def __deepcopy__(self, memo: Any) -> Any:
        message = "holds a socket"
        raise TypeError(message)


class Untraceable(Net):
    """Decides by values, so it stays Python code."""

    def forward(self, x: Tensor) -> Tensor:
        """Run on ``[N, 3, H, W]``."""
        if float(x.sum()) > 1e9:
            x = -x
        y: Tensor = super().forward(x)
        return y


class Normed(nn.Module):
    """Cannot run in train mode on one example."""

    def __init__(self) -> None:
        super().__init__()
        self.f1, self.n, self.f2 = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Run on ``[N, 6]``."""
        y: Tensor = self.f2(torch.relu(self.n(self.f1(x))))
        return y


def prepared() -> nn.Module:
    return prepare_qat_amct(fresh(), FILTER, images())


def quantized() -> nn.Module:
    return prepare_qat_amct(fresh())


ROWS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"model": 3}, TypeError, "model must be a torch.nn.Module"),
    ({"model": prepared}, RuntimeError, "already prepared"),
    ({"model": quantized}, RuntimeError, "already prepared"),
    ({"model": Uncopyable}, RuntimeError, "cannot be copied: holds a socket"),
    ({"input_data": [images()]}, RuntimeError, "input_data must be a tensor or a tuple of tensors"),
    ({"input_data": (images(), 3)}, RuntimeError, "input_data must be a tensor or a tuple of"),
    ({"input_data": torch.ones(1, 5, 8, 8)}, RuntimeError, "cannot run on"),
    ({"config_defination": None}, TypeError, "config_defination must be str"),
    ({"config_defination": ""}, ValueError, "config_defination must name a file"),
    ({"config_defination": "/nowhere/p.cfg"}, FileNotFoundError, "nowhere"),
    ({"record_file": 3}, TypeError, "record_file must be str"),
    ({"record_file": "out/"}, ValueError, "record_file must name a file"),
]
RESTORE_ROWS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"record_file": None}, TypeError, "record_file must be str"),
    ({"record_file": "/nowhere/r.txt"}, FileNotFoundError, "nowhere"),
    ({"pth_file": 3}, TypeError, "pth_file must be str"),
    ({"pth_file": "/nowhere/a.pth"}, FileNotFoundError, "nowhere"),
    ({"state_dict_name": 3}, TypeError, "state_dict_name must be str or None"),
    ({"state_dict_name": "nett"}, KeyError, "nett"),
]


def _made(model: Any) -> Any:
    return model() if callable(model) and not isinstance(model, nn.Module) else model


def given(folder: Path, changes: dict[str, Any], text: str = FILTER) -> dict[str, Any]:
    values: dict[str, Any] = {
        "model": fresh(),
        "input_data": images(),
        "config_defination": config(folder, text),
        "record_file": f"{folder}/record.txt",
    }
    made = {k: _made(v) if k == "model" else v for k, v in changes.items()}
    return values | made


def refused(call: Callable[..., Any], values: dict[str, Any], error: Any, text: str) -> None:
    """The call raises one of our errors, changes no module and writes no record."""
    model = values["model"]
    state = copy.copy(model.state_dict()) if isinstance(model, nn.Module) else {}
    state = {key: value.clone() for key, value in state.items() if isinstance(value, Tensor)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with pytest.raises(error, match=text) as caught:
            call(**values)
    assert isinstance(caught.value, AmctError)
    for key, value in state.items():
        assert torch.equal(model.state_dict()[key], value)


@pytest.mark.parametrize(("changes", "error", "text"), ROWS)
@pytest.mark.parametrize("call", CREATES)
def test_create_refuses(call: Any, changes: Any, error: Any, text: str, tmp_path: Path) -> None:
    refused(call, given(tmp_path, changes), error, text)
    assert not (tmp_path / "record.txt").exists()


@pytest.mark.parametrize(("changes", "error", "text"), [*ROWS, *RESTORE_ROWS])
@pytest.mark.parametrize("call", RESTORES)
def test_restore_refuses(call: Any, changes: Any, error: Any, text: str, tmp_path: Path) -> None:
    created = amct.create_prune_retrain_model(**given(tmp_path, {}))
    torch.save({"net": created.state_dict()}, tmp_path / "a.pth")
    values = given(tmp_path, {"pth_file": f"{tmp_path}/a.pth", "state_dict_name": "net"} | changes)
    refused(call, values, error, text)


@pytest.mark.parametrize("call", RESTORES)
def test_a_checkpoint_of_another_model_lists_the_keys(call: Any, tmp_path: Path) -> None:
    values = given(tmp_path, {"pth_file": f"{tmp_path}/a.pth"})
    created = amct.create_prune_retrain_model(**given(tmp_path, {}))
    state = created.state_dict()
    torch.save({key: value for key, value in state.items() if key != "c2.bias"}, values["pth_file"])
    refused(call, values, KeyError, "c2.bias")
    torch.save(state | {"c2.bias": torch.ones(3)}, values["pth_file"])
    refused(call, values, RuntimeError, r"c2.bias has shape \(3,\), the model's \(6,\)")


SAVE_ROWS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"model": 3}, TypeError, "model must be a torch.nn.Module"),
    ({"model": fresh}, RuntimeError, "not prepared"),
    ({"save_path": None}, TypeError, "save_path must be str"),
    ({"input_data": [images()]}, RuntimeError, "input_data must be a tensor or a tuple of tensors"),
    ({"input_names": "x"}, TypeError, "input_names must be list or None"),
    ({"output_names": ("y",)}, TypeError, "output_names must be list or None"),
    ({"dynamic_axes": [0]}, TypeError, "dynamic_axes must be dict or None"),
    ({"dynamic_axes": {0: {0: "n"}}}, RuntimeError, "dynamic_axes must have names"),
    ({"dynamic_axes": {"x": 3}}, RuntimeError, r"dynamic_axes\['x'\] must be"),
    ({"dynamic_axes": {"x": {-1: "n"}}}, RuntimeError, r"dynamic_axes\['x'\] must be"),
    ({"dynamic_axes": {"x": ["0"]}}, RuntimeError, r"dynamic_axes\['x'\] must be"),
]


@pytest.mark.parametrize(("changes", "error", "text"), SAVE_ROWS)
@pytest.mark.parametrize("name", ["prune", "compressed"])
def test_save_refuses(name: str, changes: Any, error: Any, text: str, tmp_path: Path) -> None:
    call = getattr(amct, f"save_{name}_retrain_model")
    created = amct.create_prune_retrain_model(**given(tmp_path, {"record_file": None}))
    made = {k: _made(v) if k == "model" else v for k, v in changes.items()}
    values = {"model": created, "save_path": f"{tmp_path}/out/net", "input_data": images()} | made
    record = {"record_file": f"{tmp_path}/out/r.txt"} if name == "compressed" else {}
    refused(call, values | record, error, text)
    assert not (tmp_path / "out").exists()


def test_a_record_may_be_none(tmp_path: Path) -> None:
    for call in CREATES:
        pruned = call(**given(tmp_path, {"record_file": None}))
        assert pruned.c1.out_channels == 4
    assert [path.name for path in tmp_path.iterdir()] == ["prune.cfg"]


def test_a_part_that_cannot_be_traced_stays_whole_with_that_reason(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 3, 1), Untraceable())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pruned = amct.create_prune_retrain_model(**given(tmp_path, {"model": model}))
        plan = amct_plan(model, tmp_path)
    assert pruned[0].out_channels == 4
    assert pruned[1].out_channels == 3
    assert pruned[2].c1.out_channels == 8
    reasons = {layer.name: f"{layer.code} {layer.text}" for layer in plan.pinned}
    assert "2.c1" in reasons
    assert "1" in reasons


def amct_plan(model: nn.Module, folder: Path) -> Any:
    from amct_fx import prune_plan

    return prune_plan(model, config(folder, FILTER), images(), mode="amct")


def test_one_example_is_enough_although_training_needs_two(tmp_path: Path) -> None:
    for text in (FILTER, FILTER + INT8):
        values = given(tmp_path, {"model": Normed(), "input_data": torch.ones(1, 6)}, text)
        assert amct.create_compressed_retrain_model(**values).f1.out_features == 8
