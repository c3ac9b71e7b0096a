"""Fake-quantizers that a graph calls become quantize and dequantize modules with fixed numbers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx, nn
from torch.ao.quantization import FakeQuantizeBase

from amct_fx.nn.quantized import Dequantize, Quantize, QuantizedLayer

__all__ = ["frozen_quantizers", "replace_fake_quantizers"]

Calls = Mapping[nn.Module, list[fx.Node]]


def frozen_quantizers(calls: Calls) -> dict[nn.Module | None, Quantize]:
    """Return today's scale and zero point of every fake-quantizer that a graph calls.

    Args:
        calls: All calls of modules in the graph; see :func:`amct_fx.graph.layer_calls`.

    Raises:
        ConvertError: A range is not finite; names the layer.
    """
    return {
        module: Quantize.from_fake_quant(module, _owner(nodes[0]))
        for module, nodes in calls.items()
        if isinstance(module, FakeQuantizeBase)
    }


def replace_fake_quantizers(
    calls: Calls, quantizers: Mapping[nn.Module | None, Quantize], region: nn.Module
) -> None:
    """Put a quantize and a dequantize where each fake-quantizer was, in graph and owner.

    Args:
        calls: All calls of modules in the graph; their graph is changed.
        quantizers: What :func:`frozen_quantizers` returned.
        region: The module that the graph belongs to; its layers are converted.
    """
    layers = (module for module in region.modules() if isinstance(module, QuantizedLayer))
    dtype = next((layer.dtype for layer in layers), torch.float32)
    for module, nodes in calls.items():
        if module in quantizers:
            owner = region.get_submodule(str(nodes[0].target).rpartition(".")[0])
            own = owner.dtype if isinstance(owner, QuantizedLayer) else dtype
            _replace(nodes, quantizers[module], owner, own)


def _replace(
    nodes: list[fx.Node], quantize: Quantize, owner: nn.Module, dtype: torch.dtype
) -> None:
    path = str(nodes[0].target).removesuffix("fake_quant")  # ends in input_, output_, add_output_
    key = path.rpartition(".")[2]
    delattr(owner, f"{key}fake_quant")
    owner.add_module(f"{key}quantize", quantize)
    owner.add_module(f"{key}dequantize", Dequantize(quantize, dtype))
    for node in nodes:
        with node.graph.inserting_before(node):
            codes = node.graph.call_module(f"{path}quantize", node.args)
            values = node.graph.call_module(f"{path}dequantize", (codes,))
        node.replace_all_uses_with(values)
        node.graph.erase_node(node)


def _owner(quantizer: fx.Node) -> str:
    """Return the name of the layer, or of the operation, that a quantizer belongs to."""
    parent, _, key = str(quantizer.target).rpartition(".")
    return parent or key.removesuffix("_fake_quant")
