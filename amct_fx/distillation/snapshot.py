"""The state of a model before something that may fail, and of a group at its best."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from amct_fx.observers import ULQFakeQuantize
from amct_fx.observers._base import AmctFakeQuantize

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["ModelSnapshot", "TensorSnapshot"]


class TensorSnapshot:
    """Values of tensors, to be put back in place.

    Args:
        tensors: Parameters and buffers; each is copied once.

    Example:
        >>> x = torch.zeros(2)
        >>> snapshot = TensorSnapshot([x])
        >>> _ = x.fill_(1)
        >>> snapshot.restore()
        >>> x
        tensor([0., 0.])
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        unique = {id(tensor): tensor for tensor in tensors}
        self._saved = [(tensor, tensor.detach().clone()) for tensor in unique.values()]

    @torch.no_grad()
    def restore(self) -> None:
        """Put the values back."""
        for tensor, value in self._saved:
            tensor.copy_(value)


class ModelSnapshot:
    """Everything of a model that a distillation changes.

    Args:
        model: The student; not changed.
    """

    def __init__(self, model: nn.Module) -> None:
        self._tensors = TensorSnapshot([*model.parameters(), *model.buffers()])
        self._modes = [(module, module.training) for module in model.modules()]
        self._grads = [(p, p.grad, p.requires_grad) for p in model.parameters()]
        self._quantizers = [
            (part, part._calibrated, part._batches_seen, _collected(part))
            for part in model.modules()
            if isinstance(part, AmctFakeQuantize)
        ]

    def restore(self) -> None:
        """Bring the model back."""
        self._tensors.restore()
        self.restore_modes()
        for parameter, grad, requires_grad in self._grads:
            parameter.grad = grad
            parameter.requires_grad_(requires_grad)
        for part, calibrated, seen, collected in self._quantizers:
            part._calibrated, part._batches_seen = calibrated, seen
            if isinstance(part, ULQFakeQuantize):
                part._collector.batches[:] = collected

    def restore_modes(self) -> None:
        """Bring back which modules are in training mode."""
        for module, mode in self._modes:
            module.training = mode


def _collected(quantizer: AmctFakeQuantize) -> list[Tensor]:
    """Return the batches that a calibration has collected so far."""
    return list(quantizer._collector.batches) if isinstance(quantizer, ULQFakeQuantize) else []
