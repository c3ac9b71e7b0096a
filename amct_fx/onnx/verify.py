"""``verify_onnx``: does a file compute what the model computes, layer by layer?

Two comparisons. End to end: the file and the model run on the same batch, and the codes that every
layer reads are compared; a difference in one layer shows in all later ones. Layer by layer: the
model's layer runs on what the file's layer was given, so only the layer itself can differ. The
second names the layer that is wrong. Source: spec/deploy.md sections 2.3 and 4.
"""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from amct_fx.errors import AmctFileNotFoundError, ArgumentError, ArgumentTypeError, ExportError
from amct_fx.onnx.arguments import positional

if TYPE_CHECKING:
    from collections.abc import Mapping

    from amct_fx.onnx.trace import FileCall, FileRun, ModelCall

__all__ = ["Verification", "VerifiedLayer", "verify_onnx"]

_EQUAL = 0.995
"""Share of equal codes below which a quantizer is wrong; ties and the order of sums flip some."""

_STEPS = 2
_SQNR = 60.0
"""Decibels; a scale that is off by 0.1 % gives as much, float rounding 110 and more."""

_SQNR_OF_HALF = 40.0
"""For layers in half precision."""

_SQNR_OF_FLOAT_STATE = 20.0
"""For LSTM and GRU nodes, whose hidden state stays float between the steps of the file."""


_SQNR_OF_OUTPUT = 10.0
"""End to end, where results that are quantized as well (``qdq_full``) give 20 and more."""


@dataclass(frozen=True)
class VerifiedLayer:
    """One call of a layer in a file, compared with the model.

    Attributes:
        name: Module path; a second call has ``_1`` behind it.
        equal: Share of the codes of its input that are equal, both run end to end.
        largest: Largest difference of these codes.
        sqnr: Signal to quantization noise ratio of its result in dB, both run end to end; ``inf``
            if equal, NaN where the file holds no such tensor.
        own_equal: ``equal`` when the model's quantizer is given what the file's was given.
        own_largest: ``largest``, likewise.
        own_sqnr: Ratio of the worst output channel when the model's layer is given what the file's
            layer was given.
        problem: What is wrong with this layer, or ``None``.
    """

    name: str
    equal: float
    largest: int
    sqnr: float
    own_equal: float
    own_largest: int
    own_sqnr: float
    problem: str | None


@dataclass(frozen=True)
class Verification:
    """The result of :func:`verify_onnx`; its text is a table.

    Attributes:
        path: The file.
        rows: One for each call of a quantized layer, in execution order.
        output_sqnr: Ratio of the worst output of the model in dB, run end to end.
    """

    path: str
    rows: tuple[VerifiedLayer, ...]
    output_sqnr: float

    @property
    def passed(self) -> bool:
        """Whether every layer computes what the model's layer computes, and so do the outputs.

        Outputs that are far off although all layers agree mean that something differs which is not
        quantized.
        """
        return self.first_diverging is None and self.output_sqnr >= _SQNR_OF_OUTPUT

    @property
    def first_diverging(self) -> str | None:
        """Name of the first layer that computes something else, ``None`` if there is none."""
        return next((row.name for row in self.rows if row.problem is not None), None)

    def __str__(self) -> str:
        """Return a table with one line for each layer, and what was found."""
        width = max([len(row.name) for row in self.rows] + [len("layer")])
        lines = [f"{'layer':<{width}}  {'equal':>8}  {'largest':>7}  {'SQNR':>8}  {'own SQNR':>8}"]
        for row in self.rows:
            known = not math.isnan(row.equal)
            equal, largest = (f"{row.equal:.3%}", str(row.largest)) if known else ("-", "-")
            ratios = f"{_decibels(row.sqnr)}  {_decibels(row.own_sqnr)}"
            text = f"{row.name:<{width}}  {equal:>8}  {largest:>7}  {ratios}"
            lines.append(f"{text}  {row.problem}" if row.problem else text)
        found = "every layer agrees"
        if self.first_diverging is not None:
            found = f"the first layer that differs is {self.first_diverging}"
        elif not self.passed:
            found += ", but something that is not quantized differs"
        return "\n".join([*lines, f"{found}; output {_decibels(self.output_sqnr).strip()}"])


def verify_onnx(
    path: str | os.PathLike[str],
    model: nn.Module,
    batch: Tensor | tuple[Any, ...] | Mapping[str, Any],
) -> Verification:
    """Run a file of :func:`amct_fx.export_onnx` and the model it was made of, and compare them.

    A deploy file for ATC is run as its operators are defined: onnxruntime itself cannot load it.

    Args:
        path: The file, of any format.
        model: The prepared or the converted model; it is not changed.
        batch: A tensor, a tuple of what ``forward`` takes, or a dict by its names. If the file has
            a fixed batch size, of that size.

    Returns:
        One row for each layer. Differences of a few codes are normal: PyTorch and onnxruntime sum
        in different orders.

    Raises:
        ExportError: The file is no ONNX file, cannot be run, or is of another model; or onnxruntime
            (extra ``runtime``) is not installed.
        AmctFileNotFoundError: There is no such file.
        InputDataError: ``batch`` is no tensor, tuple or dict, or does not fit model or file.

    Example:
        >>> import tempfile
        >>> from amct_fx import export_onnx, prepare_qat_amct
        >>> x = torch.randn(8, 4)
        >>> prepared = prepare_qat_amct(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
        >>> _ = prepared(x)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     export_onnx(prepared, x, f"{folder}/deploy.onnx", format="ascend")
        ...     result = verify_onnx(f"{folder}/deploy.onnx", prepared, x)
        >>> [row.name for row in result.rows], result.passed
        (['0', '2'], True)
    """
    name = _existing_file(path)
    inputs = positional(batch, model, "batch")
    if importlib.util.find_spec("onnxruntime") is None:
        message = "verify_onnx needs onnxruntime; pip install 'amct-fx[runtime]'"
        raise ExportError(message)

    from amct_fx.onnx.export import own_converted
    from amct_fx.onnx.trace import run_file, run_model

    converted = own_converted(model).cpu()
    args = tree_map(_on_cpu, inputs)
    with torch.no_grad():
        ours = run_model(converted, args)
        theirs = run_file(name, converted, args, called=ours)
        rows = tuple(_compare(call, theirs, ours.get(call.name)) for call in theirs.calls)
        outputs = zip(theirs.outputs, ours[""].outputs, strict=False)
        output_sqnr = min((_sqnr(a, b) for a, b in outputs), default=math.inf)
    return Verification(name, rows, output_sqnr)


def _existing_file(path: object) -> str:
    if not isinstance(path, (str, os.PathLike)):
        message = f"path must be str or a path, not {type(path).__name__}"
        raise ArgumentTypeError(message)
    name = os.fspath(path)
    if not Path(name).exists():
        message = f"there is no file {name}"
        raise AmctFileNotFoundError(message)
    if Path(name).is_dir():
        message = f"{name} is a folder; give the path of an ONNX file"
        raise ArgumentError(message)
    return name


def _on_cpu(item: Any) -> Any:
    return item.detach().cpu() if isinstance(item, Tensor) else item


def _compare(call: FileCall, file: FileRun, ours: ModelCall | None) -> VerifiedLayer:
    codes, result = file.codes(call), file.result(call)
    equal, largest = _agreement(codes, None if ours is None else ours.codes)
    sqnr = math.nan if ours is None or call.part else _sqnr(result, ours.outputs[0])
    own_equal, own_largest = _agreement(*file.own_codes(call))
    expected = file.own_result(call)
    own_sqnr = _worst_channel(result, expected, call.channel_axis)
    found = VerifiedLayer(
        call.name, equal, largest, sqnr, own_equal, own_largest, own_sqnr, problem=None
    )
    return replace(found, problem=_problem(found, call))


def _problem(row: VerifiedLayer, call: FileCall) -> str | None:
    if row.own_equal < _EQUAL or row.own_largest > _STEPS:
        return (
            f"its input quantizer makes other codes ({row.own_equal:.2%} equal, up to "
            f"{row.own_largest} steps apart)"
        )
    enough = _SQNR if call.layer.dtype == torch.float32 else _SQNR_OF_HALF
    if row.own_sqnr < (_SQNR_OF_FLOAT_STATE if call.keeps_float_state else enough):
        return f"its weights, bias or scales differ ({row.own_sqnr:.0f} dB)"
    return None


def _agreement(codes: Tensor, expected: Tensor | None) -> tuple[float, int]:
    """Return the share of equal codes, and the largest difference."""
    if expected is None or codes.numel() == 0:
        return math.nan, 0
    if codes.shape != expected.shape:
        return 0.0, 2**16
    difference = (codes.long() - expected.long()).abs()
    return float((difference == 0).double().mean()), int(difference.max())


def _sqnr(found: Tensor, expected: Tensor) -> float:
    """Return the signal to quantization noise ratio in dB."""
    if found.shape != expected.shape:
        return -math.inf
    equal = found == expected  # infinities, too
    noise = (found.double() - expected.double()).masked_fill(equal, 0).square().sum().item()
    signal = expected.double()[torch.isfinite(expected)].square().sum().item()
    if not math.isfinite(noise):
        return -math.inf
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal else -math.inf


def _worst_channel(found: Tensor, expected: Tensor, axis: int) -> float:
    """Return the ratio of the channel that differs most; silent ones count by the loudest."""
    if found.shape != expected.shape:
        return -math.inf
    axes = [i for i in range(expected.dim()) if i != axis % expected.dim()]
    noise = (found.double() - expected.double()).square().sum(axes)
    signal = expected.double().square().sum(axes)
    if not bool(torch.isfinite(noise).all()):
        return -math.inf
    if not bool(noise.any()):
        return math.inf
    floor = max(float(signal.max()) * 1e-4, 1e-30)
    worst = float((noise / signal.clamp(min=floor)).max())
    return -10 * math.log10(worst)


def _decibels(value: float) -> str:
    text = "-" if math.isnan(value) else "exact" if value == math.inf else f"{value:.1f} dB"
    return f"{text:>8}"
