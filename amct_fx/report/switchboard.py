"""Runs a prepared model with any choice of its layers quantized, reusing what is known already.

All of it happens on a private copy. The quantizers that the graph calls in front of the layers pass
their input on, and each layer quantizes its input itself, if it is switched on. So layers that
share a quantizer are switched one by one, in traced parts and in islands alike.

A run in which the layers behave as in an earlier run up to some call need not compute them again:
:meth:`Switchboard.run` takes the outputs of that run, one for each call of a layer. What is not a
layer (activations, additions, the user's Python) runs every time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantizeBase
from torch.utils._pytree import tree_map

from amct_fx.nn.qat import QATLayer

__all__ = ["Call", "LayerCall", "Switchboard", "copied", "switchboard"]

BOTH = frozenset({"input", "weight"})
NEITHER: frozenset[str] = frozenset()


@dataclass
class Call:
    """The output of one call of a layer, kept to be used again."""

    name: str
    output: Any


@dataclass
class LayerCall:
    """One call of a layer, for those who watch.

    Attributes:
        name: Name of the layer.
        layer: The layer.
        input: What came in, in float.
        quantized: What the layer computed with; ``input`` itself if the input is not quantized.
        output: What came out.
        again: Computes the layer on the same input with another choice of quantizers.
    """

    name: str
    layer: QATLayer
    input: Tensor
    quantized: Tensor
    output: Any
    again: Callable[[frozenset[str]], Any]


Watcher = Callable[[LayerCall], None]


class Switchboard:
    """Switches the layers of a model on and off, one by one.

    Args:
        model: A private copy of a prepared model; changed until :meth:`close`.
        layers: The layers to switch, by name; all others compute in float.
    """

    def __init__(self, model: nn.Module, layers: Mapping[str, QATLayer]) -> None:
        self.model = model
        self.layers = dict(layers)
        self._names = {layer: name for name, layer in self.layers.items()}
        self._wrapped: list[nn.Module] = []
        self._quantized: Mapping[str, frozenset[str]] = {}
        self._replay: Sequence[Call] = ()
        self._calls: list[Call] | None = None
        self._position = 0
        self._watcher: Watcher | None = None
        self._on = _switched_on(model)
        for module in model.modules():
            if isinstance(module, QATLayer):
                self._wrap(module, functools.partial(self._run_layer, module))
            elif isinstance(module, FakeQuantizeBase):
                module.enable_observer(False)
        for module in {layer.input_quantizer for layer in self.layers.values()}:
            self._wrap(module, _pass_on)

    def _wrap(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        module.__dict__["forward"] = forward
        self._wrapped.append(module)

    def close(self) -> None:
        """Let the model run as before."""
        for module in self._wrapped:
            module.__dict__.pop("forward", None)

    def run(
        self,
        forward: Callable[[nn.Module], Any],
        quantized: Mapping[str, frozenset[str]],
        *,
        replay: Sequence[Call] = (),
        keep: bool = False,
        watcher: Watcher | None = None,
    ) -> tuple[Any, list[Call]]:
        """Run the model once.

        Args:
            forward: Calls the model.
            quantized: Which of ``"input"`` and ``"weight"`` is quantized, by layer; others: none.
            replay: Outputs of the first calls of layers, which are not computed again.
            keep: Whether to keep the output of each call.
            watcher: Sees every call that is computed.

        Returns:
            What the model returned, and the outputs of its layers if they are kept.
        """
        self._quantized, self._replay, self._watcher = quantized, replay, watcher
        self._calls = [] if keep else None
        self._position = 0
        output = forward(self.model)
        return output, self._calls or []

    def _run_layer(self, layer: QATLayer, *args: Any, **kwargs: Any) -> Any:
        """Stand for the forward of a layer."""
        name = self._names.get(layer, "")
        position, self._position = self._position, self._position + 1
        if position < len(self._replay) and self._replay[position].name == name:
            return copied(self._replay[position].output)
        kwargs.pop("quantized", None)
        kwargs.pop("float_input", None)
        value = kwargs.pop("input") if "input" in kwargs else args[0]
        rest = args[1:] if args and value is args[0] else args

        def again(parts: frozenset[str]) -> Any:
            return self._compute(layer, value, parts, rest, kwargs)[1]

        chosen = self._quantized.get(name, NEITHER)
        quantized, output = self._compute(layer, value, chosen, rest, kwargs)
        if self._watcher is not None and name:
            self._watcher(LayerCall(name, layer, value, quantized, output, again))
        if self._calls is not None:
            self._calls.append(Call(name, copied(output)))
        return output

    def _compute(
        self, layer: QATLayer, value: Tensor, parts: frozenset[str], rest: Any, kwargs: Any
    ) -> tuple[Tensor, Any]:
        """Return the input that the layer computes with, and its output."""
        owner = layer.input_quantizer
        weights = {getattr(layer, key) for key in layer.weight_quantizers.values()}
        for module in layer.children():
            if isinstance(module, FakeQuantizeBase):
                part = "weight" if module in weights else "input"
                module.enable_fake_quant(part in parts and self._on[module])
        quantized = value
        if "input" in parts and self._on[owner]:
            owner.enable_fake_quant(True)
            quantized = type(owner).forward(owner, value)
        return quantized, type(layer).forward(layer, quantized, *rest, **kwargs, quantized=True)


def _pass_on(x: Tensor) -> Tensor:
    """Stand for a quantizer in front of a layer, which quantizes its input itself now."""
    return x


def _switched_on(model: nn.Module) -> dict[nn.Module, bool]:
    """Return which quantizers the user lets quantize."""
    return {
        module: bool(module.fake_quant_enabled)
        for module in model.modules()
        if isinstance(module, FakeQuantizeBase)
    }


def copied(value: Any) -> Any:
    """Copy the tensors in a value of any structure: code behind may change them in place."""
    return tree_map(lambda item: item.clone() if isinstance(item, Tensor) else item, value)


@contextmanager
def switchboard(copy: nn.Module, names: Iterable[str]) -> Iterator[Switchboard]:
    """Yield a switchboard of a private copy of a prepared model, in eval mode.

    Args:
        copy: The copy.
        names: The layers to switch.
    """
    modules = dict(copy.named_modules())
    layers = {name: layer for name in names if isinstance(layer := modules[name], QATLayer)}
    board = Switchboard(copy, layers)
    try:
        with torch.no_grad():
            yield board
    finally:
        board.close()
