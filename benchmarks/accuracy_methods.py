"""The ways to quantize that benchmarks/accuracy.py compares.

Each takes a trained float model and a batch, and returns a model to train on. A method may have
more to do before the training and the test; see :class:`Method`.
"""

from __future__ import annotations

import copy
import functools
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao import quantization as tq

import amct_fx


def _nothing(model: nn.Module) -> None:
    pass


@dataclass(frozen=True)
class Method:
    """One way to quantize.

    Args:
        name: Column of the table.
        prepare: Makes the model to train, from the float model, a batch and the weight bits.
        before_test: Called before the model is tested.
        groups: Makes the parameter groups of the optimizer, for a learning rate.
        trains: Whether the model is trained at all.
    """

    name: str
    prepare: Callable[[nn.Module, Tensor, int], nn.Module]
    before_test: Callable[[nn.Module], None] = _nothing
    groups: Callable[[nn.Module, float], Any] = lambda model, lr: model.parameters()
    trains: bool = True


def weight_bits(layer: nn.Module, bits: int) -> int:
    """Return the width of the weights of a layer: not every layer can have INT4.

    Ascend packs two INT4 codes along the input channels, so amct_fx keeps convolutions with groups
    or an odd number of inputs at INT8. To compare like with like, the others do it, too.
    """
    inputs = getattr(layer, "in_channels", getattr(layer, "in_features", 0))
    return 8 if inputs % 2 or getattr(layer, "groups", 1) > 1 else bits


def amct(model: nn.Module, batch: Tensor, bits: int, algorithm: str = "arq_retrain") -> nn.Module:
    """Learned input ranges, INT8; one weight scale per channel that follows the weights."""
    weights = f"{algorithm} {{ dst_type: INT{bits} }}"
    config = f"batch_num: 1 retrain_weight_quant_config {{ {weights} }}"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", amct_fx.AmctWarning)  # odd channels stay INT8
        # A scale for each output of a Linear is what the other tools have.
        prepared = amct_fx.prepare_qat_amct(model, config, linear_channel_wise="all")
    with torch.no_grad():
        prepared.eval()(batch)
    return prepared


def _weight_limits(bits: int) -> dict[str, Any]:
    limits = {"quant_min": -(2 ** (bits - 1)), "quant_max": 2 ** (bits - 1) - 1}
    return {**limits, "dtype": torch.qint8, "qscheme": torch.per_channel_symmetric, "ch_axis": 0}


def torch_ao(model: nn.Module, batch: Tensor, bits: int) -> nn.Module:
    """The default: moving averages of minima and maxima, also on outputs."""
    return _prepare_fx(model, batch, bits, tq.default_fused_act_fake_quant)


def torch_ao_learnable(model: nn.Module, batch: Tensor, bits: int) -> nn.Module:
    """Scales and zero points of inputs and outputs are learned (LSQ)."""
    from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize

    activation = _LearnableFakeQuantize.with_args(
        observer=tq.MovingAverageMinMaxObserver, quant_min=0, quant_max=255, use_grad_scaling=True
    )
    prepared = _prepare_fx(model, batch, bits, activation)
    learnable = [m for m in prepared.modules() if isinstance(m, _LearnableFakeQuantize)]
    for quantizer in learnable:
        quantizer.enable_static_estimate()
    with torch.no_grad():
        prepared.eval()(batch)
    for quantizer in learnable:
        quantizer.enable_param_learning()
    return prepared


def _prepare_fx(model: nn.Module, batch: Tensor, bits: int, activation: Any) -> nn.Module:
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    qconfigs = {
        width: tq.QConfig(
            activation=activation,
            weight=tq.FusedMovingAvgObsFakeQuantize.with_args(
                observer=tq.MovingAveragePerChannelMinMaxObserver, **_weight_limits(width)
            ),
        )
        for width in (8, bits)
    }
    mapping = tq.QConfigMapping().set_global(qconfigs[bits])
    mapping.set_object_type(nn.Embedding, None).set_object_type(nn.LayerNorm, None)
    for name, layer in model.named_modules():
        if weight_bits(layer, bits) != bits:
            mapping.set_module_name(name, qconfigs[8])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the deprecation
        return prepare_qat_fx(copy.deepcopy(model).train(), mapping, (batch,))


def brevitas(model: nn.Module, batch: Tensor, bits: int) -> nn.Module:
    """Learned input scales that start from percentiles, weights that follow the maximum."""
    from brevitas import nn as qnn
    from brevitas.graph.quantize import layerwise_quantize
    from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat

    settings = {
        "input_quant": Int8ActPerTensorFloat,
        "weight_quant": Int8WeightPerChannelFloat,
        "weight_bit_width": lambda module: weight_bits(module, bits),
        "return_quant_tensor": False,
    }
    layers = {nn.Conv1d: qnn.QuantConv1d, nn.Conv2d: qnn.QuantConv2d, nn.Linear: qnn.QuantLinear}
    compute = {kind: (quant, settings) for kind, quant in layers.items()}
    return layerwise_quantize(copy.deepcopy(model), compute_layer_map=compute)


#: Adam moves any parameter by about the learning rate, and learned scales of inputs are about a
#: hundredth of what they scale (a 255th of the range). So their learning rate is that much smaller.
SCALE_LR = 0.01


def amct_groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Return the groups of amct_fx; scales of weights are learned by ``ulq_retrain`` only."""
    return amct_fx.param_groups(model, lr=lr, scale_lr="auto")


def learnable_groups(model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Return the parameters of torch.ao with learned scales, by the same rule."""
    scales, others = [], []
    for name, parameter in model.named_parameters():
        (scales if name.endswith(".scale") else others).append(parameter)
    return [{"params": others}, {"params": scales, "lr": SCALE_LR * lr}]


def stop_observers(model: nn.Module) -> None:
    """Keep the test data from moving ranges."""
    model.apply(tq.disable_observer)


METHODS = (
    Method("calibration only", amct, trains=False),
    Method("amct_fx", amct, groups=amct_groups),
    Method(
        "amct_fx, ulq_retrain",
        functools.partial(amct, algorithm="ulq_retrain"),
        groups=amct_groups,
    ),
    Method("torch.ao", torch_ao, before_test=stop_observers),
    Method("torch.ao learnable", torch_ao_learnable, stop_observers, learnable_groups),
    Method("brevitas", brevitas),
)
