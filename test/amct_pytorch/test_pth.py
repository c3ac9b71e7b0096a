"""Loading of ``.pth`` files."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amct_fx.amct_pytorch._pth import load_state, read_state
from amct_fx.errors import AmctError


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def saved(folder: Path, content: Any) -> str:
    path = folder / "net.pth"
    torch.save(content, path)
    return str(path)


def restored(path: str, name: str | None = None, into: nn.Module | None = None) -> nn.Module:
    into = into or model()
    load_state(into, read_state(path, name), path)
    return into


def same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("name", [None, "net"])
def test_a_state_dict_is_found_in_the_file(name: str | None, tmp_path: Path) -> None:
    source = model()
    state = source.state_dict()
    path = saved(tmp_path, state if name is None else {name: state, "epoch": 3})
    assert same(restored(path, name), source)


def test_the_prefix_of_ddp_is_taken_away(tmp_path: Path) -> None:
    source = model()
    path = saved(tmp_path, {f"module.{k}": v for k, v in source.state_dict().items()})
    assert same(restored(path), source)


def test_the_prefix_of_ddp_is_added(tmp_path: Path) -> None:
    source = model()
    holder = nn.Module()
    holder.module = model()
    assert same(restored(saved(tmp_path, source.state_dict()), into=holder), source)


def test_nothing_in_the_file_is_executed(tmp_path: Path) -> None:
    path = saved(tmp_path, model())  # a pickled module
    with pytest.raises(RuntimeError, match=r"save model.state_dict\(\)"):
        read_state(path)


@pytest.mark.parametrize(
    ("content", "name", "kind", "message"),
    [
        ({"net": model().state_dict()}, "nets", KeyError, "has no 'nets'; it holds 'net'; did you"),
        ({"net": model().state_dict()}, None, RuntimeError, "pass state_dict_name='net'"),
        ({"net": 3}, "net", RuntimeError, "'net' in .*net.pth is no state dict but a int"),
        ([1, 2], None, RuntimeError, "is no state dict but a list"),
        ([1, 2], "net", KeyError, "has no 'net'"),
    ],
)
def test_a_file_without_the_state_dict_is_an_error(
    content: Any, name: str | None, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    with pytest.raises(kind, match=message) as caught:
        read_state(saved(tmp_path, content), name)
    assert isinstance(caught.value, AmctError)


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda s: s.pop("1.running_var"), KeyError, "it has no '1.running_var'"),
        (lambda s: s.update({"2.weight": s["0.weight"]}), RuntimeError, "has no '2.weight'"),
        (
            lambda s: s.update({"0.weight": torch.ones(2, 4), "0.bias": torch.ones(1)}),
            RuntimeError,
            r"0.weight has shape \(2, 4\), the model's \(2, 3\); 0.bias has shape",
        ),
    ],
)
def test_a_state_of_another_model_changes_nothing(
    change: Any, kind: type[Exception], message: str, tmp_path: Path
) -> None:
    state = dict(model().state_dict())
    change(state)
    path = saved(tmp_path, state)
    into = model()
    before = {key: value.clone() for key, value in into.state_dict().items()}
    for expected in {kind, RuntimeError}:
        with pytest.raises(expected, match=message):
            restored(path, into=into)
    assert all(torch.equal(value, before[key]) for key, value in into.state_dict().items())


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ((Path("net.pth"), None), TypeError, "pth_file must be str"),
        (("net.pth", 3), TypeError, "state_dict_name must be str or None, not int"),
        (("missing.pth", None), FileNotFoundError, "no such checkpoint"),
        ((".", None), ValueError, "must name a file, not the folder"),
    ],
)
def test_wrong_arguments(arguments: Any, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message) as caught:
        read_state(*arguments)
    assert isinstance(caught.value, AmctError)


@pytest.mark.parametrize(
    "content", [b"", b"junk", b"no checkpoint", pickle.dumps({"a": 1}, protocol=2)]
)
def test_a_file_of_another_kind_is_an_error(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "net.pth"
    path.write_bytes(content)
    with pytest.raises(RuntimeError, match=r"net\.pth"):
        read_state(str(path))
