"""How long prepare takes (copy, trace, swap), and that it grows linearly with the number of layers.

python benchmarks/prepare.py
"""

from __future__ import annotations

import depths
from torch import nn

import amct_fx

if __name__ == "__main__":
    depths.benchmark("Prepare", __doc__ or "", nn.Module.to, amct_fx.prepare_qat_amct)
