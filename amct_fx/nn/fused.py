"""Fused fast paths of torch.nn containers, which read weights and would bypass the quantizers."""

from __future__ import annotations

from torch import nn

from amct_fx.nn.qat import QATLayer

__all__ = ["disable_fused_paths"]


def disable_fused_paths(model: nn.Module) -> None:
    """Keep transformer encoders with quantized layers on the path that calls those layers.

    In eval mode ``nn.TransformerEncoderLayer`` hands its float weights to one fused kernel, and
    ``nn.TransformerEncoder`` packs padded batches for it. Both decide by attributes that serve
    nothing else; results are the same up to float rounding.

    Args:
        model: A model whose layers were swapped already; changed in place.
    """
    kinds = (nn.TransformerEncoderLayer, nn.TransformerEncoder)
    for module in [part for part in model.modules() if isinstance(part, kinds)]:
        if not any(isinstance(part, QATLayer) for part in module.modules()):
            continue
        if isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        else:
            module.use_nested_tensor = False
