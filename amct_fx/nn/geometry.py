"""Where the output channels of a weight lie, and quantizers that fit them.

Source: spec/quantization.md section 2.1.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from amct_fx.observers import ULQWeightFakeQuantize

if TYPE_CHECKING:
    from torch.ao.quantization import FakeQuantizeBase

__all__ = [
    "WeightGeometry",
    "constructor_arguments",
    "make_weight_fake_quant",
    "weight_geometry",
]


@dataclass(frozen=True)
class WeightGeometry:
    """Axis, groups and number of the output channels of a weight.

    ``ch_axis`` is 0, or 1 for transposed convolutions, whose weight is ``[C_in, C_out/groups, *]``;
    only there ``groups`` matters. ``num_channels`` counts physical output channels.
    """

    ch_axis: int
    groups: int
    num_channels: int

    def as_arguments(self, *, per_channel: bool) -> dict[str, Any]:
        """Return the keyword arguments of a weight fake-quantizer.

        Example:
            >>> WeightGeometry(0, 1, 8).as_arguments(per_channel=True)
            {'ch_axis': 0, 'groups': 1, 'num_channels': 8}
            >>> WeightGeometry(0, 1, 8).as_arguments(per_channel=False)
            {}
        """
        if not per_channel:
            return {}
        return {"ch_axis": self.ch_axis, "groups": self.groups, "num_channels": self.num_channels}


def weight_geometry(module: nn.Module) -> WeightGeometry:
    """Return the geometry of the weights of a layer; both weights of an LSTM or GRU have the same.

    Example:
        >>> weight_geometry(nn.ConvTranspose2d(4, 6, 3, groups=2))
        WeightGeometry(ch_axis=1, groups=2, num_channels=6)
        >>> weight_geometry(nn.LSTM(4, 6))
        WeightGeometry(ch_axis=0, groups=1, num_channels=24)
    """
    if isinstance(module, nn.RNNBase):
        rows = module.get_parameter("weight_ih_l0").shape[0]
        return WeightGeometry(ch_axis=0, groups=1, num_channels=rows)
    if isinstance(module, nn.Linear):
        return WeightGeometry(ch_axis=0, groups=1, num_channels=module.out_features)
    channels, groups = getattr(module, "out_channels"), getattr(module, "groups")  # noqa: B009
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        return WeightGeometry(ch_axis=1, groups=groups, num_channels=channels)
    return WeightGeometry(ch_axis=0, groups=1, num_channels=channels)


def constructor_arguments(constructor: Callable[..., Any]) -> tuple[Any, Mapping[str, Any]]:
    """Return the class and the keyword arguments behind ``SomeFakeQuantize.with_args(...)``.

    Example:
        >>> from torch.ao.quantization import FakeQuantize
        >>> constructor_arguments(FakeQuantize.with_args(quant_min=0))[1]
        {'quant_min': 0}
        >>> constructor_arguments(FakeQuantize.with_args(quant_min=0).with_args(quant_max=9))[1]
        {'quant_min': 0, 'quant_max': 9}
    """
    arguments: dict[str, Any] = {}
    while True:
        constructor = getattr(constructor, "p", constructor)
        if not isinstance(constructor, functools.partial):
            return constructor, arguments
        arguments = {**constructor.keywords, **arguments}
        constructor = constructor.func


def make_weight_fake_quant(
    constructor: Callable[..., Any], module: nn.Module, weight: Tensor
) -> FakeQuantizeBase:
    """Build the fake-quantizer of the weight of ``module``, on the device of ``weight``.

    A constructor that asks for one scale per channel (``ch_axis`` given) gets the axis, groups and
    number of channels of this layer, so one QConfig serves convolutions and transposed ones.
    """
    cls, arguments = constructor_arguments(constructor)
    geometry = weight_geometry(module)
    per_channel = arguments.get("ch_axis") is not None
    made = geometry.as_arguments(per_channel=per_channel)
    if not per_channel and geometry.ch_axis == 1 and cls is ULQWeightFakeQuantize:
        # one scale, yet its gradient counts the elements of an output channel
        made = {"ch_axis": 1, "groups": geometry.groups, "num_channels": 1}
    fake_quant: FakeQuantizeBase = constructor(**made)
    return fake_quant.to(weight.device).train(module.training)
