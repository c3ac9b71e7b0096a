"""What stayed of each parameter of a converted model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from amct_fx.errors import ModelStateError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["kept_indices"]


def kept_indices(converted: nn.Module) -> Mapping[str, Mapping[int, Tensor]]:
    """Return what :func:`amct_fx.convert_amct` kept of each tensor that lost channels.

    So the state of an optimizer, such as momentum, can be cut alike, to train on.

    Args:
        converted: A converted model.

    Returns:
        By name of the tensor and axis the int64 indices that stayed, in their new order.

    Raises:
        ModelStateError: The model is not converted.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> from amct_fx import convert_amct, prepare_qat_amct
        >>> cfg = '''prune_config { filter_pruner {
        ...     balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }'''
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1))
        >>> converted = convert_amct(prepare_qat_amct(model, cfg, torch.ones(1, 3, 4, 4)))
        >>> {name: list(axes) for name, axes in kept_indices(converted).items()}
        {'0.weight': [0], '0.bias': [0], '2.weight': [1]}
    """
    from amct_fx.report.preparation import preparation_of  # reports read plans, too

    preparation = preparation_of(converted)
    if preparation is None or not preparation.converted:
        message = "kept_indices takes a model of convert_amct"
        raise ModelStateError(message)
    return preparation.kept
