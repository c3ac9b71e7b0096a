"""What every model of the zoo goes through, and what is recorded of it."""

from __future__ import annotations

import gc
import inspect
import math
import re
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amct_fx import convert_amct, prepare_qat_amct, summarize
from amct_fx.nn.qat import QATLayer

from .agreement import Agreement, agreement_of, tensors_of
from .layerwise import Layerwise, compare_file, compare_layerwise, run_file

if TYPE_CHECKING:
    from .entry import Entry

__all__ = ["EXPORTERS", "FLOAT_FAILS", "Record", "TimeLimitError", "run"]

FLOAT_FAILS = "float model fails too: "
"""How the text begins that excuses an exporter."""

_SETTLING_BATCH = 8
_ALMOST_ZERO = 1e-3


@dataclass
class Record:
    """Everything the table says of one model."""

    group: str
    name: str
    input: str
    result: str = "ok"
    detail: str = ""
    quantized: int = 0
    layers: int = 0
    weights_quantized: float = 0.0
    float_reasons: dict[str, int] = field(default_factory=dict)
    islands: list[str] = field(default_factory=list)
    converted: Agreement | None = None
    layerwise: Layerwise | None = None
    onnx: Agreement | None = None
    onnx_layerwise: Layerwise | None = None
    files: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether every stage did what it should."""
        return self.result == "ok"


class TimeLimitError(BaseException):
    """The model took too long; not an ``Exception``, so that no stage takes it for its own."""


class _StageError(Exception):
    """A stage of the pipeline failed; the cause holds what was raised."""


EXPORTERS = ("TorchScript", "torch.export")
"""The two exporters behind ``torch.onnx.export``: ``dynamo=False`` and ``dynamo=True``."""


def run(entry: Entry, exporters: Sequence[str] = EXPORTERS) -> Record:
    """Take one model through the whole pipeline.

    Args:
        entry: The model.
        exporters: Which of :data:`EXPORTERS` write a file; the others do if these cannot.

    Returns:
        The record; its ``result`` is ``"ok"`` or the name of the stage that failed.
    """
    record = Record(entry.group, entry.name, entry.input_text)
    start = time.perf_counter()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            _run(entry, exporters, record)
        except _StageError as error:
            record.result = str(error)
            record.detail = _describe(error.__cause__)
    record.seconds = round(time.perf_counter() - start, 1)
    gc.collect()
    return record


def _run(entry: Entry, exporters: Sequence[str], record: Record) -> None:
    torch.manual_seed(0)
    args, kwargs = entry.arguments()
    with _stage("float model"):
        model = entry.build().train()
        _fill_zeros(model)
        _settle_batch_norms(model, entry)
        kwargs = _in_order(model, kwargs)
    with _stage("prepare"):
        prepared = prepare_qat_amct(model, example_inputs=_example_inputs(args, kwargs))
        _record_layers(prepared, record)
    with _stage("train"):
        _train(prepared, args, kwargs)
    with _stage("eval"):
        expected = _outputs(prepared.eval(), args, kwargs)
    with _stage("convert"):
        converted = convert_amct(prepared)
        actual = _outputs(converted, args, kwargs)
        record.converted = agreement_of(expected, actual)
        record.layerwise = compare_layerwise(prepared, converted, args, kwargs)
    del prepared
    with _stage("convert: codes"):
        record.layerwise.require()
    others = [exporter for exporter in EXPORTERS if exporter not in exporters]
    for exporter in [*exporters, *others]:
        if exporter in others and "ok" in record.files.values():
            break
        if exporter in entry.refused_by:
            record.files[exporter] = f"{FLOAT_FAILS}{entry.refused_by[exporter]}"
            continue
        _check_file(exporter, converted, model, (args, kwargs), actual, record)
    with _stage("export"):
        _require_a_file(record)


def _check_file(
    exporter: str,
    converted: nn.Module,
    original: nn.Module,
    arguments: tuple[tuple[Tensor, ...], dict[str, Any]],
    expected: list[Tensor],
    record: Record,
) -> None:
    """Export with one exporter and run the file; it may fail where the float model fails too."""
    args, kwargs = arguments
    values = dict(zip(_input_names(args, kwargs), [*args, *kwargs.values()], strict=True))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        with _stage(f"export ({exporter})"):
            try:
                _export(converted, args, kwargs, path, exporter)
            except Exception as error:
                if _exports(original, args, kwargs, exporter):
                    raise
                record.files[exporter] = f"{FLOAT_FAILS}{_describe(error)}"
                return
        with _stage(f"onnxruntime ({exporter})"):
            record.onnx = agreement_of(expected, tensors_of(run_file(path, values)))
            record.onnx_layerwise = compare_file(converted, path, args, kwargs, values)
    with _stage(f"onnxruntime: codes ({exporter})"):
        record.onnx_layerwise.require()
    record.files[exporter] = "ok"


def _require_a_file(record: Record) -> None:
    if "ok" not in record.files.values():
        message = "; ".join(f"{name}: {text}" for name, text in record.files.items())
        raise ValueError(message)


@contextmanager
def _stage(name: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise _StageError(name) from error


def _describe(error: BaseException | None) -> str:
    """Return the first line of the innermost cause, and the last line of code of ours or theirs."""
    if error is None:
        return ""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "/amct_fx/" in frame.filename]
    frame = (own or frames)[-1] if frames else None
    place = f" [{_short(frame.filename)}:{frame.lineno}]" if frame else ""
    text = (str(error).strip() or type(error).__name__).splitlines()[0]
    return f"{type(error).__name__}: {_short(text)[:200]}{place}"


def _short(text: str) -> str:
    """Cut file names to what follows the folder of the installed packages or of the repository."""
    text = re.sub(r"[^\s\[]*/site-packages/", "", text)
    return re.sub(r"/[^\s\[]*/(amct_fx|test)/", r"\1/", text)


def _fill_zeros(model: nn.Module) -> None:
    """Give weights and layer scales that start at 0, or almost, a random value.

    A head of zeros makes every output 0, and a residual branch scaled by 1e-6 hides its layers:
    two such models would agree whatever they compute.
    """
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            small = parameter.numel() > 0 and float(parameter.abs().max()) < _ALMOST_ZERO
            if small and parameter.dim() >= 2:
                nn.init.normal_(parameter, std=0.02)
            elif small and not name.endswith("bias"):
                nn.init.uniform_(parameter, 0.1, 0.5)


def _settle_batch_norms(model: nn.Module, entry: Entry) -> None:
    """Give batch norms the statistics of a batch, as trained weights would have them.

    With the initial statistics a deep network explodes in eval mode, and no comparison of
    outputs would mean anything.
    """
    norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.momentum = 1.0
    if norms:
        args, kwargs = entry.arguments(_SETTLING_BATCH)
        with torch.no_grad():
            model(*args, **kwargs)
    for norm, momentum in zip(norms, momenta, strict=True):
        norm.momentum = momentum


def _train(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> None:
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    for step in range(2):
        optimizer.zero_grad()
        outputs = [o for o in tensors_of(model(*args, **kwargs)) if o.requires_grad]
        loss = torch.stack([output.float().square().mean() for output in outputs]).sum()
        if not math.isfinite(loss.item()):
            message = f"the loss of step {step} is {loss.item()}"
            raise ValueError(message)
        loss.backward()
        # Random weights make some gradients enormous, and one step would end the training.
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()


def _example_inputs(args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> Any:
    """Return the inputs as prepare takes them: by position or by name."""
    return args if args or not kwargs else kwargs


def _record_layers(prepared: nn.Module, record: Record) -> None:
    summary = summarize(prepared)
    record.layers = len(summary.rows)
    record.quantized = sum(row.state != "float" for row in summary.rows)
    record.weights_quantized = _share_of_weights(prepared)
    reasons = Counter(row.reason for row in summary.rows if row.state == "float")
    record.float_reasons = dict(reasons.most_common())
    record.islands = [_short(str(island)) for island in summary.islands]


def _share_of_weights(prepared: nn.Module) -> float:
    """Return the share of all matrix-like weights, embeddings aside, that is quantized."""
    embeddings = {
        id(parameter)
        for module in prepared.modules()
        if isinstance(module, nn.Embedding)
        for parameter in module.parameters()
    }
    sizes = {
        id(parameter): parameter.numel()
        for name, parameter in prepared.named_parameters()
        if parameter.dim() >= 2 and id(parameter) not in embeddings and "pos" not in name
    }
    layers = (m for m in prepared.modules() if isinstance(m, QATLayer))
    quantized = sum({id(m.weight): m.weight.numel() for m in layers}.values())
    return quantized / max(sum(sizes.values()), 1)


def _outputs(model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> list[Tensor]:
    with torch.no_grad():
        outputs = tensors_of(model(*args, **kwargs))
    if not all(bool(torch.isfinite(output).all()) for output in outputs):
        message = "an output is not finite"
        raise ValueError(message)
    return outputs


def _exports(
    model: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Any], exporter: str
) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        try:
            _export(model.eval(), args, kwargs, Path(folder) / "float.onnx", exporter)
        except Exception:
            return False
    return True


def _export(
    model: nn.Module,
    args: tuple[Tensor, ...],
    kwargs: dict[str, Any],
    path: Path,
    exporter: str,
) -> None:
    torch.onnx.export(
        model,
        args,
        path,
        kwargs=kwargs,
        input_names=_input_names(args, kwargs),
        dynamo=exporter == "torch.export",
        opset_version=18,
        verbose=False,
    )


def _in_order(model: nn.Module, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return ``kwargs`` in the order of the signature, in which TorchScript names its inputs."""
    parameters = inspect.signature(model.forward).parameters
    return {name: kwargs[name] for name in parameters if name in kwargs}


def _input_names(args: tuple[Tensor, ...], kwargs: dict[str, Any]) -> list[str]:
    return [f"x{index}" for index in range(len(args))] + list(kwargs)
