"""What is added up for one layer while batches run through the model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amct_fx.observers.functional import to_output_major
from amct_fx.report.analysis import LayerAnalysis, Sensitivity
from amct_fx.report.batches import tensors_in
from amct_fx.report.describe import describe_input
from amct_fx.report.measures import ChannelUse, Codes, CodeUse, ErrorSum, Histogram, HistogramSum

if TYPE_CHECKING:
    from amct_fx.nn.qat import QATLayer

__all__ = ["LayerSums"]


class LayerSums:
    """Adds up errors, codes and values of one layer.

    Args:
        name: Name of the layer.
        layer: The layer, in the private copy of the model.
    """

    def __init__(self, name: str, layer: QATLayer) -> None:
        self.name, self.layer = name, layer
        self.calls = 0
        self.input, self.output = ErrorSum(), ErrorSum()
        self.alone, self.by_input, self.by_weight = ErrorSum(), ErrorSum(), ErrorSum()
        self.effect = ErrorSum()
        self._values = HistogramSum()
        self._channels = ChannelUse(axis=1 if isinstance(layer, nn.modules.conv._ConvNd) else -1)
        quantizer: Any = layer.input_quantizer
        self._input_codes = Codes(int(quantizer.quant_min), int(quantizer.quant_max))
        scale, zero_point = quantizer.calculate_qparams()
        self._scale, self._zero_point = scale.float(), zero_point

    def add_input(self, value: Tensor) -> None:
        """Look at one input, in float, as it came in the quantized model."""
        self.calls += 1
        self._values.add(value)
        if self._scale.numel() != 1:
            return
        codes = torch.round(value.float() / self._scale) + self._zero_point
        self._input_codes.add(codes)
        self._channels.add(codes - self._zero_point)

    def result(self, sensitivity: Sensitivity | None) -> LayerAnalysis:
        """Return the figures."""
        error, codes, values, dead = _weights(self.layer)
        source = describe_input(self.layer.input_quantizer)
        return LayerAnalysis(
            name=self.name,
            type=type(self.layer).float_class.__name__,
            calls=self.calls,
            input=self.input.result(),
            weight=error.result(),
            output=self.output.result(),
            output_alone=self.alone.result(),
            by_input=self.by_input.result(),
            by_weight=self.by_weight.result(),
            input_codes=self._input_codes.result(),
            weight_codes=codes,
            input_histogram=self._values.result(source.clip_min, source.clip_max),
            weight_histogram=values,
            dead_channels=dead,
            dead_inputs=self._channels.dead,
            sensitivity=sensitivity,
        )


def add_outputs(error: ErrorSum, expected: Any, actual: Any) -> None:
    """Compare what a layer returns, a tensor or several in any structure."""
    for want, have in zip(tensors_in(expected), tensors_in(actual), strict=False):
        error.add(want, have)


def _weights(
    layer: QATLayer,
) -> tuple[ErrorSum, CodeUse | None, Histogram | None, tuple[int, ...]]:
    """Look at the weights of a layer: error, codes, values, and rows whose codes are all 0."""
    half = 2 ** (layer.weight_bits - 1)
    error, codes, values = ErrorSum(), Codes(-half, half - 1), HistogramSum()
    dead: set[int] = set()
    reach = 0.0
    for name in layer.weight_quantizers:
        rows, scale = _rows(layer, name)
        unclamped = torch.round(rows.flatten(1) / scale)
        clamped = unclamped.clamp(-half, half - 1)
        error.add(rows.flatten(1), clamped * scale)
        codes.add(unclamped)
        values.add(rows)
        alive = (clamped != 0).any(1)
        dead.update((~alive).nonzero().flatten().tolist())
        # The scale of a row of zeros is 1, which says nothing of the range.
        used = scale.expand(len(rows), 1)[alive]
        reach = max(reach, float(used.max()) if len(used) else 0.0)
    clips = (-half * reach, (half - 1) * reach) if reach else (None, None)
    histogram = values.result(*clips)
    return error, codes.result(), histogram, tuple(sorted(dead))


def _rows(layer: QATLayer, name: str) -> tuple[Tensor, Tensor]:
    """Return a weight with one row for each output channel, and the scales of the rows."""
    weight = getattr(layer, name).detach().float()
    if isinstance(layer, nn.modules.conv._ConvTransposeNd):
        weight = to_output_major(weight, ch_axis=1, groups=layer.groups)
    return weight, layer.weight_scale(name).float().reshape(-1, 1)
