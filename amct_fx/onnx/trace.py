"""Runs a file and a converted model on one batch and keeps what goes into and out of each layer."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnx
import torch
import torch.nn.functional as F
from onnx import NodeProto, helper
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from amct_fx.errors import ExportError, InputDataError
from amct_fx.nn.quantized import Quantize, QuantizedLayer
from amct_fx.onnx.ascend import unpack_weights
from amct_fx.onnx.fake_quant import lower_to_standard
from amct_fx.onnx.files import write_model
from amct_fx.onnx.graph import Graph
from amct_fx.onnx.layers import MOVES_VALUES, OPERATORS, call_name
from amct_fx.onnx.recurrent import keep_recurrent_layers_whole

if TYPE_CHECKING:
    from collections.abc import Container, Mapping

__all__ = ["FileCall", "FileRun", "ModelCall", "run_file", "run_model"]


@dataclass
class ModelCall:
    """What one call of a layer of the model read and made.

    Attributes:
        codes: Codes of its input, ``None`` for the model itself.
        outputs: All tensors it returned.
    """

    codes: Tensor | None
    outputs: list[Tensor]


@dataclass(frozen=True)
class FileCall:
    """One call of a layer in a file.

    Attributes:
        name: Name of the operator: the module path, ``_1`` behind it for a second call.
        layer: The layer of the converted model.
        part: ``"ih_"`` or ``"hh_"`` for one product of an unrolled LSTM or GRU, else ``""``.
        has_bias: Whether the result has the bias in it.
        whole: The LSTM or GRU that runs as one operator, as in the file, or ``None``.
        source: Name of the float tensor that the layer is given.
        quantized: Name of the float tensor that is quantized: ``source``, or what export made of
            it by moving values in front of the quantizer.
        codes: Name of the tensor of its codes.
        shift: What the codes of the file are above those of the model.
        result: Name of the float tensor that the layer makes.
        state: Names of the initial states of an LSTM or GRU that runs as one operator.
    """

    name: str
    layer: QuantizedLayer
    part: str
    has_bias: bool
    whole: nn.Module | None
    source: str
    quantized: str
    codes: str
    shift: int
    result: str
    state: tuple[str, ...] = ()

    @property
    def quantizer(self) -> Quantize:
        """The model's quantizer of this input."""
        layer: Any = self.layer
        return layer.hidden_quantize if self.part == "hh_" else self.layer.input_quantizer

    @property
    def keeps_float_state(self) -> bool:
        """Whether the file does not quantize the hidden state between the steps."""
        return self.whole is not None

    @property
    def channel_axis(self) -> int:
        """Axis of the output channels in the result."""
        return -1 if isinstance(self.layer, (nn.Linear, nn.RNNBase)) else 1

    @property
    def moves_values(self) -> bool:
        """Whether the codes lie otherwise than the tensor that the layer is given."""
        return self.quantized != self.source

    def own_result(self, codes: Tensor, state: tuple[Tensor, ...] = ()) -> Tensor:
        """Return what the model's layer makes of codes, in its own layout, and an initial state."""
        layer: Any = self.layer
        found = self.quantizer
        values = ((codes - found.zero_point.long()) * found.scale).to(layer.dtype)
        if self.whole is not None:
            if values.dim() == 2:
                state = tuple(part.squeeze(1) for part in state)
            given = (state if len(state) == 2 else state[0]) if state else None
            output: Tensor = self.whole(values, given, quantized=True)[0]
            return output
        if self.part:
            bias = layer.dequantized_bias(self.part) if self.has_bias else None
            return F.linear(values, layer.dequantized_weight(self.part), bias)
        result: Tensor = layer(values, quantized=True)
        return result


@dataclass(frozen=True)
class FileRun:
    """All tensors of a file that a comparison needs.

    Attributes:
        calls: The calls of layers, in execution order.
        outputs: The outputs of the file.
    """

    calls: list[FileCall]
    outputs: list[Tensor]
    _tensors: Mapping[str, Tensor] = field(repr=False)

    def codes(self, call: FileCall) -> Tensor:
        """Return the codes that a layer reads, as the model counts them."""
        return self._in_layout_of_model(call, self._tensors[call.codes]).round().long() - call.shift

    def source(self, call: FileCall) -> Tensor:
        """Return the float tensor that a layer is given."""
        return self._tensors[call.source]

    def own_codes(self, call: FileCall) -> tuple[Tensor, Tensor]:
        """Return the codes that the file makes, and those of the model for the same tensor."""
        made = self._tensors[call.codes].round().long() - call.shift
        return made, call.quantizer(self._tensors[call.quantized])

    def own_result(self, call: FileCall) -> Tensor:
        """Return what the model's layer makes of the codes that the file's layer reads."""
        whole_or_plain = call.whole is not None or not call.moves_values
        codes = self.codes(call) if whole_or_plain else call.quantizer(self.source(call)).long()
        return call.own_result(codes, tuple(self._tensors[name] for name in call.state))

    def result(self, call: FileCall) -> Tensor:
        """Return what a layer makes."""
        made = self._tensors[call.result]
        return made if call.whole is None else self._in_layout_of_model(call, made.squeeze(1))

    def _in_layout_of_model(self, call: FileCall, tensor: Tensor) -> Tensor:
        """Undo what stands around an LSTM or GRU node, which reads ``[T, B, I]``."""
        layer: Any = call.whole
        if layer is None:
            return tensor
        tensor = tensor.transpose(0, 1) if layer.batch_first else tensor
        unbatched = self.source(call).dim() == 2
        return tensor.squeeze(0 if layer.batch_first else 1) if unbatched else tensor


def run_model(model: nn.Module, args: tuple[Any, ...]) -> dict[str, ModelCall]:
    """Run a converted model.

    Returns:
        Every call of a layer by name, and the model itself under ``""``.

    Raises:
        InputDataError: The model cannot run on ``args``.
    """
    found: dict[str, ModelCall] = {}
    handles = []
    names = dict(model.named_modules(remove_duplicate=False))
    for name, module in model.named_modules():
        if isinstance(module, QuantizedLayer):
            handles.append(module.register_forward_hook(_recorder(name, found, names)))
    try:
        output = model(*args)
    except Exception as error:  # whatever forward raises
        message = f"the model cannot run on this batch: {error}"
        raise InputDataError(message) from error
    finally:
        for handle in handles:
            handle.remove()
    found[""] = ModelCall(None, [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)])
    return found


def _recorder(name: str, found: dict[str, ModelCall], names: Container[str]) -> Any:
    count = [0]

    def record(layer: QuantizedLayer, args: tuple[Tensor, ...], output: Any) -> None:
        label = call_name(name, count[0], names)
        count[0] += 1
        outputs = [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        codes = None
        if args:  # quantizing what was quantized and dequantized gives the same codes
            codes = layer.input_quantizer(args[0])
        found[label] = ModelCall(codes, outputs)

    return record


def run_file(path: str, model: nn.Module, args: tuple[Any, ...], called: Container[str]) -> FileRun:
    """Run a file in onnxruntime, without its optimizations; a deploy file is lowered first.

    Args:
        path: The file.
        model: The converted model it was made of; LSTM and GRU may be changed to run whole.
        args: What ``forward`` takes.
        called: Names of the layers that ``model`` calls in eval mode; the file must hold them.

    Raises:
        ExportError: The file cannot be read or run, or holds other layers.
        InputDataError: The inputs do not fit the file.
    """
    graph = Graph(_read(path))
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantizedLayer)}
    if any(node.op_type.startswith(("Ascend", "Basic")) for node in graph.nodes):
        unpack_weights(graph, layers)
        lower_to_standard(graph)
    whole = any(node.op_type in ("LSTM", "GRU") for node in graph.nodes)
    if whole:
        keep_recurrent_layers_whole(model)
    calls = [call for node in graph.nodes if (call := _call(graph, node, layers)) is not None]
    held = {call.layer for call in calls}
    missing = [name for name, layer in layers.items() if name in called and layer not in held]
    if missing:
        message = f"{path} has no layer {missing[0]!r}; is it a file of this model?"
        raise ExportError(message)
    return _run(path, graph, calls, args)


def _read(path: str) -> onnx.ModelProto:
    try:
        return onnx.load(path)
    except Exception as error:  # protobuf and onnx raise many classes
        message = f"{path} cannot be read as an ONNX file: {error}"
        raise ExportError(message) from error


def _call(graph: Graph, node: NodeProto, layers: Mapping[str, QuantizedLayer]) -> FileCall | None:
    """Return the call that a node is the operator of, or ``None``."""
    if node.op_type not in OPERATORS:
        return None
    name, count = node.name, 0
    if name not in layers:
        parts = re.fullmatch(r"(.*?)_+([1-9]\d*)", name)
        if parts is None or parts[1] not in layers:
            return None
        name, count = parts[1], int(parts[2])
    layer = layers[name]
    unrolled = isinstance(layer, nn.RNNBase) and node.op_type not in ("LSTM", "GRU")
    quantizer = _codes_behind(graph, node.input[0])
    if quantizer is None:
        message = f"{node.name}: the file does not quantize the input of this {node.op_type}"
        raise ExportError(message)
    source, codes, shift = quantizer
    return FileCall(
        name=node.name,
        layer=layer,
        part="" if not unrolled else "hh_" if count else "ih_",
        has_bias=len(node.input) > 2,
        whole=layer if isinstance(layer, nn.RNNBase) and not unrolled else None,
        source=_before_moves(graph, source, node.name),
        quantized=source,
        codes=codes,
        shift=shift,
        result=_result(graph, node),
        state=tuple(n for n in node.input[5:7] if n) if node.op_type in ("LSTM", "GRU") else (),
    )


def _codes_behind(graph: Graph, tensor: str) -> tuple[str, str, int] | None:
    """Return source, codes and shift of the quantizer in front of an operator."""
    node = graph.producer(tensor)
    while node is not None and node.op_type in (*MOVES_VALUES, "Mul"):
        node = graph.producer(node.input[0])
    if node is None:
        return None
    if node.op_type == "DequantizeLinear":
        quantize = graph.producer(node.input[0])
        zero = None if quantize is None else graph.array(quantize.input[2])
        if quantize is None or zero is None:
            return None
        return quantize.input[0], quantize.output[0], 128 if zero.dtype.name == "uint8" else 0
    if node.op_type == "Sub":  # Mul, Round, Add, Clip, Sub
        clip = graph.producer(node.input[0])
        source, step = "", clip
        while step is not None and step.op_type in ("Clip", "Add", "Round", "Mul"):
            source = step.input[0]
            step = None if step.op_type == "Mul" else graph.producer(source)
        return None if clip is None else (source, clip.output[0], 0)
    return None


def _before_moves(graph: Graph, tensor: str, name: str) -> str:
    """Return the tensor in front of what export moved before the quantizer of a layer."""
    node = graph.producer(tensor)
    while node is not None and node.name.startswith(f"{name}.input"):
        tensor = node.input[0]
        node = graph.producer(tensor)
    return tensor


def _result(graph: Graph, node: NodeProto) -> str:
    """Return the tensor behind the bias and the dequantization of a layer."""
    tensor = str(node.output[0])
    for end in (".add", ".fakedequant.mul"):
        for reader in graph.readers(tensor):
            if reader.name == f"{node.name}{end}":
                tensor = reader.output[0]
    return tensor


def _run(path: str, graph: Graph, calls: list[FileCall], args: tuple[Any, ...]) -> FileRun:
    import onnxruntime

    outputs = graph.outputs
    wanted = list(
        dict.fromkeys(
            name
            for call in calls
            for name in (call.source, call.quantized, call.codes, call.result, *call.state)
            if name not in (*outputs, *graph.inputs, *graph.initializers)
        )
    )
    constants = {
        n: graph.array(n) for call in calls for n in (call.source, call.quantized, *call.state)
    }
    model = graph.save()
    model.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in wanted)
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.log_severity_level = 3
    tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, Tensor)]
    with tempfile.TemporaryDirectory() as folder:
        whole = Path(folder) / "model.onnx"
        write_model(model, whole, suffix="verify")
        try:
            session = onnxruntime.InferenceSession(
                str(whole), options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # onnxruntime raises classes of its own
            message = f"{path} cannot be run: {error}"
            raise ExportError(message) from error
        names = [item.name for item in session.get_inputs()]
        if len(names) != len(tensors):
            message = f"{path} has {len(names)} inputs, batch holds {len(tensors)} tensors"
            raise InputDataError(message)
        feeds = {name: x.detach().cpu().numpy() for name, x in zip(names, tensors, strict=True)}
        try:
            made = session.run([*outputs, *wanted], feeds)
        except Exception as error:  # onnxruntime raises classes of its own
            wanted_shapes = ", ".join(f"{item.name} {item.shape}" for item in session.get_inputs())
            message = (
                f"{path} cannot run on this batch; give one of the shape that the file takes "
                f"({wanted_shapes}), or export with dynamic_batch: {error}"
            )
            raise InputDataError(message) from error
    found = dict(zip([*outputs, *wanted], map(torch.from_numpy, made), strict=True))
    found.update(zip(names, tensors, strict=True))
    found.update((n, torch.from_numpy(a.copy())) for n, a in constants.items() if a is not None)
    return FileRun(calls, [found[name] for name in outputs], found)
