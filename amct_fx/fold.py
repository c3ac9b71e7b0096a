"""Which batch norm a convolution absorbs at conversion, and its eval-mode arithmetic.

Source: spec/quantization.md section 4.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Container, Iterable

import torch.nn.functional as F
from torch import Tensor, fx, nn

from amct_fx.errors import AmctWarning
from amct_fx.graph import batch_norm_after, fx_graph_of, guard_of, module_of, settled
from amct_fx.nn.become import has_hooks
from amct_fx.nn.integer import BatchNormAffine, batch_norm_affine

__all__ = ["foldable_batch_norm"]

_FOLDABLE = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def foldable_batch_norm(
    calls: list[fx.Node],
    region: nn.Module,
    name: str,
    foreign: Container[nn.Module | None] = (),
) -> tuple[BatchNormAffine | None, list[fx.Node]]:
    """Find the batch norm behind a convolution that the integer weights can absorb.

    Args:
        calls: All calls of a layer.
        region: The module that the graph belongs to.
        name: Name of the layer, for the warning.
        foreign: Modules that code outside the graph may call, or whose tensors it reads.

    Returns:
        The arithmetic and the nodes of the batch norm, one for each call; ``None`` and no node
        behind transposed convolutions and Linear, with other readers of the convolution, with hooks
        on either, when the calls have different followers, or calls of another form may have,
        without running statistics, or when a value is not finite (with a warning).
    """
    following = [batch_norm_after(call, region) for call in calls]
    form = guard_of(region).form
    found = [
        node
        for call, node in zip(calls, following, strict=True)
        if node is not None and settled(call, form)(node)
    ]
    layer = module_of(calls[0], region)
    foldable = isinstance(layer, _FOLDABLE) and not has_hooks(layer)
    foldable = foldable and layer not in foreign
    foldable = foldable and not any(module_of(node, region) in foreign for node in found)
    foldable = foldable and not any(_is_hooked(node, region) for node in found)
    same = len({module_of(node, region) or node for node in found}) == 1
    if not foldable or not same or len(found) != len(calls):
        return None, []
    affine = _affine_of(found[0], region)
    if affine is None:
        return None, []
    if not affine.is_finite:
        message = f"the batch norm behind {name} is not finite in eval mode; it is not folded"
        warnings.warn(message, AmctWarning, stacklevel=4)
        return None, []
    return affine, found


def used_elsewhere(region: nn.Module, others: Iterable[nn.Module]) -> set[nn.Module | None]:
    """Return what more than the calls of one graph depends on.

    Args:
        region: A traced part.
        others: The other traced parts of the model.

    Returns:
        Modules inside islands, called by other traced parts, or whose tensors the graph reads.
    """
    found: set[nn.Module | None] = set()
    for other in others:
        found.update(module_of(node, other) for node in fx_graph_of(other).nodes)
    for node in fx_graph_of(region).nodes:
        if node.op == "get_attr" and not str(node.target).endswith("training"):
            found.add(region.get_submodule(str(node.target).rpartition(".")[0]))
        module = module_of(node, region)
        if module is not None:
            found.update(part for part in module.modules() if part is not module)
    return found - {None}


def _is_hooked(node: fx.Node, region: nn.Module) -> bool:
    module = module_of(node, region)
    return module is not None and has_hooks(module)


def _affine_of(node: fx.Node, region: nn.Module) -> BatchNormAffine | None:
    module = module_of(node, region)
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return batch_norm_affine(
            module.running_mean, module.running_var, module.weight, module.bias, module.eps
        )
    if node.target is not F.batch_norm:
        return None
    values = inspect.signature(F.batch_norm).bind(*node.args, **node.kwargs).arguments
    if not _evaluates(values.get("training")):
        return None
    names = ("running_mean", "running_var", "weight", "bias")
    mean, var, weight, bias = (_tensor_of(values.get(key), region) for key in names)
    return batch_norm_affine(mean, var, weight, bias, float(values.get("eps", 1e-5)))


def _evaluates(training: object) -> bool:
    """Say whether a functional batch norm uses its statistics in eval mode."""
    if isinstance(training, fx.Node):
        return training.op == "get_attr" and str(training.target).endswith("training")
    return not training


def _tensor_of(value: object, region: nn.Module) -> Tensor | None:
    if not isinstance(value, fx.Node):
        return None
    owner, _, name = str(value.target).rpartition(".")
    tensor = getattr(region.get_submodule(owner), name)
    return tensor if isinstance(tensor, Tensor) else None
