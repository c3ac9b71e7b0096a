"""The tools that are compared: each makes a float network ready for quantization-aware training.

Ours and those of PyTorch run in this process. Run as a script, this file serves one tool of another
maker over standard input and output, in the virtual environment where that tool is installed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from harness import peak_bytes, saved_bytes, start, stopwatch
from networks import SmallResNet, TrainingStep
from torch import Tensor, nn

Make = Callable[[nn.Module, Tensor], nn.Module]


def plain(model: nn.Module, images: Tensor) -> nn.Module:
    """Leave the network float."""
    return model


def ours(model: nn.Module, images: Tensor) -> nn.Module:
    """Prepare with the defaults: ULQ on every input, ARQ per channel; calibrate on one batch."""
    import amct_fx

    prepared = amct_fx.prepare_qat_amct(model, "retrain_weight_quant_config { arq_retrain {} }")
    with torch.no_grad():
        prepared.train()(images)
    return prepared


def torch_ao(model: nn.Module, images: Tensor) -> nn.Module:
    """Prepare with the default QAT mapping of torch.ao."""
    from torch.ao.quantization import get_default_qat_qconfig_mapping
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    mapping = get_default_qat_qconfig_mapping("x86")
    return prepare_qat_fx(model.train(), mapping, (images,))


def torch_ao_learnable(model: nn.Module, images: Tensor) -> nn.Module:
    """Prepare with torch.ao's learnable fake-quantizer for inputs and weights."""
    from torch.ao.quantization import MovingAverageMinMaxObserver, QConfig, QConfigMapping
    from torch.ao.quantization._learnable_fake_quantize import _LearnableFakeQuantize
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    activation = _LearnableFakeQuantize.with_args(
        observer=MovingAverageMinMaxObserver,
        quant_min=0,
        quant_max=255,
        dtype=torch.quint8,
        qscheme=torch.per_tensor_affine,
    )
    weight = _LearnableFakeQuantize.with_args(
        observer=MovingAverageMinMaxObserver,
        quant_min=-128,
        quant_max=127,
        dtype=torch.qint8,
        qscheme=torch.per_tensor_symmetric,
    )
    mapping = QConfigMapping().set_global(QConfig(activation, weight))
    prepared = prepare_qat_fx(model.train(), mapping, (images,))
    for _ in range(3):
        prepared(images)
    for module in prepared.modules():
        if isinstance(module, _LearnableFakeQuantize):
            module.enable_param_learning()
    return prepared


def brevitas(model: nn.Module, images: Tensor) -> nn.Module:
    """Swap layers for those of Brevitas, with learned activation scales."""
    import brevitas.nn as qnn
    from brevitas.quant import Int8ActPerTensorFloat, Int8WeightPerChannelFloat

    settings = {
        "input_quant": Int8ActPerTensorFloat,
        "weight_quant": Int8WeightPerChannelFloat,
    }
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Conv2d):
                new = qnn.QuantConv2d(
                    child.in_channels,
                    child.out_channels,
                    child.kernel_size,
                    stride=child.stride,
                    padding=child.padding,
                    bias=child.bias is not None,
                    **settings,
                )
            elif isinstance(child, nn.Linear):
                new = qnn.QuantLinear(child.in_features, child.out_features, True, **settings)
            else:
                continue
            setattr(parent, name, new)
    model.train()
    for _ in range(310):  # it collects statistics over 300 steps, then learns
        model(images[:1])
    return model


def _declare_torchvision_operators() -> None:
    """Let the torchvision that AIMET imports start beside another build of PyTorch.

    Its wheels register kernels for two compiled operators, which exist only in its own build.
    """
    for name in ("nms", "qnms"):
        schema = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
        torch.library.define(f"torchvision::{name}", schema)


def aimet(model: nn.Module, images: Tensor) -> nn.Module:
    """Wrap the network in AIMET's simulation, ranges calibrated and learned."""
    _declare_torchvision_operators()
    from aimet_torch.quantsim import QuantizationSimModel

    simulation = QuantizationSimModel(model.eval(), dummy_input=images)
    simulation.compute_encodings(lambda m, _: m(images), None)
    prepared: nn.Module = simulation.model
    return prepared.train()


def nncf(model: nn.Module, images: Tensor) -> nn.Module:
    """Quantize with NNCF, which leaves its quantizers trainable."""
    os.environ.setdefault("NNCF_EXTENSION_LOAD_TIMEOUT", "0")  # it compiles kernels at first
    import nncf as tool

    prepared: nn.Module = tool.quantize(model.eval(), tool.Dataset([images]))
    return prepared.train()


def modelopt(model: nn.Module, images: Tensor) -> nn.Module:
    """Quantize with ModelOpt; its ranges stay as calibrated."""
    import modelopt.torch.quantization as mtq

    prepared: nn.Module = mtq.quantize(model, mtq.INT8_DEFAULT_CFG, lambda m: m(images))
    return prepared.train()


def torchao_pt2e(model: nn.Module, images: Tensor) -> nn.Module:
    """Prepare with the export flow of torchao."""
    from torchao.quantization.pt2e import move_exported_model_to_train
    from torchao.quantization.pt2e.quantize_pt2e import prepare_qat_pt2e
    from torchao.quantization.pt2e.quantizer.x86_inductor_quantizer import (
        X86InductorQuantizer,
        get_default_x86_inductor_quantization_config,
    )

    exported = torch.export.export(model.train(), (images,)).module()
    quantizer = X86InductorQuantizer()
    quantizer.set_global(get_default_x86_inductor_quantization_config(is_qat=True))
    prepared: nn.Module = prepare_qat_pt2e(exported, quantizer)
    move_exported_model_to_train(prepared)
    prepared.train = lambda mode=True: prepared  # exported programs refuse it
    return prepared


PEERS: dict[str, tuple[Make, list[str]]] = {
    "brevitas": (brevitas, ["setuptools<81", "brevitas==0.13.4"]),
    "aimet-torch": (aimet, ["aimet-torch==2.42.0"]),
    "nncf": (nncf, ["nncf==3.4.0", "ninja"]),
    "nvidia-modelopt": (modelopt, ["nvidia-modelopt==0.47.0", "huggingface_hub"]),
    "torchao": (torchao_pt2e, ["torchao==0.18.0"]),
}
"""Tools of other makers: how to prepare with them, and what to install."""


def build(make: Make, batch: int, size: int, device: torch.device) -> TrainingStep:
    """Build the network of the benchmark, prepare it and return its training step."""
    torch.manual_seed(0)
    images = torch.randn(batch, 3, size, size, device=device)
    return TrainingStep(make(SmallResNet().to(device), images), images)


def serve(name: str, batch: int, size: int, device: torch.device, threads: int) -> None:
    """Answer requests, one a line: ``run``, ``stopwatch COUNT`` or ``memory``."""
    start(argparse.Namespace(threads=threads, device=str(device)))
    warnings.simplefilter("ignore")
    answers, sys.stdout = sys.stdout, sys.stderr  # tools print
    step = build(PEERS[name][0], batch, size, device)
    step()

    def answer(value: Any) -> None:
        print(json.dumps(value), file=answers, flush=True)

    answer("ready")
    for line in sys.stdin:
        request, *rest = line.split()
        if request == "run":
            step()
            answer(None)
        elif request == "stopwatch":
            answer(stopwatch(step, device, int(rest[0])))
        elif request == "memory":
            answer([saved_bytes(step.loss, step.model), peak_bytes(step, device)])


if __name__ == "__main__":
    serve(
        sys.argv[1],
        int(sys.argv[2]),
        int(sys.argv[3]),
        torch.device(sys.argv[4]),
        int(sys.argv[5]),
    )
