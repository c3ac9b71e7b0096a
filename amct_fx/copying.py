"""Copying models that ``copy.deepcopy`` alone refuses."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = ["copy_model"]

Model = TypeVar("Model", bound=nn.Module)


def copy_model(model: Model) -> Model:
    """Return a deep copy; tensors that are results of a computation are copied by value.

    The old ``torch.nn.utils.weight_norm`` keeps such a tensor as the weight of its layer and makes
    it anew in the next forward; ``copy.deepcopy`` refuses it after the first one.

    Args:
        model: Any module; it is not changed.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 2)
        >>> layer.result = layer(torch.ones(2))
        >>> copy_model(layer).result.grad_fn is None
        True
    """
    results: dict[int, Any] = {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    return copy.deepcopy(model, results)
