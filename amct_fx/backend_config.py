"""What can be quantized, and the reason when not.

Source: spec/config.md section 5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from amct_fx.config import LayerFacts, ModelFacts, PruneMode
from amct_fx.config.layer_types import CONV_TYPES, QUANTIZABLE_TYPES
from amct_fx.config.messages import warn
from amct_fx.errors import InputDataError
from amct_fx.graph import Capture, as_call, is_functional_layer, layer_calls, weight_readers
from amct_fx.graph.makers import channel_makers
from amct_fx.graph.recording import Recording, record_calls
from amct_fx.nn.become import changes_its_input, float_class_of
from amct_fx.nn.recurrent import unsupported_form

__all__ = [
    "QUANTIZABLE_CLASSES",
    "Reuse",
    "is_layer",
    "is_only_prunable",
    "model_facts",
    "other_weights",
    "warn_of_reused_layers",
]

QUANTIZABLE_CLASSES: tuple[type[nn.Module], ...] = tuple(
    getattr(nn, name) for name in QUANTIZABLE_TYPES
)
"""Layer types that a configuration may name; exactly these classes, no subclasses.

A layer under ``torch.nn.utils.parametrize`` counts as the class it was.
"""


def is_layer(module: nn.Module) -> bool:
    """Say whether ``module`` is of a type that a configuration may name.

    Example:
        >>> is_layer(nn.Linear(2, 2)), is_layer(nn.ReLU())
        (True, False)
    """
    return float_class_of(module) in QUANTIZABLE_CLASSES


_PRUNABLE_CLASSES = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.Linear,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)
_REUSED = "in one forward (reused)"
_SET_BY_HOOK = "its weight is set by a hook (torch.nn.utils.prune, old spectral_norm)"
_UNBATCHED = "its input has no batch axis"

Reuse = Literal["float", "quantize"]
"""What to do with a layer that one forward calls several times, or whose weight is shared."""


def model_facts(
    model: nn.Module,
    captured: Capture,
    reused: Reuse = "float",
    *,
    functional: bool = False,
    prune_mode: PruneMode = "native",
) -> ModelFacts:
    """Describe the layers of ``model`` for the configuration.

    Args:
        model: The traced model.
        captured: What tracing found; decides which layers are called, and how often.
        reused: ``"float"`` excludes layers that are called several times or share a weight.
        functional: A layer whose weight only a functional call reads owns no share in it.
        prune_mode: Decides which layers can be pruned.

    Returns:
        Every layer that can be quantized or pruned by its type, in ``named_modules()`` order, with
        the reason when it must stay float, or must not be pruned.
    """
    calls = _call_counts(model, captured)
    sharing = calls if functional else model.modules()
    owners = Counter(key for layer in sharing for key in _weights(layer))
    readers = _weight_readers(captured, functional)
    layers = tuple(
        _layer_facts(name, module, _Use(calls.get(module, 0), owners, readers, reused, prune_mode))
        for name, module in model.named_modules()
        if is_layer(module) or is_only_prunable(module)
    )
    modules = {name: type(module).__name__ for name, module in model.named_modules()}
    makers = channel_makers(model, captured)
    return ModelFacts(layers=layers, modules=modules, prune_mode=prune_mode, makers=makers)


def warn_of_reused_layers(facts: ModelFacts) -> None:
    """Warn once of all layers that stay float because one forward calls them several times."""
    names = [repr(layer.name) for layer in facts.layers if (layer.reason or "").endswith(_REUSED)]
    if names:
        warn(
            f"one forward calls {', '.join(names)} several times, so they stay float; "
            'reused="quantize" quantizes them'
        )


def recorded_run(
    model: nn.Module, example_inputs: Any, argument: str = "example_inputs"
) -> Recording:
    """Return what a run on the example inputs shows.

    Args:
        model: The float model; runs once, in eval mode, and is the same afterwards.
        example_inputs: A tensor, a tuple of arguments, or a dict of them by name.
        argument: What the caller calls them, for the message.

    Raises:
        InputDataError: If the model cannot run on them.
    """
    as_call(example_inputs)  # raises errors of its own
    try:
        return record_calls(model, example_inputs)
    except Exception as error:  # whatever the user's forward raises
        message = f"the model cannot run on {argument}: {type(error).__name__}: {error}"
        raise InputDataError(message) from error


def unbatched_layers(
    model: nn.Module, example_inputs: Any, argument: str = "example_inputs"
) -> frozenset[str]:
    """Return the names of the convolutions whose input has no batch axis.

    As :func:`recorded_run` and :func:`unbatched_in`.
    """
    return unbatched_in(model, recorded_run(model, example_inputs, argument))


def unbatched_in(model: nn.Module, calls: Recording) -> frozenset[str]:
    """Return the names of the convolutions whose input had no batch axis in a recorded run."""
    return frozenset(
        name
        for name, layer in model.named_modules()
        if _is_convolution(layer) and layer in calls.ranks and calls.ranks[layer] < _rank(layer)
    )


def _rank(layer: Any) -> int:
    return int(layer.weight.dim())


def without_unbatched(facts: ModelFacts, unbatched: Container[str]) -> ModelFacts:
    """Exclude the convolutions whose input has no batch axis."""
    layers = tuple(
        replace(layer, reason=layer.reason or _UNBATCHED, prune_reason=_UNBATCHED)
        if layer.name in unbatched
        else layer
        for layer in facts.layers
    )
    return replace(facts, layers=layers)


def is_only_prunable(module: nn.Module) -> bool:
    """Say whether a module computes what a layer computes, but is of no type that is quantized."""
    base = _prunable_base(module)
    return base is not None and not is_layer(module) and type(module).forward is base.forward


def _prunable_base(module: nn.Module) -> type[nn.Module] | None:
    return next((cls for cls in _PRUNABLE_CLASSES if isinstance(module, cls)), None)


def _is_convolution(module: nn.Module) -> bool:
    return is_layer(module) and float_class_of(module).__name__ in CONV_TYPES


def other_weights(model: nn.Module) -> tuple[LayerFacts, ...]:
    """List the modules with weight matrices that no configuration can name, with the reason.

    Args:
        model: The float model.

    Example:
        >>> attention = nn.MultiheadAttention(8, 2)
        >>> [(layer.name, layer.layer_type) for layer in other_weights(attention)]
        [('', 'MultiheadAttention'), ('out_proj', 'NonDynamicallyQuantizableLinear')]
    """
    return tuple(
        LayerFacts(name=name, layer_type=type(module).__name__, reason=_why_no_layer(module))
        for name, module in model.named_modules()
        if not is_layer(module) and any(p.dim() > 1 for p in module.parameters(recurse=False))
    )


def _why_no_layer(module: nn.Module) -> str:
    base = next((cls.__name__ for cls in QUANTIZABLE_CLASSES if isinstance(module, cls)), None)
    if base is not None:
        return f"only exact {base} layers are quantized: a subclass may compute something else"
    return f"{type(module).__name__} is no layer type that is quantized"


def _weights(module: nn.Module) -> list[int]:
    """Identify the weight tensors of a layer; biases may be shared."""
    if not is_layer(module):
        return []
    named = module.named_parameters(recurse=False)
    return [id(parameter) for name, parameter in named if name.startswith("weight")]


def _call_counts(model: nn.Module, captured: Capture) -> Counter[nn.Module]:
    """Count the calls of each layer; one that an island calls counts once: nothing shows more."""
    counts: Counter[nn.Module] = Counter()
    for region in captured.regions:
        for module, nodes in layer_calls(region.graph, region.module).items():
            counts[module] += len(nodes)
    for name in captured.island_leaves:
        layer = model.get_submodule(name)
        counts[layer] = max(counts[layer], 1)  # a traced part may hold it under another name
    return counts


def _weight_readers(captured: Capture, functional: bool) -> dict[int, str]:
    """Say for each weight what computes with it other than a call of its layer."""
    found: dict[int, str] = {}
    for region in captured.regions:
        for key, node in weight_readers(region.graph, region.module).items():
            advice = ", which functional=True quantizes" if is_functional_layer(node) else ""
            found[key] = f"only its weight is read, by {node.name!r}" + advice * (not functional)
        for module, nodes in layer_calls(region.graph, region.module).items():
            found.update(
                (key, f"the functional layer {nodes[0].target!r} computes with its weight")
                for key in _weights(module)
            )
    return found


@dataclass(frozen=True)
class _Use:
    """How the model uses a layer, and which uses hinder."""

    calls: int
    owners: Counter[int]
    readers: Mapping[int, str]
    reused: Reuse
    prune_mode: PruneMode

    def of_weight(self, module: nn.Module) -> int:
        """Return how often the weight of a layer is used."""
        return max([self.calls, *(self.owners[key] for key in _weights(module))])

    def quant_reason(self, module: nn.Module) -> str | None:
        """Give the reason against quantization."""
        if not is_layer(module):
            return _why_no_layer(module)
        return _own_reason(module) or self._reason(module, may_repeat=self.reused == "quantize")

    def prune_reason(self, module: nn.Module) -> str | None:
        """Give the reason against pruning."""
        if _weight_set_by_hook(module):
            return _SET_BY_HOOK
        if not is_layer(module):
            return None if self.prune_mode == "native" else _why_no_layer(module)
        return self._reason(module, may_repeat=self.prune_mode == "native")

    def _reason(self, module: nn.Module, *, may_repeat: bool) -> str | None:
        if not may_repeat and any(self.owners[key] > 1 for key in _weights(module)):
            return "its weight is shared with another layer"
        if self.calls == 0:
            read = [self.readers[key] for key in _weights(module) if key in self.readers]
            return "; ".join(["it is never called in the traced forward", *read[:1]])
        if not may_repeat and self.calls > 1:
            return f"it is called {self.calls} times {_REUSED}"
        return None


def _layer_facts(name: str, module: nn.Module, use: _Use) -> LayerFacts:
    layer: Any = module  # the attributes below belong to its class
    if isinstance(module, nn.RNNBase):
        sizes: dict[str, Any] = {"packing_sizes": (layer.input_size, layer.hidden_size)}
    elif isinstance(module, nn.Linear):
        sizes = {"packing_sizes": (layer.in_features,)}
    else:
        channels = layer.in_channels
        sizes = {"packing_sizes": (channels,), "in_channels": channels, "groups": layer.groups}
        sizes["dilation"] = layer.dilation
    return LayerFacts(
        name=name,
        layer_type=(_prunable_base(module) or float_class_of(module)).__name__,
        reason=use.quant_reason(module),
        prune_reason=use.prune_reason(module),
        uses=use.of_weight(module),
        prune_mode=use.prune_mode,
        **sizes,
    )


def _own_reason(module: nn.Module) -> str | None:
    """Give the reason that lies in the layer itself."""
    mode = getattr(module, "padding_mode", "zeros")
    if mode != "zeros":
        return f"padding_mode={mode!r}: only zero padding equals the zero point of the input"
    if isinstance(module, nn.Conv3d) and module.dilation[0] != 1:
        return f"dilation {module.dilation[0]} along depth is not supported"
    if _weight_set_by_hook(module):
        return _SET_BY_HOOK
    if isinstance(module, nn.RNNBase):
        if type(module) is not float_class_of(module):
            return "a weight of it is parametrized"
        return unsupported_form(module)
    return None


def _weight_set_by_hook(module: nn.Module) -> bool:
    """Say whether something other than ``parametrize`` or ``weight_norm`` makes the weight."""
    plain = isinstance(vars(module).get("weight"), Tensor)
    return plain and changes_its_input(module)
