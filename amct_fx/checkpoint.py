"""One file with everything a prepared or converted model needs: the recipe and the state.

A state dict alone restores a model that was prepared the same way. A checkpoint also holds the
configuration and the options of that call, so the float model and the file are enough. The file
loads with ``weights_only=True``: it holds tensors and plain data only.
"""

from __future__ import annotations

import os
import pickle
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from amct_fx.checks import check_float_model
from amct_fx.convert import convert_amct
from amct_fx.errors import CheckpointError, ModelStateError
from amct_fx.nn.qat import QATLayer
from amct_fx.nn.quantized import Quantize
from amct_fx.observers import ULQFakeQuantize, ULQWeightFakeQuantize
from amct_fx.prepare import prepare_qat_amct
from amct_fx.report.preparation import preparation_of

__all__ = ["load_checkpoint", "save_checkpoint"]

_FORMAT = 1
"""Version of the file layout; a newer file is refused, an older one must stay readable."""


def save_checkpoint(
    model: nn.Module, path: str | os.PathLike[str], *, extra: Mapping[str, Any] | None = None
) -> None:
    """Write a prepared or converted model, recipe and state, into one file.

    The file is written beside ``path`` and renamed, so a crash leaves the old one.

    Args:
        model: What :func:`amct_fx.prepare_qat_amct` or :func:`amct_fx.convert_amct` returned, not
            wrapped.
        path: The file to write.
        extra: Anything else to keep, such as the state of the optimizer; tensors and plain data.

    Raises:
        ModelStateError: The model was never prepared, or was prepared from a ``QConfigMapping``,
            which is code and cannot stand in a file: save its ``state_dict`` instead.

    Example:
        >>> import tempfile
        >>> from amct_fx import prepare_qat_amct
        >>> prepared = prepare_qat_amct(nn.Sequential(nn.Linear(4, 2)), "batch_num: 2")
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_checkpoint(prepared, f"{folder}/qat.pt", extra={"epoch": 3})
        ...     restored, extra = load_checkpoint(
        ...         f"{folder}/qat.pt", nn.Sequential(nn.Linear(4, 2))
        ...     )
        >>> restored[0].input_fake_quant.batch_num, extra
        (2, {'epoch': 3})
    """
    preparation = preparation_of(model)
    if preparation is None or preparation.recipe.config is None:
        why = "was never prepared" if preparation is None else "was prepared from a QConfigMapping"
        message = f"the model {why}; save model.state_dict() instead of a checkpoint"
        raise ModelStateError(message)
    config = preparation.recipe.config
    content = {
        "amct_fx_checkpoint": _FORMAT,
        "stage": "converted" if _is_converted(model) else "prepared",
        "config": config.to_json_dict() if config.resolved else config.to_cfg(),
        "options": dict(preparation.recipe.options),
        "state": model.state_dict(),
        "extra": dict(extra or {}),
    }
    _write(content, Path(path))


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    map_location: str | torch.device | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Make a float model what it was when :func:`save_checkpoint` wrote the file.

    Args:
        path: The file.
        model: The float model, with any weights; it is not changed.
        map_location: Device for the tensors of the file, as for ``torch.load``.

    Returns:
        The prepared or converted model, and what was given as ``extra``.

    Raises:
        FileNotFoundError: There is no such file.
        CheckpointError: It is no checkpoint of this package, or one of another architecture; names
            the first difference.
        ModelStateError: ``model`` is already prepared, or wrapped.
    """
    check_float_model(model)
    content = _read(path, map_location)
    restored = prepare_qat_amct(model, content["config"] or None, **content["options"])
    if content["stage"] == "converted":
        restored = _converted_shell(restored)
    state: dict[str, Any] = content["state"]
    _compare(restored.state_dict(), state, os.fspath(path))
    restored.load_state_dict(state)
    extra: dict[str, Any] = content["extra"]
    return restored, extra


def _is_converted(model: nn.Module) -> bool:
    return any(isinstance(module, Quantize) for module in model.modules())


def _converted_shell(prepared: nn.Module) -> nn.Module:
    """Convert a model without data: the state that follows replaces every number."""
    for module in prepared.modules():
        if isinstance(module, ULQFakeQuantize):
            module.set_clips(1.0, -1.0)
        weight_fake_quant = getattr(module, "weight_fake_quant", None)
        if isinstance(weight_fake_quant, ULQWeightFakeQuantize) and isinstance(module, QATLayer):
            weight_fake_quant.initialize(module.weight)
    return convert_amct(prepared)


def _write(content: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            torch.save(content, file)
        Path(temporary).replace(path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _read(path: str | os.PathLike[str], map_location: Any) -> dict[str, Any]:
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
    except (pickle.UnpicklingError, EOFError, RuntimeError, KeyError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        message = f"{os.fspath(path)} is no checkpoint: {reason}"
        raise CheckpointError(message) from error
    version = content.get("amct_fx_checkpoint") if isinstance(content, dict) else None
    if not isinstance(version, int):
        message = (
            f"{os.fspath(path)} was not written by save_checkpoint; a plain state dict loads with "
            "prepare_qat_amct(model, cfg).load_state_dict(...)"
        )
        raise CheckpointError(message)
    if version > _FORMAT:
        message = f"{os.fspath(path)} has format {version}, this amct_fx reads up to {_FORMAT}"
        raise CheckpointError(message)
    checkpoint: dict[str, Any] = content
    return checkpoint


def _compare(expected: Mapping[str, Any], found: Mapping[str, Any], path: str) -> None:
    """Name the first difference between two architectures, in model order."""
    for key, value in expected.items():
        if key not in found:
            message = f"{path} is of another model: it has no {key}"
            raise CheckpointError(message)
        ours, theirs = _shape(value), _shape(found[key])
        if ours != theirs:
            message = f"{path} is of another model: {key} has shape {theirs}, the model's {ours}"
            raise CheckpointError(message)
    for key in found:
        if key not in expected:
            message = f"{path} is of another model: the model has no {key}"
            raise CheckpointError(message)


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
