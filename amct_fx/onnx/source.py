"""Runs PyTorch's ONNX exporters on a converted model and returns the graph they make.

Source: spec/deploy.md section 2.
"""

from __future__ import annotations

import importlib.util
import inspect
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import onnx
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from amct_fx.errors import ExportError, InputDataError

__all__ = ["Exporter", "Request", "export_model", "opsets_for"]

Exporter = Literal["auto", "dynamo", "torchscript"]

logger = logging.getLogger("amct_fx")

_NOISY = ("torch.onnx", "torch.export", "torch._guards", "onnxscript", "onnx_ir")
"""Loggers that tell of failures, too, which here are exceptions or left to the other exporter."""


@dataclass(frozen=True)
class Request:
    """What a caller asked of the exporter; all checked.

    Attributes:
        args: Example inputs.
        opsets: Exporters to try, in order, each with the version of the default operator set.
        input_names: Names of the inputs, or ``None``.
        output_names: Names of the outputs, or ``None``.
        dynamic_axes: As for ``torch.onnx.export(dynamo=False)``, by input or output name.
        dynamic_shapes: As for ``torch.onnx.export(dynamo=True)``.
    """

    args: tuple[Any, ...]
    opsets: Mapping[Literal["dynamo", "torchscript"], int]
    input_names: Sequence[str] | None = None
    output_names: Sequence[str] | None = None
    dynamic_axes: Mapping[str, Mapping[int, str]] | None = None
    dynamic_shapes: Any = None


def export_model(model: nn.Module, request: Request) -> onnx.ModelProto:
    """Return what the first exporter that succeeds makes of a converted model in eval mode.

    Raises:
        ExportError: No exporter can write the model; holds what each of them said.
        InputDataError: The model itself cannot run on the example inputs.
    """
    failures: list[tuple[str, Exception]] = []
    for exporter, opset in request.opsets.items():
        run = _export_dynamo if exporter == "dynamo" else _export_torchscript
        try:
            with (
                _quiet(),
                _plain_attention(),
                torch.no_grad(),
                TemporaryDirectory() as folder,
            ):
                return _checked(run(model, request, opset, Path(folder) / "model.onnx"), opset)
        except Exception as error:  # whatever the exporter or the user's forward raises
            logger.info("the %s exporter failed: %s", exporter, error)
            failures.append((exporter, error))
    _check_runs(model, request.args)
    reasons = "; ".join(f"{name}: {_first_line(error)}" for name, error in failures)
    message = f"torch.onnx.export cannot write this model ({reasons})"
    raise ExportError(message) from failures[0][1]


def _check_runs(model: nn.Module, args: tuple[Any, ...]) -> None:
    """Tell inputs that the model cannot take from a model that cannot be exported."""
    try:
        with torch.no_grad():
            model(*args)
    except Exception as error:  # whatever forward raises
        shapes = [list(leaf.shape) for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
        message = (
            f"the model cannot run on the example inputs, of shapes {shapes}; give inputs as in "
            f"training: {_first_line(error)}"
        )
        raise InputDataError(message) from error


def _checked(made: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Read the opset back: one exporter stays at a newer one when it cannot convert down."""
    written = next(item.version for item in made.opset_import if not item.domain)
    if written == opset:
        return made
    message = f"it wrote opset {written}, which it could not convert to {opset}; ask for {written}"
    raise ExportError(message)


def _export_dynamo(model: nn.Module, request: Request, opset: int, path: Path) -> onnx.ModelProto:
    shapes = request.dynamic_shapes
    if shapes is None and request.dynamic_axes:
        shapes = _shapes_of_axes(request)
    program = torch.onnx.export(
        model,
        _with_two(request),
        dynamo=True,
        opset_version=opset,
        input_names=request.input_names,
        output_names=request.output_names,
        dynamic_shapes=shapes,
        external_data=False,
        verbose=False,
    )
    if program is None:
        message = "it returned no program"
        raise ExportError(message)
    program.save(str(path), external_data=True)
    return onnx.load(path)


def _shapes_of_axes(request: Request) -> Any:
    """Translate ``dynamic_axes`` of the inputs; the sizes of outputs follow from them."""
    dims: dict[str, Any] = {}

    def shape(axes: Mapping[int, str]) -> dict[int, Any]:
        return {axis: dims.setdefault(name, torch.export.Dim(name)) for axis, name in axes.items()}

    return tree_map(lambda axes: shape(axes.of) if axes else None, _axes_of(request))


@dataclass(frozen=True)
class _Axes:
    """The dynamic axes of one tensor; a class of its own, so that it is a leaf of a tree."""

    of: Mapping[int, str]


def _axes_of(request: Request) -> Any:
    """Return the example inputs with each tensor replaced by its dynamic axes."""
    names = iter(request.input_names or ())
    axes = request.dynamic_axes or {}

    def of(item: Any) -> _Axes | None:
        return _Axes(axes.get(next(names, ""), {})) if isinstance(item, Tensor) else None

    return tree_map(of, request.args)


def _with_two(request: Request) -> tuple[Any, ...]:
    """Return the example inputs with at least two of whatever is dynamic: 1 would be a constant."""

    def grow(item: Any, axes: _Axes | None) -> Any:
        for axis in axes.of if axes else ():
            if item.shape[axis] == 1:
                item = torch.cat([item, item], axis)
        return item

    if not request.dynamic_axes or request.dynamic_shapes is not None:
        return request.args
    grown: tuple[Any, ...] = tree_map(grow, request.args, _axes_of(request))
    return grown


def _export_torchscript(
    model: nn.Module, request: Request, opset: int, path: Path
) -> onnx.ModelProto:
    names = request.input_names or _argument_names(model, request)
    with _forward_of_tensors(model, request.args) as tensors:
        torch.onnx.export(
            model,
            tensors,
            str(path),
            dynamo=False,
            opset_version=opset,
            input_names=names,
            output_names=request.output_names,
            dynamic_axes=request.dynamic_axes,
            external_data=True,
        )
    return onnx.load(path)


def _argument_names(model: nn.Module, request: Request) -> list[str] | None:
    """Name inputs by the arguments of ``forward``, as the newer exporter does."""
    names: list[str] = []
    for name, value in inspect.signature(model.forward).bind(*request.args).arguments.items():
        tensors = [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        single = isinstance(value, Tensor)
        names += [name] if single else [f"{name}_{i}" for i in range(len(tensors))]
    taken = len(set(names)) < len(names) or not set(names).isdisjoint(request.output_names or ())
    return None if taken else names


@contextmanager
def _forward_of_tensors(model: nn.Module, args: tuple[Any, ...]) -> Iterator[tuple[Tensor, ...]]:
    """Let ``forward`` of our own copy take only the tensors of ``args``, and yield these.

    The older exporter makes inputs of numbers and of defaults, too.
    """
    leaves, tree = tree_flatten(args)
    forward, own = model.forward, model.__dict__.get("forward")

    def run(*tensors: Tensor) -> Any:
        torch._C._jit_set_onnx_log_enabled(False)  # it prints its graphs; here they are turned on
        given = iter(tensors)
        filled = [next(given) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return forward(*tree_unflatten(filled, tree))

    model.__dict__["forward"] = run
    try:
        yield tuple(leaf for leaf in leaves if isinstance(leaf, Tensor))
    finally:
        del model.__dict__["forward"]
        if own is not None:
            model.__dict__["forward"] = own


def opsets_for(
    exporter: Exporter, preferred: str, opset: int, *, least: int
) -> dict[Literal["dynamo", "torchscript"], int]:
    """Return the exporters to try, with the operator set for each.

    Args:
        exporter: What the caller asked for.
        preferred: Tried first for ``"auto"``. Without onnxscript only ``"torchscript"`` can run.
        opset: The operator set.
        least: The oldest that may be used in place of an older default; the newer exporter writes
            18 at least.

    Example:
        >>> opsets_for("torchscript", "dynamo", 18, least=18)
        {'torchscript': 18}
    """
    newer = max(opset, least)
    if exporter == "dynamo":
        return {"dynamo": newer}
    if exporter == "torchscript" or importlib.util.find_spec("onnxscript") is None:
        return {"torchscript": opset}
    if preferred == "dynamo":
        return {"dynamo": newer, "torchscript": opset}
    return {"torchscript": opset, "dynamo": newer}


def _first_line(error: BaseException) -> str:
    """Return what an error says first; of an exporter's report on a step, what went wrong there."""
    text = re.sub(r"\x1b\[[0-9;]*m", "", str(error))  # colours of a terminal
    if text.startswith("Failed to ") and error.__cause__ is not None:
        return _first_line(error.__cause__)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text if len(text) <= 300 else f"{text[:297]}..."


@contextmanager
def _plain_attention() -> Iterator[None]:
    """Keep ``nn.MultiheadAttention`` from its fused kernel, which no exporter can write."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep the exporters' notes, and the graphs they print, to themselves; errors come through."""
    loggers = [logging.getLogger(name) for name in _NOISY]
    levels = [log.level for log in loggers]
    for log in loggers:
        log.setLevel(logging.CRITICAL)
    graphs_printed = torch._C._jit_is_onnx_log_enabled()
    try:
        with warnings.catch_warnings(), redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch._C._jit_set_onnx_log_enabled(graphs_printed)
        for log, level in zip(loggers, levels, strict=True):
            log.setLevel(level)
