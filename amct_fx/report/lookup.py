"""Which quantizer each layer of a prepared or converted model reads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch.ao.quantization import FakeQuantizeBase
from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel

from amct_fx.graph import fx_graph_of, layer_input, module_of, regions
from amct_fx.nn.qat import QATLayer
from amct_fx.nn.quantized import Dequantize, Quantize, QuantizedLayer

if TYPE_CHECKING:
    from torch import fx, nn

__all__ = ["input_quantizers", "joined", "unwrapped"]


def input_quantizers(model: nn.Module) -> dict[str, tuple[str, nn.Module]]:
    """Map each layer to the owner and the module of the quantizer of its input.

    Example:
        >>> from torch import nn
        >>> from amct_fx import prepare_qat_amct
        >>> found = input_quantizers(prepare_qat_amct(nn.Sequential(nn.Linear(4, 2))))
        >>> found["0"][0], type(found["0"][1]).__name__
        ('0', 'ULQFakeQuantize')
    """
    found: dict[str, tuple[str, nn.Module]] = {}
    names = {module: name for name, module in model.named_modules()}
    for module, name in names.items():
        if isinstance(module, (QATLayer, QuantizedLayer)) and module.quantizes_input:
            found[name] = (names[module.input_owner], module.input_quantizer)
    for prefix, region in regions(model):
        for node in fx_graph_of(region).nodes:
            if not isinstance(module_of(node, region), (QATLayer, QuantizedLayer)):
                continue
            source = _quantizer_node(node, region)
            if source is not None:
                owner = str(source.target).rpartition(".")[0]
                quantizer = region.get_submodule(str(source.target))
                found[joined(prefix, str(node.target))] = (joined(prefix, owner), quantizer)
    return found


def _quantizer_node(node: fx.Node, region: nn.Module) -> fx.Node | None:
    source = layer_input(node)
    if source is not None and isinstance(module_of(source, region), Dequantize):
        source = layer_input(source)
    if source is None:
        return None
    quantizes = isinstance(module_of(source, region), (FakeQuantizeBase, Quantize))
    return source if quantizes else None


def unwrapped(model: nn.Module) -> nn.Module:
    """Return the model inside DistributedDataParallel, DataParallel and ``torch.compile``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> unwrapped(nn.DataParallel(torch.compile(nn.ReLU())))
        ReLU()
    """
    while True:
        if isinstance(model, (DataParallel, DistributedDataParallel)):
            model = model.module
        elif isinstance(inner := model.__dict__.get("_modules", {}).get("_orig_mod"), Module):
            model = inner
        else:
            return model


def joined(prefix: str, name: str) -> str:
    """Return the name in the model of what a part of it calls ``name``."""
    return f"{prefix}.{name}" if prefix else name
