"""Export with the stock exporter, run in stock onnxruntime, compare the integer codes."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

from amct_fx.nn.quantized import collect_codes

__all__ = ["CodeComparison", "compare_codes", "export", "onnx_codes", "onnx_logits", "torch_codes"]

Codes = list[npt.NDArray[np.int64]]


def export(model: nn.Module, path: Path) -> None:
    """Write ``model`` to one ONNX file that takes batches of any size."""
    model.eval()
    example_inputs = (torch.zeros(2, 1, 8, 8),)
    torch.onnx.export(
        model,
        example_inputs,
        path,
        dynamo=True,
        dynamic_shapes=({0: "batch"},),
        external_data=False,
        verbose=False,
    )


def _run(model: bytes, outputs: list[str] | None, images: Tensor) -> list[npt.NDArray[np.generic]]:
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    [image_input] = session.get_inputs()
    results: list[npt.NDArray[np.generic]] = session.run(
        outputs, {image_input.name: images.numpy()}
    )
    return results


def onnx_logits(path: Path, images: Tensor) -> Tensor:
    """Return what onnxruntime makes of ``images`` with the model in ``path``."""
    [logits] = _run(path.read_bytes(), None, images)
    return torch.from_numpy(logits)


def onnx_codes(path: Path, images: Tensor) -> Codes:
    """Return the integer codes of every activation quantizer in the file, in graph order.

    Weights are stored as integers, so each QuantizeLinear node is an activation quantizer; its
    output is made an output of the graph.
    """
    model = onnx.shape_inference.infer_shapes(onnx.load(path))
    infos = {info.name: info for info in model.graph.value_info}
    names = [node.output[0] for node in model.graph.node if node.op_type == "QuantizeLinear"]
    model.graph.output.extend(infos[name] for name in names)
    results = _run(model.SerializeToString(), names, images)
    return [codes.astype(np.int64) for codes in results]


@torch.no_grad()
def torch_codes(converted: nn.Module, images: Tensor) -> Codes:
    """Return the integer codes of every activation quantizer of ``converted``, in graph order."""
    with collect_codes(converted) as collected:
        converted(images)
    return [torch.cat(codes).numpy().astype(np.int64) for codes in collected.values()]


class CodeComparison(NamedTuple):
    """How well two runs agree: the share of equal codes, and the largest difference."""

    equal: float
    max_difference: int


def compare_codes(ours: Codes, theirs: Codes) -> CodeComparison:
    """Compare two runs, quantizer by quantizer; each code counts once.

    Raises:
        ValueError: If the runs differ in the number of quantizers or in a shape.

    Example:
        >>> compare_codes([np.array([1, 2, 3, 4])], [np.array([1, 2, 3, 5])])
        CodeComparison(equal=0.75, max_difference=1)
    """
    if [codes.shape for codes in ours] != [codes.shape for codes in theirs]:
        message = "the two runs do not have the same quantizers"
        raise ValueError(message)
    differences = np.concatenate([abs(a - b).ravel() for a, b in zip(ours, theirs, strict=True)])
    return CodeComparison(float(np.mean(differences == 0)), int(differences.max()))
