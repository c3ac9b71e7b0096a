"""A fake-quantized weight that is kept while the weight does not change.

Evaluation and gradient accumulation run many forwards with the same weights. A tensor's version
counter does not tell all changes: writes through ``.data``, NumPy or a fused kernel leave it alone.
So a kept result is used only after the weight was compared with a copy, one pass instead of seven.
Comparing reads a value on the host, so accelerators keep nothing unless the caller promises that
nothing changes (:func:`amct_fx.control.weights_unchanged`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Hashable

__all__ = ["WeightCache"]


class _Kept(NamedTuple):
    """A result, its version when it was made, and what the weight was then."""

    scale: Tensor
    result: Tensor
    version: int
    weight: Tensor | None


@dataclass(repr=False)
class WeightCache:
    """The last fake-quantized weight of one quantizer, if the weight was seen unchanged before.

    A weight's first result is kept if the weight before it was seen twice, later ones always. So
    nothing is kept in a training that changes its weights between any two forwards. Copies and
    pickles start empty.

    Attributes:
        trusted: The caller promises that no weight changes; every device then keeps results, and
            no weight is compared.
    """

    trusted: bool = False
    _key: Hashable = None
    _seen: int = 0
    _kept: _Kept | None = None

    def find(self, weight: Tensor, settings: Hashable) -> tuple[Tensor, Tensor] | None:
        """Return scale and result for ``weight``, if they are known for sure."""
        kept = self._kept
        if kept is None or not self._usable(weight) or self._key_of(weight, settings) != self._key:
            return None
        unchanged = kept.weight is None or torch.equal(weight.detach(), kept.weight)
        if not unchanged or kept.result._version != kept.version:
            self._kept = None
            return None
        self._seen += 1
        return kept.scale, kept.result

    def note(self, weight: Tensor, settings: Hashable, scale: Tensor, result: Tensor) -> None:
        """Learn of a result just computed; keep it if the weight is likely to be seen again."""
        if not self._usable(weight):
            return
        key = self._key_of(weight, settings)
        repeats = key == self._key
        likely = self.trusted or repeats or self._seen > 1
        self._seen = self._seen + 1 if repeats else 1
        self._key, self._kept = key, None
        if likely:
            copied = None if self.trusted else weight.detach().clone()
            alias = result.detach()
            self._kept = _Kept(scale, alias, alias._version, copied)

    def clear(self) -> None:
        """Forget everything."""
        self._key, self._seen, self._kept = None, 0, None

    def _usable(self, weight: Tensor) -> bool:
        """Say whether ``weight`` is an ordinary tensor in eager, on a device where we may look."""
        return (
            type(weight) in (Tensor, nn.Parameter)
            and (self.trusted or weight.device.type == "cpu")
            and not torch._C._functorch.is_functorch_wrapped_tensor(weight)
            and not weight.is_inference()
            and not torch.is_inference_mode_enabled()
        )

    @staticmethod
    def _key_of(weight: Tensor, settings: Hashable) -> Hashable:
        return (
            settings,
            weight.data_ptr(),
            weight._version,
            weight.dtype,
            weight.shape,
            weight.stride(),
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return WeightCache, ()
