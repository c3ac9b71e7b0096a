"""Checks of arguments that AMCT's functions share."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from amct_fx.amct_pytorch._arguments import (
    check_export_names,
    file_path,
    save_paths,
    unwrapped,
)
from amct_fx.errors import AmctError


@pytest.mark.parametrize(
    ("save_path", "deploy", "fake_quant"),
    [
        ("", "deploy_model.onnx", "fake_quant_model.onnx"),
        ("net", "net_deploy_model.onnx", "net_fake_quant_model.onnx"),
        ("a/b/net.v2", "a/b/net.v2_deploy_model.onnx", "a/b/net.v2_fake_quant_model.onnx"),
        ("a/b/", "a/b/deploy_model.onnx", "a/b/fake_quant_model.onnx"),
        ("/net", "/net_deploy_model.onnx", "/net_fake_quant_model.onnx"),
        ("./net", "net_deploy_model.onnx", "net_fake_quant_model.onnx"),
    ],
)
def test_save_path_is_split_at_its_last_slash(save_path: str, deploy: str, fake_quant: str) -> None:
    paths = save_paths(save_path)
    assert paths.deploy == Path(deploy)
    assert paths.fake_quant == Path(fake_quant)


def test_a_prefix_is_as_long_as_a_file_name_allows(tmp_path: Path) -> None:
    longest = 255 - len("_fake_quant_model.onnx")
    save_paths(f"{tmp_path}/{'n' * longest}").fake_quant.write_text("fits")
    with pytest.raises(ValueError, match="1 bytes too long"):
        save_paths("n" * (longest + 1))
    with pytest.raises(ValueError, match="too long"):
        save_paths("n" * 242)
    with pytest.raises(ValueError, match="too long"):
        save_paths("é" * longest)


def test_folders_and_files_that_are_in_the_way_are_named(tmp_path: Path) -> None:
    (tmp_path / "net_fake_quant_model.onnx").mkdir()
    with pytest.raises(
        ValueError, match=r"net_fake_quant_model.onnx' cannot be written, as a folder"
    ):
        save_paths(f"{tmp_path}/net")
    (tmp_path / "file").write_text("")
    for path in (f"{tmp_path}/file/net", f"{tmp_path}/file/more/net"):
        with pytest.raises(ValueError, match=r"/file' is a file, not a folder"):
            save_paths(path)


@pytest.mark.parametrize("value", ["", "folder/", ".", "/"])
def test_a_path_of_a_file_names_a_file(value: str) -> None:
    with pytest.raises(ValueError, match="record_file must name a file"):
        file_path("record_file", value)


@pytest.mark.parametrize(
    ("check", "message"),
    [
        (lambda: file_path("record_file", Path("a")), "record_file must be str, not PosixPath"),
        (lambda: save_paths(None), "save_path must be str, not NoneType"),
        (lambda: unwrapped(nn.Linear), "model must be a torch.nn.Module, not type"),
        (lambda: check_export_names("x", None, None), "input_names must be list or None, not str"),
        (lambda: check_export_names(None, ("y",), None), "output_names must be list or None"),
        (lambda: check_export_names(None, None, [0]), "dynamic_axes must be dict or None"),
    ],
)
def test_a_wrong_type_names_the_argument(check: Callable[[], Any], message: str) -> None:
    with pytest.raises(TypeError, match=message) as caught:
        check()
    assert isinstance(caught.value, AmctError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([1], None, None), "input_names must be a list of names"),
        (([""], None, None), "input_names must be a list of names"),
        ((None, ["y", None], None), "output_names must be a list of names"),
        ((["x"], ["x"], None), "hold a name twice"),
        ((None, None, {0: {0: "n"}}), "must have names of inputs or outputs as keys, not 0"),
        ((None, None, {"x": 0}), r"dynamic_axes\['x'\] must be"),
        ((None, None, {"x": (0,)}), r"dynamic_axes\['x'\] must be"),
        ((None, None, {"x": [-1]}), r"dynamic_axes\['x'\] must be"),
        ((None, None, {"x": [True]}), r"dynamic_axes\['x'\] must be"),
        ((None, None, {"x": {"0": "n"}}), r"dynamic_axes\['x'\] must be"),
        ((None, None, {"x": {0: 1}}), r"dynamic_axes\['x'\] must be"),
        ((["input"], ["y"], {"inputs": [0]}), "is no input or output; did you mean 'input'"),
    ],
)
def test_wrong_names_and_axes_are_both_classes_of_errors(
    arguments: tuple[Any, Any, Any], message: str
) -> None:
    for kind in (RuntimeError, ValueError):
        with pytest.raises(kind, match=message):
            check_export_names(*arguments)


@pytest.mark.parametrize(
    "arguments",
    [
        (None, None, None),
        (["x"], ["y"], {"x": {0: "n"}, "y": [0]}),
        (["x"], None, {"whatever": {0: "n", 2: "h"}}),
    ],
)
def test_right_names_and_axes_pass(arguments: tuple[Any, Any, Any]) -> None:
    check_export_names(*arguments)
