"""What quantizes and prunes one layer, as plain values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from amct_fx.nn.qat import QATLayer
from amct_fx.nn.quantized import Quantize, QuantizedLayer
from amct_fx.observers import ARQFakeQuantize, ULQFakeQuantize, ULQWeightFakeQuantize
from amct_fx.observers.functional import ulq_effective_clips
from amct_fx.prune.parametrization import M4N2

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "InputQuantizer",
    "Pruning",
    "WeightQuantizer",
    "describe_input",
    "describe_pruning",
    "describe_weight",
]


@dataclass(frozen=True)
class InputQuantizer:
    """How a tensor is quantized; the ranges are ``None`` before the calibration.

    Attributes:
        bits: Width of the codes.
        clip_max: Upper end of the range.
        clip_min: Lower end of the range.
        scale: Step between two codes.
        offset: Code of 0.
        shared_with: The layer that owns the quantizer, ``None`` if it is the layer itself.
    """

    bits: int
    clip_max: float | None = None
    clip_min: float | None = None
    scale: float | None = None
    offset: int | None = None
    shared_with: str | None = None

    def __str__(self) -> str:
        """Return bits, scale, zero point and owner."""
        shared = f", of {self.shared_with}" if self.shared_with is not None else ""
        if self.scale is None:
            return f"{self.bits} bits, not calibrated{shared}"
        clips = f"{self.clip_min:.4g} … {self.clip_max:.4g}"
        place = f"scale={self.scale:.6g}, zero_point={self.offset}"
        return f"{self.bits} bits, {place}, {clips}{shared}"


@dataclass(frozen=True)
class WeightQuantizer:
    """How a weight is quantized.

    Attributes:
        algorithm: ``"ARQ"``, ``"ULQ"``, ``"integer"`` after conversion, or the name of a class.
        per_channel: Whether each output channel has a scale.
        bits: Width of the codes.
        scales: Number of scales.
    """

    algorithm: str
    per_channel: bool
    bits: int
    scales: int

    def __str__(self) -> str:
        """Return algorithm, bits and number of scales."""
        scales = "1 scale" if self.scales == 1 else f"{self.scales} scales"
        if self.algorithm == "integer":
            return f"int{self.bits}, {scales}"
        return f"{self.algorithm}, {self.bits} bits, {scales}"


@dataclass(frozen=True)
class Pruning:
    """What is cut away or masked.

    Attributes:
        kept: Output channels, or elements of each group, that stay.
        total: How many there are.
        pattern: ``"filter"`` or ``"2:4"``.
    """

    kept: int
    total: int
    pattern: str

    def __str__(self) -> str:
        """Return ``kept/total pattern``."""
        return f"{self.kept}/{self.total} {self.pattern}"


def describe_input(quantizer: nn.Module, *, shared_with: str | None = None) -> InputQuantizer:
    """Describe a fake-quantizer of an activation, or the quantizer it was converted to.

    Args:
        quantizer: Per tensor.
        shared_with: The layer that owns it, if that is another one.

    Example:
        >>> print(describe_input(Quantize(0.5, 3)))
        8 bits, scale=0.5, zero_point=3, -65.5 … 62
    """
    if isinstance(quantizer, Quantize):
        bits = torch.iinfo(quantizer.zero_point.dtype).bits
        scale, zero_point = float(quantizer.scale), int(quantizer.zero_point)
    else:
        bits = int(getattr(quantizer, "num_bits", 8))
        if not getattr(quantizer, "is_calibrated", True):
            return InputQuantizer(bits, shared_with=shared_with)
        found: Any = quantizer
        scale, zero_point = (value.item() for value in found.calculate_qparams())
    half = 2.0 ** (bits - 1)
    upper, lower = (half - 1 - zero_point) * scale, (-half - zero_point) * scale
    if isinstance(quantizer, ULQFakeQuantize):
        upper, lower = (float(clip) for clip in _clips(quantizer))
    return InputQuantizer(bits, upper, lower, scale, int(zero_point), shared_with)


def _clips(quantizer: ULQFakeQuantize) -> tuple[Tensor, Tensor]:
    """Return the clips that the next forward would use, upper then lower."""
    return ulq_effective_clips(
        quantizer.clip_max.detach(),
        quantizer.clip_min.detach(),
        fixed_min=bool(quantizer.fixed_min),
        previous=(quantizer.clip_max_prev, quantizer.clip_min_prev),
    )


def describe_weight(layer: QATLayer | QuantizedLayer) -> WeightQuantizer:
    """Describe how the weights of a layer are quantized.

    Example:
        >>> from amct_fx import prepare_qat_amct
        >>> print(describe_weight(prepare_qat_amct(nn.Sequential(nn.Linear(4, 2)))[0]))
        ARQ, 8 bits, 1 scale
    """
    if isinstance(layer, QATLayer):
        first = getattr(layer, next(iter(layer.weight_quantizers.values())))
        algorithm = _ALGORITHMS.get(type(first), type(first).__name__)
        scales: list[Tensor] = [layer.weight_scale(name) for name in layer.weight_quantizers]
    else:
        algorithm, scales = "integer", layer.weight_scales()
    number = sum(scale.numel() for scale in scales)
    return WeightQuantizer(algorithm, number > len(scales), layer.weight_bits, number)


_ALGORITHMS: dict[type[nn.Module], str] = {ARQFakeQuantize: "ARQ", ULQWeightFakeQuantize: "ULQ"}


def describe_pruning(
    module: nn.Module, planned: tuple[int, int] | None = None, *, patterns: bool = False
) -> Pruning | None:
    """Describe what is masked in a prepared layer or was cut from a converted one.

    Args:
        module: The layer.
        planned: How many of how many output channels stay by the plan.
        patterns: Look for 2:4 sparsity in the codes of a converted layer.

    Example:
        >>> from amct_fx.prune.parametrization import m4n2
        >>> layer = nn.Linear(8, 2)
        >>> _ = m4n2(layer)
        >>> str(describe_pruning(layer))
        '2/4 2:4'
    """
    kept = module._buffers.get("kept_channels")
    if kept is not None:
        return Pruning(int(kept.sum()), kept.numel(), "filter")
    if planned is not None:
        return Pruning(*planned, "filter")
    chain: Any = module.parametrizations.weight if is_parametrized(module, "weight") else ()  # type: ignore[union-attr]
    masked = any(isinstance(part, M4N2) for part in chain) or (patterns and _is_2_of_4(module))
    return Pruning(2, 4, "2:4") if masked else None


def _is_2_of_4(module: nn.Module) -> bool:
    """Say whether at most two of every four neighbouring input channels of a weight are used."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, torch.Tensor) or weight.dim() < 2:
        return False
    axis = 0 if isinstance(module, nn.modules.conv._ConvTransposeNd) else 1
    used = (weight.detach().movedim(axis, -1) != 0).flatten(0, -2)
    whole = used.shape[1] // 4 * 4
    groups = used[:, :whole].view(len(used), -1, 4).sum(-1)
    return whole > 0 and bool((groups <= 2).all())
