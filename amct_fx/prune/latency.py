"""What layers take on this device, at any width: measured when it is first asked for."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amct_fx.prune.channels.walk import float_class

if TYPE_CHECKING:
    from amct_fx.prune.plan import PrunePlan
    from amct_fx.prune.plan_parts import LayerCost

__all__ = ["LayerClock"]

_REPEATS = 5
_PATIENCE = 0.05
"""Seconds after which a width was measured often enough, if it was at least twice."""
_WIDTHS = 32
"""Widths of an axis that are measured at most; in between, the time follows the operations."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_Key = tuple[Any, ...]


class LayerClock:
    """Seconds that the calls of a model's layers take with the channels that they have left.

    Layers of the same class, settings, channels and input are measured once, with the shortest of
    five runs. What is no convolution or Linear is taken to be as fast for each multiply-accumulate
    as the others together.

    Args:
        model: The model, in eval mode; it runs once.
        plan: Names its layers and their costs.
        inputs: A tensor or a tuple of arguments.
        budget: Seconds that measuring may take; after that, a new width is taken to be as fast for
            each multiply-accumulate as the last one of its layer.

    Example:
        >>> from amct_fx import prune_plan
        >>> cfg = '''prune_config { filter_pruner {
        ...     balanced_l2_norm_filter_prune { prune_ratio: 0.5 } } }'''
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 1), nn.ReLU(), nn.Conv2d(8, 2, 1)).eval()
        >>> images = torch.ones(1, 3, 2, 2)
        >>> clock = LayerClock(model, prune_plan(model, cfg, images), images)
        >>> clock.seconds(0, (4, 3, 1, 1)) > 0, clock.measured
        (True, 3)
    """

    def __init__(
        self, model: nn.Module, plan: PrunePlan, inputs: Any, *, budget: float = 30.0
    ) -> None:
        self.measured = 0
        self._left = math.inf  # the full widths are always measured
        self._known: dict[_Key, float] = {}
        self._costs = plan.costs
        self._calls = _calls(model, plan.costs, inputs)
        self._rate = [0.0] * len(self._calls)
        found = [number for number, call in enumerate(self._calls) if call is not None]
        full = sum(self.seconds(number, self._costs[number].shape) for number in found)
        self._mean = full / max(sum(self._costs[number].macs for number in found), 1)
        self._left = budget

    def seconds(self, number: int, shape: Sequence[int]) -> float:
        """Return what a call takes.

        Args:
            number: Of the call among the costs of the plan.
            shape: That its weight has now.
        """
        call, places = self._calls[number], self._costs[number].positions
        if call is None:
            return self._mean * math.prod(shape) * places
        near = call.near(shape)
        key = call.key(near)
        if key not in self._known and self._left > 0:
            start = time.perf_counter()
            self._known[key] = _fastest(call, near)
            self._left -= time.perf_counter() - start
            self.measured += 1
        if key in self._known:
            self._rate[number] = self._known[key] / math.prod(near)
        return self._rate[number] * math.prod(shape)


@dataclass(frozen=True)
class _Call:
    """A call of a convolution or Linear: the layer, its input, and the full shape of its weight."""

    layer: Any
    input: Tensor
    shape: tuple[int, ...]

    @property
    def _block(self) -> int:
        """How many output channels a group has, or for depthwise layers how many groups there are.

        Widths are multiples of it along axis 0.
        """
        groups = getattr(self.layer, "groups", 1)
        return self.shape[0] // groups if self._depthwise else groups

    @property
    def _depthwise(self) -> bool:
        """Whether groups go with the channels."""
        groups = getattr(self.layer, "groups", 1)
        return groups > 1 and groups == self.layer.in_channels

    def near(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the next larger shape that is measured."""
        block = 1 if isinstance(self.layer, _TRANSPOSED) and not self._depthwise else self._block
        return (
            _round_up(shape[0], self.shape[0], block),
            _round_up(shape[1], self.shape[1], 1),
            *shape[2:],
        )

    def channels(self, shape: tuple[int, ...]) -> tuple[int, int, int]:
        """Return input channels, output channels and groups for a shape of the weight."""
        groups = getattr(self.layer, "groups", 1)
        if isinstance(self.layer, _TRANSPOSED):
            groups = shape[0] if self._depthwise else groups
            return shape[0], shape[1] * groups, groups
        groups = shape[0] // self._block if self._depthwise else groups
        return shape[1] * groups, shape[0], groups

    def key(self, shape: tuple[int, ...]) -> _Key:
        """Return what the time depends on."""
        layer = self.layer
        names = ("kernel_size", "stride", "padding", "dilation", "output_padding", "padding_mode")
        settings = tuple(getattr(layer, name, None) for name in names)
        form = (self.input.shape, self.input.stride(), layer.weight.dtype, layer.weight.device)
        plain = layer.weight.is_contiguous()
        return float_class(layer), settings, layer.bias is None, plain, *form, self.channels(shape)

    @torch.no_grad()
    def build(self, shape: tuple[int, ...]) -> tuple[nn.Module, Tensor]:
        """Return such a layer of other width, and an input for it."""
        layer, (inputs, outputs, groups) = self.layer, self.channels(shape)
        bias, like = layer.bias is not None, layer.weight
        made: Any
        if isinstance(layer, nn.Linear):
            made = nn.Linear(inputs, outputs, bias, device="meta", dtype=like.dtype)
            form = (*self.input.shape[:-1], inputs)
        else:
            base = next(c for c in (*_CONVOLUTIONS, *_TRANSPOSED) if isinstance(layer, c))
            more = {"groups": groups, "bias": bias, "dilation": layer.dilation}
            if isinstance(layer, _TRANSPOSED):
                more["output_padding"] = layer.output_padding
            made = base(
                *(inputs, outputs, layer.kernel_size, layer.stride, layer.padding),
                **more,
                padding_mode=layer.padding_mode,
                device="meta",
                dtype=like.dtype,
            )
            axis = self.input.dim() - len(layer.kernel_size) - 1
            form = (*self.input.shape[:axis], inputs, *self.input.shape[axis + 1 :])
        made = made.to_empty(device=like.device).eval()
        value = torch.full(form, 0.5, dtype=self.input.dtype, device=self.input.device)
        for parameter in made.parameters():
            parameter.fill_(0.01)
        if like.dim() == 4 and not like.is_contiguous():
            made = made.to(memory_format=torch.channels_last)
        if value.dim() == 4 and not self.input.is_contiguous():
            value = value.to(memory_format=torch.channels_last)
        return made, value


def _round_up(size: int, full: int, block: int) -> int:
    """Return the next width of an axis that is measured."""
    step = -(-max(full // _WIDTHS, 1) // block) * block
    return min(-(-size // step) * step, full)


@torch.no_grad()
def _calls(model: nn.Module, costs: Sequence[LayerCost], inputs: Any) -> list[_Call | None]:
    """Run the model; return the call of each cost, ``None`` where it is no known layer's."""
    taken: dict[str, list[Tensor]] = {}
    modules = dict(model.named_modules(remove_duplicate=False))
    known = (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)
    names = {cost.name for cost in costs if isinstance(modules.get(cost.name), known)}
    hooks = [
        modules[name].register_forward_pre_hook(_keeper(taken.setdefault(name, [])))
        for name in names
    ]
    arguments = inputs if isinstance(inputs, tuple) else (inputs,)
    try:
        model(*copy.deepcopy(arguments))
    finally:
        for hook in hooks:
            hook.remove()
    found: list[_Call | None] = []
    for cost in costs:
        calls = taken.get(cost.name)
        layer: Any = modules.get(cost.name)
        fits = bool(calls) and tuple(layer.weight.shape) == tuple(cost.shape)
        found.append(_Call(layer, calls.pop(0), tuple(cost.shape)) if calls and fits else None)
    return found


def _keeper(calls: list[Tensor]) -> Any:
    def keep(_module: nn.Module, arguments: Any) -> None:
        if len(arguments) == 1 and isinstance(arguments[0], Tensor):
            calls.append(arguments[0])

    return keep


@torch.no_grad()
def _fastest(call: _Call, shape: tuple[int, ...]) -> float:
    """Run a layer some times; return the seconds of the shortest run."""
    layer, value = call.build(shape)
    layer(value)
    best, started = math.inf, time.perf_counter()
    for repeat in range(_REPEATS):
        start = time.perf_counter()
        layer(value)
        if value.device.type != "cpu":
            torch.accelerator.synchronize()
        best = min(best, time.perf_counter() - start)
        if repeat > 0 and time.perf_counter() - started > _PATIENCE:
            break
    return best
