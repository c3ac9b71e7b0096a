"""Layers of the converted model: int8 weight codes, int32 bias codes, float32 scales.

Each class is a subclass of its ``torch.nn`` namesake whose ``weight`` and ``bias`` are computed
from integer buffers, so the ordinary float operator runs on dequantized tensors in eager, and an
exported file holds the integers with a DequantizeLinear each. Source: spec/deploy.md section 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from amct_fx.nn.quantized_layer import Dequantize, IntegerWeight, Quantize, QuantizedLayer
from amct_fx.nn.quantized_rnn import GRU, LSTM

__all__ = [
    "GRU",
    "LSTM",
    "Conv1d",
    "Conv2d",
    "Conv3d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "Dequantize",
    "IntegerWeight",
    "Linear",
    "Quantize",
    "QuantizedLayer",
    "collect_codes",
    "quantized_class_of",
]


class _WeightedLayer(QuantizedLayer):
    """A converted layer with one weight; ``weight`` and ``bias`` are dequantized on reading."""

    weight: Any = property(
        QuantizedLayer.dequantized_weight,
        doc="The dequantized weight, in the layout and dtype of the float one.",
    )
    bias: Any = property(QuantizedLayer.dequantized_bias, doc="The dequantized bias, or ``None``.")

    def forward(self, input: Tensor, *args: Any, quantized: bool = False) -> Tensor:
        """Run the float operator on the dequantized input, weight and bias."""
        output: Tensor = super().forward(self.quantized_input(input, quantized), *args)
        return output


class Conv1d(_WeightedLayer, nn.Conv1d):
    """Converted ``torch.nn.Conv1d``."""

    float_class = nn.Conv1d


class Conv2d(_WeightedLayer, nn.Conv2d):
    """Converted ``torch.nn.Conv2d``, depthwise and grouped included."""

    float_class = nn.Conv2d


class Conv3d(_WeightedLayer, nn.Conv3d):
    """Converted ``torch.nn.Conv3d``."""

    float_class = nn.Conv3d


class ConvTranspose1d(_WeightedLayer, nn.ConvTranspose1d):
    """Converted ``torch.nn.ConvTranspose1d``."""

    float_class = nn.ConvTranspose1d


class ConvTranspose2d(_WeightedLayer, nn.ConvTranspose2d):
    """Converted ``torch.nn.ConvTranspose2d``."""

    float_class = nn.ConvTranspose2d


class Linear(_WeightedLayer, nn.Linear):
    """Converted ``torch.nn.Linear``."""

    float_class = nn.Linear


_CLASSES: tuple[type[QuantizedLayer], ...] = (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    Linear,
    LSTM,
    GRU,
)


def quantized_class_of(float_class: type[nn.Module]) -> type[QuantizedLayer]:
    """Return the converted class for exactly ``float_class``.

    Raises:
        KeyError: If there is none.
    """
    return {cls.float_class: cls for cls in _CLASSES}[float_class]


@contextmanager
def collect_codes(model: nn.Module) -> Iterator[dict[str, list[Tensor]]]:
    """Record the codes that every activation quantizer of a converted model makes.

    Args:
        model: A converted model, in eager.

    Yields:
        A dict, filled while the model runs: name of the :class:`Quantize` module to its codes, one
        tensor for each call.

    Example:
        >>> import torch
        >>> model = nn.Sequential(Quantize(0.5, 0))
        >>> with collect_codes(model) as codes:
        ...     _ = model(torch.tensor([1.0]))
        >>> codes
        {'0': [tensor([2], dtype=torch.int8)]}
    """
    codes: dict[str, list[Tensor]] = {}
    handles = []
    for name, module in model.named_modules():
        if isinstance(module, Quantize):
            made = codes.setdefault(name, [])
            handles.append(
                module.register_forward_hook(lambda _m, _i, output, made=made: made.append(output))
            )
    try:
        yield codes
    finally:
        for handle in handles:
            handle.remove()
