"""Execution on Ascend devices through torch-npu: ``convert_amct(model, backend="npu")``.

torch-npu is imported when the first model is lowered, never before.
"""

from amct_fx.npu.lower import Lowering, LoweringRow, lowering_of, lowering_to_npu
from amct_fx.npu.probe import NpuState, Probe, probe
from amct_fx.npu.rules import NpuOptions
from amct_fx.npu.scale import pack_scale, unpack_scale

__all__ = [
    "Lowering",
    "LoweringRow",
    "NpuOptions",
    "NpuState",
    "Probe",
    "lowering_of",
    "lowering_to_npu",
    "pack_scale",
    "probe",
    "unpack_scale",
]
