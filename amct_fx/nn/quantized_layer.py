"""What all converted layers share: integer buffers, quantize and dequantize modules.

Source: spec/deploy.md section 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from amct_fx.errors import ConvertError
from amct_fx.nn.functional import (
    QParams,
    cast,
    dequantize_per_channel,
    dequantize_per_tensor,
    quantize_per_tensor,
)
from amct_fx.nn.precision import fp16_scale
from amct_fx.observers.functional import from_output_major

if TYPE_CHECKING:
    from torch.ao.quantization import FakeQuantizeBase

__all__ = ["Dequantize", "IntegerWeight", "Quantize", "QuantizedLayer"]


class _KeepsScales(nn.Module):
    """Keeps scales in float32 when the model is cast; what the layer returns follows the cast."""

    dtype: torch.dtype

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        if hasattr(self, "dtype"):
            self.dtype = fn(torch.empty(0, dtype=self.dtype)).dtype
        for child in self.children() if recurse else ():
            child._apply(fn)
        return super()._apply(keep_dtype, recurse=False)  # type: ignore[no-untyped-call]


class _TensorQParams(_KeepsScales):
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
        force_fp16: Round the scale to half precision, and let the layers that read the codes
            truncate their dequantization scales to 19 bits.

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
        self,
        scale: float | Tensor,
        zero_point: int | Tensor,
        dtype: torch.dtype = torch.int8,
        *,
        force_fp16: bool = False,
    ) -> None:
        device = scale.device if isinstance(scale, Tensor) else None
        held = torch.tensor(float(scale), dtype=torch.float32, device=device)
        super().__init__(
            fp16_scale(held) if force_fp16 else held,
            torch.tensor(int(zero_point), dtype=dtype, device=device),
        )
        self.force_fp16 = force_fp16

    @classmethod
    def from_fake_quant(cls, fake_quant: FakeQuantizeBase, name: str = "") -> Quantize:
        """Freeze an activation fake-quantizer at today's scale and zero point.

        Args:
            fake_quant: Per tensor, calibrated.
            name: Name of its layer, for messages.

        Raises:
            ConvertError: The scale is not finite, or no integer type has that many bits.
        """
        scale, zero_point = fake_quant.calculate_qparams()
        bits = getattr(fake_quant, "num_bits", 8)
        dtypes = {8: torch.int8, 16: torch.int16}
        finite = bool(torch.isfinite(scale).all())
        if bits not in dtypes or not finite:
            message = (
                f"{name}: {bits}-bit activations have no integer type; choose INT8 or INT16"
                if finite
                else f"{name}: the range of its input is not finite; the training has diverged: "
                "lower the learning rate, or load an earlier checkpoint"
            )
            raise ConvertError(message)
        force_fp16 = getattr(fake_quant, "force_fp16", False)
        return cls(scale.reshape(()), zero_point.reshape(()), dtypes[bits], force_fp16=force_fp16)

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
        num_bits: Bits of the codes; those of INT4 weights stand in int8, too.
    """

    codes: Tensor
    scale: Tensor
    bias_codes: Tensor | None
    bias_scale: Tensor | None
    axis: int = 0
    groups: int = 1
    num_bits: int = 8


@dataclass(frozen=True)
class _Layout:
    """How the codes of a weight lie, and its scale as a number if there is only one."""

    axis: int
    groups: int
    scale_value: float | None = None


class QuantizedLayer(_KeepsScales):
    """What all converted layers share: integer buffers, and where the input is quantized.

    Attributes:
        parts: Prefixes of the buffers of each weight and its bias: ``weight_<part>codes``,
            ``weight_<part>scale``, ``bias_<part>codes``, ``bias_<part>scale``.
        float_parameters: Names of the parameters that the buffers replace.
        backend: The library whose integer operator runs the layer, ``""`` for PyTorch's float one.
        quantizes_input: Whether the layer always quantizes its input itself; see
            :class:`amct_fx.nn.qat.QATLayer`.
        dtype: Floating point type of the operator.
        weight_bits: Bits of the weight codes.
    """

    float_class: ClassVar[type[nn.Module]]
    parts: ClassVar[tuple[str, ...]] = ("",)
    float_parameters: ClassVar[tuple[str, ...]] = ("weight", "bias")
    backend: ClassVar[str] = ""
    weight_codes: Tensor
    weight_scale: Tensor
    bias_codes: Tensor | None
    bias_scale: Tensor | None
    input_quantize: Quantize
    input_dequantize: Dequantize
    quantizes_input: bool
    _input_owner: tuple[QuantizedLayer, ...]
    dtype: torch.dtype
    weight_bits: int = 8
    _layouts: dict[str, _Layout]

    def adopt(self, integers: Mapping[str, IntegerWeight], dtype: torch.dtype) -> None:
        """Replace the float parameters by integer buffers, one set for each of ``parts``."""
        for name in self.float_parameters:
            self._parameters.pop(name, None)
        self._layouts = {}
        for part in self.parts:
            integer = integers[part]
            self.register_buffer(f"weight_{part}codes", integer.codes)
            self.register_buffer(f"weight_{part}scale", integer.scale)
            self.register_buffer(f"bias_{part}codes", integer.bias_codes)
            self.register_buffer(f"bias_{part}scale", integer.bias_scale)
            self._layouts[part] = _Layout(integer.axis, integer.groups)
        self.dtype = dtype
        self.weight_bits = integers[self.parts[0]].num_bits
        self._remember_numbers()

    @property
    def input_quantizer(self) -> Quantize:
        """The quantizer of the input, of this layer or of the one it shares with."""
        return self.input_owner.input_quantize

    def own_input_quantizer(self, quantize: Quantize) -> None:
        """Put ``quantize`` and its dequantize where the fake-quantizer of the input was."""
        del self.input_fake_quant
        self.input_quantize = quantize
        self.input_dequantize = Dequantize(quantize, self.dtype)

    def quantized_input(self, input: Tensor, quantized: bool) -> Tensor:
        """Return the tensor the float operator runs on."""
        if quantized:
            return input
        owner = self.input_owner
        values: Tensor = owner.input_dequantize(owner.input_quantize(input))
        return values

    @property
    def input_owner(self) -> QuantizedLayer:
        """The layer that holds the quantizer of the input: this one, or the one it shares with."""
        return self._input_owner[0] if self._input_owner else self

    def dequantized_weight(self, part: str = "") -> Tensor:
        """Return a weight in the layout and dtype of the float one."""
        codes, scale = getattr(self, f"weight_{part}codes"), getattr(self, f"weight_{part}scale")
        layout = self._layouts[part]
        if layout.scale_value is not None:
            zero = torch.zeros((), dtype=torch.int8, device=codes.device)
            qparams = QParams(scale.reshape(()), zero, layout.scale_value, 0)
            weight = dequantize_per_tensor(codes, qparams)
        else:
            weight = dequantize_per_channel(codes, scale, layout.axis)
        if layout.groups > 1:
            weight = from_output_major(weight, ch_axis=1, groups=layout.groups)
        return cast(weight, self.dtype)

    def dequantized_bias(self, part: str = "") -> Tensor | None:
        """Return a bias ``[C_out]`` in the dtype of the float one, or ``None``."""
        codes, scale = getattr(self, f"bias_{part}codes"), getattr(self, f"bias_{part}scale")
        return None if codes is None else cast(dequantize_per_channel(codes, scale), self.dtype)

    def weight_scales(self) -> list[Tensor]:
        """Return the scales of each weight, ``[C_out]`` or ``[1]``."""
        return [getattr(self, f"weight_{part}scale") for part in self.parts]

    def _remember_numbers(self) -> None:
        """Keep scales that belong to a whole tensor as numbers too, which exporters need."""
        for part, scale in zip(self.parts, self.weight_scales(), strict=True):
            value = float(scale) if scale.numel() == 1 else None
            self._layouts[part] = replace(self._layouts[part], scale_value=value)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._remember_numbers()

    def extra_repr(self) -> str:
        """Add the form of the weight to the float layer's text."""
        per_channel = any(scale.numel() > 1 for scale in self.weight_scales())
        scales = "per channel" if per_channel else "per tensor"
        return f"{super().extra_repr()}, weight=int{self.weight_bits} {scales}"
