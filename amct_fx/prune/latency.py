"""What a layer takes on this device, measured once."""

from __future__ import annotations

import copy
import math
import time
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from amct_fx.prune.plan import PrunePlan

__all__ = ["seconds_per_mac"]

_REPEATS = 5


@torch.no_grad()
def seconds_per_mac(model: nn.Module, plan: PrunePlan, inputs: Any) -> dict[str, float]:
    """Measure the layers of a model, and divide by their multiply-accumulates.

    A layer that loses channels is taken to become faster in proportion.

    Args:
        model: The model, in eval mode.
        plan: Names its layers and their costs.
        inputs: A tensor or a tuple of arguments.

    Returns:
        Seconds for each multiply-accumulate, by name of the layer; the shortest of five runs.
    """
    taken: dict[str, list[Any]] = {}
    hooks = []
    names = {cost.name for cost in plan.costs}
    for name, module in model.named_modules():
        if name in names:
            hooks.append(module.register_forward_pre_hook(_keeper(taken.setdefault(name, []))))
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    model(*copy.deepcopy(arguments))
    for hook in hooks:
        hook.remove()
    seconds = {
        name: sum(_fastest(model.get_submodule(name), call) for call in calls)
        for name, calls in taken.items()
        if calls
    }
    macs = {name: sum(c.macs for c in plan.costs if c.name == name) for name in names}
    mean = sum(seconds.values()) / max(sum(macs[name] for name in seconds), 1)
    return {name: seconds[name] / macs[name] if name in seconds else mean for name in names}


def _keeper(calls: list[Any]) -> Any:
    def keep(_module: nn.Module, arguments: Any) -> None:
        calls.append(arguments)

    return keep


def _fastest(layer: nn.Module, arguments: Any) -> float:
    device = next((p.device for p in layer.parameters()), torch.device("cpu"))
    best = math.inf
    for _ in range(_REPEATS):
        start = time.perf_counter()
        layer(*arguments)
        if device.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - start)
    return best
