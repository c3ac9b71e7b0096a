"""The words of AMCT for PyTorch, for scripts that change one import line.

    from amct_fx import amct_pytorch as amct

    amct.create_quant_retrain_config("config.json", model, input_data, "quant.cfg")

Names, order of arguments and the classes of errors are AMCT's. The files that are written are, byte
for byte, those of AMCT; ``docs/configuration.md`` lists where a value in them differs on purpose.
"""

from amct_fx.amct_pytorch.distillation import (
    DistillSampleBase,
    create_distill_config,
    create_distill_model,
    distill,
    save_distill_model,
)
from amct_fx.amct_pytorch.ops import (
    GRUQAT,
    LSTMQAT,
    Conv1dQAT,
    Conv2dQAT,
    Conv3dQAT,
    ConvTranspose1dQAT,
    ConvTranspose2dQAT,
    LinearQAT,
    MatMulQAT,
)
from amct_fx.amct_pytorch.prune import (
    auto_channel_prune_search,
    create_compressed_retrain_model,
    create_prune_retrain_model,
    restore_compressed_retrain_model,
    restore_prune_retrain_model,
    save_compressed_retrain_model,
    save_prune_retrain_model,
)
from amct_fx.amct_pytorch.quant import (
    create_quant_retrain_config,
    create_quant_retrain_model,
    restore_quant_retrain_model,
    save_quant_retrain_model,
)

__all__ = [
    "GRUQAT",
    "LSTMQAT",
    "Conv1dQAT",
    "Conv2dQAT",
    "Conv3dQAT",
    "ConvTranspose1dQAT",
    "ConvTranspose2dQAT",
    "DistillSampleBase",
    "LinearQAT",
    "MatMulQAT",
    "auto_channel_prune_search",
    "create_compressed_retrain_model",
    "create_distill_config",
    "create_distill_model",
    "create_prune_retrain_model",
    "create_quant_retrain_config",
    "create_quant_retrain_model",
    "distill",
    "restore_compressed_retrain_model",
    "restore_prune_retrain_model",
    "restore_quant_retrain_model",
    "save_compressed_retrain_model",
    "save_distill_model",
    "save_prune_retrain_model",
    "save_quant_retrain_model",
]
