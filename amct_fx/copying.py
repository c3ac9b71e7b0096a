"""Copying models that ``copy.deepcopy`` alone refuses."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

from torch import Tensor, nn

__all__ = ["copy_model", "shadow_model"]

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
    return copy.deepcopy(model, _results(model))


def shadow_model(model: Model, *, share_buffers: bool) -> Model:
    """Return other module objects around the same parameters, at no cost in memory.

    Modes, classes and hooks of a shadow can be changed without the model noticing; hooks that the
    model has run for its shadow, too.

    Args:
        model: Any module; it is not changed.
        share_buffers: Share the buffers as well; otherwise the shadow has copies of them.

    Example:
        >>> layer = nn.BatchNorm1d(2)
        >>> shadow = shadow_model(layer, share_buffers=False).eval()
        >>> shadow.weight is layer.weight, shadow.running_mean is layer.running_mean, layer.training
        (True, False, True)
    """
    memo = _results(model)
    memo |= {id(parameter): parameter for parameter in model.parameters()}
    if share_buffers:
        memo |= {id(buffer): buffer for buffer in model.buffers()}
    for module in model.modules():
        hooks = (value for key, value in vars(module).items() if key.endswith("hooks"))
        memo |= {id(value): value for value in hooks if isinstance(value, dict)}
    return copy.deepcopy(model, memo)


def _results(model: nn.Module) -> dict[int, Any]:
    """Return copies of the tensors that ``copy.deepcopy`` refuses, for its memo."""
    return {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
