"""Which layer makes the channels that another module only passes on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn

from amct_fx.graph.facts import module_of

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import fx

    from amct_fx.graph.capture import Capture

__all__ = ["channel_makers"]

_FOLLOWING = (
    nn.modules.batchnorm._NormBase,
    nn.GroupNorm,
    nn.LayerNorm,
    nn.RMSNorm,
    nn.PReLU,
)
_MAKING = (nn.modules.conv._ConvNd, nn.Linear)


def channel_makers(model: nn.Module, captured: Capture) -> Mapping[str, str]:
    """Say which layer makes the channels of modules that have parameters for them but make none.

    Args:
        model: The traced model.
        captured: Its traced parts.

    Returns:
        By name of a norm, a PReLU or a depthwise convolution the name of the nearest convolution or
        Linear before it; behind an addition or a concatenation of one of them.

    Example:
        >>> from amct_fx.backend_config import is_layer
        >>> from amct_fx.graph import capture
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.BatchNorm2d(8))
        >>> channel_makers(model, capture(model, is_layer))
        {'2': '0'}
    """
    names = {module: name for name, module in model.named_modules()}
    found: dict[str, str] = {}
    for region in captured.regions:
        makers: dict[fx.Node, str] = {}
        for node in region.graph.nodes:
            module = module_of(node, region.module)
            if module is not None and _makes_channels(module):
                makers[node] = names[module]
                continue
            before = next((makers[n] for n in node.all_input_nodes if n in makers), None)
            if before is None or not _passes_on(module):
                continue
            makers[node] = before
            if module is not None and _follows(module):
                found.setdefault(names[module], before)
    return found


def _makes_channels(module: nn.Module) -> bool:
    return isinstance(module, _MAKING) and not _follows(module)


def _follows(module: Any) -> bool:
    depthwise = isinstance(module, nn.modules.conv._ConvNd) and (
        module.groups == module.in_channels > 1
    )
    return depthwise or isinstance(module, _FOLLOWING)


def _passes_on(module: nn.Module | None) -> bool:
    """Say whether a call may keep channels: a function, a follower, or a module without weights."""
    return module is None or _follows(module) or next(module.parameters(), None) is None
