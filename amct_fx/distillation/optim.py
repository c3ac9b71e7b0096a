"""The optimizer of a group. Source: spec/distillation.md section 9.3, table of defaults."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from amct_fx.nn.qat_layer import QATLayer
from amct_fx.observers import ULQFakeQuantize, ULQWeightFakeQuantize

__all__ = [
    "CLIP_LR",
    "WEIGHT_STEP",
    "OptimizerFactory",
    "Trained",
    "default_optimizer",
    "rebuilt_optimizer",
]

OptimizerFactory = Callable[[list[dict[str, Any]]], Optimizer]
"""Takes parameter groups, returns an optimizer."""

CLIP_LR = 0.1
"""AMCT's learning rate of clips: a step of Adam moves a clip by about as much."""

WEIGHT_STEP = 0.02
"""Largest step of a weight by default, as a share of its quantization step."""

_CLIP_STEP = 0.01
"""Largest step of a clip by default, as a share of its range."""
_SCALE_LR = 1e-4
_WEIGHT_DECAY = 0.01


@dataclass
class Trained:
    """The parameters of one group, by what they are.

    Args:
        clips: Clips of input ranges.
        scales: Learned scales of weights.
        rest: Weights, biases, and what else the modules own.
        spans: Width of the input range that each clip belongs to.
        quantum: Smallest mean distance between two codes among the quantized weights of the
            group, as coarse as those in front of it; infinite without any.
        largest_code: The largest code of weights with that distance.
    """

    clips: list[nn.Parameter] = field(default_factory=list)
    scales: list[nn.Parameter] = field(default_factory=list)
    rest: list[nn.Parameter] = field(default_factory=list)
    spans: list[float] = field(default_factory=list)
    quantum: float = math.inf
    largest_code: int = 128

    @classmethod
    def of(
        cls, module: nn.Module, parameters: Iterable[nn.Parameter], bits: int | None = None
    ) -> Trained:
        """Sort parameters.

        Args:
            module: Holds the quantizers.
            parameters: Those that are trained.
            bits: Of the coarsest weights up to this group, whose errors it makes up for; ``None``:
                as its own.
        """
        spans = {
            clip: float(part.clip_max.detach() - part.clip_min.detach())
            for part in module.modules()
            if isinstance(part, ULQFakeQuantize)
            for clip in (part.clip_max, part.clip_min)
        }
        scales = {
            part.scale for part in module.modules() if isinstance(part, ULQWeightFakeQuantize)
        }
        layers = [part for part in module.modules() if isinstance(part, QATLayer)]
        widths = [layer.weight_bits for layer in layers]
        fewest = min(widths if bits is None else [*widths, bits], default=8)
        found = cls(quantum=_quantum(layers, fewest), largest_code=2 ** (fewest - 1))
        for parameter in parameters:
            if parameter in spans:
                found.clips.append(parameter)
                found.spans.append(spans[parameter])
            else:
                (found.scales if parameter in scales else found.rest).append(parameter)
        return found

    def all(self) -> list[nn.Parameter]:
        """Return all of them."""
        return [*self.rest, *self.scales, *self.clips]

    def groups(self) -> list[dict[str, Any]]:
        """Return parameter groups for any optimizer; ranges and scales do not decay."""
        ranges = [*self.clips, *self.scales]
        groups: list[dict[str, Any]] = [{"params": self.rest}] if self.rest else []
        return [*groups, {"params": ranges, "weight_decay": 0.0}] if ranges else groups


@torch.no_grad()
def _quantum(layers: Sequence[QATLayer], bits: int) -> float:
    """Return the smallest mean distance between two codes, if no layer had more than ``bits``."""
    distances = [
        float(layer.weight_scale(name).mean()) * 2.0 ** max(layer.weight_bits - bits, 0)
        for layer in layers
        for name in layer.weight_names
    ]
    return min(distances, default=math.inf)


def default_optimizer(
    trained: Trained,
    lr: float,
    clip_lr: float | None,
    *,
    weight_step: float | None = WEIGHT_STEP,
    factor: float = 1.0,
) -> Optimizer:
    """Return AdamW with the learning rates of the specification, where they are not too large.

    Adam moves every weight by about the learning rate, however small its gradient is. The weights
    are near their best already, so that is noise. Next to 4 bits 1e-3 is little of it; it is a
    quarter of the distance between two codes of 8 bits.

    Args:
        trained: The parameters of the group.
        lr: For weights, biases and batch norms, at most.
        weight_step: Largest step of a weight, also by a learned scale, as a share of the distance
            between two codes of the quantized weights in the group; ``None``: no limit. Behind
            coarser weights, whose errors the group makes up for, the distance counts as if its own
            were as coarse.
        clip_lr: For clips; ``None``: 0.1, but at most a hundredth of the range. A fixed step of
            0.1 would cross a range such as [-0.2, 0.2] in a few steps.
        factor: For all learning rates.
    """
    groups: list[dict[str, Any]] = [
        {
            "params": [clip],
            "lr": factor * (min(CLIP_LR, _CLIP_STEP * span) if clip_lr is None else clip_lr),
            "weight_decay": 0.0,
        }
        for clip, span in zip(trained.clips, trained.spans, strict=True)
    ]
    longest = math.inf if weight_step is None else weight_step * trained.quantum
    if trained.scales:
        scale_lr = min(_SCALE_LR, longest / trained.largest_code)  # the largest weights move most
        groups.append({"params": trained.scales, "lr": factor * scale_lr, "weight_decay": 0.0})
    if trained.rest:
        lr = min(lr, longest)
        groups.append({"params": trained.rest, "lr": factor * lr, "weight_decay": _WEIGHT_DECAY})
    return torch.optim.AdamW(groups)


def rebuilt_optimizer(optimizer: Optimizer, trained: Trained) -> Optimizer:
    """Return an optimizer of the same class and with the same hyper-parameters.

    Args:
        optimizer: The user's, on any parameters; it is not changed.
        trained: The parameters of the group.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> given = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        >>> rebuilt_optimizer(given, Trained(rest=[layer.weight])).defaults["momentum"]
        0.9
    """
    settings = dict(optimizer.defaults)
    settings |= {key: value for key, value in optimizer.param_groups[0].items() if key != "params"}
    parameters = inspect.signature(type(optimizer).__init__).parameters
    takes_all = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in parameters.values())
    known = {key: value for key, value in settings.items() if takes_all or key in parameters}
    made: Optimizer = type(optimizer)(trained.groups(), **known)
    return made
