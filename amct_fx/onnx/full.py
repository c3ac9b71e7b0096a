"""Quantized results for ``qdq_full``: calibrated on given data where they were not trained.

Source: spec/deploy.md section 2.4.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from amct_fx.errors import ArgumentError, ArgumentTypeError, CalibrationError, InputDataError
from amct_fx.freezing import frozen_quantizers, replace_fake_quantizers
from amct_fx.graph import fx_graph_of, guard_of, install_graph, layer_calls, regions
from amct_fx.observers import ULQFakeQuantize
from amct_fx.onnx.arguments import positional
from amct_fx.outputs import insert_output_quantizers
from amct_fx.report.preparation import preparation_of

__all__ = ["has_trained_outputs", "quantize_outputs_on"]


def has_trained_outputs(model: nn.Module) -> bool:
    """Say whether a converted model was prepared with ``outputs="quantize"``."""
    preparation = preparation_of(model)
    return preparation is not None and preparation.recipe.options.get("outputs") == "quantize"


@torch.no_grad()
def quantize_outputs_on(model: nn.Module, data: Iterable[Any] | None) -> None:
    """Quantize the results in a converted model, with the ranges of some batches.

    Args:
        model: A converted model in eval mode, of our own; changed.
        data: Batches, each a tensor or a tuple of what ``forward`` takes.

    Raises:
        ArgumentError: There are no batches.
        ArgumentTypeError: ``data`` is no collection of batches.
        CalibrationError: A batch or a result is not finite.
        InputDataError: A batch is neither a tensor nor a tuple, or does not fit the model.
    """
    batches = _batches(data)
    if not batches:
        message = (
            "format 'qdq_full' quantizes results too: give calibration_data, a list of batches, or "
            "prepare the model with outputs='quantize'"
        )
        raise ArgumentError(message)
    activation = ULQFakeQuantize.with_args(batch_num=len(batches))
    parts = [region for _, region in regions(model)]
    for region in parts:
        graph = fx_graph_of(region)
        insert_output_quantizers(graph, region, activation)
        install_graph(region, graph, guard_of(region))
    for batch in batches:
        _run(model, batch)
    for region in parts:
        graph = fx_graph_of(region)
        calls = layer_calls(graph, region)
        quantizers = frozen_quantizers(calls)
        if quantizers:
            replace_fake_quantizers(calls, quantizers, region)
            install_graph(region, graph, guard_of(region))
    model.eval()


def _batches(data: object) -> list[Any]:
    if data is None:
        return []
    if isinstance(data, (Tensor, str, Mapping)) or not isinstance(data, Iterable):
        kind = type(data).__name__
        message = f"calibration_data must be a list of batches, not {kind}; write [batch]"
        raise ArgumentTypeError(message)
    return list(data)


def _run(model: nn.Module, batch: Any) -> None:
    arguments = positional(batch, model, "a batch of calibration_data")
    for tensor in tree_leaves(arguments):
        if isinstance(tensor, Tensor) and not bool(torch.isfinite(tensor).all()):
            message = "a batch of calibration_data holds NaN or Inf, from which no range follows"
            raise CalibrationError(message)
    try:
        model(*arguments)
    except CalibrationError:
        raise
    except Exception as error:  # whatever forward raises
        message = f"the model cannot run on a batch of calibration_data: {error}"
        raise InputDataError(message) from error
