"""Where pruning meets quantization: masks on a model with quantizers, and their end at convert.

The order on a weight is filter mask, 2:4 mask, fake-quantizer. Source: spec/pruning.md section 9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from amct_fx.prune.masks import attach_m4n2, fold_masks

if TYPE_CHECKING:
    from torch import nn

    from amct_fx.config import PruneConfig
    from amct_fx.prune.options import PruneOptions

__all__ = ["attach_pruning", "remove_pruned"]


def attach_pruning(
    model: nn.Module, settings: Mapping[str, PruneConfig], options: PruneOptions
) -> None:
    """Mask what the configuration prunes.

    Args:
        model: The model, quantizers already inserted; changed in place.
        settings: How each layer is pruned, by name.
        options: Those of pruning.
    """
    attach_m4n2(model, settings, {}, options)


def remove_pruned(model: nn.Module) -> None:
    """Fold the masks into the weights and cut the masked channels away.

    Args:
        model: Our own copy of a prepared model; changed in place.
    """
    fold_masks(model)
