"""One file with everything a prepared or converted model needs: the recipe and the state.

A state dict alone restores a model that was prepared the same way. A checkpoint also holds the
configuration and the options of that call, so the float model and the file are enough. The file
loads with ``weights_only=True``: it holds tensors and plain data only.
"""

from __future__ import annotations

import errno
import os
import pickle
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantizeBase

from amct_fx.checks import check_float_model
from amct_fx.config.files import replacing
from amct_fx.config.messages import listing
from amct_fx.convert import convert_amct
from amct_fx.copying import copy_model
from amct_fx.errors import (
    AmctFileNotFoundError,
    AmctWarning,
    CheckpointError,
    CheckpointKeyError,
    ConvertError,
    ModelStateError,
    did_you_mean,
    first_line,
)
from amct_fx.graph import kept_python
from amct_fx.nn.qat import QATLayer
from amct_fx.nn.quantized import QuantizedLayer, quantized_class_of
from amct_fx.observers import ULQFakeQuantize, ULQWeightFakeQuantize
from amct_fx.prepare import prepare_qat_amct
from amct_fx.pruning import current_plan, kept_channels
from amct_fx.report.preparation import preparation_of

__all__ = ["compare_states", "load_checkpoint", "save_checkpoint"]

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
        "islands": _islands(model),
        "kept_channels": _kept_channels(model),
        "state": model.state_dict(),
        "extra": dict(extra or {}),
    }
    with replacing(path) as file:
        torch.save(content, file)


def load_checkpoint(
    path: str | os.PathLike[str],
    model: nn.Module,
    *,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | Tensor | None = None,
    map_location: str | torch.device | None = None,
) -> tuple[nn.Module, dict[str, Any]]:
    """Make a float model what it was when :func:`save_checkpoint` wrote the file.

    Args:
        path: The file.
        model: The float model, with any weights; it is not changed.
        example_inputs: What was given to :func:`amct_fx.prepare_qat_amct`, if anything was.
        map_location: Device for the tensors of the file, as for ``torch.load``.

    Returns:
        The prepared or converted model, and what was given as ``extra``.

    Raises:
        AmctFileNotFoundError: There is no such file.
        CheckpointError: It is no checkpoint of this package, or one of another architecture; names
            the first difference. Or other parts of the model can be traced now than then.
        ModelStateError: ``model`` is already prepared, or wrapped.
    """
    check_float_model(model)
    content, name = _read(path, map_location), os.fspath(path)
    state: dict[str, Any] = content["state"]
    model = copy_model(model)
    with kept_python(model, content.get("islands") or ()):
        restored = prepare_qat_amct(
            model,
            content["config"] or None,
            example_inputs,
            inplace=True,
            plan=content.get("kept_channels"),
            **content["options"],
        )
    _compare_islands(_islands(restored), content.get("islands"), name)
    if content["stage"] == "converted":
        restored = _converted_shell(restored, state, name)
    compare_states(restored.state_dict(), state, name)
    restored.load_state_dict(state)
    extra: dict[str, Any] = content["extra"]
    return restored, extra


def _is_converted(model: nn.Module) -> bool:
    preparation = preparation_of(model)
    return preparation is not None and preparation.converted


def _kept_channels(model: nn.Module) -> dict[str, Tensor] | None:
    """Return the output channels that pruning keeps; what was chosen once is not chosen again."""
    plan = current_plan(model)
    return None if plan is None else kept_channels(plan)


def _islands(model: nn.Module) -> list[str]:
    """Return the names of the parts with layers that were not traced."""
    preparation = preparation_of(model)
    return [] if preparation is None else [island.name for island in preparation.islands]


def _converted_shell(prepared: nn.Module, state: Mapping[str, Any], path: str) -> nn.Module:
    """Convert without data what the state will fill: only its structure must be that of the file.

    Where conversion decides by values, the values are made to decide as they did for the file:
    batch norms that were not folded, layers that stayed float, one weight scale or many.
    """
    _set_values(prepared, state)
    for name, layer in prepared.named_modules():
        if isinstance(layer, QATLayer) and not _stays_float(layer, name, state):
            _end_calibration(layer)
    _end_calibration_of_results(prepared)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", AmctWarning)  # was issued when the file was made
            converted = convert_amct(prepared)
    except ConvertError as error:
        message = f"{path} is of another model: {error}"
        raise CheckpointError(message) from error
    for name, module in converted.named_modules():
        if isinstance(module, QuantizedLayer):
            _take_scale_shapes(module, name, state)
    return converted


@torch.no_grad()
def _set_values(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load what the file has under the same name; all else will be converted: make it harmless."""
    quantizers = {n for n, module in model.named_modules() if isinstance(module, FakeQuantizeBase)}
    fitting = {}
    for key, ours in model.state_dict().items():
        if key in state:
            if _shape(state[key]) == _shape(ours):
                fitting[key] = state[key]
        elif (
            isinstance(ours, Tensor)
            and ours.is_floating_point()
            and key.rpartition(".")[0] not in quantizers
            and "parametrizations." not in key
        ):
            ours.fill_(1.0)
    model.load_state_dict(fitting, strict=False)


def _stays_float(layer: QATLayer, name: str, state: Mapping[str, Any]) -> bool:
    """Say whether the file holds a float layer here; convert leaves a layer that never ran."""
    parts = quantized_class_of(layer.float_class).parts
    prefix = f"{name}." if name else ""
    if any(f"{prefix}weight_{part}codes" in state for part in parts):
        return False
    return any(key.startswith(prefix) for key in state)


def _end_calibration(layer: QATLayer) -> None:
    """Give every quantizer of a layer some range."""
    for weight, fake_quant in layer.weight_quantizers.items():
        quantizer = getattr(layer, fake_quant)
        if isinstance(quantizer, ULQWeightFakeQuantize):
            quantizer.initialize(getattr(layer, weight))
    for module in layer.modules():
        if isinstance(module, ULQFakeQuantize):
            module.set_clips(1.0, -1.0)


def _end_calibration_of_results(model: nn.Module) -> None:
    """Give every quantizer of a result some range; those of layers that stay float go unused."""
    for name, module in model.named_modules():
        if isinstance(module, ULQFakeQuantize) and name.endswith("output_fake_quant"):
            module.set_clips(1.0, -1.0)


def _take_scale_shapes(layer: QuantizedLayer, name: str, state: Mapping[str, Any]) -> None:
    """Let weight scales have the shape of the file: one value becomes many if all weights are 0."""
    for part in layer.parts:
        key = f"weight_{part}scale"
        ours, found = getattr(layer, key), state.get(f"{name}.{key}" if name else key)
        if isinstance(found, Tensor) and found.dim() == 1 and 1 in (len(ours), len(found)):
            setattr(layer, key, ours.new_ones(len(found)))


def _compare_islands(found: list[str], saved: list[str] | None, path: str) -> None:
    """Refuse a preparation that traced other parts: the same state would compute other results."""
    if saved is None or sorted(saved) == sorted(found):
        return
    more, less = set(found) - set(saved), set(saved) - set(found)
    differences = [
        f"{listing(name or '<model>' for name in sorted(names))} {what}"
        for names, what in ((less, "stayed Python then"), (more, "stays Python now"))
        if names
    ]
    message = (
        f"{path} is of a model that was traced differently: {', '.join(differences)}; pass the "
        "same example_inputs, and the same model, as were given to prepare_qat_amct; if it sets "
        "attributes at its first call and had run before, run it before"
    )
    raise CheckpointError(message)


def _read(path: str | os.PathLike[str], map_location: Any) -> dict[str, Any]:
    name = os.fspath(path)
    try:
        content = torch.load(path, map_location=map_location, weights_only=True)
    except FileNotFoundError as error:
        message = "there is no such checkpoint"
        raise AmctFileNotFoundError(errno.ENOENT, message, name) from error
    except IsADirectoryError as error:
        message = f"{name} is a folder; give the path of a checkpoint"
        raise CheckpointError(message) from error
    except Exception as error:  # unpickling foreign bytes raises many classes
        if isinstance(error, OSError) and error.filename is not None:
            raise  # of the file; a seek beyond the end of what is cut off names none
        message = f"{name} is no checkpoint: {_why_unreadable(error)}"
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


def _why_unreadable(error: Exception) -> str:
    """Return one sentence; torch's own is an advice of many lines to trust the file."""
    if isinstance(error, (EOFError, OSError)):
        return "it is empty or cut off"
    if isinstance(error, pickle.UnpicklingError) and "GLOBAL" in str(error):
        return "it holds Python objects, such as a whole model, not only tensors and plain data"
    if isinstance(error, (pickle.UnpicklingError, KeyError)):  # bytes that pickle never writes
        return "torch.save did not write it, or it is damaged"
    return first_line(error)


def compare_states(expected: Mapping[str, Any], found: Mapping[str, Any], path: str) -> None:
    """Refuse a state dict that is not of the model.

    Args:
        expected: The model's own.
        found: What a file holds.
        path: Name of the file, for messages.

    Raises:
        CheckpointKeyError: It lacks keys; lists them in the order of the model.
        CheckpointError: Shapes differ, or it has keys that the model lacks.
    """
    if missing := [key for key in expected if key not in found]:
        message = f"{path} is of another model: it has no {listing(missing, limit=5)}"
        close = did_you_mean(missing[0], [key for key in found if key not in expected])
        raise CheckpointKeyError(message + close + _hint(missing[0]))
    shapes = {key: (_shape(found[key]), _shape(value)) for key, value in expected.items()}
    wrong = [f"{key} has shape {a}, the model's {b}" for key, (a, b) in shapes.items() if a != b]
    if wrong:
        more = f", and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        message = f"{path} is of another model: {'; '.join(wrong[:5])}{more}"
        raise CheckpointError(message)
    if unknown := [key for key in found if key not in expected]:
        message = f"{path} is of another model: the model has no {listing(unknown, limit=5)}"
        message += _hint(unknown[0])
        raise CheckpointError(message)


def _hint(key: str) -> str:
    """Say what else may be the reason when only the quantizers differ."""
    advice = "; or it was prepared with other example_inputs: pass the same ones"
    return advice if ".input_fake_quant." in key or ".input_quantize." in key else ""


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
