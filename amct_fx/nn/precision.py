"""The scales of devices that compute in half precision: FORCE_FP16_QUANT.

Source: spec/quantization.md section 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["fp16_scale", "truncate_to_19_bits"]

_LARGEST = 65504.0
_SMALLEST_NORMAL = 2.0**-14
_KEPT_BITS = -8192  # 0xFFFFE000: sign, exponent and 10 bits of the mantissa


def fp16_scale(scale: Tensor) -> Tensor:
    """Round the scale of an activation to what half precision can hold, kept as float32.

    Outside the normal range of half precision its square root is rounded and squared again, as the
    device does.

    Args:
        scale: float32, positive.

    Example:
        >>> [f"{v:.9g}" for v in fp16_scale(torch.tensor([0.0123456789, 1e-5, 1e5])).tolist()]
        ['0.0123443604', '1.00006728e-05', '100014.062']
    """
    scale = scale.float()
    root = scale.sqrt().half().float()
    normal = (scale <= _LARGEST) & (scale >= _SMALLEST_NORMAL)
    return torch.where(normal, scale.half().float(), root * root)


def truncate_to_19_bits(scale: Tensor) -> Tensor:
    """Clear the low 13 bits of a float32 dequantization scale.

    Args:
        scale: float32, input scale times weight scale.

    Example:
        >>> scales = torch.tensor([0.01, 0.1, 0.0123456789])
        >>> [f"{v:.9g}" for v in truncate_to_19_bits(scales).tolist()]
        ['0.00999450684', '0.0999755859', '0.0123443604']
    """
    return (scale.float().contiguous().view(torch.int32) & _KEPT_BITS).view(torch.float32)
