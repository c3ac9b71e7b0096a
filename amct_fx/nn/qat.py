"""Quantization-aware training layers: the float layer with a fake-quantized weight and input.

Each class is a subclass of its ``torch.nn`` namesake with the same parameters and attributes, so a
float checkpoint loads by name and code that reads ``layer.weight`` or ``layer.stride`` keeps
working.

A layer quantizes its own input. In a traced graph the quantizer is a node of its own, run once for
all consumers of the tensor, and the call of the layer says ``quantized=True``. So a layer that is
called past the graph, from a method of the user's, still computes with a quantized input.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx.nn import recomputing
from amct_fx.nn.qat_layer import QATLayer
from amct_fx.nn.qat_rnn import GRU, LSTM

__all__ = [
    "GRU",
    "LSTM",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "Linear",
    "QATLayer",
    "qat_class_of",
]


class _ConvNd(QATLayer):
    """Forward of the convolutions."""

    def forward(self, input: Tensor, *, quantized: bool = False) -> Tensor:
        """Convolve the quantized input ``[N, C_in, *]`` with the fake-quantized weight."""
        input = self.quantized_input(input, quantized)
        layer: Any = self
        source = self.source_of(input) if _is_plain(layer, input) else None
        if source is not None:
            geometry = layer.stride, layer.padding, layer.dilation, False, layer.output_padding
            weight = recomputing.Weight(*self.weight_and_values())
            return recomputing.convolution(
                input, weight, self.bias, source, (*geometry, layer.groups)
            )
        output: Tensor = layer._conv_forward(input, self.quantized_weight(), self.bias)
        return output


def _is_plain(layer: Any, input: Tensor) -> bool:
    """Say whether a convolution is just ``torch.convolution``: zeros around a whole batch."""
    plain = layer.padding_mode == "zeros" and not isinstance(layer.padding, str)
    return plain and input.dim() == len(layer.kernel_size) + 2


class Conv1d(_ConvNd, nn.Conv1d):
    """Quantization-aware ``torch.nn.Conv1d``."""

    float_class = nn.Conv1d


class Conv2d(_ConvNd, nn.Conv2d):
    """Quantization-aware ``torch.nn.Conv2d``, depthwise and grouped included."""

    float_class = nn.Conv2d


class Conv3d(_ConvNd, nn.Conv3d):
    """Quantization-aware ``torch.nn.Conv3d``."""

    float_class = nn.Conv3d


class _ConvTransposeNd(QATLayer):
    """Forward of the transposed convolutions."""

    spatial_dims: ClassVar[int]
    operator: ClassVar[Any]

    def forward(
        self, input: Tensor, output_size: list[int] | None = None, *, quantized: bool = False
    ) -> Tensor:
        """Convolve the quantized input ``[N, C_in, *]`` with the fake-quantized weight."""
        input = self.quantized_input(input, quantized)
        layer: Any = self
        output_padding = layer._output_padding(
            input,
            output_size,
            layer.stride,
            layer.padding,
            layer.kernel_size,
            self.spatial_dims,
            layer.dilation,
        )
        source = self.source_of(input) if _is_plain(layer, input) else None
        if source is not None:
            geometry = layer.stride, layer.padding, layer.dilation, True, output_padding
            weight = recomputing.Weight(*self.weight_and_values())
            return recomputing.convolution(
                input, weight, self.bias, source, (*geometry, layer.groups)
            )
        output: Tensor = type(self).operator(
            input,
            self.quantized_weight(),
            self.bias,
            layer.stride,
            layer.padding,
            output_padding,
            layer.groups,
            layer.dilation,
        )
        return output


class ConvTranspose1d(_ConvTransposeNd, nn.ConvTranspose1d):
    """Quantization-aware ``torch.nn.ConvTranspose1d``."""

    float_class = nn.ConvTranspose1d
    spatial_dims = 1
    operator = staticmethod(F.conv_transpose1d)


class ConvTranspose2d(_ConvTransposeNd, nn.ConvTranspose2d):
    """Quantization-aware ``torch.nn.ConvTranspose2d``."""

    float_class = nn.ConvTranspose2d
    spatial_dims = 2
    operator = staticmethod(F.conv_transpose2d)


class Linear(QATLayer, nn.Linear):
    """Quantization-aware ``torch.nn.Linear`` for inputs ``[*, in_features]`` of any rank."""

    float_class = nn.Linear

    def forward(self, input: Tensor, *, quantized: bool = False) -> Tensor:
        """Multiply the quantized input with the fake-quantized weight."""
        input = self.quantized_input(input, quantized)
        source = self.source_of(input)
        if source is not None:
            weight = recomputing.Weight(*self.weight_and_values())
            return recomputing.linear(input, weight, self.bias, source)
        return F.linear(input, self.quantized_weight(), self.bias)


_CLASSES: tuple[type[QATLayer], ...] = (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    Linear,
    LSTM,
    GRU,
)


def qat_class_of(float_class: type[nn.Module]) -> type[QATLayer] | None:
    """Return the quantization-aware class for exactly ``float_class``, ``None`` if there is none.

    Example:
        >>> qat_class_of(nn.Linear).__name__
        'Linear'
    """
    return next((cls for cls in _CLASSES if cls.float_class is float_class), None)
