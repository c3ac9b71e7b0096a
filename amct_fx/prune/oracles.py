"""Checks that a plan removes only what the rest of the model cannot see.

Source: spec/pruning.md section 13.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from amct_fx.copying import copy_model
from amct_fx.errors import PruneError
from amct_fx.graph.signature import as_call
from amct_fx.prune.masked_norms import attach_norm_masks
from amct_fx.prune.remove import KeptIndices, cut_tensor, remove_channels, run_graphs

if TYPE_CHECKING:
    from amct_fx.prune.plan import PrunePlan

__all__ = ["Agreement", "check_plan", "column_mask_oracle", "masked_copy", "safe_oracle"]


@dataclass(frozen=True)
class Agreement:
    """How far a pruned model is from the full one with masks.

    Attributes:
        outputs: Largest difference of the outputs, relative to their largest magnitude.
        gradients: The same for the gradients of what is kept.
    """

    outputs: float
    gradients: float = 0.0

    @property
    def worst(self) -> float:
        """The larger of both."""
        return max(self.outputs, self.gradients)


def masked_copy(model: nn.Module, plan: PrunePlan, *, rows: bool = False) -> nn.Module:
    """Return a copy whose weights are zero where the plan's column masks are.

    Args:
        model: The full model.
        plan: A plan for it.
        rows: Apply the row masks, too.
    """
    masked = copy_model(model)
    masks = [*plan.column_masks().items(), *(plan.row_masks().items() if rows else ())]
    with torch.no_grad():
        for name, mask in masks:
            parameter = masked.get_parameter(name)
            parameter.mul_(mask.to(parameter.device))
    norms = plan.norm_masks()
    if any(norm.call for norm in norms):  # what a function counts is decided in the graph
        run_graphs(masked, plan)
    attach_norm_masks(masked, norms)
    return masked


def column_mask_oracle(
    model: nn.Module,
    plan: PrunePlan,
    example_inputs: Any,
    *,
    train: bool = False,
    double: bool = False,
    rows: bool = False,
) -> Agreement:
    """Compare the full model with masked columns and the model without the channels.

    Valid for every operation between producer and consumer. In train mode the gradients of a sum
    of squares are compared too; dropout must be off.

    Args:
        model: The full model; it is not changed.
        plan: A plan for it.
        example_inputs: A tensor, a tuple of arguments, or a dict of them by name.
        train: Compare in train mode.
        double: Compute in float64, where rounding hides nothing.
        rows: Mask the rows of the producers, too.

    Example:
        >>> from amct_fx import prune_plan
        >>> cfg = '''prune_config { filter_pruner {
        ...     balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }'''
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Sigmoid(), nn.Conv2d(8, 2, 3))
        >>> x = torch.ones(1, 3, 8, 8)
        >>> column_mask_oracle(model, prune_plan(model, cfg, x), x, train=True).worst < 1e-5
        True
    """
    full, small = masked_copy(model, plan, rows=rows), copy_model(model)
    kept = remove_channels(small, plan)
    inputs = as_call(example_inputs)
    if double:
        full, small = full.double(), small.double()
        inputs = tree_map(_as_double, inputs)
    with _mode(full, train), _mode(small, train):
        expected, actual = _outputs(full, inputs), _outputs(small, inputs)
        outputs = max(map(_difference, actual, expected), default=0.0)
        if not train:
            return Agreement(outputs)
        for results in (expected, actual):
            sum(result.square().sum() for result in results if result.requires_grad).backward()  # type: ignore[union-attr]
    return Agreement(outputs, _gradient_difference(full, small, plan, kept))


def safe_oracle(model: nn.Module, plan: PrunePlan, example_inputs: Any) -> Agreement:
    """Compare, in eval mode, the full model with zeroed producers and the pruned model.

    Rows, biases, and what is attached to removed channels are zero. Cheap, but valid only if every
    operation up to the consumers maps 0 to 0.

    Args:
        model: The full model; it is not changed.
        plan: A plan for it.
        example_inputs: A tensor, a tuple of arguments, or a dict of them by name.
    """
    full, small = copy_model(model), copy_model(model)
    with torch.no_grad():
        for group in plan.groups:
            for member in group.members:
                if member.role in ("row", "attached") and not member.parameter.startswith(
                    "running"
                ):
                    _zero(full, member, group.cut)
    remove_channels(small, plan)
    inputs = as_call(example_inputs)
    with _mode(full, False), _mode(small, False):
        expected, actual = _outputs(full, inputs), _outputs(small, inputs)
    return Agreement(max(map(_difference, actual, expected), default=0.0))


def check_plan(
    model: nn.Module, plan: PrunePlan, example_inputs: Any, tolerance: float = 1e-5
) -> None:
    """Raise unless the plan leaves the function of the model alone, up to its masks.

    Args:
        model: The full model; it is not changed.
        plan: A plan for it, perhaps edited.
        example_inputs: A tensor, a tuple of arguments, or a dict of them by name.
        tolerance: Largest difference allowed, relative to the largest output.

    Raises:
        PruneError: If the pruned model computes something else.
    """
    found = column_mask_oracle(model, plan, example_inputs)
    if not found.outputs <= tolerance:
        message = (
            f"the pruned model differs from the masked one by {found.outputs:.3g}; please report "
            "this model, its plan is wrong"
        )
        raise PruneError(message)


def _zero(model: nn.Module, member: Any, cut: tuple[int, ...]) -> None:
    tensor = getattr(model.get_submodule(member.layer), member.parameter)
    indices = [position for unit in cut for position in member.positions[unit]]
    if member.groups == 1:
        tensor.index_fill_(member.axis, torch.tensor(indices, dtype=torch.long), 0)
        return
    width = tensor.shape[1]
    block = tensor.shape[0] // member.groups
    for index in indices:
        group = index // width
        tensor[group * block : (group + 1) * block, index % width] = 0


@contextmanager
def _mode(model: nn.Module, train: bool) -> Iterator[None]:
    before = {module: module.training for module in model.modules()}
    model.train(train)
    try:
        yield
    finally:
        for module, mode in before.items():
            module.training = mode


def _outputs(model: nn.Module, call: Any) -> list[Tensor]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return [
            leaf for leaf in tree_leaves(model(*call[0], **call[1])) if isinstance(leaf, Tensor)
        ]


def _as_double(value: Any) -> Any:
    floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.double() if floating else value


def _difference(actual: Tensor, expected: Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    scale = expected.detach().abs().max().clamp(min=1e-12)
    return float((actual - expected).detach().abs().max() / scale)


def _gradient_difference(
    full: nn.Module, small: nn.Module, plan: PrunePlan, kept: KeptIndices
) -> float:
    theirs = dict(small.named_parameters())
    groups: Mapping[str, int] = {
        member.key: member.groups
        for group in plan.groups
        for member in group.members
        if member.groups > 1
    }
    gradients = {
        name: cut_tensor(parameter.grad, kept.get(name, {}), groups.get(name, 1))
        for name, parameter in full.named_parameters()
        if parameter.grad is not None
    }
    # what is 0 by its nature, such as a bias before a batch norm, holds only rounding noise
    floor = 1e-3 * max((float(g.abs().max()) for g in gradients.values()), default=0.0)
    worst = 0.0
    for name, expected in gradients.items():
        actual = theirs[name].grad
        if actual is None or actual.shape != expected.shape:
            return float("inf")
        scale = max(float(expected.abs().max()), floor, 1e-12)
        worst = max(worst, float((actual - expected).abs().max()) / scale)
    return worst
