"""Layers of the converted model: int8 weight codes, int32 bias codes, float32 scales.

Each class is a subclass of its ``torch.nn`` namesake whose ``weight`` and ``bias`` are computed
from integer buffers, so the ordinary float operator runs on dequantized tensors in eager, and an
exported file holds the integers with a DequantizeLinear each. Source: spec/deploy.md section 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from amct_fx.nn.functional import (
    QParams,
    cast,
    dequantize_per_channel,
    dequantize_per_tensor,
    quantize_per_tensor,
)
from amct_fx.observers.functional import from_output_major

__all__ = [
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


class _TensorQParams(nn.Module):
    """Holder of the scale and zero point of one tensor.

    Exporters need them as numbers, and reading a tensor there is not allowed: the numbers are kept
    beside the buffers and renewed whenever a state dict is loaded.
    """

    scale: Tensor
    zero_point: Tensor

    def __init__(self, scale: Tensor, zero_point: Tensor) -> None:
        super().__init__()
        self.register_buffer("scale", scale)
        self.register_buffer("zero_point", zero_point)
        self._remember_numbers()

    @property
    def qparams(self) -> QParams:
        """Scale and zero point as tensors and as numbers."""
        return QParams(self.scale, self.zero_point, self._scale_value, self._zero_point_value)

    def _remember_numbers(self) -> None:
        self._scale_value = float(self.scale)
        self._zero_point_value = int(self.zero_point)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._remember_numbers()

    def extra_repr(self) -> str:
        dtype = str(self.zero_point.dtype).removeprefix("torch.")
        return f"scale={self._scale_value:.6g}, zero_point={self._zero_point_value}, dtype={dtype}"


class Quantize(_TensorQParams):
    """Turns a float tensor into integer codes.

    Args:
        scale: One value, positive.
        zero_point: Integer, inside the range of ``dtype``.
        dtype: ``torch.int8`` or ``torch.int16``.

    Example:
        >>> quantize = Quantize(0.5, 3)
        >>> quantize
        Quantize(scale=0.5, zero_point=3, dtype=int8)
        >>> codes = quantize(torch.tensor([-1.0, 0.3])); codes
        tensor([1, 4], dtype=torch.int8)
        >>> Dequantize(quantize)(codes)
        tensor([-1.0000,  0.5000])
    """

    def __init__(
        self, scale: float | Tensor, zero_point: int | Tensor, dtype: torch.dtype = torch.int8
    ) -> None:
        device = scale.device if isinstance(scale, Tensor) else None
        super().__init__(
            torch.tensor(float(scale), dtype=torch.float32, device=device),
            torch.tensor(int(zero_point), dtype=dtype, device=device),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the codes of ``x``, any shape."""
        return quantize_per_tensor(x, self.qparams)


class Dequantize(_TensorQParams):
    """Turns the codes of a :class:`Quantize` back into floats; shares its scale and zero point.

    Args:
        quantize: The module whose codes come in.
        dtype: Floating point type of the result.
    """

    def __init__(self, quantize: Quantize, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(quantize.scale, quantize.zero_point)
        self.dtype = dtype

    def forward(self, codes: Tensor) -> Tensor:
        """Return ``(codes - zero_point) * scale``."""
        return cast(dequantize_per_tensor(codes, self.qparams), self.dtype)


@dataclass(frozen=True)
class IntegerWeight:
    """The integer form of one layer.

    Attributes:
        codes: int8, output-major: the weight itself, or for transposed convolutions with groups the
            regrouped ``[C_out, C_in/groups, *]``.
        scale: float32, ``[C_out]``, or ``[1]`` for one scale per tensor.
        bias_codes: int32 ``[C_out]``, or ``None``.
        bias_scale: float32 ``[C_out]``, input scale times weight scale, or ``None``.
        axis: Axis of ``codes`` that ``scale`` runs along.
        groups: Groups of the regrouping, 1 when ``codes`` has the layout of the weight.
    """

    codes: Tensor
    scale: Tensor
    bias_codes: Tensor | None
    bias_scale: Tensor | None
    axis: int = 0
    groups: int = 1


class QuantizedLayer(nn.Module):
    """What all converted layers share; ``weight`` and ``bias`` are dequantized on reading."""

    float_class: ClassVar[type[nn.Module]]
    weight_codes: Tensor
    weight_scale: Tensor
    bias_codes: Tensor | None
    bias_scale: Tensor | None
    input_quantize: Quantize
    input_dequantize: Dequantize
    quantizes_input: bool
    _weight_axis: int
    _weight_groups: int
    _weight_scale_value: float | None
    dtype: torch.dtype

    def adopt(self, integer: IntegerWeight, dtype: torch.dtype) -> None:
        """Replace the float parameters by integer buffers."""
        for name in ("weight", "bias"):
            self._parameters.pop(name, None)
        self.register_buffer("weight_codes", integer.codes)
        self.register_buffer("weight_scale", integer.scale)
        self.register_buffer("bias_codes", integer.bias_codes)
        self.register_buffer("bias_scale", integer.bias_scale)
        self._weight_axis = integer.axis
        self._weight_groups = integer.groups
        self.dtype = dtype
        self._remember_numbers()

    def _dequantized_weight(self) -> Tensor:
        if self.weight_scale.numel() == 1:
            zero = torch.zeros((), dtype=torch.int8, device=self.weight_codes.device)
            scale = self.weight_scale.reshape(())
            qparams = QParams(scale, zero, self._weight_scale_value or 1.0, 0)
            weight = dequantize_per_tensor(self.weight_codes, qparams)
        else:
            weight = dequantize_per_channel(self.weight_codes, self.weight_scale, self._weight_axis)
        if self._weight_groups > 1:
            weight = from_output_major(weight, ch_axis=1, groups=self._weight_groups)
        return cast(weight, self.dtype)

    def _dequantized_bias(self) -> Tensor | None:
        if self.bias_codes is None or self.bias_scale is None:
            return None
        return cast(dequantize_per_channel(self.bias_codes, self.bias_scale), self.dtype)

    weight: Any = property(
        _dequantized_weight, doc="The dequantized weight, in the layout and dtype of the float one."
    )
    bias: Any = property(_dequantized_bias, doc="The dequantized bias, or ``None``.")

    def forward(self, input: Tensor, *args: Any) -> Tensor:
        """Run the float operator on the dequantized input, weight and bias."""
        if self.quantizes_input:
            input = self.input_dequantize(self.input_quantize(input))
        output: Tensor = super().forward(input, *args)
        return output

    def _remember_numbers(self) -> None:
        single = self.weight_scale.numel() == 1
        self._weight_scale_value = float(self.weight_scale) if single else None

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._remember_numbers()

    def extra_repr(self) -> str:
        """Add the form of the weight to the float layer's text."""
        scales = "per channel" if self.weight_scale.numel() > 1 else "per tensor"
        return f"{super().extra_repr()}, weight=int8 {scales}"


class Conv1d(QuantizedLayer, nn.Conv1d):
    """Converted ``torch.nn.Conv1d``."""

    float_class = nn.Conv1d


class Conv2d(QuantizedLayer, nn.Conv2d):
    """Converted ``torch.nn.Conv2d``, depthwise and grouped included."""

    float_class = nn.Conv2d


class Conv3d(QuantizedLayer, nn.Conv3d):
    """Converted ``torch.nn.Conv3d``."""

    float_class = nn.Conv3d


class ConvTranspose1d(QuantizedLayer, nn.ConvTranspose1d):
    """Converted ``torch.nn.ConvTranspose1d``."""

    float_class = nn.ConvTranspose1d


class ConvTranspose2d(QuantizedLayer, nn.ConvTranspose2d):
    """Converted ``torch.nn.ConvTranspose2d``."""

    float_class = nn.ConvTranspose2d


class Linear(QuantizedLayer, nn.Linear):
    """Converted ``torch.nn.Linear``."""

    float_class = nn.Linear


_CLASSES: tuple[type[QuantizedLayer], ...] = (
    Conv1d,
    Conv2d,
    Conv3d,
    ConvTranspose1d,
    ConvTranspose2d,
    Linear,
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
