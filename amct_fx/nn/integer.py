"""From a trained layer to integers: batch-norm folding, weight codes, bias codes, dead channels.

Source: spec/quantization.md sections 4 and 5.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from amct_fx.errors import ConvertError
from amct_fx.nn.geometry import weight_geometry
from amct_fx.nn.precision import truncate_to_19_bits
from amct_fx.nn.quantized_layer import IntegerWeight
from amct_fx.observers.functional import EPS, to_output_major

__all__ = ["BatchNormAffine", "batch_norm_affine", "integer_weight"]

_DEAD_BIAS_CODE = 2.0**20
"""Code that represents the bias of a dead channel: fine enough for 1e-6, small enough for int32."""


@dataclass(frozen=True)
class BatchNormAffine:
    """What a batch norm computes in eval mode: ``factor * (y - mean) + shift``, each ``[C]``."""

    factor: Tensor
    mean: Tensor
    shift: Tensor

    @property
    def is_finite(self) -> bool:
        """Whether folding gives finite weights; a batch norm that does not is left alone."""
        return all(bool(torch.isfinite(t).all()) for t in (self.factor, self.mean, self.shift))


def batch_norm_affine(
    mean: Tensor | None,
    var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
) -> BatchNormAffine | None:
    """Return the eval-mode arithmetic of a batch norm, ``None`` if it has no running statistics.

    Args:
        mean: Running mean ``[C]``.
        var: Running variance ``[C]``.
        weight: Gamma ``[C]``; ``None`` means 1.
        bias: Beta ``[C]``; ``None`` means 0.
        eps: Added to the variance.

    Example:
        >>> one = torch.ones(1)
        >>> batch_norm_affine(0 * one, 4 * one, 3 * one, None, 0.0).factor
        tensor([1.5000])
    """
    if mean is None or var is None:
        return None
    mean, var = mean.detach().float(), var.detach().float()
    factor = torch.rsqrt(var + eps)
    if weight is not None:
        factor = weight.detach().float() * factor
    shift = torch.zeros_like(mean) if bias is None else bias.detach().float()
    return BatchNormAffine(factor, mean, shift)


def integer_weight(
    layer: nn.Module,
    *,
    weight_scale: Tensor,
    num_bits: int,
    input_scale: Tensor,
    parameters: tuple[str, str] = ("weight", "bias"),
    batch_norm: BatchNormAffine | None = None,
    force_fp16: bool = False,
    name: str = "",
) -> IntegerWeight:
    """Turn a float weight of a layer and its bias into codes and scales.

    Args:
        layer: Convolution, transposed convolution, Linear, LSTM or GRU with float parameters.
        weight_scale: float32 ``[C_out]`` or ``[1]``, the scale of the training.
        num_bits: Bits of the weight codes.
        input_scale: Scale of what the weight is multiplied with, one value.
        parameters: Names of the weight and the bias; the bias may be absent or ``None``.
        batch_norm: Arithmetic of the batch norm to fold.
        force_fp16: Truncate the dequantization scale, input scale times weight scale, to 19 bits.
        name: Name of the layer, for messages.

    Raises:
        ConvertError: For non-finite values, or a bias that does not fit into int32.
    """
    geometry = weight_geometry(layer)
    weight, bias = _float_parameters(layer, parameters, name)
    rows = to_output_major(weight, ch_axis=geometry.ch_axis, groups=geometry.groups)
    scale = weight_scale.detach().float()
    codes = _trained_codes(rows, scale, num_bits)
    if batch_norm is not None:
        scale = scale.expand(geometry.num_channels) * batch_norm.factor.abs()
        codes = _follow_sign(codes, batch_norm.factor, scale, num_bits)
        centred = -batch_norm.mean if bias is None else bias - batch_norm.mean
        bias = centred * batch_norm.factor + batch_norm.shift
    scale = _usable_scale(codes, scale, bias, input_scale)
    bias_scale = None if bias is None else _bias_scale(scale, input_scale, geometry.num_channels)
    bias_codes = _bias_codes(bias, bias_scale, name)
    if force_fp16:
        input_scale = input_scale.float()
        scale = truncate_to_19_bits(scale * input_scale) / input_scale
        bias_scale = None if bias_scale is None else truncate_to_19_bits(bias_scale)
    regrouped = geometry.ch_axis == 1 and geometry.groups > 1
    if not regrouped and geometry.ch_axis == 1:
        codes = codes.transpose(0, 1)
    return IntegerWeight(
        codes=codes.to(torch.int8).contiguous(),
        scale=scale.contiguous(),
        bias_codes=bias_codes,
        bias_scale=bias_scale,
        axis=0 if regrouped else geometry.ch_axis,
        groups=geometry.groups if regrouped else 1,
        num_bits=num_bits,
    )


def _float_parameters(
    layer: nn.Module, parameters: tuple[str, str], name: str
) -> tuple[Tensor, Tensor | None]:
    weight: Tensor = getattr(layer, parameters[0]).detach().float()
    found: Tensor | None = getattr(layer, parameters[1], None)
    bias = None if found is None else found.detach().float()
    for label, tensor in zip(parameters, (weight, bias), strict=True):
        if tensor is not None and not bool(torch.isfinite(tensor).all()):
            message = (
                f"{name}: the {label} holds NaN or Inf; the training has diverged: lower the "
                "learning rate, or load an earlier checkpoint"
            )
            raise ConvertError(message)
    return weight, bias


def _trained_codes(rows: Tensor, scale: Tensor, num_bits: int) -> Tensor:
    """Return the codes that training used, as float32, output-major."""
    half = 2 ** (num_bits - 1)
    column = scale.reshape(-1, *[1] * (rows.dim() - 1))
    return torch.round(rows / column).clamp_(-half, half - 1)


def _follow_sign(codes: Tensor, factor: Tensor, scale: Tensor, num_bits: int) -> Tensor:
    """Give each row the sign of its batch-norm factor; rows too small for any scale become 0.

    The codes stay the trained ones: rounding the folded weight anew would only add flips at ties.
    """
    sign = torch.where(scale < EPS, 0.0, torch.sign(factor))
    signed = codes * sign.reshape(-1, *[1] * (codes.dim() - 1))
    return signed.clamp_(max=2 ** (num_bits - 1) - 1)


def _usable_scale(codes: Tensor, scale: Tensor, bias: Tensor | None, input_scale: Tensor) -> Tensor:
    """Choose the scale of dead channels, whose codes are all 0, so that the bias survives."""
    dead = codes.flatten(1).abs().amax(1) == 0 if codes.numel() else torch.ones(len(codes)) > 0
    if scale.numel() == 1 and len(codes) > 1:
        if not bool(dead.all()):
            return scale
        scale = scale.expand(len(codes))
    wanted = torch.zeros_like(scale) if bias is None else bias.abs().to(scale)
    for_bias = wanted / (input_scale.float() * _DEAD_BIAS_CODE)
    tiny = torch.finfo(torch.float32).tiny
    for_bias = torch.where(for_bias * input_scale < tiny, torch.ones_like(scale), for_bias)
    return torch.where(dead, for_bias, scale)


def _bias_scale(scale: Tensor, input_scale: Tensor, channels: int) -> Tensor:
    return (scale * input_scale.float()).expand(channels).contiguous()


def _bias_codes(bias: Tensor | None, bias_scale: Tensor | None, name: str) -> Tensor | None:
    if bias is None or bias_scale is None:
        return None
    codes = torch.round(bias.double() / bias_scale.double())
    worst = int(codes.abs().argmax())
    if not bool(codes.abs()[worst] <= 2**31 - 1):
        message = (
            f"{name}: the bias of output channel {worst}, {float(bias[worst]):.6g}, does not fit "
            f"into int32 at step {float(bias_scale[worst]):.6g} (input scale times weight scale); "
            "the bias is too large for the channel's small weights, or has diverged: train on, or "
            "list the layer in quant_skip_layers"
        )
        raise ConvertError(message)
    return codes.to(torch.int32)
