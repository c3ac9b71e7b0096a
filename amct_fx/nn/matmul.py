"""``torch.matmul`` of two quantized tensors, in training and converted.

Prepare never inserts one: raw products stay float, as in AMCT. It is for models that are written
with :class:`amct_fx.amct_pytorch.MatMulQAT`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from amct_fx.nn.become import become
from amct_fx.nn.quantized import Dequantize, Quantize

if TYPE_CHECKING:
    from torch.ao.quantization import FakeQuantizeBase

__all__ = ["QATMatMul", "QuantizedMatMul", "convert_matmuls"]


class QATMatMul(nn.Module):
    """A product of two fake-quantized tensors.

    Attributes:
        input_fake_quant: Fake-quantizer of the left factor.
        other_fake_quant: Fake-quantizer of the right factor.
    """

    input_fake_quant: FakeQuantizeBase
    other_fake_quant: FakeQuantizeBase

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """Multiply ``input`` ``[..., M, K]`` with ``other`` ``[..., K, N]``."""
        return torch.matmul(self.input_fake_quant(input), self.other_fake_quant(other))


class QuantizedMatMul(nn.Module):
    """A product of two tensors that become integers and back; made by :func:`convert_matmuls`."""

    input_quantize: Quantize
    input_dequantize: Dequantize
    other_quantize: Quantize
    other_dequantize: Dequantize

    def forward(self, input: Tensor, other: Tensor) -> Tensor:
        """Multiply ``input`` ``[..., M, K]`` with ``other`` ``[..., K, N]``."""
        left: Tensor = self.input_dequantize(self.input_quantize(input))
        right: Tensor = self.other_dequantize(self.other_quantize(other))
        return torch.matmul(left, right)


def convert_matmuls(model: nn.Module) -> None:
    """Freeze the quantizers of every product; one without quantizers stays as it is.

    Args:
        model: A model with calibrated quantizers; changed in place.

    Raises:
        ConvertError: A range is not finite; names the product.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, QATMatMul) and "input_fake_quant" in module._modules:
            _convert(module, name)


def _convert(module: QATMatMul, name: str) -> None:
    frozen = {
        part: Quantize.from_fake_quant(getattr(module, f"{part}_fake_quant"), name)
        for part in ("input", "other")
    }
    converted = become(module, QuantizedMatMul)
    for part, quantize in frozen.items():
        delattr(converted, f"{part}_fake_quant")
        setattr(converted, f"{part}_quantize", quantize)
        setattr(converted, f"{part}_dequantize", Dequantize(quantize))
