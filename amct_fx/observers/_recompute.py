"""How a fake-quantized activation can be made again in backward, instead of being kept.

A layer needs its quantized input to compute the gradient of its weight, and keeps it. The input
before quantization is kept too, by the quantizer and mostly by what produced it. So a layer may
keep that one only, and make the other again: six passes over memory for four bytes per element.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from amct_fx.observers._scale import as_float32

if TYPE_CHECKING:
    from torch import Tensor

    from amct_fx.observers._ulq_settings import Settings

__all__ = ["Remade", "Source", "SourceOfLast", "fake_quantize_values", "is_traced"]


def fake_quantize_values(x: Tensor, scale: Tensor, offset: Tensor, num_bits: int) -> Tensor:
    """Return ``(clamp(RNE(x/s + o), qmin, qmax) - o) * s``, float32, fresh.

    Args:
        x: Any floating dtype.
        scale: float32 ``(1,)``.
        offset: float32 ``(1,)``, an integer.
        num_bits: Width of the codes.
    """
    half = 2 ** (num_bits - 1)
    if x.dim() == 0:
        scale, offset = scale.reshape(()), offset.reshape(())
    codes = (as_float32(x) / scale).add_(offset).round_().clamp_(-half, half - 1)
    return codes.sub_(offset).mul_(scale)


def is_traced() -> bool:
    """Say whether a compiler or an exporter records the operations instead of running them."""
    return torch.compiler.is_compiling() or bool(torch._C._is_tracing())


@dataclass
class Remade:
    """The values that the first layer in backward made again, for the other readers.

    The backward of the quantizer comes after all of them and drops the values.
    """

    values: Tensor | None = None

    def get(self, x: Tensor, scale: Tensor, offset: Tensor, num_bits: int) -> Tensor:
        """Return the float32 values, making them if no one has yet."""
        if self.values is None:
            self.values = fake_quantize_values(x, scale, offset, num_bits)
        return self.values

    def drop(self) -> Tensor | None:
        """Forget the values and hand over their memory."""
        values, self.values = self.values, None
        return values


class Source(NamedTuple):
    """What a fake-quantized tensor was made from.

    Attributes:
        x: The float tensor.
        clips: The tensors that receive the gradients of the clips; their values may have changed.
        settings: What it was made with.
        remade: Where the layers that read it leave the values for one another.
    """

    x: Tensor
    clips: tuple[Tensor, Tensor]
    settings: Settings
    remade: Remade


@dataclass
class SourceOfLast:
    """Remembers the source of the last tensor that a quantizer made, as long as that lives.

    Copies and pickles start empty.
    """

    _last: tuple[weakref.ref[Tensor], int, Source] | None = field(default=None, repr=False)

    def remember(self, y: Tensor, source: Source) -> None:
        """Note that ``y`` was made from ``source``."""
        self._last = weakref.ref(y, self._forget), y._version, source

    def of(self, y: Tensor) -> Source | None:
        """Return the source of ``y``, if it is the last tensor made and was not changed since."""
        last = self._last
        if last is None or last[0]() is not y or last[1] != y._version:
            return None
        return last[2]

    def _forget(self, gone: weakref.ref[Tensor]) -> None:
        if self._last is not None and self._last[0] is gone:
            self._last = None

    def __reduce__(self) -> tuple[Any, ...]:
        return SourceOfLast, ()
