"""The numerics of amct_fx as plain functions.

The modules of :mod:`amct_fx.observers` call these; there is no second implementation.

====================================  ====================================================
function                              returns
====================================  ====================================================
:func:`ulq_qparams`                   scale and offset of a pair of clips
:func:`ulq_effective_clips`           clips after ``fixed_min`` and the guard
:func:`ulq_fake_quantize`             fake-quantized activation, learned clips
:func:`ifmr_range`                    clips to start with
:func:`ifmr_search`                   the same with losses of all candidates
:func:`arq_qparams`                   scale of a weight
:func:`arq_fake_quantize`             fake-quantized weight
:func:`weight_ulq_scale`              effective scale of a learned weight scale
:func:`ulq_weight_fake_quantize`      fake-quantized weight, learned scale
:func:`to_output_major`               weight with the output channels on axis 0
:func:`from_output_major`             its inverse
====================================  ====================================================
"""

from __future__ import annotations

from amct_fx.observers._arq import (
    arq_fake_quantize,
    arq_qparams,
    ulq_weight_fake_quantize,
    weight_ulq_scale,
)
from amct_fx.observers._geometry import from_output_major, to_output_major
from amct_fx.observers._ifmr import IFMRResult, ifmr_range, ifmr_search
from amct_fx.observers._scale import EPS
from amct_fx.observers._ulq import (
    ulq_effective_clips,
    ulq_fake_quantize,
    ulq_qparams,
)

__all__ = [
    "EPS",
    "IFMRResult",
    "arq_fake_quantize",
    "arq_qparams",
    "from_output_major",
    "ifmr_range",
    "ifmr_search",
    "to_output_major",
    "ulq_effective_clips",
    "ulq_fake_quantize",
    "ulq_qparams",
    "ulq_weight_fake_quantize",
    "weight_ulq_scale",
]
