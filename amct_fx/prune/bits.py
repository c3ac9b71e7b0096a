"""2:4 masks as AMCT's record file packs them: eight bits a byte, eight bytes an integer.

Source: spec/pruning.md section 10.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from amct_fx.errors import RecordError

__all__ = ["pack_mask", "unpack_mask"]


def pack_mask(mask: Tensor) -> list[int]:
    """Pack a mask into integers.

    Args:
        mask: Bool or integers, nonzero where a weight is kept.

    Returns:
        Little-endian int64 values; bits run row by row, the highest of a byte first, and zero bytes
        fill the last value.

    Example:
        >>> pack_mask(torch.tensor([[0, 1, 1, 0, 1, 1], [1, 1, 0, 0, 1, 1], [0, 1, 0, 1, 1, 1]]))
        [12596591]
    """
    packed = np.packbits((mask != 0).flatten().cpu().numpy())
    padded = np.pad(packed, (0, -len(packed) % 8))
    return [int(value) for value in padded.view("<i8")]


def unpack_mask(values: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Undo :func:`pack_mask`.

    Args:
        values: The integers.
        shape: Shape of the weight.

    Returns:
        bool of that shape.

    Raises:
        RecordError: There are too few or too many integers for the shape.

    Example:
        >>> unpack_mask([12597615], (3, 6)).int().tolist()
        [[0, 1, 1, 0, 1, 1], [1, 1, 0, 0, 1, 1], [1, 0, 0, 1, 1, 1]]
    """
    count = int(np.prod(shape, dtype=np.int64))
    if len(values) != -(-count // 64):
        message = (
            f"a mask of shape {tuple(shape)} takes {-(-count // 64)} integers, not {len(values)}"
        )
        raise RecordError(message)
    packed = np.asarray(values, dtype="<i8").view(np.uint8)
    return torch.from_numpy(np.unpackbits(packed)[:count].astype(bool)).reshape(tuple(shape))
