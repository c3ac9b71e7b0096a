"""The integers and scales of a converted layer, in the layout of an ONNX operator.

Source: spec/deploy.md section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from amct_fx.nn.recurrent import ONNX_GATES
from amct_fx.observers.functional import from_output_major

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from amct_fx.nn.quantized_layer import Quantize, QuantizedLayer

__all__ = [
    "Range",
    "activation_range",
    "bias_codes",
    "dead_scale",
    "dequant_scale",
    "pack_int4",
    "packing_axis",
    "scale_bits",
    "unpack_int4",
    "weight_codes",
]

_KEPT_BITS = np.uint32(0xFFFFE000)
_HALF_STEP = np.uint32(0x1000)


@dataclass(frozen=True)
class Range:
    """How a float tensor becomes integers: ``round(x / scale) + offset``.

    Attributes:
        scale: float32.
        offset: The zero point.
        bits: 8 or 16.
    """

    scale: np.float32
    offset: int
    bits: int

    @property
    def reciprocal(self) -> np.float32:
        """``1 / scale`` in float32."""
        return np.float32(1) / self.scale

    @property
    def type_name(self) -> str:
        """``"INT8"`` or ``"INT16"``."""
        return f"INT{self.bits}"


def activation_range(quantize: Quantize) -> Range:
    """Return the scale and offset of a quantizer.

    Example:
        >>> from amct_fx.nn.quantized import Quantize
        >>> found = activation_range(Quantize(0.5, 3))
        >>> float(found.scale), float(found.reciprocal), found.offset, found.type_name
        (0.5, 2.0, 3, 'INT8')
    """
    bits = quantize.zero_point.element_size() * 8
    return Range(np.float32(float(quantize.scale)), int(quantize.zero_point), bits)


def weight_codes(layer: QuantizedLayer, part: str = "") -> NDArray[np.int8]:
    """Return the codes of a weight as ONNX lays them out.

    Returns:
        int8: convolutions as in PyTorch, Linear ``[in, out]``, LSTM and GRU ``[1, G*H, I or H]``
        with ONNX's order of gates.
    """
    codes: Tensor = getattr(layer, f"weight_{part}codes")
    groups = layer._layouts[part].groups
    if groups > 1:
        codes = from_output_major(codes, ch_axis=1, groups=groups)
    array = _array(codes)
    if isinstance(layer, nn.Linear):
        return np.ascontiguousarray(array.T)
    if isinstance(layer, nn.RNNBase):
        return _onnx_gates(array, layer.mode)[None]
    return array


def bias_codes(layer: QuantizedLayer, part: str = "") -> NDArray[np.int32] | None:
    """Return the int32 bias ``[C_out]``; LSTM and GRU ``[G*H]`` with ONNX's order of gates."""
    codes: Tensor | None = getattr(layer, f"bias_{part}codes")
    if codes is None:
        return None
    array = _array(codes)
    common = dead_scale(layer)
    if (
        common is not None and layer.bias_scale is not None
    ):  # its channels have steps of their own, and get one for all
        values = array * _array(layer.bias_scale).astype(np.float64)
        codes_in_common: NDArray[np.int32] = np.rint(
            values / (common * float(layer.input_quantizer.scale))
        ).astype(np.int32)
        return codes_in_common
    return _onnx_gates(array, layer.mode) if isinstance(layer, nn.RNNBase) else array


def dequant_scale(layer: QuantizedLayer, quantize: Quantize, part: str = "") -> NDArray[np.float32]:
    """Return the step of the integer result, input scale times weight scale.

    Returns:
        float32 ``[1]`` or ``[C_out]``; for LSTM and GRU ``[G]`` or ``[G*H]``, gates in ONNX's
        order.
    """
    scale = _array(getattr(layer, f"weight_{part}scale")).astype(np.float32)
    product = scale * _array(quantize.scale).astype(np.float32)
    if quantize.force_fp16:  # was truncated to 19 bits, then divided by the input scale
        product = ((product.view(np.uint32) + _HALF_STEP) & _KEPT_BITS).view(np.float32)
    common = dead_scale(layer)
    if common is not None:
        return np.array([common * np.float32(float(quantize.scale))], np.float32)
    if isinstance(layer, nn.RNNBase):
        gates = len(ONNX_GATES[layer.mode])
        return np.repeat(product, gates) if product.size == 1 else _onnx_gates(product, layer.mode)
    return product


def dead_scale(layer: QuantizedLayer) -> np.float32 | None:
    """Return one scale for a Linear whose weights are all 0 and whose scales serve only its biases.

    Returns:
        The largest scale of a channel with a bias, which is fine enough for all of them; ``None``
        for every other layer.
    """
    scale, bias = getattr(layer, "weight_scale", None), getattr(layer, "bias_codes", None)
    if not isinstance(layer, nn.Linear) or scale is None or scale.numel() == 1:
        return None
    if bool(layer.weight_codes.any()):
        return None
    used = scale[bias != 0] if bias is not None else scale[:0]
    return np.float32(float(used.max())) if used.numel() else np.float32(1)


def packing_axis(layer: QuantizedLayer) -> int:
    """Return the axis of :func:`weight_codes` along which two INT4 codes share a byte."""
    if isinstance(layer, nn.RNNBase):
        return 2
    return 1 if isinstance(layer, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) else 0


def scale_bits(scale: NDArray[np.float32]) -> NDArray[np.uint64]:
    """Return dequantization scales as ATC reads them: the float32 pattern in the low 32 bits.

    Example:
        >>> scale_bits(np.array([1.889783379738219e-05], np.float32))
        array([933136074], dtype=uint64)
    """
    return scale.astype(np.float32).view(np.uint32).astype(np.uint64)


def pack_int4(codes: NDArray[np.int8], axis: int) -> NDArray[np.int8]:
    """Put two 4-bit codes into one byte, the even index in the low half.

    Args:
        codes: −8 … 7, an even number of them along ``axis``.
        axis: The axis that halves.

    Example:
        >>> pack_int4(np.array([1, 0, -2, -2, 2, 2], np.int8), 0)
        array([  1, -18,  34], dtype=int8)
    """
    even = codes.take(range(0, codes.shape[axis], 2), axis)
    odd = codes.take(range(1, codes.shape[axis], 2), axis)
    packed = (even.view(np.uint8) & 0x0F) | (odd.view(np.uint8) << 4)
    return packed.astype(np.uint8).view(np.int8)


def unpack_int4(packed: NDArray[np.int8], axis: int) -> NDArray[np.int8]:
    """Undo :func:`pack_int4`.

    Example:
        >>> unpack_int4(np.array([1, -18], np.int8), 0)
        array([ 1,  0, -2, -2], dtype=int8)
    """
    low = (packed << 4).astype(np.int8) >> 4
    pair = np.stack([low, packed >> 4], axis + 1)
    shape = list(packed.shape)
    shape[axis] *= 2
    return pair.reshape(shape)


def _onnx_gates(array: NDArray[Any], mode: str) -> NDArray[Any]:
    """Reorder the gates, which are stacked along axis 0."""
    order = ONNX_GATES[mode]
    return np.concatenate([np.split(array, len(order))[gate] for gate in order])


def _array(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().numpy()
    return array
