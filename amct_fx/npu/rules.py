"""Which converted layers torch-npu can run in integers, and the reason when not.

The limits are those of Ascend's documents; no device stands behind them. Source: spec/deploy.md
sections 8.2 and 8.4.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amct_fx.errors import ArgumentError
from amct_fx.npu.layers import accumulator_bias, convolution_padding
from amct_fx.npu.probe import has_arguments

if TYPE_CHECKING:
    from amct_fx.nn.quantized import QuantizedLayer
    from amct_fx.npu.probe import Probe

__all__ = ["NpuOptions", "why_not"]

_LONGEST_AXIS = 65535
_EAGER_CONVOLUTION = "Ascend950"
"""Devices whose names begin so run int8 convolutions outside of a graph, too."""
_QUANTIZE = ("scales", "zero_points", "dtype", "axis", "div_mode")
_MATMUL = ("x1", "x2", "scale", "bias", "output_dtype")
_CONVOLUTION = ("strides", "pads", "dilations", "groups", "offset_x", "output_dtype", "bias")
_LIMITS = {"kernel_size": (1, 255), "stride": (1, 63), "dilation": (1, 255)}


@dataclass(frozen=True)
class NpuOptions:
    """How a model is lowered for torch-npu; give it as ``backend`` of ``convert_amct``.

    Attributes:
        graph_mode: The model will run as a static graph, ``torch.compile`` with torchair's backend
            and ``dynamic=False``. Only there most devices have an int8 convolution.
        output_dtype: What Linear layers return before the cast to the model's dtype,
            ``torch.float16`` or ``torch.bfloat16``; ``None`` follows the model.

    Raises:
        ArgumentError: Another ``output_dtype``.
    """

    graph_mode: bool = False
    output_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        """Check the dtype."""
        if self.output_dtype not in (None, torch.float16, torch.bfloat16):
            message = (
                f"output_dtype must be torch.float16, torch.bfloat16 or None, not "
                f"{self.output_dtype!r}"
            )
            raise ArgumentError(message)

    def output_dtype_of(self, layer: QuantizedLayer) -> torch.dtype:
        """Return what the operator of a layer returns."""
        if self.output_dtype is not None:
            return self.output_dtype
        return torch.bfloat16 if layer.dtype is torch.bfloat16 else torch.float16


def why_not(layer: QuantizedLayer, options: NpuOptions, found: Probe) -> str | None:
    """Say why a layer keeps its fake-quantized arithmetic, ``None`` if an operator can run it.

    Args:
        layer: A converted layer.
        options: How the model is lowered.
        found: What torch-npu can do.
    """
    return next(_reasons(layer, options, found), None)


def _reasons(layer: Any, options: NpuOptions, found: Probe) -> Iterator[str]:
    kind = layer.float_class.__name__
    if kind not in ("Linear", "Conv2d"):
        yield f"torch-npu has int8 operators for Linear and Conv2d, not for {kind}"
        return
    quantize = layer.input_owner.input_quantize
    if quantize.zero_point.dtype is not torch.int8:
        yield "its input has 16 bits, the operators take int8"
    if layer.weight_bits != 8:
        yield f"its weight has {layer.weight_bits} bits, the operators take int8"
    if not has_arguments("npu_quantize", *_QUANTIZE):
        yield "this torch-npu has no suitable npu_quantize"
    yield from _linear(layer) if kind == "Linear" else _convolution(layer, options, found)
    try:
        accumulator_bias(layer)
    except OverflowError:
        yield "its bias and the share of the zero point exceed int32"


def _linear(layer: nn.Linear) -> Iterator[str]:
    if not has_arguments("npu_quant_matmul", *_MATMUL):
        yield "this torch-npu has no suitable npu_quant_matmul"
    longest = max(layer.in_features, layer.out_features)
    if longest > _LONGEST_AXIS:
        yield f"it has {longest} features, npu_quant_matmul takes {_LONGEST_AXIS}"


def _convolution(layer: nn.Conv2d, options: NpuOptions, found: Probe) -> Iterator[str]:
    if not options.graph_mode and not found.device_name.startswith(_EAGER_CONVOLUTION):
        yield (
            "int8 convolutions run only in a static graph: compile with torchair and convert with "
            "NpuOptions(graph_mode=True)"
        )
    if not has_arguments("npu_quant_conv2d", *_CONVOLUTION):
        yield "this torch-npu has no suitable npu_quant_conv2d"
    if layer.groups != 1:
        yield f"it has {layer.groups} groups, npu_quant_conv2d takes 1"
    padding = convolution_padding(layer)
    if padding is None:
        yield "its padding 'same' needs more on one side, npu_quant_conv2d pads both alike"
    sides = {name: (getattr(layer, name), *limits) for name, limits in _LIMITS.items()}
    sides["padding"] = (padding or (0, 0), 0, 255)
    for name, (values, lowest, highest) in sides.items():
        if not all(lowest <= value <= highest for value in values):
            yield f"its {name} {tuple(values)} is outside of {lowest} … {highest}"
