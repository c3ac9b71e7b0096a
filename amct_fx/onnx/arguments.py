"""Checks of what ``export_onnx`` was asked for, before anything is exported or written."""

from __future__ import annotations

import inspect
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from torch.utils._pytree import tree_leaves

from amct_fx.errors import ArgumentError, ArgumentTypeError, InputDataError, did_you_mean

__all__ = [
    "FORMATS",
    "Axes",
    "Format",
    "FormatRules",
    "check_options",
    "check_outputs",
    "checked_inputs",
    "checked_opset",
    "positional",
    "rules_of",
]

Format = Literal["qdq", "qdq_full", "qdq_pairs", "ascend", "fake_quant"]

Axes = Mapping[str, Mapping[int, str]]
"""``dynamic_axes`` in its full form: by tensor name the name of each dimension that varies."""


@dataclass(frozen=True)
class FormatRules:
    """What a format allows.

    Attributes:
        lowest: First version of the default operator set.
        highest: Last version.
        default: The version when none is asked for.
        int16: First version for INT16 activations.
        preferred: The exporter to try first.
        suffix: Ending of the names of files with external data.
    """

    lowest: int
    highest: int
    default: int
    int16: int
    preferred: Literal["dynamo", "torchscript"]
    suffix: str


FORMATS: dict[str, FormatRules] = {
    "qdq": FormatRules(13, 23, 18, 21, "dynamo", "qdq"),
    "qdq_full": FormatRules(13, 23, 18, 21, "dynamo", "qdq"),
    "qdq_pairs": FormatRules(13, 18, 16, 99, "torchscript", "qdq"),
    "ascend": FormatRules(11, 18, 16, 11, "torchscript", "deploy"),
    "fake_quant": FormatRules(11, 23, 16, 11, "torchscript", "fakequant"),
}
"""By name. ATC's tables hold Conv, Gemm and the like only up to 18; Round and Clip with inputs need
11, scales per channel 13, INT16 in QuantizeLinear 21."""


def rules_of(format: object) -> FormatRules:
    """Return the rules of a format.

    Raises:
        ArgumentError: There is no such format.

    Example:
        >>> rules_of("fakequant")
        Traceback (most recent call last):
        amct_fx.errors.ArgumentError: format must be one of 'qdq', 'qdq_full', 'qdq_pairs', \
'ascend', 'fake_quant', not 'fakequant'; did you mean 'fake_quant'?
    """
    if isinstance(format, str) and format in FORMATS:
        return FORMATS[format]
    allowed = ", ".join(map(repr, FORMATS))
    close = did_you_mean(str(format), FORMATS, count=1)
    message = f"format must be one of {allowed}, not {format!r}{close}"
    raise ArgumentError(message)


def checked_opset(
    opset: object, format: str, *, exporter: object = "auto", int16: bool = False
) -> int:
    """Return the operator set to use.

    Args:
        opset: What was asked for, ``None`` for the default.
        format: A known format.
        exporter: What was asked for.
        int16: Whether the model has INT16 activations.

    Raises:
        ArgumentTypeError: ``opset`` is neither int nor ``None``.
        ArgumentError: The format has no such operator set, or no such exporter.

    Example:
        >>> checked_opset(None, "qdq"), checked_opset(None, "qdq", int16=True)
        (18, 21)
        >>> checked_opset(20, "ascend")
        Traceback (most recent call last):
        amct_fx.errors.ArgumentError: format 'ascend' needs an opset from 11 to 18, not 20
    """
    if exporter not in ("auto", "dynamo", "torchscript"):
        message = f"exporter must be 'auto', 'dynamo' or 'torchscript', not {exporter!r}"
        raise ArgumentError(message)
    if opset is not None and (isinstance(opset, bool) or not isinstance(opset, int)):
        message = f"opset must be int or None, not {type(opset).__name__}"
        raise ArgumentTypeError(message)
    rules = FORMATS[format]
    lowest = rules.int16 if int16 else rules.lowest
    if lowest > rules.highest:
        message = f"format {format!r} cannot hold INT16 activations; use 'qdq' or 'ascend'"
        raise ArgumentError(message)
    if opset is None:
        return max(rules.default, lowest)
    if not lowest <= opset <= rules.highest:
        why = ", because of its INT16 activations" if int16 and opset >= rules.lowest else ""
        message = (
            f"format {format!r} needs an opset from {lowest} to {rules.highest}{why}, not {opset}"
        )
        raise ArgumentError(message)
    return opset


def check_outputs(shapes: Sequence[int | None], inputs: Inputs) -> None:
    """Refuse names and axes of more outputs than a model has, or of axes beyond theirs.

    Args:
        shapes: The number of dimensions of each output, ``None`` where it is not known.
        inputs: What was asked for.

    Raises:
        ArgumentError: Names the argument.

    Example:
        >>> check_outputs([2], Inputs((), None, ["a", "b"], None, None))
        Traceback (most recent call last):
        amct_fx.errors.ArgumentError: output_names has 2 names for 1 output tensors
    """
    names = inputs.output_names or []
    if len(names) > len(shapes):
        message = f"output_names has {len(names)} names for {len(shapes)} output tensors"
        raise ArgumentError(message)
    for name, dims in zip(names, shapes, strict=False):
        _check_axis(name, (inputs.dynamic_axes or {}).get(name, {}), dims)


def check_options(format: str, **options: bool) -> None:
    """Refuse options of the QDQ files for onnxruntime in other formats.

    Raises:
        ArgumentError: Names the option.

    Example:
        >>> check_options("ascend", signed_activations=True)
        Traceback (most recent call last):
        amct_fx.errors.ArgumentError: signed_activations is for formats 'qdq' and 'qdq_full', not \
'ascend'
    """
    for name, given in options.items():
        if given and format not in ("qdq", "qdq_full"):
            message = f"{name} is for formats 'qdq' and 'qdq_full', not {format!r}"
            raise ArgumentError(message)


@dataclass(frozen=True)
class Inputs:
    """Example inputs, their names, and what varies; all checked.

    Attributes:
        args: What ``forward`` takes.
        input_names: One for each input tensor, or ``None``.
        output_names: As given.
        dynamic_axes: In the full form, or ``None``.
        dynamic_shapes: As given.
    """

    args: tuple[Any, ...]
    input_names: list[str] | None
    output_names: list[str] | None
    dynamic_axes: Axes | None
    dynamic_shapes: Any


def checked_inputs(
    args: object,
    path: object,
    model: object,
    *,
    dynamic_batch: bool,
    input_names: object,
    output_names: object,
    dynamic_axes: object,
    dynamic_shapes: Any,
    exporter: object = "auto",
) -> Inputs:
    """Check everything that needs no model; see :func:`amct_fx.export_onnx`.

    Raises:
        ArgumentError: A name or axis does not fit, or ``path`` is a folder.
        ArgumentTypeError: An argument is of the wrong type.
        InputDataError: ``args`` is no tensor, tuple or dict, does not fit, or holds no tensor.
    """
    _check_path(path)
    inputs = positional(args, model)
    tensors = [leaf for leaf in tree_leaves(inputs) if isinstance(leaf, Tensor)]
    if not tensors:
        message = "args holds no tensor; give the inputs of forward, as a tensor or a tuple"
        raise InputDataError(message)
    names = _names("input_names", input_names)
    outputs = _names("output_names", output_names)
    if names is not None and len(names) > len(tensors):
        message = f"input_names has {len(names)} names for {len(tensors)} input tensors"
        raise ArgumentError(message)
    if both_have := set(names or ()) & set(outputs or ()):
        message = f"input_names and output_names both hold {min(both_have)!r}"
        raise ArgumentError(message)
    both = dynamic_shapes is not None and (dynamic_axes is not None or dynamic_batch)
    if both or (dynamic_axes is not None and dynamic_batch):
        message = "give only one of dynamic_batch, dynamic_axes and dynamic_shapes"
        raise ArgumentError(message)
    axes = None if dynamic_axes is None else _full_axes(dynamic_axes)
    if axes is not None or dynamic_batch:
        names = [*(names or ()), *_default_names(tensors, names or [])]
    if dynamic_shapes is not None and exporter == "torchscript":
        message = "dynamic_shapes needs the exporter 'dynamo'; write dynamic_axes for 'torchscript'"
        raise ArgumentError(message)
    if dynamic_batch:
        axes = _batch_axes(tensors, names or [])
    for name, of in (axes or {}).items():
        _check_axes(name, of, dict(zip(names or (), tensors, strict=False)), outputs)
    return Inputs(inputs, names, outputs, axes, dynamic_shapes)


def _check_path(path: object) -> None:
    if not isinstance(path, (str, os.PathLike)):
        message = f"path must be str or a path, not {type(path).__name__}"
        raise ArgumentTypeError(message)
    name = os.fspath(path)
    if not name or name.endswith("/") or Path(name).is_dir():
        message = f"path must name a file, and {name!r} is a folder; write {name}model.onnx"
        if not name:
            message = "path must name a file, not be empty"
        elif not name.endswith("/"):
            message = f"path must name a file, and {name!r} is a folder; write {name}/model.onnx"
        raise ArgumentError(message)


def positional(args: object, model: object, name: str = "args") -> tuple[Any, ...]:
    """Return example inputs as positional arguments of ``model.forward``.

    Raises:
        InputDataError: They are no tensor, tuple or dict, or a dict that ``forward`` cannot take.
    """
    if isinstance(args, Tensor):
        return (args,)
    if isinstance(args, tuple):
        return args
    if not isinstance(args, Mapping):
        kind = type(args).__name__
        message = f"{name} must be a tensor, a tuple of inputs or a dict of them, not {kind}"
        raise InputDataError(message)
    forward = getattr(model, "forward", model)
    assert callable(forward)
    try:
        bound = inspect.signature(forward).bind(**args)
    except TypeError as error:
        message = f"{name} does not fit forward: {error}"
        raise InputDataError(message) from error
    bound.apply_defaults()
    if bound.kwargs:
        message = f"{name}: forward takes {', '.join(bound.kwargs)} by name only, which no file can"
        raise InputDataError(message)
    return bound.args


def _names(argument: str, names: object) -> list[str] | None:
    if names is None:
        return None
    if isinstance(names, str) or not isinstance(names, Sequence):
        message = f"{argument} must be a list of str or None, not {type(names).__name__}"
        raise ArgumentTypeError(message)
    found = list(names)
    wrong = [name for name in found if not isinstance(name, str) or not name]
    if wrong:
        message = f"{argument} must hold names, not {wrong[0]!r}"
        raise ArgumentError(message)
    if len(set(found)) < len(found):
        message = f"{argument} holds a name twice: {', '.join(found)}"
        raise ArgumentError(message)
    return found


def _default_names(tensors: list[Tensor], given: list[str]) -> list[str]:
    """Return names for the inputs that were given none."""
    missing = range(len(given), len(tensors))
    return [f"input_{i}" if len(tensors) > 1 else "input" for i in missing]


def _full_axes(axes: object) -> dict[str, dict[int, str]]:
    """Return ``dynamic_axes`` with a name for each dimension."""
    if not isinstance(axes, Mapping):
        message = f"dynamic_axes must be a dict or None, not {type(axes).__name__}"
        raise ArgumentTypeError(message)
    full: dict[str, dict[int, str]] = {}
    for name, of in axes.items():
        if not isinstance(name, str):
            message = f"dynamic_axes must have names of inputs and outputs as keys, not {name!r}"
            raise ArgumentError(message)
        if isinstance(of, Mapping):
            full[name] = dict(of)
        elif isinstance(of, Sequence) and not isinstance(of, str):
            full[name] = {axis: f"{name}_dim_{axis}" for axis in of}
        else:
            full[name] = {-1: ""}
        for axis, dim in full[name].items():
            is_axis = isinstance(axis, int) and not isinstance(axis, bool) and axis >= 0
            if not is_axis or not isinstance(dim, str) or not dim:
                message = (
                    f"dynamic_axes of {name!r} must be {{axis: name}} or [axis], with axes from 0, "
                    f"not {of!r}"
                )
                raise ArgumentError(message)
    return full


def _batch_axes(tensors: list[Tensor], names: list[str]) -> dict[str, dict[int, str]]:
    scalars = [name for name, t in zip(names, tensors, strict=False) if t.dim() == 0]
    if scalars:
        message = f"dynamic_batch: input {scalars[0]!r} is a scalar; use dynamic_axes"
        raise ArgumentError(message)
    return {name: {0: "batch"} for name in names}


def _check_axes(
    name: str, of: Mapping[int, str], inputs: Mapping[str, Tensor], outputs: list[str] | None
) -> None:
    if name in inputs:
        _check_axis(name, of, inputs[name].dim())
    elif name not in (outputs or ()):
        known = [*inputs, *(outputs or ())]
        close = did_you_mean(name, known)
        message = f"dynamic_axes: {name!r} is no input or output ({', '.join(known)}){close}"
        raise ArgumentError(message)


def _check_axis(name: str, of: Mapping[int, str], dims: int | None) -> None:
    if of and dims is not None and max(of) >= dims:
        message = f"dynamic_axes: {name!r} has {dims} dimensions, so no axis {max(of)}"
        raise ArgumentError(message)
