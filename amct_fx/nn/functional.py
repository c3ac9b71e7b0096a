"""Quantize and dequantize as the converted model does: exact in eager, Q/DQ nodes in a file.

Eager divides, ``round(x / scale) + zero_point``, which equals ONNX QuantizeLinear also on ties;
torch's decomposed operators multiply by the reciprocal and differ there, so they are used only
while a graph is captured for a file. Both ONNX exporters then write QuantizeLinear/DequantizeLinear
with nothing registered: ``dynamo=True`` translates the decomposed operators, ``dynamo=False`` calls
``symbolic``. Source: spec/deploy.md sections 1 and 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.ao.quantization.fx._decomposed
from torch import Tensor

from amct_fx._compat import is_exporting

__all__ = [
    "QParams",
    "cast",
    "dequantize_per_channel",
    "dequantize_per_tensor",
    "quantize_per_tensor",
]

_decomposed = torch.ops.quantized_decomposed


class QParams(NamedTuple):
    """Scale and zero point of one tensor, as tensors and as the numbers that a file needs.

    ``scale`` is float32 and ``zero_point`` of the integer type, both 0-d.
    """

    scale: Tensor
    zero_point: Tensor
    scale_value: float
    zero_point_value: int


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``x`` as ``dtype``; unlike ``x.to`` it leaves no Cast in a file for no change."""
    return x if x.dtype == dtype else x.to(dtype)


def _exporting() -> bool:
    exporting: bool = torch.onnx.is_in_onnx_export() or is_exporting()
    return exporting


def quantize_per_tensor(x: Tensor, qparams: QParams) -> Tensor:
    """Return the integer codes of ``x``.

    Args:
        x: Any shape, floating point; computed in float32.
        qparams: Its ``zero_point`` decides the integer type (int8 or int16) of the result.

    Returns:
        ``clamp(round(x / scale) + zero_point)``, same shape, rounding half to even.

    Example:
        >>> qparams = QParams(torch.tensor(0.5), torch.tensor(3, dtype=torch.int8), 0.5, 3)
        >>> quantize_per_tensor(torch.tensor([-1.0, 0.25, 0.75, 99.0]), qparams)
        tensor([  1,   3,   5, 127], dtype=torch.int8)
    """
    codes: Tensor = _Quantize.apply(cast(x, torch.float32), *qparams)  # type: ignore[no-untyped-call]
    return codes


def dequantize_per_tensor(codes: Tensor, qparams: QParams) -> Tensor:
    """Return ``(codes - zero_point) * scale`` as float32.

    Example:
        >>> qparams = QParams(torch.tensor(0.5), torch.tensor(3, dtype=torch.int8), 0.5, 3)
        >>> dequantize_per_tensor(torch.tensor([1, 3], dtype=torch.int8), qparams)
        tensor([-1.,  0.])
    """
    values: Tensor = _Dequantize.apply(codes, *qparams)  # type: ignore[no-untyped-call]
    return values


def dequantize_per_channel(codes: Tensor, scale: Tensor, axis: int = 0) -> Tensor:
    """Return ``codes * scale`` as float32, one scale for each index of ``axis``.

    Args:
        codes: int8 weight or int32 bias codes; the zero points are 0.
        scale: float32, shape ``[codes.size(axis)]``.
        axis: The channel axis.

    Example:
        >>> codes = torch.tensor([[1, 2], [3, 4]], dtype=torch.int8)
        >>> dequantize_per_channel(codes, torch.tensor([0.5, 2.0]))
        tensor([[0.5000, 1.0000],
                [6.0000, 8.0000]])
    """
    values: Tensor = _DequantizePerChannel.apply(codes, scale, axis)  # type: ignore[no-untyped-call]
    return values


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scale: Tensor, zero_point: Tensor, scale_value: float, zero_value: int
    ) -> Tensor:
        limits = torch.iinfo(zero_point.dtype)
        if _exporting():
            codes: Tensor = _decomposed.quantize_per_tensor(
                x, scale_value, zero_value, limits.min, limits.max, zero_point.dtype
            )
            return codes
        rounded = torch.round(x / scale).add_(zero_point)
        return rounded.clamp_(limits.min, limits.max).to(zero_point.dtype)

    @staticmethod
    def symbolic(g: Any, x: Any, scale: Any, zero_point: Any, *_: Any) -> Any:
        return g.op("QuantizeLinear", x, scale, zero_point)


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, codes: Tensor, scale: Tensor, zero: Tensor, scale_value: float, zero_value: int
    ) -> Tensor:
        if _exporting():
            limits = torch.iinfo(codes.dtype)
            values: Tensor = _decomposed.dequantize_per_tensor(
                codes, scale_value, zero_value, limits.min, limits.max, codes.dtype
            )
            return values
        return codes.float().sub_(zero).mul_(scale)

    @staticmethod
    def symbolic(g: Any, codes: Any, scale: Any, zero_point: Any, *_: Any) -> Any:
        return g.op("DequantizeLinear", codes, scale, zero_point)


class _DequantizePerChannel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, codes: Tensor, scale: Tensor, axis: int) -> Tensor:
        if _exporting():
            limits = torch.iinfo(codes.dtype)
            zeros = torch.zeros_like(scale, dtype=torch.int64)
            values: Tensor = _decomposed.dequantize_per_channel(
                codes, scale, zeros, axis, limits.min, limits.max, codes.dtype
            )
            return values
        shape = [1] * codes.dim()
        shape[axis] = -1
        return codes.float().mul_(scale.view(shape))

    @staticmethod
    def symbolic(g: Any, codes: Any, scale: Any, axis: int) -> Any:
        dtype = codes.type().dtype()
        if dtype == torch.int32:
            return g.op("DequantizeLinear", codes, scale, axis_i=axis)
        # May be left out, but then onnxruntime before 1.28 takes int8 codes for uint8.
        zeros = g.op("Constant", value_t=torch.zeros(scale.type().sizes(), dtype=dtype))
        return g.op("DequantizeLinear", codes, scale, zeros, axis_i=axis)
