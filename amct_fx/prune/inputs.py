"""Example inputs for a model that came without any, and their description for the plan."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from amct_fx.errors import InputDataError, ModelError
from amct_fx.graph.shapes import propagate_shapes

if TYPE_CHECKING:
    from amct_fx.graph.capture import Region
    from amct_fx.graph.shapes import ShapeFacts

__all__ = ["example_specs", "guess_inputs", "inputs_of"]

_SIDES = (32, 224, 64, 16, 28, 8, 96, 128, 256, 299, 48, 24, 12, 512)


def example_specs(example_inputs: Any) -> tuple[tuple[tuple[int, ...], str], ...]:
    """Return shape and dtype of each tensor of the example; nothing if there is anything else."""
    if isinstance(example_inputs, Mapping):
        return ()
    inputs = example_inputs if isinstance(example_inputs, tuple) else (example_inputs,)
    if not all(isinstance(item, Tensor) for item in inputs):
        return ()
    return tuple((tuple(item.shape), str(item.dtype).removeprefix("torch.")) for item in inputs)


def inputs_of(specs: Sequence[tuple[Sequence[int], str]]) -> tuple[Tensor, ...]:
    """Return zeros of the shapes and dtypes that :func:`example_specs` wrote.

    Example:
        >>> inputs_of([((2, 3), "float32")])
        (tensor([[0., 0., 0.],
                [0., 0., 0.]]),)
    """
    return tuple(torch.zeros(tuple(shape), dtype=getattr(torch, dtype)) for shape, dtype in specs)


def guess_inputs(model: nn.Module, regions: Sequence[Region]) -> tuple[Any, ShapeFacts]:
    """Find shapes that the model takes, from the layers that read its inputs.

    Returns:
        The example inputs and the shapes in the graphs.

    Raises:
        ModelError: If none of the usual shapes fits.
    """
    whole = next((region for region in regions if region.module is model), None)
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    for shapes in _candidates(whole) if whole is not None else ():
        inputs = tuple(torch.zeros(shape, device=device, dtype=_dtype(model)) for shape in shapes)
        try:
            return inputs, propagate_shapes(model, regions, inputs)
        except InputDataError:
            continue
    message = (
        "pruning follows the shapes in the model, which cannot be guessed here; pass "
        "example_inputs, a tensor or a tuple of arguments"
    )
    raise ModelError(message)


def _dtype(model: nn.Module) -> torch.dtype:
    kinds = (p.dtype for p in model.parameters() if p.dtype.is_floating_point)
    return next(kinds, torch.float32)


def _candidates(region: Region) -> Iterator[tuple[tuple[int, ...], ...]]:
    """Yield shapes for all inputs of a traced model."""
    inputs = [node for node in region.graph.nodes if node.op == "placeholder" and not node.args]
    readers = [_first_layer(node, region.module) for node in inputs]
    if not readers or any(layer is None for layer in readers):
        return
    axes = max(_spatial_axes(layer) for layer in readers if layer is not None)
    for side in _SIDES if axes else (1,):
        yield tuple(_shape(layer, side) for layer in readers if layer is not None)
    if not axes:
        yield tuple((2, 5, *_shape(layer, 1)[1:]) for layer in readers if layer is not None)


def _first_layer(node: fx.Node, root: nn.Module) -> nn.Module | None:
    """Return the first layer that reads a value, through operations without a weight."""
    waiting, seen = list(node.users), set()
    for _ in itertools.count():
        if not waiting:
            return None
        user = waiting.pop(0)
        if user in seen:
            continue
        seen.add(user)
        module = root.get_submodule(str(user.target)) if user.op == "call_module" else None
        if isinstance(module, (nn.modules.conv._ConvNd, nn.Linear)):
            return module
        if isinstance(module, (nn.modules.batchnorm._BatchNorm, nn.LayerNorm)) and not user.users:
            return None
        waiting += user.users
    return None


def _spatial_axes(layer: nn.Module) -> int:
    weight: Any = layer.weight
    return 0 if isinstance(layer, nn.Linear) else int(weight.dim()) - 2


def _shape(layer: nn.Module, side: int) -> tuple[int, ...]:
    if isinstance(layer, nn.Linear):
        return 2, layer.in_features
    return (2, int(layer.in_channels), *(side,) * _spatial_axes(layer))  # type: ignore[arg-type]
