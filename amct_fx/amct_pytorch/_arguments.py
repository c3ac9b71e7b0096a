"""What all of AMCT's functions check and do with their arguments."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amct_fx.backend_config import is_layer, unbatched_layers, without_unbatched
from amct_fx.checks import check_float_model
from amct_fx.copying import copy_model
from amct_fx.errors import (
    ArgumentError,
    ArgumentTypeError,
    ConfigError,
    InputDataError,
    ModelStateError,
    ModelTypeError,
    did_you_mean,
)
from amct_fx.graph import Capture, capture

if TYPE_CHECKING:
    from amct_fx.config import ModelFacts

__all__ = [
    "SavePaths",
    "Traced",
    "check_different",
    "check_export_names",
    "check_input_data",
    "check_type",
    "config_paths",
    "file_path",
    "float_model",
    "save_paths",
    "trace",
    "unwrapped",
]

_LONGEST_NAME = 255
"""Bytes in a file name that file systems allow. AMCT refuses prefixes above 241 characters only."""


def check_type(name: str, value: object, kind: type, *, optional: bool = False) -> None:
    """Refuse an argument of another class.

    Args:
        name: Name of the argument.
        value: What the caller gave.
        kind: The class it must have.
        optional: Whether ``None`` is allowed, too.

    Raises:
        ArgumentTypeError: Names the argument.

    Example:
        >>> check_type("save_path", 3, str)
        Traceback (most recent call last):
        amct_fx.errors.ArgumentTypeError: save_path must be str, not int
    """
    if isinstance(value, kind) or (optional and value is None):
        return
    expected = f"{kind.__name__} or None" if optional else kind.__name__
    message = f"{name} must be {expected}, not {type(value).__name__}"
    raise ArgumentTypeError(message)


def file_path(name: str, value: object) -> str:
    """Return the path of a file to read or write.

    Args:
        name: Name of the argument, such as ``"record_file"``.
        value: What the caller gave.

    Raises:
        ArgumentTypeError: It is no string.
        ConfigError: It is empty, ends in ``/``, or is a folder.

    Example:
        >>> file_path("record_file", "out/")
        Traceback (most recent call last):
        amct_fx.errors.ConfigError: record_file must name a file, not 'out/'
    """
    check_type(name, value, str)
    path = str(value)
    if not path or path.endswith("/") or Path(path).is_dir():
        message = f"{name} must name a file, not {path!r}"
        raise ConfigError(message)
    return path


def check_different(**paths: str | None) -> None:
    """Refuse a file to write that is also another argument, and would be lost.

    Args:
        **paths: By name of the argument.

    Raises:
        ConfigError: Names two arguments.

    Example:
        >>> check_different(config_file="a.json", record_file="./a.json")
        Traceback (most recent call last):
        amct_fx.errors.ConfigError: config_file and record_file are the same file './a.json'
    """
    seen: dict[Path, str] = {}
    for name, path in paths.items():
        if path is None:
            continue
        first = seen.setdefault(Path(path).resolve(), name)
        if first != name:
            message = f"{first} and {name} are the same file {path!r}"
            raise ConfigError(message)


def config_paths(config_file: object, definition: object) -> tuple[str, Path | None]:
    """Return the path to write, and the path of the ``.cfg`` file."""
    check_type("config_file", config_file, str)
    check_type("config_defination", definition, str, optional=True)
    path = file_path("config_file", config_file)
    if definition == "":
        message = "config_defination is empty; pass None for the defaults"
        raise ConfigError(message)
    if definition is None:
        return path, None
    check_different(config_file=path, config_defination=str(definition))
    return path, Path(str(definition))


@dataclass(frozen=True)
class SavePaths:
    """The two files that AMCT's ``save`` functions write.

    Attributes:
        deploy: The file for ATC.
        fake_quant: The file that simulates it in onnxruntime.
    """

    deploy: Path
    fake_quant: Path


def save_paths(save_path: object) -> SavePaths:
    """Split ``save_path`` at its last slash into a folder and the prefix of two names.

    Args:
        save_path: What the caller gave.

    Raises:
        ArgumentTypeError: It is no string.
        ArgumentError: The names would be too long for a file system, or are those of folders.

    Example:
        >>> save_paths("out/net").deploy.as_posix(), save_paths("out/").fake_quant.as_posix()
        ('out/net_deploy_model.onnx', 'out/fake_quant_model.onnx')
    """
    check_type("save_path", save_path, str)
    folder, slash, prefix = str(save_path).rpartition("/")
    parent = Path(folder or slash)  # "/net" lies in the root folder
    start = f"{prefix}_" if prefix else ""
    names = [f"{start}deploy_model.onnx", f"{start}fake_quant_model.onnx"]
    excess = max(len(name.encode()) for name in names) - _LONGEST_NAME
    if excess > 0:
        message = f"the name at the end of save_path is {excess} bytes too long: {prefix[:20]!r}…"
        raise ArgumentError(message)
    existing = next(part for part in (parent, *parent.absolute().parents) if part.exists())
    if not existing.is_dir():
        message = f"save_path: {str(existing)!r} is a file, not a folder"
        raise ArgumentError(message)
    paths = SavePaths(parent / names[0], parent / names[1])
    for path in (paths.deploy, paths.fake_quant):
        if path.is_dir():
            message = (
                f"save_path: the file {str(path)!r} cannot be written, as a folder has its name"
            )
            raise ArgumentError(message)
    return paths


def check_export_names(input_names: object, output_names: object, dynamic_axes: object) -> None:
    """Refuse names and axes that no exporter could use.

    Args:
        input_names: Names of the inputs in the file, or ``None``.
        output_names: Names of the outputs in the file, or ``None``.
        dynamic_axes: By name of an input or output the axes that may change, as
            ``{axis: name of the axis}`` or as a list of axes; or ``None``.

    Raises:
        ArgumentTypeError: Not lists, not a dict; names the argument.
        ArgumentError: Not lists of strings, a name twice, or axes that are no axes.

    Example:
        >>> check_export_names(["x"], None, {"x": {0: "batch"}})
        >>> check_export_names(["x"], None, {"x": {"0": "batch"}})
        Traceback (most recent call last):
        amct_fx.errors.ArgumentError: dynamic_axes['x'] must be {axis: name} or a list of axes, \
with whole numbers from 0 as axes, not {'0': 'batch'}
    """
    known: list[str] | None = []
    for name, names in (("input_names", input_names), ("output_names", output_names)):
        check_type(name, names, list, optional=True)
        known = _with_names(known, name, names)
    if known is not None and len(set(known)) < len(known):
        message = f"input_names and output_names hold a name twice: {known}"
        raise ArgumentError(message)
    check_type("dynamic_axes", dynamic_axes, dict, optional=True)
    assert isinstance(dynamic_axes, (dict, type(None)))
    for key, axes in (dynamic_axes or {}).items():
        _check_axes(key, axes, known)


def _with_names(known: list[str] | None, argument: str, names: Any) -> list[str] | None:
    """Add checked names to ``known``; ``None`` once a list is missing: then any name may be."""
    if names is not None and not all(isinstance(name, str) and name for name in names):
        message = f"{argument} must be a list of names, not {names!r}"
        raise ArgumentError(message)
    return None if names is None or known is None else known + names


def _check_axes(key: object, axes: object, known: list[str] | None) -> None:
    """Check one entry of ``dynamic_axes``."""
    if not isinstance(key, str):
        message = f"dynamic_axes must have names of inputs or outputs as keys, not {key!r}"
        raise ArgumentError(message)
    if known is not None and key not in known:
        message = f"dynamic_axes names {key!r}, which is no input or output"
        raise ArgumentError(message + did_you_mean(key, known))
    fits = isinstance(axes, (Mapping, list)) and all(map(_is_axis, axes))
    if isinstance(axes, Mapping):
        fits = fits and all(isinstance(name, str) for name in axes.values())
    if not fits:
        message = (
            f"dynamic_axes[{key!r}] must be {{axis: name}} or a list of axes, with whole numbers "
            f"from 0 as axes, not {axes!r}"
        )
        raise ArgumentError(message)


def _is_axis(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def unwrapped(model: object) -> nn.Module:
    """Return a module, out of ``DistributedDataParallel``.

    Raises:
        ModelTypeError: It is no ``nn.Module``.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    if not isinstance(model, nn.Module):
        message = f"model must be a torch.nn.Module, not {type(model).__name__}"
        raise ModelTypeError(message)
    return model


def float_model(model: object, call: str = "this function") -> nn.Module:
    """Return the float model, out of ``DistributedDataParallel``.

    Args:
        model: What the caller gave.
        call: The function that was called, for messages.
    """
    if isinstance(model, DistributedDataParallel):
        model = model.module
    check_float_model(model, call=call)
    if not isinstance(model, nn.Module):  # has just been checked; says it to mypy
        raise ModelTypeError
    if is_layer(model):
        kind = type(model).__name__
        message = f"the model is a single {kind}, which has no name; use nn.Sequential(model)"
        raise ModelStateError(message)
    return model


def check_input_data(data: object, *, tensors_only: bool = False) -> None:
    """Refuse what is no example input."""
    wrong = not isinstance(data, (torch.Tensor, tuple))
    if isinstance(data, tuple) and tensors_only:
        wrong = not all(isinstance(item, torch.Tensor) for item in data)
    if wrong:
        what = "a tensor or a tuple of tensors" if tensors_only else "a tensor or a tuple"
        message = f"input_data must be {what}, not {type(data).__name__}"
        raise InputDataError(message)


@dataclass(frozen=True)
class Traced:
    """A copy of the model in eval mode, what tracing and one run found in it."""

    model: nn.Module
    captured: Capture
    unbatched: frozenset[str]

    def mark_unbatched(self, facts: ModelFacts) -> ModelFacts:
        """Exclude the convolutions whose input has no batch axis."""
        return without_unbatched(facts, self.unbatched)


def trace(model: nn.Module, input_data: Any) -> Traced:
    """Copy, run and trace the model."""
    traced = copied(model).eval()
    unbatched = unbatched_layers(traced, input_data, "input_data")
    captured = capture(traced, is_layer, example_inputs=input_data)
    return Traced(traced, captured, unbatched)


def copied(model: nn.Module) -> nn.Module:
    """Return a deep copy.

    Raises:
        ModelStateError: The model cannot be copied.
    """
    try:
        return copy_model(model)
    except Exception as error:  # whatever the user's objects raise
        message = f"the model cannot be copied: {error}"
        raise ModelStateError(message) from error
