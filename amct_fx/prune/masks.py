"""Masks on a whole model: put on at prepare, folded into the weights at convert.

Source: spec/pruning.md sections 5 and 9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch.nn.utils import parametrize

from amct_fx.config import M4N2PruneConfig, PruneConfig
from amct_fx.nn.become import drop_reparametrization
from amct_fx.nn.parametrized import parametrized_names
from amct_fx.prune.parametrization import WeightMask, detach_hooks, filter_norm, m4n2

if TYPE_CHECKING:
    from torch import Tensor, nn

    from amct_fx.prune.options import PruneOptions

__all__ = ["attach_filter_masks", "attach_m4n2", "fold_masks"]


def attach_m4n2(
    model: nn.Module,
    settings: Mapping[str, PruneConfig],
    columns: Mapping[str, Tensor],
    options: PruneOptions,
) -> None:
    """Put 2:4 masks on all layers that are set so.

    Args:
        model: The model; changed in place.
        settings: How each layer is pruned, by name.
        columns: Masks of the input channels, by name of the parameter; groups of four run over what
            is left.
        options: Those of pruning.
    """
    for name, setting in settings.items():
        if isinstance(setting, M4N2PruneConfig):
            m4n2(
                model.get_submodule(name),
                update_freq=setting.update_freq,
                columns=columns.get(f"{name}.weight"),
                count_eval=options.count_eval,
            )


def attach_filter_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Mask channels of parameters.

    Args:
        model: The model; changed in place.
        masks: By name of the parameter, broadcastable to it.
    """
    for name, mask in masks.items():
        owner, _, parameter = name.rpartition(".")
        filter_norm(model.get_submodule(owner), parameter, mask)


def fold_masks(model: nn.Module) -> None:
    """Make every masked parameter a plain one that holds its zeros.

    Args:
        model: Our own copy; changed in place.

    Example:
        >>> from torch import nn
        >>> layer = nn.Linear(4, 2)
        >>> _ = m4n2(layer)
        >>> fold_masks(layer)
        >>> type(layer) is nn.Linear, int((layer.weight == 0).sum())
        (True, 4)
    """
    for module in model.modules():
        if not parametrize.is_parametrized(module):
            continue
        chains = [module.parametrizations[name] for name in parametrized_names(module)]  # type: ignore[index]
        if any(isinstance(part, WeightMask) for chain in chains for part in chain):
            drop_reparametrization(module)
            detach_hooks(module)
