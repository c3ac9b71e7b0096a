"""Simulation and integer model, compared at every quantizer on equal inputs.

One code that rounds differently changes many sums behind it, so in a deep network with random
weights two correct models drift apart: the share of differing codes grows from quantizer to
quantizer without any of them being wrong. Here each quantizer of the integer model is compared
with the simulated one and then given the simulated codes, so that every layer starts from equal
values and what is counted is made by that layer alone.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor, nn

from amct_fx.nn.quantized import Quantize

from .agreement import agreement_of, tensors_of

__all__ = ["Layerwise", "calls_in_file", "compare_file", "compare_layerwise", "run_file"]

_MIN_EQUAL = 0.995
_MAX_STEPS = 2
_MAX_OUTPUT_DIFFERENCE = 0.01


@dataclass
class Layerwise:
    """Equal codes over all quantizers, the quantizers that are worst, and the outputs.

    ``output`` is the largest difference of an output that was made from equal codes, as a part of
    its range.
    """

    codes: int = 0
    flips: int = 0
    quantizers: int = 0
    worst_equal: float = 1.0
    worst: str = ""
    steps: int = 0
    furthest: str = ""
    output: float = 0.0

    @property
    def equal(self) -> float:
        """Share of equal codes over all quantizers."""
        return 1.0 - self.flips / max(self.codes, 1)

    def add(self, name: str, simulated: Tensor, made: Tensor) -> None:
        """Count the codes of one call of a quantizer."""
        difference = (simulated.int() - made.int()).abs()
        flips = int((difference > 0).sum())
        equal = 1.0 - flips / max(difference.numel(), 1)
        if equal < self.worst_equal:
            self.worst_equal, self.worst = equal, name
        if flips and int(difference.max()) > self.steps:
            self.steps, self.furthest = int(difference.max()), name
        self.codes += difference.numel()
        self.flips += flips
        self.quantizers += 1

    def require(self) -> None:
        """Raise what contract 2 of the design forbids.

        The share is asked of all codes together: of the few codes behind a global pooling, the
        rounding of an int32 bias moves more, and never by more than one step.
        """
        if self.quantizers == 0:
            message = "no quantizer was compared"
            raise ValueError(message)
        if self.equal < _MIN_EQUAL:
            message = (
                f"{self.equal:.4f} of the codes are equal; {self.worst_equal:.4f} at {self.worst}"
            )
            raise ValueError(message)
        if self.steps > _MAX_STEPS:
            message = f"codes differ by {self.steps} at {self.furthest}"
            raise ValueError(message)
        if self.output > _MAX_OUTPUT_DIFFERENCE:
            message = f"with equal codes the outputs differ by {self.output:.3g} of their range"
            raise ValueError(message)


def compare_layerwise(
    prepared: nn.Module,
    converted: nn.Module,
    args: tuple[Tensor, ...],
    kwargs: dict[str, Any],
) -> Layerwise:
    """Run both models in eval mode and compare the codes of every call of every quantizer."""
    simulated: dict[str, list[Tensor]] = {}
    quantizers = {
        name.replace("input_fake_quant", "input_quantize"): module
        for name, module in prepared.named_modules()
        if name.endswith("input_fake_quant")
    }
    with _hooks(quantizers, lambda name: partial(_record, simulated.setdefault(name, []))):
        expected = tensors_of(prepared(*args, **kwargs))
    found = Layerwise()
    with _hooks(
        _quantizers(converted), lambda name: partial(_replace, found, name, simulated[name])
    ):
        actual = tensors_of(converted(*args, **kwargs))
    found.output = agreement_of(expected, actual).difference
    return found


def compare_file(
    converted: nn.Module,
    path: Path,
    args: tuple[Tensor, ...],
    kwargs: dict[str, Any],
    values: dict[str, Tensor],
) -> Layerwise:
    """Compare the codes of the converted model with those of its file in onnxruntime.

    Args:
        converted: The model in torch.
        path: Its file.
        args: Positional arguments of the model.
        kwargs: Keyword arguments of the model.
        values: The same tensors by the names of the inputs in the file.
    """
    made: list[tuple[str, Tensor]] = []
    with _hooks(_quantizers(converted), lambda name: partial(_append, made, name)):
        expected = tensors_of(converted(*args, **kwargs))
    cut = onnx.load(path)
    outputs = [item.name for item in cut.graph.output]
    modules = [_module_of(node) for node in cut.graph.node if node.op_type == "QuantizeLinear"]
    names = _cut_behind_quantizers(cut)
    made = calls_in_file(made, modules, converted)
    codes = {_INPUT + name: item for name, (_, item) in zip(names, made, strict=True)}
    results = run_file(cut.SerializeToString(), {**values, **codes}, [*names, *outputs])
    found = Layerwise()
    for (name, wanted), result in zip(made, results, strict=False):
        found.add(name.removesuffix(".input_quantize"), wanted, result)
    found.output = agreement_of(expected, tensors_of(results[len(names) :])).difference
    return found


def run_file(
    model: Path | bytes, values: dict[str, Tensor], names: list[str] | None = None
) -> list[Tensor]:
    """Run a file in onnxruntime on one thread; return the outputs called ``names``, or all."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    feed = {item.name: values[item.name].numpy() for item in session.get_inputs()}
    return [torch.from_numpy(output) for output in session.run(names, feed)]


def calls_in_file(
    made: list[tuple[str, Tensor]], names: list[str | None], converted: nn.Module
) -> list[tuple[str, Tensor]]:
    """Return the calls of quantizers that a file holds, in the order of its quantizers.

    The file may hold fewer than torch made: layers of a part that was not traced each quantize
    what they read, and where two equal quantizers read one tensor, ``torch.export`` merges them.

    Args:
        made: Name of the quantizer and codes of every call in torch, in order.
        names: For every quantizer of the file the name of its module, where the exporter wrote it.
        converted: The model in torch.

    Raises:
        ValueError: If the file holds other calls, or lacks one whose codes no earlier call of an
            equal quantizer made.
    """
    total = Counter(name for name, _ in made)
    held = Counter(names)
    kept: list[tuple[str, Tensor]] = []
    for number, (name, codes) in enumerate(made):
        all_held = None in held or held[name] == total[name]
        if all_held or not _is_repetition(made[:number], name, codes, converted):
            kept.append((name, codes))
    if [None if None in held else name for name, _ in kept] != names:
        message = f"{len(names)} quantizers in the file, {len(made)} calls in torch: {names}"
        raise ValueError(message)
    return kept


def _is_repetition(
    earlier: list[tuple[str, Tensor]], name: str, codes: Tensor, converted: nn.Module
) -> bool:
    """Say whether an equal quantizer made the same codes before."""
    qparams = converted.get_submodule(name).qparams[2:]
    return any(
        converted.get_submodule(other).qparams[2:] == qparams and torch.equal(seen, codes)
        for other, seen in earlier
    )


def _module_of(node: onnx.NodeProto) -> str | None:
    """Return the name of the module that made a node, where ``torch.export`` wrote it down."""
    scopes = next((p.value for p in node.metadata_props if p.key == _SCOPES), None)
    return None if scopes is None else ast.literal_eval(scopes)[-2]


_SCOPES = "pkg.torch.onnx.name_scopes"
_INPUT = "given_"


def _cut_behind_quantizers(model: onnx.ModelProto) -> list[str]:
    """Make the codes of each quantizer an output, and let its readers read an input instead."""
    graph = model.graph
    made = [node.output[0] for node in graph.node if node.op_type == "QuantizeLinear"]
    types = {item.name: item.data_type for item in graph.initializer}
    renamed = {name: _INPUT + name for name in made}
    for node in graph.node:
        for index, name in enumerate(node.input):
            node.input[index] = renamed.get(name, name)
        if node.op_type == "QuantizeLinear":
            kind = types.get(node.input[2], onnx.TensorProto.INT8)
            for target, label in (
                (graph.output, node.output[0]),
                (graph.input, renamed[node.output[0]]),
            ):
                target.append(onnx.helper.make_tensor_value_info(label, kind, None))
    return made


@contextmanager
def _hooks(modules: dict[str, nn.Module], hook_of: Callable[[str], Any]) -> Iterator[None]:
    handles = [module.register_forward_hook(hook_of(name)) for name, module in modules.items()]
    try:
        with torch.no_grad():
            yield
    finally:
        for handle in handles:
            handle.remove()


def _quantizers(converted: nn.Module) -> dict[str, nn.Module]:
    return {n: module for n, module in converted.named_modules() if isinstance(module, Quantize)}


def _record(calls: list[Tensor], module: Any, _inputs: Any, values: Tensor) -> None:
    scale, zero_point = module.calculate_qparams()
    calls.append((values / scale).round().to(torch.int32) + zero_point.to(torch.int32))


def _append(made: list[tuple[str, Tensor]], name: str, _m: Any, _inputs: Any, y: Tensor) -> None:
    made.append((name, y.clone()))


def _replace(
    found: Layerwise, name: str, calls: list[Tensor], _module: Any, _inputs: Any, made: Tensor
) -> Tensor:
    simulated = calls.pop(0).to(made.dtype)
    found.add(name.removesuffix(".input_quantize"), simulated, made)
    return simulated
