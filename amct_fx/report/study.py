"""The runs that ``analyze`` makes, and what they add up to."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amct_fx.errors import InputDataError
from amct_fx.report.analysis import Analysis, Sensitivity
from amct_fx.report.batches import Forward, device_of, moved, run_batch, samples_in
from amct_fx.report.layer_sums import LayerSums, add_outputs
from amct_fx.report.measures import ErrorSum
from amct_fx.report.switchboard import BOTH, Call, LayerCall, Switchboard, copied

if TYPE_CHECKING:
    from amct_fx.report.batches import Batches
    from amct_fx.report.graph_view import GraphView
    from amct_fx.report.progress import ProgressReport
    from amct_fx.report.summary import Summary

__all__ = ["Judge", "Metric", "Study"]

Metric = Callable[[Any, Any], float | Tensor]
"""Judges what the model returned for a batch: ``metric(output, batch)``."""


class Judge:
    """The metric: a function of the user's, or the error of the output.

    Args:
        metric: ``None`` for the mean squared error of the output.
        greater_is_better: Whether a greater value of the function is better.
    """

    def __init__(self, metric: Metric | None, greater_is_better: bool) -> None:
        self.metric = metric
        self.greater_is_better = greater_is_better and metric is not None
        name = "output MSE" if metric is None else getattr(metric, "__name__", "metric")
        self.name = "metric" if name == "<lambda>" else name

    def value(self, output: Any, batch: Any, expected: Any) -> float:
        """Return the value for one batch."""
        if self.metric is None:
            error = ErrorSum()
            add_outputs(error, expected, output)
            if error.result() is None:
                message = "the model returns no floating point tensor; say what counts by metric="
                raise InputDataError(message)
            return error.mean_square
        value = self.metric(output, batch)
        try:
            return float(value)
        except (TypeError, ValueError, RuntimeError) as error:
            message = f"metric(output, batch) must return one number, not {value!r}"
            raise InputDataError(message) from error

    def better(self, value: float, other: float) -> float:
        """Return by how much ``value`` is better than ``other``."""
        return value - other if self.greater_is_better else other - value


@dataclass
class _Watched:
    """Inputs and outputs of layers, call by call, by the name of the layer."""

    inputs: dict[str, list[Tensor]] = field(default_factory=dict)
    outputs: dict[str, list[Any]] = field(default_factory=dict)

    def add(self, name: str, value: Any, output: Any) -> None:
        """Keep copies: the model may change both in place."""
        self.inputs.setdefault(name, []).append(copied(value))
        self.outputs.setdefault(name, []).append(copied(output))


@dataclass
class _Batch:
    """One batch, and what calls a model with it."""

    batch: Any
    number: int
    samples: int
    forward: Forward | None
    restart: Callable[[], None]
    device: torch.device

    def run(self, model: nn.Module) -> Any:
        """Call a model, always with the same random numbers; the batch stays as it is."""
        self.restart()
        return run_batch(model, copied(self.batch), self.number, self.forward)

    def run_elsewhere(self, model: nn.Module) -> Any:
        """Call a model on a device of its own, and bring the result back."""
        batch = replace(self, batch=moved(self.batch, device_of(model)))
        return moved(batch.run(model), self.device)


class Study:
    """Everything that is measured, added up over the batches.

    Args:
        board: Runs the prepared model.
        float_model: The float model, ``None`` to compare with the prepared one.
        judge: The metric.
        forward: How a batch meets a model, ``None`` for the usual ways.
        sensitivity: Whether to run each layer alone quantized and alone float.
        each_quantizer: Whether to run each quantizer of a layer alone, too.
    """

    def __init__(
        self,
        board: Switchboard,
        float_model: nn.Module | None,
        judge: Judge,
        forward: Forward | None,
        *,
        sensitivity: bool,
        each_quantizer: bool = False,
    ) -> None:
        self.board, self.float_model, self.judge = board, float_model, judge
        self._forward, self._sensitivity = forward, sensitivity
        self._parts = ("input", "weight") if each_quantizer else ()
        self._sums = {name: LayerSums(name, layer) for name, layer in board.layers.items()}
        self._output = ErrorSum()
        self._values: dict[str, float] = {}
        self._batches = self._samples = 0
        self._device = device_of(board.model)

    def measure(self, batches: Batches, report: ProgressReport) -> None:
        """Run through all batches."""
        alone = 2 + len(self._parts) if self._sensitivity else 0
        runs = 3 + alone * len(self._sums)
        for number, batch in enumerate(self._prepared(batches)):
            for step, _ in enumerate(self._steps(batch), 1):
                done = number * runs + step
                report("Analyzing layers", done, len(batches) * runs)
            self._batches += 1
            self._samples += batch.samples

    def value_without(self, skipped: Collection[str], batches: Batches) -> float:
        """Return the metric with some layers float and all others quantized."""
        key = f"without {', '.join(skipped)} together"
        samples = 0
        for batch in self._prepared(batches):
            reference = self._reference(batch)
            output, _ = self.board.run(batch.run, self._all_but(skipped))
            self._judge(key, output, batch, reference)
            samples += batch.samples
        return self._values.pop(key) / max(samples, 1)

    def result(self, summary: Summary, graph: GraphView, notes: Iterable[str]) -> Analysis:
        """Return the figures, without suggestions."""
        silent = [name for name, sums in self._sums.items() if not sums.calls]
        missing = [f"no batch reached {', '.join(silent)}"] if silent else []
        if not math.isfinite(self._value("float")) or not math.isfinite(self._value("quantized")):
            missing.append(
                "the metric is NaN or infinite: look for such values in the data and in the model"
            )
        return Analysis(
            layers=tuple(
                sums.result(self._sensitivity_of(name) if self._sensitivity else None)
                for name, sums in self._sums.items()
                if sums.calls
            ),
            metric=self.judge.name,
            greater_is_better=self.judge.greater_is_better,
            float_value=self._value("float"),
            unquantized_value=self._value("unquantized"),
            quantized_value=self._value("quantized"),
            output=self._output.result(),
            batches=self._batches,
            samples=self._samples,
            suggestions=(),
            notes=(*notes, *missing),
            summary=summary,
            graph=graph,
        )

    def _prepared(self, batches: Batches) -> Iterator[_Batch]:
        with _same_randomness(self._device) as restart:
            for number, batch in enumerate(batches):
                here = moved(batch, self._device)
                yield _Batch(here, number, samples_in(here), self._forward, restart, self._device)

    def _steps(self, batch: _Batch) -> Iterator[None]:
        """Run everything on one batch; yields after each run."""
        expected, reference = _Watched(), None
        if self.float_model is not None:
            reference, expected = self._run_float(batch)
        yield
        seen = set(expected.outputs)  # not layers that the float model passes by, as a fused path

        def watch(call: LayerCall) -> None:
            if call.name not in seen:
                expected.add(call.name, call.input, call.output)

        plain, plain_calls = self.board.run(batch.run, {}, keep=True, watcher=watch)
        plain = copied(plain)
        reference = plain if self.float_model is None else reference
        self._judge("unquantized base", plain, batch, plain)
        self._judge("float", reference, batch, reference)
        self._judge("unquantized", plain, batch, reference)
        yield
        compare = functools.partial(self._compare, expected, {})
        quantized, calls = self.board.run(batch.run, self._all_but(()), keep=True, watcher=compare)
        quantized = copied(quantized)
        self._judge("quantized", quantized, batch, reference)
        add_outputs(self._output, reference, quantized)
        yield
        for name in self._sums if self._sensitivity else ():
            self._run_alone(name, batch, plain, plain_calls)
            yield
            for part in self._parts:
                self._run_part(name, part, batch, plain, plain_calls)
                yield
            start = _first_call(name, calls)
            left = quantized
            if start is not None:
                left, _ = self.board.run(batch.run, self._all_but((name,)), replay=calls[:start])
            self._judge(f"without {name}", left, batch, reference)
            yield

    def _run_float(self, batch: _Batch) -> tuple[Any, _Watched]:
        """Run the float model, and watch its layers."""
        assert self.float_model is not None
        seen = _Watched()
        modules = dict(self.float_model.named_modules())
        handles = [
            modules[name].register_forward_hook(
                functools.partial(_see, seen, name), with_kwargs=True
            )
            for name in self._sums
            if name in modules
        ]
        try:
            return copied(batch.run_elsewhere(self.float_model)), seen
        finally:
            for handle in handles:
                handle.remove()

    def _reference(self, batch: _Batch) -> Any:
        """Return what the float model returns, if the metric needs it."""
        if self.judge.metric is not None:
            return None
        if self.float_model is not None:
            return batch.run_elsewhere(self.float_model)
        return self.board.run(batch.run, {})[0]

    def _compare(self, expected: _Watched, calls: dict[str, int], call: LayerCall) -> None:
        """Compare one call in the quantized model with the same call in the float model."""
        index = calls[call.name] = calls.get(call.name, -1) + 1
        sums = self._sums[call.name]
        sums.add_input(call.input)
        inputs, outputs = expected.inputs.get(call.name, []), expected.outputs.get(call.name, [])
        if index < min(len(inputs), len(outputs)):
            sums.input.add(inputs[index], call.quantized)
            add_outputs(sums.output, outputs[index], call.output)

    def _run_alone(self, name: str, batch: _Batch, plain: Any, calls: list[Call]) -> None:
        """Quantize one layer alone, from its first call on."""
        sums, output = self._sums[name], plain
        start = _first_call(name, calls)

        def watch(call: LayerCall) -> None:
            if call.name == name:
                expected = call.again(frozenset())
                add_outputs(sums.alone, expected, call.output)
                add_outputs(sums.by_input, expected, call.again(frozenset({"input"})))
                add_outputs(sums.by_weight, expected, call.again(frozenset({"weight"})))

        if start is not None:
            output, _ = self.board.run(batch.run, {name: BOTH}, replay=calls[:start], watcher=watch)
        add_outputs(sums.effect, plain, output)
        self._judge(f"only {name}", output, batch, plain)

    def _run_part(self, name: str, part: str, batch: _Batch, plain: Any, calls: list[Call]) -> None:
        """Switch on one quantizer alone."""
        output, start = plain, _first_call(name, calls)
        if start is not None:
            chosen = {name: frozenset({part})}
            output, _ = self.board.run(batch.run, chosen, replay=calls[:start])
        self._judge(f"only the {part} of {name}", output, batch, plain)

    def _all_but(self, skipped: Collection[str]) -> Mapping[str, frozenset[str]]:
        return {name: BOTH for name in self._sums if name not in skipped}

    def _judge(self, key: str, output: Any, batch: _Batch, expected: Any) -> None:
        value = self.judge.value(output, batch.batch, expected)
        self._values[key] = self._values.get(key, 0.0) + value * batch.samples

    def _value(self, key: str) -> float:
        return self._values.get(key, 0.0) / max(self._samples, 1)

    def _sensitivity_of(self, name: str) -> Sensitivity:
        only, without = self._value(f"only {name}"), self._value(f"without {name}")
        base = self._value("unquantized base")
        harms = {
            f"harm_{part}": self.judge.better(base, self._value(f"only the {part} of {name}"))
            for part in self._parts
        }
        return Sensitivity(
            alone_quantized=only,
            alone_float=without,
            harm=self.judge.better(base, only),
            gain=self.judge.better(without, self._value("quantized")),
            output_mse=self._sums[name].effect.mean_square,
            **harms,
        )


def _see(seen: _Watched, name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    """Keep input and output of a layer of the float model; used as a forward hook."""
    value = args[0] if args else kwargs.get("input")
    if isinstance(value, Tensor):
        seen.add(name, value, output)


def _first_call(name: str, calls: list[Call]) -> int | None:
    """Return the position of the first call of a layer."""
    return next((index for index, call in enumerate(calls) if call.name == name), None)


@contextmanager
def _same_randomness(device: torch.device) -> Iterator[Callable[[], None]]:
    """Yield what makes each run draw the same random numbers; the user's state is kept."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        seed = torch.initial_seed()

        def restart() -> None:
            torch.manual_seed(seed)

        yield restart
