"""amct_fx: quantization-aware training from AMCT's configuration files, as a torch.fx plugin.

The four lines of use::

    model = amct_fx.prepare_qat_amct(model, "quant.cfg")
    train(model)
    model = amct_fx.convert_amct(model)
    torch.onnx.export(model, args, "model.onnx")
"""

from amct_fx.checkpoint import load_checkpoint, save_checkpoint
from amct_fx.config import CompressionConfig, load_config
from amct_fx.control import param_groups
from amct_fx.convert import convert_amct
from amct_fx.distillation import distill, prepare_distill_amct
from amct_fx.errors import (
    AmctError,
    AmctFileNotFoundError,
    AmctIsADirectoryError,
    AmctNotADirectoryError,
    AmctWarning,
    ArgumentError,
    ArgumentTypeError,
    BackendError,
    CalibrationError,
    CheckpointError,
    CheckpointKeyError,
    ConfigError,
    ConfigFileNotFoundError,
    ConfigTypeError,
    ConvertError,
    DistillError,
    ExportError,
    InputDataError,
    LayerNameError,
    LayerTypeError,
    MissingExtraError,
    ModelError,
    ModelStateError,
    ModelTypeError,
    PruneError,
    RecordError,
    RecordParseError,
)
from amct_fx.onnx import export_onnx, verify_onnx
from amct_fx.prepare import prepare_qat_amct
from amct_fx.prune import prune_plan, search_channel_pruning
from amct_fx.qconfig import get_qconfig_mapping
from amct_fx.report import analyze, summarize
from amct_fx.torch_ao import get_backend_config

__version__ = "0.1.0"

__all__ = [
    "AmctError",
    "AmctFileNotFoundError",
    "AmctIsADirectoryError",
    "AmctNotADirectoryError",
    "AmctWarning",
    "ArgumentError",
    "ArgumentTypeError",
    "BackendError",
    "CalibrationError",
    "CheckpointError",
    "CheckpointKeyError",
    "CompressionConfig",
    "ConfigError",
    "ConfigFileNotFoundError",
    "ConfigTypeError",
    "ConvertError",
    "DistillError",
    "ExportError",
    "InputDataError",
    "LayerNameError",
    "LayerTypeError",
    "MissingExtraError",
    "ModelError",
    "ModelStateError",
    "ModelTypeError",
    "PruneError",
    "RecordError",
    "RecordParseError",
    "analyze",
    "convert_amct",
    "distill",
    "export_onnx",
    "get_backend_config",
    "get_qconfig_mapping",
    "load_checkpoint",
    "load_config",
    "param_groups",
    "prepare_distill_amct",
    "prepare_qat_amct",
    "prune_plan",
    "save_checkpoint",
    "search_channel_pruning",
    "summarize",
    "verify_onnx",
]
