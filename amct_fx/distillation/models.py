"""What may be a teacher, and what a student."""

from __future__ import annotations

from torch import nn
from torch.ao.quantization import FakeQuantizeBase
from torch.nn.parallel import DataParallel, DistributedDataParallel

from amct_fx.checks import check_prepared_model
from amct_fx.errors import ModelStateError, ModelTypeError
from amct_fx.nn.quantized import QuantizedLayer

__all__ = ["student_model", "teacher_model"]

_FIRST = "prepare_distill_amct (of amct_pytorch: create_distill_model)"


def teacher_model(model: object) -> nn.Module:
    """Return the teacher, out of ``DistributedDataParallel``.

    Raises:
        ModelTypeError: It is no module, or in ``DataParallel``.
        ModelStateError: It has quantizers.
    """
    module = _unwrapped(model, "teacher")
    for name, part in module.named_modules():
        if isinstance(part, (FakeQuantizeBase, QuantizedLayer)):
            message = (
                f"the teacher is quantized ({name.rpartition('.')[0] or name or 'the model'}); "
                "give the float model first, then the student"
            )
            raise ModelStateError(message)
    return module


def student_model(model: object) -> nn.Module:
    """Return the student, out of ``DistributedDataParallel``.

    Raises:
        ModelTypeError: It is no module, or in ``DataParallel``.
        ModelStateError: It has no quantizers, or is converted.
    """
    module = _unwrapped(model, "student")
    check_prepared_model(module, first=_FIRST)
    if not any(isinstance(part, FakeQuantizeBase) for part in module.modules()):
        message = (
            "the student has no quantizers: it was prepared to be pruned only; give "
            "prepare_qat_amct a configuration that quantizes as well"
        )
        raise ModelStateError(message)
    return module


def _unwrapped(model: object, what: str) -> nn.Module:
    if isinstance(model, DistributedDataParallel):
        inner: nn.Module = model.module
        return inner
    if isinstance(model, DataParallel):
        message = (
            f"the {what} is in DataParallel; use DistributedDataParallel, or pass model.module"
        )
        raise ModelTypeError(message)
    if isinstance(model, nn.Module):
        return model
    message = f"the {what} must be a torch.nn.Module, not {type(model).__name__}"
    raise ModelTypeError(message)
