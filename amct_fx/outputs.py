"""Quantizers on the results of convolutions, additions and poolings: integers from end to end.

AMCT quantizes inputs and weights only, so what flows between an addition and the next layer is
float, and an integer runtime that wants an integer result keeps such a convolution float. Here
every convolution of a traced part gets a quantized result, behind what the runtime fuses with it,
and so do additions, products, concatenations and poolings of quantized tensors. Where a layer
quantizes the tensor anyway, that quantizer serves all readers. This is not AMCT's arithmetic.
Source: spec/deploy.md sections 2.4 and 3.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.ao.quantization import FakeQuantizeBase

from amct_fx.graph import (
    install_graph,
    is_nonnegative,
    kind_of,
    layer_input,
    module_of,
    mutates,
    tensor_version,
)
from amct_fx.nn.geometry import constructor_arguments
from amct_fx.nn.qat import QATLayer
from amct_fx.nn.quantized import Dequantize, Quantize, QuantizedLayer
from amct_fx.observers import ULQFakeQuantize

if TYPE_CHECKING:
    from amct_fx.graph import Capture

__all__ = ["Outputs", "insert_output_quantizers", "quantize_outputs"]

Outputs = Literal["float", "quantize"]
"""Whether results stay float, as in AMCT, or are quantized."""

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FUSED: set[Any] = {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, F.batch_norm}
_FUSED |= {nn.ReLU, F.relu, F.relu_, torch.relu, torch.relu_, "relu", "relu_", nn.ReLU6, F.relu6}
_FUSED |= {nn.Hardtanh, F.hardtanh, torch.clamp, "clamp", "clamp_", "clip", "clip_"}
_MOVES: set[Any] = {nn.Identity, nn.Dropout, nn.Dropout2d, nn.Dropout3d, F.dropout, nn.Flatten}
_MOVES |= {nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, F.max_pool1d, F.max_pool2d, F.max_pool3d}
_MOVES |= {torch.flatten, torch.reshape, torch.transpose, torch.permute, torch.squeeze}
_MOVES |= {torch.unsqueeze, "flatten", "reshape", "view", "transpose", "permute", "squeeze"}
_MOVES |= {"unsqueeze", "contiguous", nn.ChannelShuffle, nn.PixelShuffle}
_BINARY: set[Any] = {torch.add, operator.add, operator.iadd, "add", "add_"}
_BINARY |= {torch.mul, operator.mul, operator.imul, "mul", "mul_"}
_INTEGER: set[Any] = {*_BINARY, torch.cat, torch.concat, nn.AvgPool1d, nn.AvgPool2d}
_INTEGER |= {nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d}
_INTEGER |= {F.avg_pool1d, F.avg_pool2d, F.adaptive_avg_pool1d, F.adaptive_avg_pool2d}
"""What runs on integers if its operands and its result are quantized."""


def insert_output_quantizers(
    graph: fx.Graph, root: nn.Module, activation: Callable[..., Any] | None = None
) -> list[str]:
    """Insert the quantizers of results into the graph of a prepared or converted part.

    Args:
        graph: Its layers read quantized tensors; changed.
        root: Owner of the modules; gets the new fake-quantizers, ``output_fake_quant`` of a layer,
            ``<node>_output_fake_quant`` of another operation.
        activation: Constructor of the fake-quantizers; ``None`` to take that of the inputs of the
            layers.

    Returns:
        Names of the new fake-quantizers.
    """
    return list(_Inserter(graph, root, activation).run())


def quantize_outputs(captured: Capture) -> None:
    """Quantize the results in all traced parts of a prepared model; islands stay as they are."""
    for region in captured.regions:
        insert_output_quantizers(region.graph, region.module)
        install_graph(region.module, region.graph, region.guard)


class _Inserter:
    def __init__(
        self, graph: fx.Graph, root: nn.Module, activation: Callable[..., Any] | None
    ) -> None:
        self._graph = graph
        self._root = root
        self._activation = activation
        # Asked now, as a value is not known to be >= 0 behind a quantizer.
        self._nonnegative = {
            node
            for node in graph.nodes
            if node.users and is_nonnegative(node, next(iter(node.users)), root, "nonnegative")
        }

    def run(self) -> Iterator[str]:
        """Go through the graph in execution order; each result may depend on earlier ones."""
        for node in list(self._graph.nodes):
            if self._is_layer(node):
                name = self._quantize(self._end(node), f"{node.target}.output_fake_quant", node)
            elif kind_of(node, self._root) in _INTEGER and self._reads_quantized(node):
                name = self._quantize(self._end(node), f"{node.name}_output_fake_quant", None)
            else:
                continue
            if name is not None:
                yield name

    def _is_layer(self, node: fx.Node) -> bool:
        """Say whether ``node`` is a quantized convolution that the graph quantizes the input of."""
        module = module_of(node, self._root)
        bits = _activation_bits(module)
        return isinstance(module, _CONVOLUTIONS) and bits == 8 and not _quantizes_itself(module)

    def _end(self, node: fx.Node) -> fx.Node:
        """Follow a tensor through what is fused with its producer or only moves its values."""
        while len(node.users) == 1:
            (user,) = node.users
            if kind_of(user, self._root) not in _FUSED | _MOVES or layer_input(user) is not node:
                break
            node = user
        return node

    def _reads_quantized(self, node: fx.Node) -> bool:
        tensors = [item for item in node.all_input_nodes if item.op != "get_attr"]
        needed = 2 if kind_of(node, self._root) in _BINARY and len(node.args) > 1 else 1
        return len(tensors) >= needed and all(self._is_quantized(item) for item in tensors)

    def _is_quantized(self, node: fx.Node) -> bool:
        while kind_of(node, self._root) in _MOVES:
            source = layer_input(node)
            if source is None:
                return False
            node = source
        return isinstance(module_of(node, self._root), (FakeQuantizeBase, Dequantize))

    def _quantize(self, tensor: fx.Node, target: str, layer: fx.Node | None) -> str | None:
        """Let all readers of ``tensor`` read it quantized; return the name of a new quantizer."""
        found = [user for user in tensor.users if self._is_quantizer(user)]
        others = [user for user in tensor.users if user not in found]
        if not others and len(found) == 1:
            return None
        if layer is None and all(user.op == "output" for user in others):
            return None
        if any(tensor_version(tensor, user, self._root) is not None for user in tensor.users):
            return None  # read before and after a change in place
        if len(found) == 1:
            self._redirect(tensor, others, self._moved_up(tensor, found[0]))
            return None
        if not _has_module(self._root, target):
            self._own(target, tensor, layer)
        with self._graph.inserting_after(tensor):
            value = self._graph.call_module(target, (tensor,))
        self._redirect(tensor, [*others, *found], value)
        return target

    def _is_quantizer(self, node: fx.Node) -> bool:
        return isinstance(module_of(node, self._root), (FakeQuantizeBase, Quantize))

    def _moved_up(self, tensor: fx.Node, quantizer: fx.Node) -> fx.Node:
        """Move a quantizer right behind what it reads, and return its value."""
        value = quantizer
        if isinstance(module_of(quantizer, self._root), Quantize):
            (value,) = quantizer.users
        tensor.append(quantizer)
        if value is not quantizer:
            quantizer.append(value)
        return value

    def _redirect(self, tensor: fx.Node, readers: list[fx.Node], value: fx.Node) -> None:
        for reader in readers:
            changes = mutates(reader, tensor, self._root)
            reader.replace_input_with(tensor, value)
            if changes and len(value.users) > 1:
                with self._graph.inserting_before(reader):
                    own = self._graph.call_method("clone", (value,))
                reader.replace_input_with(value, own)

    def _own(self, target: str, tensor: fx.Node, layer: fx.Node | None) -> None:
        """Make the fake-quantizer of a tensor."""
        constructor = self._activation or self._constructor(layer)
        made = _constructor_for_result(constructor, tensor in self._nonnegative)()
        parent, _, key = target.rpartition(".")
        if isinstance(made, ULQFakeQuantize):
            made.layer_name = parent or key
        device = next((p.device for p in self._root.parameters()), None) or next(
            (b.device for b in self._root.buffers()), torch.device("cpu")
        )
        owner = self._root.get_submodule(parent)
        owner.add_module(key, made.to(device).train(self._root.training))

    def _constructor(self, layer: fx.Node | None) -> Callable[..., Any]:
        """Return the constructor of the input quantizer of a layer, or of the first there is."""
        module = None if layer is None else module_of(layer, self._root)
        if not isinstance(module, QATLayer):
            layers = (m for m in self._root.modules() if isinstance(m, QATLayer))
            module = next(m for m in layers if _activation_bits(m) == 8)
        constructor: Callable[..., Any] = module.qconfig.activation
        return constructor


def _constructor_for_result(constructor: Callable[..., Any], nonnegative: bool) -> Any:
    """Return the constructor of the quantizer of a result: explicit clips are those of an input."""
    cls, arguments = constructor_arguments(constructor)
    if not (isinstance(cls, type) and issubclass(cls, ULQFakeQuantize)):
        return constructor
    kept = {k: v for k, v in arguments.items() if k not in ("clip_max", "clip_min")}
    return cls.with_args(**{**kept, "fixed_min": nonnegative})


def _activation_bits(module: nn.Module | None) -> int:
    """Return the width of the input codes of a quantized layer, 0 for any other module."""
    if isinstance(module, QATLayer):
        return int(getattr(module.input_quantizer, "num_bits", 8))
    if isinstance(module, QuantizedLayer):
        return module.input_quantizer.zero_point.element_size() * 8
    return 0


def _quantizes_itself(module: nn.Module | None) -> bool:
    return bool(getattr(module, "quantizes_input", False))


def _has_module(root: nn.Module, target: str) -> bool:
    parent, _, key = target.rpartition(".")
    return key in root.get_submodule(parent)._modules
