"""Configurations: ``.cfg`` files to frozen dataclasses, and those to one spec per layer.

:func:`load_config` reads, :func:`resolve` decides. Neither needs torch; protobuf is imported when
the first file is read.
"""

from __future__ import annotations

from amct_fx.config.dialect import detect_dialect, rename_layers, to_pytorch
from amct_fx.config.json_config import resolution_to_dict, save_json_config
from amct_fx.config.json_object import dump_json
from amct_fx.config.load import load_config
from amct_fx.config.resolve import resolve
from amct_fx.config.schema import (
    ActivationConfig,
    CompressionConfig,
    DataType,
    FilterPruneConfig,
    LayerOverride,
    M4N2PruneConfig,
    PruneConfig,
    Source,
    TypeOverride,
    WeightConfig,
)
from amct_fx.config.specs import (
    LayerFacts,
    LayerSpec,
    LinearChannelWise,
    ModelFacts,
    Origin,
    PruneMode,
    Resolution,
)

__all__ = [
    "ActivationConfig",
    "CompressionConfig",
    "DataType",
    "FilterPruneConfig",
    "LayerFacts",
    "LayerOverride",
    "LayerSpec",
    "LinearChannelWise",
    "M4N2PruneConfig",
    "ModelFacts",
    "Origin",
    "PruneConfig",
    "PruneMode",
    "Resolution",
    "Source",
    "TypeOverride",
    "WeightConfig",
    "detect_dialect",
    "dump_json",
    "load_config",
    "rename_layers",
    "resolution_to_dict",
    "resolve",
    "save_json_config",
    "to_pytorch",
]
