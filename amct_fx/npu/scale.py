"""Dequantization scales as the device reads them: 19 bits of a float32 inside an int64.

What ``npu_trans_quant_param`` does, without a device. Source: spec/deploy.md section 8.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["pack_scale", "unpack_scale"]

_FLAG = 1 << 46
_LOW_BITS = 13
_OFFSET_BITS = 9
_OFFSET_AT = 37


def pack_scale(scale: Tensor, *, offset: int = 0, rounded: bool = True) -> Tensor:
    """Pack scales for ``npu_quant_conv2d`` and ``npu_quant_matmul``.

    Args:
        scale: float32, any shape, positive.
        offset: Offset of a quantized output, in 9 bits; 0 for a float output.
        rounded: Round to the 19 bits that are kept (``round_mode=1``); else cut the rest off.

    Returns:
        int64, the shape of ``scale``.

    Example:
        >>> pack_scale(torch.tensor([0.01, 1.0]), rounded=False).tolist()
        [70369753153536, 70369809530880]
        >>> f"{unpack_scale(pack_scale(torch.tensor([0.01]))).item():.7g}"
        '0.01000214'
    """
    bits = scale.detach().float().contiguous().view(torch.int32).to(torch.int64)
    if rounded:
        bits = bits + (1 << (_LOW_BITS - 1))
    kept = (bits >> _LOW_BITS) << _LOW_BITS
    return kept | _FLAG | ((offset & ((1 << _OFFSET_BITS) - 1)) << _OFFSET_AT)


def unpack_scale(packed: Tensor) -> Tensor:
    """Return the float32 scales that the device computes with.

    Args:
        packed: int64, of :func:`pack_scale`.
    """
    return (packed & 0xFFFFFFFF).to(torch.int32).view(torch.float32)
