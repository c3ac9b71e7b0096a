"""What one run on example inputs shows: the form of each call, and layers that read one tensor."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from amct_fx.graph.signature import CallForm, as_call, call_form

__all__ = ["Recording", "record_calls"]


@dataclass
class Recording:
    """The calls that a model made while it ran on example inputs.

    Attributes:
        forms: The form in which each module is called; not of modules that are called in several.
        inputs: The first tensor that each call of a module read, as it was then.
        ranks: The lowest rank of the first tensor that each module read.
        outputs: What the model returned.
        random_state: That of the CPU after the run.
    """

    forms: dict[nn.Module, CallForm] = field(default_factory=dict)
    inputs: dict[nn.Module, list[Any]] = field(default_factory=dict)
    ranks: dict[nn.Module, int] = field(default_factory=dict)
    outputs: Any = None
    random_state: Tensor | None = None

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


def record_calls(model: nn.Module, example_inputs: Any) -> Recording:
    """Run ``model`` once, in eval mode; it is the same afterwards, and so is the random state.

    Args:
        model: The float model.
        example_inputs: See :func:`amct_fx.graph.signature.as_call`.
    """
    forms: dict[nn.Module, CallForm | None] = {}
    inputs: dict[nn.Module, list[Any]] = {}
    ranks: dict[nn.Module, int] = {}
    alive: list[Tensor] = []  # an id says nothing once its tensor is gone

    def observe(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        form = call_form(module, args, kwargs)
        forms[module] = form if forms.get(module, form) == form else None
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, Tensor):
            ranks[module] = min(first.dim(), ranks.get(module, first.dim()))
        if isinstance(first, Tensor) and not first.is_inference():
            alive.append(first)
            inputs.setdefault(module, []).append((id(first), first._version))

    hooks = [
        module.register_forward_pre_hook(observe, with_kwargs=True)
        for module in model.modules()
        if not isinstance(module, torch.jit.ScriptModule)
    ]
    modes = {module: module.training for module in model.modules()}
    args, kwargs = copy.deepcopy(as_call(example_inputs))
    try:
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            outputs = model(*args, **kwargs)
            random_state = torch.get_rng_state()
    finally:
        for hook in hooks:
            hook.remove()
        for module, mode in modes.items():
            module.training = mode
    known = {module: form for module, form in forms.items() if form is not None}
    return Recording(known, inputs, ranks, outputs, random_state)
