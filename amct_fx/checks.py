"""Checks of the model before anything is changed. Each raises one error that says what to do."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.ao.quantization import FakeQuantizeBase
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy

from amct_fx.errors import ModelError, ModelStateError, ModelTypeError
from amct_fx.graph import check_parts
from amct_fx.nn.matmul import QATMatMul
from amct_fx.nn.qat import QATLayer
from amct_fx.nn.quantized import QuantizedLayer

if TYPE_CHECKING:
    from amct_fx.config import CompressionConfig
    from amct_fx.report.preparation import Preparation

__all__ = [
    "check_finite_weights",
    "check_float_model",
    "check_only_quantizes",
    "check_prepared_model",
]


def check_float_model(model: object, *, call: str = "prepare_qat_amct") -> None:
    """Refuse what prepare cannot take: no module, prepared, converted, wrapped.

    Args:
        model: What the user gave.
        call: The function that the user called, for messages.

    Raises:
        ModelTypeError: ``model`` is no ``nn.Module``.
        ModelStateError: It is prepared, converted, compiled, scripted, or wrapped for data
        parallelism.
    """
    module = _as_module(model)
    for name, part in module.named_modules():
        where = f"layer {name!r}" if name else "the model"
        if isinstance(part, (QATLayer, FakeQuantizeBase)):
            message = f"{where} is already prepared; give {call} the float model"
            raise ModelStateError(message)
        if isinstance(part, QuantizedLayer):
            message = f"{where} is already converted; give {call} the float model"
            raise ModelStateError(message)
        _refuse_wrapper(part, where)
        if any(is_lazy(parameter) for parameter in part._parameters.values()):
            message = f"{where} is lazy; run one forward pass before {call}"
            raise ModelStateError(message)
    preparation = _preparation_of(module)
    if preparation is not None and not preparation.converted:
        message = f"the model is already prepared; give {call} the float model"
        raise ModelStateError(message)


def check_prepared_model(
    model: object, *, first: str = "prepare_qat_amct(model, cfg) and train it"
) -> None:
    """Refuse what convert cannot take.

    Args:
        model: What the user gave.
        first: What comes before this call, for messages.

    Raises:
        ModelTypeError: ``model`` is no ``nn.Module``.
        ModelStateError: It is not prepared, already converted, or wrapped, or a layer was replaced.
    """
    module = _as_module(model)
    check_parts(module)
    parts = list(module.modules())
    for part in parts:
        _refuse_wrapper(part, "the model", advice="convert the module inside")
    preparation = _preparation_of(module)
    if any(isinstance(part, (QATLayer, QATMatMul)) for part in parts):
        return
    if preparation is not None and not preparation.converted:
        return  # it only prunes
    done = preparation is not None or any(isinstance(part, QuantizedLayer) for part in parts)
    message = (
        "the model is already converted"
        if done
        else f"the model is not prepared; call {first} first"
    )
    raise ModelStateError(message)


def check_finite_weights(model: nn.Module, names: Iterable[str]) -> None:
    """Refuse layers whose parameters hold NaN or Inf.

    Raises:
        ModelError: Names the first such parameter.
    """
    for name in names:
        for key, parameter in model.get_submodule(name).named_parameters():
            if parameter.is_complex():
                message = f"{name}.{key} is complex; list the layer in quant_skip_layers"
                raise ModelError(message)
            if not parameter.is_meta and not bool(torch.isfinite(parameter).all()):
                message = f"{name}.{key} holds NaN or Inf; load a sound checkpoint before preparing"
                raise ModelError(message)


def check_only_quantizes(config: CompressionConfig) -> None:
    """Refuse pruning where the result can only say how to quantize; nothing is ignored silently.

    Raises:
        ConfigError: The configuration asks for pruning.
    """
    blocks = [config.prune, *(level.prune for level in config.overrides)]
    for block in blocks:
        if block is not None:
            message = (
                "a QConfigMapping cannot prune; give the configuration to prepare_qat_amct, or "
                "remove its prune_config blocks"
            )
            raise block.source.error(message)


def _preparation_of(model: nn.Module) -> Preparation | None:
    from amct_fx.report.preparation import preparation_of  # reports check models, too

    return preparation_of(model)


def _as_module(model: object) -> nn.Module:
    if isinstance(model, nn.Module):
        return model
    message = f"the model must be a torch.nn.Module, not {type(model).__name__}"
    raise ModelTypeError(message)


def _refuse_wrapper(
    part: nn.Module, where: str, *, advice: str = "prepare first, then wrap"
) -> None:
    if isinstance(part, (DistributedDataParallel, DataParallel)):
        how = f"{advice}: pass model.module"
    elif hasattr(part, "_orig_mod"):
        how = f"{advice}: pass model._orig_mod"
    elif isinstance(part, torch.jit.ScriptModule):
        how = "pass the Python module it was scripted or traced from"
    else:
        return
    message = f"{where} is wrapped in {type(part).__name__}; {how}"
    raise ModelStateError(message)
