"""Masks on a whole model: put on at prepare, folded into the weights at convert.

Source: spec/pruning.md sections 5 and 9.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from amct_fx.config import M4N2PruneConfig, PruneConfig
from amct_fx.errors import ArgumentTypeError
from amct_fx.graph.region import GraphForward
from amct_fx.nn.become import drop_reparametrization
from amct_fx.nn.parametrized import parametrized_names
from amct_fx.prune.graph_masks import fold_graph_masks, mask_in_graph, masked_parameters
from amct_fx.prune.parametrization import WeightMask, detach_hooks, filter_norm, m4n2

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

    from amct_fx.prune.options import PruneOptions

__all__ = ["attach_filter_masks", "attach_m4n2", "fold_masks", "keep_zeros"]


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
                straight_through=options.straight_through,
            )


def attach_filter_masks(model: nn.Module, masks: Mapping[str, Tensor]) -> None:
    """Mask channels of parameters.

    Args:
        model: The model; changed in place.
        masks: By name of the parameter, broadcastable to it.
    """
    for name, mask in masks.items():
        path, _, parameter = name.rpartition(".")
        owner = model.get_submodule(path)
        if isinstance(owner, GraphForward):
            mask_in_graph(owner, parameter, mask)
        else:
            filter_norm(owner, parameter, mask)


def keep_zeros(optimizer: Optimizer, model: nn.Module) -> RemovableHandle:
    """Let the stored weights have the zeros of their masks after every step of an optimizer.

    Masked entries play no part in the model, yet weight decay and momentum move what is stored of
    them. A 2:4 mask that is refreshed then keeps its choice: a zero never returns.

    Args:
        optimizer: Any optimizer.
        model: A prepared model, or one with masks put on by hand.

    Returns:
        A handle whose ``remove()`` ends it.

    Raises:
        ArgumentTypeError: ``optimizer`` is none.

    Example:
        >>> import torch
        >>> layer = torch.nn.Linear(4, 1)
        >>> _ = m4n2(layer)
        >>> optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, weight_decay=0.1)
        >>> handle = keep_zeros(optimizer, layer)
        >>> layer(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> int((layer.parametrizations.weight.original == 0).sum())
        2
    """
    given: object = optimizer
    if not isinstance(given, Optimizer):
        message = f"keep_zeros takes an optimizer and a model, not a {type(given).__name__}"
        raise ArgumentTypeError(message)
    chains = [chain for module in model.modules() for chain in _masked(module)]

    def zero(*_: Any) -> None:
        with torch.no_grad():
            for chain in chains:
                for part in chain:
                    if isinstance(part, WeightMask):
                        chain.original.mul_(part.mask)
            for module in model.modules():
                for parameter, mask in masked_parameters(module):
                    parameter.mul_(mask)

    return optimizer.register_step_post_hook(zero)


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
    for module in list(model.modules()):
        if isinstance(module, GraphForward):
            fold_graph_masks(module)
        if _masked(module):
            drop_reparametrization(module)
            detach_hooks(module)


def _masked(module: Any) -> list[Any]:
    """Return the parametrizations of a module that have a mask, one for each parameter."""
    chains = [module.parametrizations[name] for name in parametrized_names(module)]
    return [chain for chain in chains if any(isinstance(part, WeightMask) for part in chain)]
