"""Converted layers that run on the integer operators of torch-npu.

Each takes int8 codes, multiplies in int32, adds an int32 bias and scales to half precision. The
operators know no zero point of the input: a convolution pads with it (``offset_x``), and the bias
takes ``zero_point * sum(weight codes)`` off. Source: spec/deploy.md sections 8.2 and 8.3.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from amct_fx.nn import quantized
from amct_fx.nn.become import become
from amct_fx.nn.functional import cast
from amct_fx.nn.quantized import Quantize, QuantizedLayer
from amct_fx.npu.scale import pack_scale

__all__ = ["NpuConv2d", "NpuLinear", "NpuQuantize", "accumulator_bias", "convolution_padding"]

_INT32 = torch.iinfo(torch.int32)


class NpuQuantize(Quantize):
    """Turns a float tensor into int8 codes with ``npu_quantize``."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the codes of ``x``, any shape."""
        scale = torch.reciprocal(self.scale).reshape(1).to(x.dtype)
        offset = self.zero_point.reshape(1).to(x.dtype)
        codes: Tensor = torch.ops.npu.npu_quantize(x, scale, offset, torch.qint8, -1, False)
        return codes


class _NpuLayer(QuantizedLayer):
    """What both share: bias and scale as the operator wants them, computed from the codes.

    Attributes:
        npu_bias: int32 ``[C_out]`` with the share of the input's zero point, or ``None``.
        npu_scale: ``[C_out]``, input scale times weight scale: float32, or packed int64.
        output_dtype: What the operator returns; then cast to the dtype of the layer.
    """

    backend = "npu"
    npu_bias: Tensor | None
    npu_scale: Tensor
    output_dtype: torch.dtype
    _packed: bool

    @classmethod
    def adopt_layer(
        cls, layer: QuantizedLayer, *, output_dtype: torch.dtype, packed: bool
    ) -> _NpuLayer:
        """Make a converted layer one of this class; it stays the same object.

        Args:
            layer: Converted Linear or Conv2d that the operator can run.
            output_dtype: ``torch.float16`` or ``torch.bfloat16``.
            packed: Give the scale as int64.
        """
        lowered = become(layer, cls)
        lowered.output_dtype, lowered._packed = output_dtype, packed
        lowered.register_buffer("npu_bias", None, persistent=False)
        lowered.register_buffer("npu_scale", None, persistent=False)
        lowered.prepare_operands()
        return lowered

    def prepare_operands(self) -> None:
        """Compute bias and scale anew, after the codes or the scales have changed."""
        input_scale = self.input_owner.input_quantize.scale
        scale = (self.weight_scale * input_scale).float()
        self.npu_bias = accumulator_bias(self)
        if self._packed:  # one for each channel: npu_quant_conv2d takes no single one
            scale = pack_scale(scale.expand(len(self.weight_codes)))
        self.npu_scale = scale

    @property
    def zero_point(self) -> int:
        """Code of 0 of the input."""
        return self.input_owner.input_quantize.qparams.zero_point_value

    def quantized_input(self, input: Tensor, quantized: bool) -> Tensor:
        """Return the codes the operator runs on."""
        if quantized:
            return input
        codes: Tensor = self.input_owner.input_quantize(input)
        return codes

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.prepare_operands()

    def extra_repr(self) -> str:
        """Add what the operator returns to the converted layer's text."""
        return f"{super().extra_repr()}, output={str(self.output_dtype).removeprefix('torch.')}"


class NpuLinear(_NpuLayer, quantized.Linear):
    """``torch.nn.Linear`` on ``npu_quant_matmul``."""

    operator = "npu_quant_matmul"

    def forward(self, input: Tensor, *args: Any, quantized: bool = False) -> Tensor:
        """Multiply codes ``[*, in_features]`` (float unless ``quantized``) with the weight."""
        codes = self.quantized_input(input, quantized)
        rows = codes if 2 <= codes.dim() <= 6 else codes.reshape(-1, codes.shape[-1])
        output: Tensor = torch.ops.npu.npu_quant_matmul(
            rows,
            self.weight_codes.t(),
            self.npu_scale,
            bias=self.npu_bias,
            output_dtype=self.output_dtype,
        )
        output = cast(output, self.dtype)
        return output if rows is codes else output.reshape(*codes.shape[:-1], -1)


class NpuConv2d(_NpuLayer, quantized.Conv2d):
    """``torch.nn.Conv2d`` without groups on ``npu_quant_conv2d``."""

    operator = "npu_quant_conv2d"

    def forward(self, input: Tensor, *args: Any, quantized: bool = False) -> Tensor:
        """Convolve codes ``[N, C_in, H, W]`` (float unless ``quantized``) with the weight."""
        padding = convolution_padding(self)
        assert padding is not None, "checked before the layer was lowered"
        output: Tensor = torch.ops.npu.npu_quant_conv2d(
            self.quantized_input(input, quantized),
            self.weight_codes,
            self.npu_scale,
            list(self.stride),
            list(padding),
            list(self.dilation),
            1,
            self.zero_point,
            "rint",
            torch.float16,
            self.npu_bias,
        )
        return cast(output, self.dtype)


class _Sides(NamedTuple):
    """Padding of height and width, the same at both ends."""

    height: int
    width: int


def convolution_padding(layer: Any) -> tuple[int, int] | None:
    """Return the padding of a Conv2d in numbers, ``None`` if both ends differ (``"same"``).

    Example:
        >>> from torch import nn
        >>> convolution_padding(nn.Conv2d(3, 3, 5, padding="same", dilation=(1, 2)))
        _Sides(height=2, width=4)
        >>> convolution_padding(nn.Conv2d(3, 3, 2, padding="same")) is None
        True
    """
    if layer.padding == "valid":
        return _Sides(0, 0)
    if layer.padding != "same":
        return _Sides(*layer.padding)
    total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
    return None if any(side % 2 for side in total) else _Sides(*(side // 2 for side in total))


def accumulator_bias(layer: QuantizedLayer) -> Tensor | None:
    """Return the int32 bias that also takes the zero point of the input off.

    Args:
        layer: A converted layer; ``weight_codes`` is ``[C_out, *]``.

    Returns:
        int32 ``[C_out]``, or ``None`` if there is nothing to add.

    Raises:
        OverflowError: It does not fit into int32.
    """
    zero_point = layer.input_owner.input_quantize.qparams.zero_point_value
    if layer.bias_codes is None and zero_point == 0:
        return None
    sums = layer.weight_codes.flatten(1).sum(1, dtype=torch.int64)
    bias = -zero_point * sums
    if layer.bias_codes is not None:
        bias = bias + layer.bias_codes
    if bias.numel() and (int(bias.max()) > _INT32.max or int(bias.min()) < _INT32.min):
        raise OverflowError
    return bias.to(torch.int32)
