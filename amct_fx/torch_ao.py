"""Our quantizers in ``torch.ao.quantization.prepare_qat_fx``, for those who mix.

:func:`amct_fx.prepare_qat_amct` does more and is the product; this is the same configuration for
torch's own FX mode. Source: spec/deploy.md section 9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantizeBase
from torch.ao.quantization.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    ObservationType,
)

from amct_fx.errors import LayerTypeError
from amct_fx.nn import qat
from amct_fx.nn.become import float_class_of, shared_as
from amct_fx.observers import ARQFakeQuantize

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = ["get_backend_config", "use_trained_ranges"]


def get_backend_config() -> BackendConfig:
    """Return what ``prepare_qat_fx`` must know to use a mapping of ``get_qconfig_mapping``.

    Inputs and weights of Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d and Linear are
    quantized, outputs stay float, convolutions and batch norms stay apart: torch's fused module
    divides by the weight of the batch norm. The limits of torch's FX mode remain: the whole model
    must be traceable, LSTM and GRU stay float, an automatic ``fixed_min`` counts as false, and
    readers of one tensor with different settings share a quantizer.

    Call :func:`amct_fx.torch_ao.use_trained_ranges` before torch's ``convert`` functions.

    Example:
        >>> import warnings
        >>> from torch.ao.quantization.quantize_fx import prepare_qat_fx
        >>> from amct_fx import get_qconfig_mapping
        >>> model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.rand(1, 3, 8, 8)
        >>> mapping = get_qconfig_mapping(None, model)
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("ignore")  # torch.ao is deprecated
        ...     prepared = prepare_qat_fx(
        ...         model.train(), mapping, (x,), backend_config=get_backend_config()
        ...     )
        >>> type(prepared.activation_post_process_0).__name__, prepared(x).shape
        ('ULQFakeQuantize', torch.Size([1, 8, 6, 6]))
    """
    import torch.ao.nn.quantized.reference as reference

    patterns = []
    for cls in _CLASSES:
        for pattern in (cls.float_class, cls):
            config = BackendPatternConfig(pattern)
            config.set_observation_type(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT)
            config.set_dtype_configs(_dtype_configs())
            config.set_root_module(cls.float_class)
            config.set_qat_module(cls)
            config.set_reference_quantized_module(getattr(reference, cls.__name__))
            patterns.append(config)
    return BackendConfig("amct_fx").set_backend_pattern_configs(patterns)


def use_trained_ranges(model: nn.Module) -> nn.Module:
    """Let torch's ``convert`` functions take the ranges of the moment as constants.

    Weight scales are computed anew, since the optimizer has moved the weights. Our activation
    quantizers call themselves dynamic, because only then does ``prepare_qat_fx`` leave outputs
    alone; ``convert`` would take them at their word and compute ranges at run time.

    Args:
        model: What ``prepare_qat_fx`` returned, trained; changed in place, as torch's ``convert``
            changes it too: give a copy to keep it.

    Returns:
        ``model``.
    """
    for module in model.modules():
        if isinstance(module, FakeQuantizeBase):
            module.__dict__["is_dynamic"] = False
        if isinstance(module, _StockLayer) and isinstance(
            module.weight_fake_quant, ARQFakeQuantize
        ):
            with torch.no_grad():
                module.weight_fake_quant.scale.copy_(module.weight_scale())
    return model


def _dtype_configs() -> list[DTypeConfig]:
    """Return the pairs of input and weight types; INT4 weights call themselves qint8, too."""
    return [
        DTypeConfig(
            input_dtype=dtype,
            output_dtype=torch.float,
            weight_dtype=torch.qint8,
            bias_dtype=torch.float,
            is_dynamic=True,  # with False nothing would be observed, or the outputs, too
        )
        for dtype in (torch.qint8, torch.int16)
    ]


class _StockLayer(qat.QATLayer):
    """A layer whose input was quantized by a node in front; only its weight is left to do."""

    @classmethod
    def from_float(  # type: ignore[override]
        cls, module: nn.Module, use_precomputed_fake_quant: bool = False
    ) -> Self:
        """Return a layer that shares the parameters of ``module``, which has a ``qconfig``."""
        if float_class_of(module) is not cls.float_class:
            message = f"{cls.__name__} stands for {cls.float_class}, not for {type(module)}"
            raise LayerTypeError(message)
        layer = shared_as(module, cls)
        layer.attach(module.qconfig)  # type: ignore[arg-type]
        return layer

    def to_float(self) -> nn.Module:
        """Return the float layer; torch's ``convert`` adds the weight's scale to it."""
        layer = shared_as(self, self.float_class)
        del layer._modules["weight_fake_quant"]
        return layer

    def quantized_input(self, input: Tensor, quantized: bool) -> Tensor:
        """Return the input, which has passed its quantizer."""
        return input

    def source_of(self, input: Tensor) -> None:
        """Return ``None``: the quantizer of the input is not known here."""


class Conv1d(_StockLayer, qat.Conv1d):
    """``torch.nn.Conv1d`` with a fake-quantized weight, for torch's FX mode."""


class Conv2d(_StockLayer, qat.Conv2d):
    """``torch.nn.Conv2d`` with a fake-quantized weight, for torch's FX mode."""


class Conv3d(_StockLayer, qat.Conv3d):
    """``torch.nn.Conv3d`` with a fake-quantized weight, for torch's FX mode."""


class ConvTranspose1d(_StockLayer, qat.ConvTranspose1d):
    """``torch.nn.ConvTranspose1d`` with a fake-quantized weight, for torch's FX mode."""


class ConvTranspose2d(_StockLayer, qat.ConvTranspose2d):
    """``torch.nn.ConvTranspose2d`` with a fake-quantized weight, for torch's FX mode."""


class Linear(_StockLayer, qat.Linear):
    """``torch.nn.Linear`` with a fake-quantized weight, for torch's FX mode."""


_CLASSES: tuple[Any, ...] = (Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, Linear)
