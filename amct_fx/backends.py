"""What a converted model can be made to run on beside PyTorch's own operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from torch import nn

    from amct_fx.npu import NpuOptions

__all__ = ["Backend", "lowering_for"]

Backend: TypeAlias = "str | NpuOptions | None"
"""``None`` for PyTorch, ``"npu"`` or an :class:`amct_fx.npu.NpuOptions` for torch-npu."""


def lowering_for(backend: Backend) -> Callable[[nn.Module], nn.Module]:
    """Return what makes a converted model run on a backend; changes the model and returns it.

    Args:
        backend: One of :data:`Backend`.

    Raises:
        ArgumentError: There is no such backend.
        BackendError: Its library is not installed, or cannot be imported.

    Example:
        >>> import torch
        >>> model = torch.nn.Identity()
        >>> lowering_for(None)(model) is model
        True
    """
    if backend is None:
        return _unchanged
    from amct_fx.npu import lowering_to_npu

    return lowering_to_npu(backend)


def _unchanged(converted: nn.Module) -> nn.Module:
    return converted
