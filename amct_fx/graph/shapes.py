"""Shapes of every value in a traced model, found without computing it.

The graph runs once on fake tensors, which have a shape but no data. Where that is not possible (an
island that decides by values), it runs once on the real example. Source: spec/pruning.md section 3.
"""

from __future__ import annotations

import copy
import logging
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.immutable_collections import immutable_dict, immutable_list
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from amct_fx.errors import InputDataError
from amct_fx.graph.facts import layer_calls, submodule
from amct_fx.graph.signature import as_call
from amct_fx.graph.trial import trial

if TYPE_CHECKING:
    from amct_fx.graph.capture import Region
    from amct_fx.graph.recording import Recording, Result

__all__ = ["Shape", "ShapeFacts", "TensorFact", "propagate_shapes", "tried_on"]

Shape: TypeAlias = tuple[int, ...]


@dataclass(frozen=True)
class TensorFact:
    """What is known of a tensor: its shape."""

    shape: Shape


@dataclass(frozen=True)
class ShapeFacts:
    """What one example shows of the traced parts.

    Attributes:
        values: By name of the region, then of the node: a :class:`TensorFact`, a number, or tuples
            of them. Regions and nodes that the example did not reach are absent.
        called_elsewhere: Names of modules that code outside the graphs calls, too.
    """

    values: Mapping[str, Mapping[str, Any]]
    called_elsewhere: frozenset[str] = frozenset()


def propagate_shapes(
    model: nn.Module, regions: Iterable[Region], example_inputs: Any
) -> ShapeFacts:
    """Return the shape of every value of the traced parts, for one example.

    Args:
        model: The model that the regions belong to; it is the same afterwards.
        regions: Its traced parts.
        example_inputs: A tensor, a tuple of arguments, or a dict of them by name.

    Raises:
        InputDataError: If the model cannot run on them.

    Example:
        >>> from amct_fx.graph import capture
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> found = capture(model, lambda module: isinstance(module, nn.Conv2d))
        >>> propagate_shapes(model, found.regions, torch.ones(2, 3, 8, 8)).values[""]["_0"]
        TensorFact(shape=(2, 8, 6, 6))
    """
    listed, call = list(regions), as_call(example_inputs)
    try:
        with (
            _quiet(),
            trial(model),
            FakeTensorMode(allow_non_fake_inputs=True) as mode,
            _QuickBatchNorm(),
        ):
            fake = tree_map(lambda x: mode.from_tensor(x) if isinstance(x, Tensor) else x, call)
            return _run(model, listed, fake)
    except Exception:  # the model is the user's; islands may do what fake tensors cannot
        pass
    try:
        with trial(model):
            return _run(model, listed, copy.deepcopy(call))
    except Exception as error:
        message = f"the model cannot run on example_inputs: {type(error).__name__}: {error}"
        raise InputDataError(message) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Let a run that fails be tried otherwise without a page of errors in the log of torch."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


class _QuickBatchNorm(TorchFunctionMode):
    """Takes the shape of what a batch normalization reads; fake tensors would work it out slowly.

    That is all that it is asked for where the statistics have one entry for each channel.
    """

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run a function; ``batch_norm`` in eval mode only makes a tensor."""
        if func is F.batch_norm and self._fits(*args, **(kwargs or {})):
            return torch.empty_like(args[0])
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _fits(
        x: Any = None, mean: Any = None, *rest: Any, training: bool = False, **others: Any
    ) -> bool:
        training = bool(rest[3]) if len(rest) > 3 else training
        known = isinstance(x, Tensor) and isinstance(mean, Tensor) and not training
        tensors = [item for item in (mean, *rest, *others.values()) if isinstance(item, Tensor)]
        return known and all(t.shape == x.shape[1:2] and t.dtype == x.dtype for t in tensors)


def _run(model: nn.Module, regions: list[Region], call: Any) -> ShapeFacts:
    whole = len(regions) == 1 and regions[0].module is model
    arguments: dict[str, Any] = {regions[0].name: call} if whole else {}
    values: dict[str, dict[str, Any]] = {}
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        with _counting(model) as counts:
            if whole:
                values[regions[0].name] = _Recorder(regions[0]).record(*call)
            else:
                arguments = _region_inputs(model, regions, call)
        seen = counts.copy()
        for region in regions:
            if region.name in arguments and region.name not in values:
                values[region.name] = _Recorder(region).record(*arguments[region.name])
    runs = Counter({region.name: 1 if whole else seen[region.module] for region in regions})
    return ShapeFacts(values, _called_elsewhere(model, regions, runs, seen))


def tried_on(region: Region, example_inputs: Any, calls: Recording) -> tuple[Any, ShapeFacts]:
    """Run the graph of a whole model on the example inputs, in eval mode.

    Args:
        region: The model, as it was traced.
        example_inputs: As for :func:`propagate_shapes`.
        calls: What a run of the model itself showed; the results of its layers are not computed
            again where they read the same values, and nothing is if it computed nothing.

    Returns:
        What the graph returns, and the shapes in it.
    """
    recorder = _Recorder(region, calls.results)
    with trial(region.module, writes=calls.dry is None), torch.no_grad():
        if calls.dry is None:
            values = {region.name: recorder.record(*copy.deepcopy(as_call(example_inputs)))}
        else:
            with calls.dry.replaying():
                values = {region.name: recorder.record(*calls.dry.call)}
    once = Counter({region.name: 1})
    elsewhere = _called_elsewhere(region.module, [region], once, calls.counts)
    return recorder.outputs, ShapeFacts(values, elsewhere)


def _called_elsewhere(
    model: nn.Module, regions: list[Region], runs: Counter[str], seen: Counter[nn.Module]
) -> frozenset[str]:
    """Return the modules that ran more often than the graphs call them."""
    expected: Counter[nn.Module] = Counter()
    for region in regions:
        for module, nodes in layer_calls(region.graph, region.module).items():
            expected[module] += len(nodes) * runs[region.name]
    names = {module: name for name, module in model.named_modules()}
    return frozenset(
        names[module] for module in expected if seen[module] > expected[module] and module in names
    )


@contextmanager
def _counting(model: nn.Module) -> Iterator[Counter[nn.Module]]:
    """Count the calls of every module."""
    counts: Counter[nn.Module] = Counter()

    def observe(module: nn.Module, args: Any) -> None:
        counts[module] += 1

    hooks = [
        module.register_forward_pre_hook(observe)
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    try:
        yield counts
    finally:
        for hook in hooks:
            hook.remove()


def _region_inputs(model: nn.Module, regions: list[Region], call: Any) -> dict[str, Any]:
    """Return the arguments that each region gets in its first call."""
    calls: dict[str, Any] = {}

    def observe(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.setdefault(name, (args, kwargs))

    hooks = [
        region.module.register_forward_pre_hook(partial(observe, region.name), with_kwargs=True)
        for region in regions
    ]
    try:
        model(*call[0], **call[1])
    finally:
        for hook in hooks:
            hook.remove()
    return calls


class _Recorder(fx.Interpreter):
    """Runs a graph and writes down what each node makes.

    ``results`` are those of layers that need not be computed again.
    """

    def __init__(
        self, region: Region, results: Mapping[nn.Module, Sequence[Result]] | None = None
    ) -> None:
        super().__init__(region.module, graph=region.graph)
        self.facts: dict[str, Any] = {}
        self.outputs: Any = None
        self._root = region.module
        self._form = region.guard.form
        self._results = results or {}

    def record(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Run with the arguments of one call."""
        given = self._inputs(args, dict(kwargs))
        if given is not None:
            self.outputs = _plain(self.run(*given, enable_io_processing=False))
        return self.facts

    def _inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any] | None:
        """Return the inputs of the graph, ``None`` for a call of another form."""
        if self._form is not None:
            return self._form.leaves(args, kwargs)
        inputs = [node for node in self.graph.nodes if node.op == "placeholder"]
        defaults = {str(node.target): node.args[0] for node in inputs if node.args}
        named = defaults | kwargs
        rest = (str(node.target) for node in inputs[len(args) :])
        return [*args, *(named[name] for name in rest if name in named)]

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a module, unless its result is known."""
        module = submodule(self._root, target)
        known = self._results.get(module, ())
        for result in known if len(args) == 1 and not kwargs else ():
            if result.answers(args[0]):
                return result.output
        return module(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        result = super().run_node(n)
        self.facts[n.name] = _fact(result)
        return result


def _plain(value: Any) -> Any:
    """Make ordinary lists and dicts of those that a graph cannot change."""
    if isinstance(value, immutable_dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, immutable_list):
        return [_plain(item) for item in value]
    return tuple(map(_plain, value)) if type(value) is tuple else value


def _fact(value: Any) -> Any:
    """Return the fact about a value; ``None`` where there is nothing to say."""
    if isinstance(value, Tensor):
        return TensorFact(tuple(int(size) for size in value.shape))
    if isinstance(value, (tuple, list)):
        return tuple(_fact(item) for item in value)
    return value if isinstance(value, (bool, int, float, str)) else None
