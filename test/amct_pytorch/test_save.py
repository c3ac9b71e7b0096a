"""All files of AMCT's save functions are written, or none: no record beside a file of another."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amct_fx import amct_pytorch as amct
from amct_fx.errors import AmctWarning

pytest.importorskip("onnx")
CFG = """batch_num: 1
retrain_data_quant_config { ulq_quantize { } }
prune_config { filter_pruner {
    balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }
"""
IMAGE = torch.randn(1, 3, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[nn.Module, dict[Path, bytes]]:
    """Return a model that is saved, and then trains on; and what the files hold."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))
    (tmp_path / "prune.cfg").write_text(CFG)
    created = amct.create_compressed_retrain_model(model, IMAGE, f"{tmp_path}/prune.cfg", None)
    train(created)
    save(created, tmp_path)
    train(created)
    return created, contents(tmp_path)


def train(model: nn.Module) -> None:
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.1)
    model(IMAGE).square().mean().backward()
    optimizer.step()


def save(model: nn.Module, folder: Path, record: str = "out/record.txt") -> None:
    amct.save_compressed_retrain_model(model, f"{folder}/{record}", f"{folder}/out/net", IMAGE)


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_new_save_replaces_all_three(saved: Any, tmp_path: Path) -> None:
    with pytest.warns(AmctWarning, match="exists and is replaced"):
        save(saved[0], tmp_path)
    changed = {path.name for path, old in saved[1].items() if contents(tmp_path)[path] != old}
    assert changed == {"record.txt", "net_deploy_model.onnx", "net_fake_quant_model.onnx"}


@pytest.mark.parametrize("part", ["record_text", "_move"])
def test_a_full_disk_leaves_the_old_files(
    part: str, saved: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"amct_fx.amct_pytorch._save.{part}", full)
    with pytest.raises(OSError, match="No space left"):
        save(saved[0], tmp_path)
    assert contents(tmp_path) == saved[1]


def test_a_record_that_cannot_be_written_leaves_the_old_files(saved: Any, tmp_path: Path) -> None:
    with pytest.raises(NotADirectoryError):
        save(saved[0], tmp_path, "prune.cfg/record.txt")
    assert contents(tmp_path) == saved[1]


def test_a_warning_that_is_an_error_leaves_the_old_files(saved: Any, tmp_path: Path) -> None:
    model, before = saved
    (tmp_path / "out" / "net_deploy_model.onnx").unlink()  # only the other one is warned of
    del before[tmp_path / "out" / "net_deploy_model.onnx"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmctWarning)
        with pytest.raises(AmctWarning, match="net_fake_quant_model"):
            save(model, tmp_path)
    assert contents(tmp_path) == before


def test_no_argument_may_overwrite_another(saved: Any, tmp_path: Path) -> None:
    model, before = saved
    for name in ("deploy", "fake_quant"):
        with pytest.raises(ValueError, match="record_file and save_path are the same file"):
            save(model, tmp_path, f"out/net_{name}_model.onnx")
    cfg, fresh = f"{tmp_path}/prune.cfg", nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 2, 3))
    for create in (amct.create_prune_retrain_model, amct.create_compressed_retrain_model):
        with pytest.raises(ValueError, match="config_defination and record_file are the same"):
            create(fresh, IMAGE, cfg, cfg)
    with pytest.raises(ValueError, match="config and output_cfg are the same file"):
        amct.auto_channel_prune_search(fresh, cfg, [IMAGE, IMAGE], cfg)
    assert contents(tmp_path) == before


SIGNATURES: list[tuple[Callable[..., Any], str]] = [
    (amct.create_prune_retrain_model, "model, input_data, config_defination, record_file"),
    (
        amct.restore_prune_retrain_model,
        "model, input_data, record_file, config_defination, pth_file, state_dict_name=None",
    ),
    (
        amct.save_prune_retrain_model,
        "model, save_path, input_data, input_names=None, output_names=None, dynamic_axes=None",
    ),
    (amct.create_compressed_retrain_model, "model, input_data, config_defination, record_file"),
    (
        amct.restore_compressed_retrain_model,
        "model, input_data, config_defination, record_file, pth_file, state_dict_name=None",
    ),
    (
        amct.save_compressed_retrain_model,
        "model, record_file, save_path, input_data, input_names=None, output_names=None, "
        "dynamic_axes=None",
    ),
    (
        amct.auto_channel_prune_search,
        "model, config, input_data, output_cfg, sensitivity='TaylorLossSensitivity', "
        "search_alg='GreedySearch'",
    ),
]


@pytest.mark.parametrize(("function", "expected"), SIGNATURES)
def test_the_signature_is_amcts(function: Callable[..., Any], expected: str) -> None:
    parameters = inspect.signature(function).parameters.values()
    assert all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in parameters)
    bare = [parameter.replace(annotation=parameter.empty) for parameter in parameters]
    assert ", ".join(map(str, bare)) == expected
