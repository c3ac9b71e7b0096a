"""Layers: :mod:`amct_fx.nn.qat` for training, :mod:`amct_fx.nn.quantized` after conversion."""

from amct_fx.nn import qat, quantized

__all__ = ["qat", "quantized"]
