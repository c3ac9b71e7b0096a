"""How long convert takes, and that it grows linearly with the number of layers.

python benchmarks/convert.py
"""

from __future__ import annotations

import depths
import torch
from torch import nn

import amct_fx


def calibrated(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a prepared model that knows its ranges."""
    model = amct_fx.prepare_qat_amct(model.to(device).eval())
    with torch.no_grad():
        model(torch.randn(2, 3, 8, 8, device=device))
    return model


if __name__ == "__main__":
    depths.benchmark("Convert", __doc__ or "", calibrated, amct_fx.convert_amct)
