"""What one run on example inputs shows: the form of each call, and layers that read one tensor.

Nothing is computed where :class:`amct_fx.graph.dry.DryRun` can follow the model.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from amct_fx.graph.dry import DryRun
from amct_fx.graph.signature import CallForm, as_call, call_form
from amct_fx.graph.trial import trial

__all__ = ["Recording", "Result", "record_calls"]

_PURE: tuple[type[nn.Module], ...] = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
    nn.Linear,
)
"""Layers whose result depends on their input alone, and that take most of the time."""
_MEMORY = 2**28
"""Bytes that remembered results may take."""


@dataclass(frozen=True)
class Result:
    """What a layer made of one input, so that it need not be computed again.

    Attributes:
        input: What it read.
        output: What it gave.
        versions: Of both; changes in place show in them.
    """

    input: Tensor
    output: Tensor
    versions: tuple[int, int]

    @classmethod
    def of(cls, value: Any, output: Any) -> Result | None:
        """Remember a result of one plain tensor; ``None`` for any other."""
        if type(value) is not Tensor or type(output) is not Tensor or output.is_inference():
            return None
        return cls(value, output, (value._version, output._version))

    @property
    def size(self) -> int:
        """Bytes that it keeps."""
        tensors = (self.input, self.output)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def answers(self, value: Any) -> bool:
        """Say whether it is what the layer makes of ``value``."""
        if type(value) is not Tensor or (self.input._version, self.output._version) != (
            self.versions
        ):
            return False
        alike = value.dtype == self.input.dtype and value.stride() == self.input.stride()
        return value is self.input or (alike and torch.equal(value, self.input))


@dataclass
class Recording:
    """The calls that a model made while it ran on example inputs.

    Attributes:
        forms: The form in which each module is called; not of modules that are called in several.
        inputs: The first tensor that each call of a module read, as it was then.
        ranks: The lowest rank of the first tensor that each module read.
        counts: How often each module was called.
        results: What layers made of their inputs, as far as it is remembered.
        outputs: What the model returned.
        random_state: That of the CPU after the run; ``None`` if there was none on real tensors.
        dry: The calls of a run on meta tensors, if that was enough.
    """

    forms: dict[nn.Module, CallForm] = field(default_factory=dict)
    inputs: dict[nn.Module, list[Any]] = field(default_factory=dict)
    ranks: dict[nn.Module, int] = field(default_factory=dict)
    counts: Counter[nn.Module] = field(default_factory=Counter)
    results: dict[nn.Module, list[Result]] = field(default_factory=dict)
    outputs: Any = None
    random_state: Tensor | None = None
    dry: DryRun | None = None

    @property
    def ran(self) -> bool:
        """Whether the model ran at all."""
        return self.dry is not None or self.random_state is not None

    def readers_of_one_tensor(self, layers: Iterable[nn.Module]) -> list[list[nn.Module]]:
        """Group layers that are called once and read the very same tensor.

        Args:
            layers: Layers that quantize their own input.

        Returns:
            Groups of two or more layers, in the order given.
        """
        groups: dict[Any, list[nn.Module]] = {}
        for layer in layers:
            if len(self.inputs.get(layer, ())) == 1:
                groups.setdefault(self.inputs[layer][0], []).append(layer)
        return [group for group in groups.values() if len(group) > 1]


def record_calls(model: nn.Module, example_inputs: Any, *, dry: bool = True) -> Recording:
    """Run ``model`` once, in eval mode; it is the same afterwards, and so is the random state.

    Args:
        model: The float model.
        example_inputs: See :func:`amct_fx.graph.signature.as_call`.
        dry: Compute nothing, if the model can be followed without.
    """
    call = as_call(example_inputs)
    run = DryRun.of(model, call) if dry else None
    found = None if run is None else _followed(model, run)
    return _computed(model, call) if found is None else found


def _followed(model: nn.Module, run: DryRun) -> Recording | None:
    """Run a model on shapes alone; ``None`` if that does not go through."""
    found = Recording(dry=run)
    args, kwargs = run.call
    with _observed(model, found), _trying(model, writes=False), run.recording(model):
        found.outputs = model(*args, **kwargs)
    return found if run.went_through else None


def _computed(model: nn.Module, call: Any) -> Recording:
    """Run a model on real tensors."""
    found = Recording()
    remember = _remembering(found)
    pure = [part for part in model.modules() if type(part) in _PURE and not _has_hooks(part)]
    hooks = [part.register_forward_hook(remember) for part in pure]
    args, kwargs = copy.deepcopy(call)
    try:
        with _observed(model, found), _trying(model, writes=True):
            found.outputs = model(*args, **kwargs)
            found.random_state = torch.get_rng_state()
    finally:
        for hook in hooks:
            hook.remove()
    return found


@contextmanager
def _trying(model: nn.Module, *, writes: bool) -> Iterator[None]:
    with trial(model, writes=writes), torch.no_grad(), torch.random.fork_rng(devices=[]):
        yield


@contextmanager
def _observed(model: nn.Module, found: Recording) -> Iterator[None]:
    """Write down each call of each module."""
    forms: dict[nn.Module, CallForm | None] = {}
    classes: dict[type[nn.Module], Any] = {}
    alive: list[Tensor] = []  # an id says nothing once its tensor is gone

    def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        with torch._C.DisableTorchFunction():  # questions of ours are no calls of the model
            form = call_form(module, args, kwargs, classes)
            forms[module] = form if forms.get(module, form) == form else None
            found.counts[module] += 1
            first = args[0] if args else kwargs.get("input")
            if not isinstance(first, Tensor):
                return
            found.ranks[module] = min(first.dim(), found.ranks.get(module, first.dim()))
            if not first.is_inference():
                alive.append(first)
                found.inputs.setdefault(module, []).append((id(first), first._version))

    parts = [part for part in model.modules() if not isinstance(part, torch.jit.ScriptModule)]
    hooks = [part.register_forward_pre_hook(observe, with_kwargs=True) for part in parts]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
    found.forms = {module: form for module, form in forms.items() if form is not None}


def _remembering(found: Recording) -> Callable[[nn.Module, Any, Any], None]:
    """Return a forward hook that remembers results while there is memory for them."""
    left = _MEMORY

    def remember(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal left
        result = Result.of(args[0], output) if len(args) == 1 else None
        if result is not None and result.size <= left:
            left -= result.size
            found.results.setdefault(module, []).append(result)

    return remember


def _has_hooks(module: nn.Module) -> bool:
    """Say whether a call of a module runs more than its class."""
    return bool(module._forward_hooks or module._forward_pre_hooks) or "forward" in vars(module)
