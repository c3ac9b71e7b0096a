"""Where the converted layers of a model stand in an exported QuantizeLinear/DequantizeLinear graph.

A layer is known by its integer weights: the constant behind the DequantizeLinear of its weight has
the name of the layer's buffer, and the exporter of ``dynamo=True`` also notes the module.
Source: spec/deploy.md sections 1 and 4.
"""

from __future__ import annotations

import ast
from collections.abc import Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amct_fx.errors import ExportError
from amct_fx.nn.quantized import QuantizedLayer

if TYPE_CHECKING:
    from onnx import NodeProto
    from torch import nn

    from amct_fx.onnx.graph import Graph

__all__ = ["MOVES_VALUES", "OPERATORS", "LayerCall", "call_name", "find_layers", "name_activations"]

OPERATORS = ("Conv", "ConvTranspose", "Gemm", "MatMul", "LSTM", "GRU")
_CHANGES_NO_VALUE = ("Transpose", "Reshape", "Cast", "Identity", "Unsqueeze", "Squeeze", "Flatten")
_ON_WEIGHTS = (*_CHANGES_NO_VALUE, "Slice", "Concat", "Expand")
MOVES_VALUES = (*_CHANGES_NO_VALUE, "Pad", "Slice")
"""Operators whose results hold the values of their input, and zeros."""

_NAMED = ("Relu", "Clip", "BatchNormalization")
_SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass
class LayerCall:
    """One call of a converted layer.

    Attributes:
        name: Module path of the layer; a second call has ``_1`` behind it, and so on.
        path_name: Module path of the layer.
        layer: The converted layer.
        node: Its operator.
        bias_add: The Add of the bias behind a MatMul.
        quantize: QuantizeLinear of the input.
        path: Nodes between DequantizeLinear and the operator that only move values.
    """

    name: str
    path_name: str
    layer: QuantizedLayer
    node: NodeProto
    quantize: NodeProto
    bias_add: NodeProto | None = None
    path: list[NodeProto] = field(default_factory=list)

    @property
    def last(self) -> NodeProto:
        """The node that makes the result of the layer."""
        return self.node if self.bias_add is None else self.bias_add

    @property
    def source(self) -> str:
        """The float tensor that is quantized."""
        return self.quantize.input[0]


def find_layers(graph: Graph, model: nn.Module) -> list[LayerCall]:
    """Find every call of the converted layers of a model, in execution order.

    Args:
        graph: What an exporter made of ``model``.
        model: The converted model.

    Raises:
        ExportError: A layer is called but its quantized input cannot be found.
    """
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}
    first = {layer: name for name, layer in layers.items()}
    aliases = {
        alias: first[module]
        for alias, module in model.named_modules(remove_duplicate=False)
        if isinstance(module, QuantizedLayer)
    }
    buffers = dict(_weight_names(aliases, layers))
    found: list[LayerCall] = []
    counts: dict[str, int] = {}
    only_weight: dict[str, str] = {}  # as ``x @ layer.weight.T``, which is no call of the layer
    for node in graph.nodes:
        if node.op_type not in OPERATORS or len(node.input) < 2:
            continue
        name = _layer_of(graph, node, aliases, buffers)
        if name is None:
            continue
        quantizer = _quantizer(graph, node)
        if quantizer is None:
            only_weight.setdefault(name, node.op_type)
            continue
        quantize, path = quantizer
        count = counts[name] = counts.get(name, -1) + 1
        label = call_name(name, count, aliases)
        call = LayerCall(label, name, layers[name], node, quantize, path=path)
        call.bias_add = _bias_add(graph, call)
        found.append(call)
    for name, operator in only_weight.items():
        if name not in counts:
            message = f"{name}: the exported graph does not quantize the input of this {operator}"
            raise ExportError(message)
    return found


def call_name(name: str, count: int, taken: Container[str]) -> str:
    """Return the name of a call of a layer, which no other layer has.

    Args:
        name: Module path of the layer.
        count: 0 for its first call.
        taken: All module paths.

    Example:
        >>> call_name("conv", 0, {"conv"}), call_name("conv", 1, {"conv"})
        ('conv', 'conv_1')
        >>> call_name("conv", 1, {"conv", "conv_1"})
        'conv__1'
    """
    if not count:
        return name
    line = "_"
    while f"{name}{line}{count}" in taken:
        line += "_"
    return f"{name}{line}{count}"


def name_activations(graph: Graph, model: nn.Module) -> None:
    """Name activations and batch norms by their module paths, where the exporter noted these."""
    paths = {name for name, module in model.named_modules() if not list(module.children())}
    for node in graph.nodes:
        path = node.name.removeprefix("/").rpartition("/")[0]
        if node.op_type in _NAMED and path in paths and node.name.startswith("/"):
            node.name = path


def _weight_names(
    aliases: Mapping[str, str], layers: Mapping[str, QuantizedLayer]
) -> Iterator[tuple[str, str]]:
    """Yield every name of a weight buffer, and the layer that it belongs to."""
    for alias, name in aliases.items():
        for part in layers[name].parts:
            yield f"{alias}.weight_{part}codes" if alias else f"weight_{part}codes", name


def _layer_of(
    graph: Graph, node: NodeProto, aliases: Mapping[str, str], buffers: Mapping[str, str]
) -> str | None:
    """Return the module path of the layer whose operator ``node`` is."""
    named = [buffers[t] for t in _dequantized_constants(graph, node.input[1]) if t in buffers]
    if not named:
        return None
    scoped = [aliases[scope] for scope in _scopes(node) if scope in aliases]
    return scoped[-1] if scoped else named[0]


def _scopes(node: NodeProto) -> list[str]:
    """Return the module paths around a node, outermost first.

    The last scope is the node itself: ``linear`` for the call of any Linear.
    """
    for item in node.metadata_props:
        if item.key == _SCOPES:
            return [str(scope) for scope in ast.literal_eval(item.value)[:-1]]
    return []


def _dequantized_constants(graph: Graph, tensor: str) -> Iterator[str]:
    """Yield the integer tensors that a weight is made of, through nodes that only move values."""
    node = graph.producer(tensor)
    if node is None:
        return
    if node.op_type == "DequantizeLinear":
        yield node.input[0]
    elif node.op_type in _ON_WEIGHTS:
        sources = node.input if node.op_type == "Concat" else node.input[:1]
        for source in sources:
            yield from _dequantized_constants(graph, source)


def _quantizer(graph: Graph, node: NodeProto) -> tuple[NodeProto, list[NodeProto]] | None:
    """Return the quantizer of the input of ``node``, and the nodes between, in execution order."""
    path: list[NodeProto] = []
    maker = graph.producer(node.input[0])
    while maker is not None and maker.op_type in MOVES_VALUES:
        path.insert(0, maker)
        maker = graph.producer(maker.input[0])
    quantize = graph.producer(maker.input[0]) if maker is not None else None
    if maker is None or maker.op_type != "DequantizeLinear" or quantize is None:
        return None
    return quantize, path


def _bias_add(graph: Graph, call: LayerCall) -> NodeProto | None:
    """Return the Add of the bias behind the MatMul of a Linear with more than two dimensions."""
    bias = getattr(call.layer, "bias_codes", None)
    if call.node.op_type not in ("MatMul", "Gemm") or bias is None or len(call.node.input) > 2:
        return None
    readers = graph.readers(call.node.output[0])
    adds = [node for node in readers if node.op_type == "Add"]
    if len(readers) != 1 or not adds:
        message = f"{call.name}: the exported graph does not add the bias behind the MatMul"
        raise ExportError(message)
    return adds[0]
