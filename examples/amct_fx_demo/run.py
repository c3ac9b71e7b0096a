"""The demo from start to finish: train, quantize, train on, convert, export, compare."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from torch import nn

import amct_fx

from .data import Split, digits
from .deployment import compare_codes, export, onnx_codes, onnx_logits, torch_codes
from .network import DigitsNet
from .training import Progress, accuracy, correct_share, fit

__all__ = ["CONFIG", "DemoResult", "Report", "run_demo"]

CONFIG = Path(__file__).with_name("quant.cfg")

# Called with the name of a stage, how much of it is done, and how much there is.
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class DemoResult:
    """What the demo measured, on the held-out third of the images.

    Attributes:
        float_accuracy: Share of right answers of the float model.
        prepared_accuracy: The same of the model that simulates INT8 while it trains.
        converted_accuracy: The same of the model with integer weights, in PyTorch.
        onnxruntime_accuracy: The same of the exported integer model, in onnxruntime.
        float_onnx_bytes: Size of the exported float model.
        int8_onnx_bytes: Size of the exported integer model.
        equal_codes: Share of activation codes that are equal in PyTorch and onnxruntime.
        max_code_difference: Largest difference between two such codes.
        seconds: Time for everything.
    """

    float_accuracy: float
    prepared_accuracy: float
    converted_accuracy: float
    onnxruntime_accuracy: float
    float_onnx_bytes: int
    int8_onnx_bytes: int
    equal_codes: float
    max_code_difference: int
    seconds: float


def run_demo(*, seed: int, epochs: int, report: Report) -> DemoResult:
    """Run the whole demo.

    Args:
        seed: Decides the start weights and the order of the images; the split is always the same.
        epochs: Passes over the training images in float; a third as many follow with quantization.
        report: Told about the progress.
    """
    started = time.perf_counter()
    torch.manual_seed(seed)
    with _one_thread():
        data = digits()
        model = DigitsNet()
        progress = partial(report, "Float training")
        fit(model, data.train, epochs=epochs, max_lr=3e-3, progress=progress)

        prepared = amct_fx.prepare_qat_amct(model, CONFIG)
        progress = partial(report, "Quantization-aware training")
        fit(prepared, data.train, epochs=max(1, epochs // 3), max_lr=3e-4, progress=progress)

        models = _Models(model, prepared, amct_fx.convert_amct(prepared))
        progress = partial(report, "Export and comparison")
        return _measure(models, data.held_out, started=started, progress=progress)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let PyTorch use one thread: the tensors are small, and a run repeats to the last digit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Models(NamedTuple):
    original: nn.Module
    prepared: nn.Module
    converted: nn.Module


def _measure(models: _Models, split: Split, *, started: float, progress: Progress) -> DemoResult:
    images, labels = split
    progress(0, 3)
    with TemporaryDirectory() as folder:
        float_onnx = Path(folder, "float.onnx")
        int8_onnx = Path(folder, "int8.onnx")
        export(models.original, float_onnx)
        progress(1, 3)
        export(models.converted, int8_onnx)
        progress(2, 3)
        codes = compare_codes(torch_codes(models.converted, images), onnx_codes(int8_onnx, images))
        result = DemoResult(
            float_accuracy=accuracy(models.original, split),
            prepared_accuracy=accuracy(models.prepared, split),
            converted_accuracy=accuracy(models.converted, split),
            onnxruntime_accuracy=correct_share(onnx_logits(int8_onnx, images), labels),
            float_onnx_bytes=float_onnx.stat().st_size,
            int8_onnx_bytes=int8_onnx.stat().st_size,
            equal_codes=codes.equal,
            max_code_difference=codes.max_difference,
            seconds=round(time.perf_counter() - started, 2),
        )
    progress(3, 3)
    return result
