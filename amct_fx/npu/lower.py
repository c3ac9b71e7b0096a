"""Lowering a converted model to the integer operators of torch-npu.

Layers that an operator can run take codes instead of dequantized values; all others stay as
``convert_amct`` made them, with the reason in the report. Source: spec/deploy.md section 8.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import fx, nn

from amct_fx.errors import ArgumentError
from amct_fx.graph import (
    GraphForward,
    fx_graph_of,
    install_graph,
    layer_calls,
    layer_input,
    module_of,
    regions,
)
from amct_fx.nn.become import become
from amct_fx.nn.quantized import Dequantize, Quantize, QuantizedLayer
from amct_fx.npu.layers import NpuConv2d, NpuLinear, NpuQuantize
from amct_fx.npu.probe import Probe, probe
from amct_fx.npu.rules import NpuOptions, why_not
from amct_fx.report.preparation import preparation_of, record_preparation

__all__ = ["Lowering", "LoweringRow", "lowering_of", "lowering_to_npu"]

logger = logging.getLogger("amct_fx")

_ATTRIBUTE = "_amct_lowering"
_CLASSES: dict[type[nn.Module], Any] = {nn.Linear: NpuLinear, nn.Conv2d: NpuConv2d}


@dataclass(frozen=True)
class LoweringRow:
    """What became of one quantized layer.

    Attributes:
        name: Name of the layer.
        type: Class of the float layer.
        operator: The operator of torch-npu that runs it, ``""`` for none.
        reason: Why no operator does, or ``""``.
    """

    name: str
    type: str
    operator: str
    reason: str


@dataclass(frozen=True)
class Lowering:
    """What became of every quantized layer of a model that was lowered; ``print`` it.

    Attributes:
        probe: What torch-npu can do on the machine.
        options: How the model was lowered.
        rows: All quantized layers, in model order.
    """

    probe: Probe
    options: NpuOptions
    rows: tuple[LoweringRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return {"torch_npu": str(self.probe), "layers": [asdict(row) for row in self.rows]}

    def __str__(self) -> str:
        """Return an aligned table and one line of totals."""
        table = [("name", "type", "operator", "reason")]
        table += [(row.name, row.type, row.operator, row.reason) for row in self.rows]
        widths = [max(len(row[column]) for row in table) for column in range(4)]
        lines = [
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in table
        ]
        integer = sum(bool(row.operator) for row in self.rows)
        return "\n".join([*lines, f"{integer} of {len(self.rows)} layers on integer operators"])


def lowering_of(model: nn.Module) -> Lowering | None:
    """Return what ``convert_amct(model, backend="npu")`` decided, ``None`` for other models.

    Args:
        model: Any module.
    """
    found = getattr(model, _ATTRIBUTE, None)
    return found if isinstance(found, Lowering) else None


def lowering_to_npu(backend: object = "npu") -> Callable[[nn.Module], nn.Module]:
    """Return what lets the integer operators of torch-npu run what they can of a converted model.

    Args:
        backend: ``"npu"``, or :class:`NpuOptions`.

    Returns:
        A function that changes a converted model and returns it.

    Raises:
        ArgumentError: There is no such backend.
        BackendError: torch-npu is not installed or cannot be imported; says why.
    """
    options = _options(backend)
    found = probe()
    found.require_operators()
    return functools.partial(_lowered, options=options, found=found)


def _lowered(converted: nn.Module, *, options: NpuOptions, found: Probe) -> nn.Module:
    names = {layer: name for name, layer in reversed(list(converted.named_modules()))}
    reasons = {
        layer: why_not(layer, options, found)
        for layer in converted.modules()
        if isinstance(layer, QuantizedLayer)
    }
    integer = {layer for layer, reason in reasons.items() if reason is None}
    for _, region in list(regions(converted)):
        _read_codes(region, integer)
    rows = tuple(_row(names[layer], layer, reason) for layer, reason in reasons.items())
    for layer in integer:
        _lower(layer, options)
    _record(converted, Lowering(found, options, rows))
    return converted


def _row(name: str, layer: QuantizedLayer, reason: str | None) -> LoweringRow:
    kind = layer.float_class
    operator = _CLASSES[kind].operator if reason is None else ""
    return LoweringRow(name, kind.__name__, operator, reason or "")


def _options(backend: object) -> NpuOptions:
    if isinstance(backend, NpuOptions):
        return backend
    if backend != "npu":
        message = f"backend must be None, 'npu' or amct_fx.npu.NpuOptions(...), not {backend!r}"
        raise ArgumentError(message)
    return NpuOptions()


def _lower(layer: QuantizedLayer, options: NpuOptions) -> None:
    """Change the class of a layer and of the quantizer of its input."""
    quantize = layer.input_owner.input_quantize
    if not isinstance(quantize, NpuQuantize):
        become(quantize, NpuQuantize)
    cls = _CLASSES[layer.float_class]
    output_dtype = options.output_dtype_of(layer)
    # Convolutions take packed scales only; so does a matmul in a graph that returns float16.
    packed = cls is NpuConv2d or (options.graph_mode and output_dtype is torch.float16)
    cls.adopt_layer(layer, output_dtype=output_dtype, packed=packed)


def _read_codes(region: GraphForward, lowered: set[QuantizedLayer]) -> None:
    """Let the calls of lowered layers read codes, and drop dequantizers that nothing reads."""
    graph = fx_graph_of(region)
    for layer, nodes in layer_calls(graph, region).items():
        if layer in lowered:
            for node in nodes:
                _skip_dequantize(node, region)
    for node in reversed(list(graph.nodes)):
        if not node.users and isinstance(module_of(node, region), Dequantize):
            graph.erase_node(node)
    install_graph(region, graph)


def _skip_dequantize(call: fx.Node, region: nn.Module) -> None:
    """Read the codes in front of the dequantizer, if the quantizer stands in the graph."""
    values = layer_input(call)
    if values is None or not isinstance(module_of(values, region), Dequantize):
        return  # the layer quantizes its own input
    codes = layer_input(values)
    assert codes is not None
    assert isinstance(module_of(codes, region), Quantize)
    call.replace_input_with(values, codes)


def _fallbacks(lowering: Lowering) -> Iterator[LoweringRow]:
    return (row for row in lowering.rows if row.reason)


def _record(model: nn.Module, lowering: Lowering) -> None:
    """Keep the decisions with the model, and let its other reports know the fallbacks."""
    setattr(model, _ATTRIBUTE, lowering)
    preparation = preparation_of(model)
    if preparation is not None:
        reasons = {row.name: f"npu: {row.reason}" for row in _fallbacks(lowering)}
        layers = tuple(
            replace(layer, reason=layer.reason or reasons.get(layer.name))
            for layer in preparation.layers
        )
        record_preparation(model, replace(preparation, layers=layers))
    logger.info("%s", str(lowering).rpartition("\n")[2])
