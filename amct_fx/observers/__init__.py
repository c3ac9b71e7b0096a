"""Observers and fake-quantizers in the vocabulary of ``torch.ao.quantization``.

===============================  ===========================================================
:class:`ULQFakeQuantize`         activations: learned clips, started by IFMR
:class:`ARQFakeQuantize`         weights: scale recomputed in every forward
:class:`ULQWeightFakeQuantize`   weights: learned scale, started by ARQ
:class:`IFMRObserver`            range with the least quantization error
:class:`MinMaxObserver`          largest and smallest value seen
:mod:`functional`                the same numerics as plain functions
===============================  ===========================================================
"""

from __future__ import annotations

from amct_fx.observers import functional
from amct_fx.observers._base import AmctFakeQuantize
from amct_fx.observers._recompute import Source
from amct_fx.observers.arq import ARQFakeQuantize
from amct_fx.observers.ifmr import IFMRObserver, MinMaxObserver
from amct_fx.observers.ulq import ULQFakeQuantize
from amct_fx.observers.weight_ulq import ULQWeightFakeQuantize

__all__ = [
    "ARQFakeQuantize",
    "AmctFakeQuantize",
    "IFMRObserver",
    "MinMaxObserver",
    "Source",
    "ULQFakeQuantize",
    "ULQWeightFakeQuantize",
    "functional",
]
