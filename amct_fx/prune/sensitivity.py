"""How much a loss depends on each unit of channels: first-order Taylor expansion.

Source: spec/pruning.md section 11; Molchanov et al., "Importance Estimation for Neural Network
Pruning", CVPR 2019.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from amct_fx.errors import InputDataError

if TYPE_CHECKING:
    from amct_fx.prune.plan_parts import PruneGroup

__all__ = ["Loss", "Samples", "TaylorLossSensitivity", "samples_of"]

Loss = Callable[[Any, Any], Tensor]
Samples = list[tuple[Any, Any]]


class TaylorLossSensitivity:
    """Scores a unit by ``Σ |w · grad|`` over its rows in all producers of its group.

    The gradient is that of the loss in eval mode, averaged over the samples.

    Args:
        loss: Of an output and a target; ``None`` for the mean absolute difference.
    """

    def __init__(self, loss: Loss | None = None) -> None:
        self.loss = loss or _l1

    def setup_initialization(
        self,
        graph_and_info: tuple[Any, nn.Module],
        samples: Samples,
        iterations: int,
        _outputs: Any,
    ) -> None:
        """Compute the gradients.

        Args:
            graph_and_info: The plan and the model; its parameters get gradients.
            samples: Inputs and targets.
            iterations: How many of them to take.

        Raises:
            InputDataError: There are fewer samples.
        """
        self._model = graph_and_info[1]
        if len(samples) < iterations:
            message = f"test_iteration is {iterations}, but there are only {len(samples)} samples"
            raise InputDataError(message)
        self._model.eval().zero_grad(set_to_none=True)
        with torch.enable_grad():
            for number, sample in enumerate(samples[:iterations]):
                inputs, target = tree_map_only(Tensor, Tensor.detach, sample)  # nothing but ours
                arguments = inputs if isinstance(inputs, tuple) else (inputs,)
                output = self._model(*arguments)
                try:
                    loss = self._total(output, target)
                except (AttributeError, RuntimeError, TypeError, ValueError) as error:
                    message = (
                        f"the loss of sample {number} cannot be computed ({error}); pass loss=, a "
                        "function of an output and a target"
                    )
                    raise InputDataError(message) from error
                if not bool(loss.isfinite()):
                    message = f"the loss of sample {number} is {loss.item()}; look at its values"
                    raise InputDataError(message)
                (loss / iterations).backward()

    def get_sensitivity(self, groups: Sequence[PruneGroup]) -> list[list[float]]:
        """Return one score for each unit of each group."""
        return [self._scores(group) for group in groups]

    def _total(self, output: Any, target: Any) -> Tensor:
        """Return the loss; those of several outputs are added."""
        if isinstance(output, (tuple, list)):
            targets = target if isinstance(target, (tuple, list)) else [target] * len(output)
            losses = [self.loss(o, t) for o, t in zip(output, targets, strict=True)]
            return torch.stack(losses).sum()
        return self.loss(output, target)

    def _scores(self, group: PruneGroup) -> list[float]:
        scores = torch.zeros(group.channels, dtype=torch.float64)
        for member in group.members:
            if member.role != "row" or member.parameter != "weight":
                continue
            weight = self._model.get_parameter(member.key)
            if weight.grad is None:
                continue
            rows = _row_sums((weight * weight.grad).abs().detach().double().cpu(), member)
            for unit, positions in enumerate(member.positions):
                scores[unit] += rows[list(positions)].sum()
        return [float(score) for score in scores]


def samples_of(data: Any, count: int | None = None) -> Samples:
    """Return single samples with a batch axis of 1, or the batches of an iterable as they are.

    Args:
        data: ``[inputs, targets]`` with the samples along axis 0: two tensors, a tuple of inputs
            and a tensor, or a tensor and a tuple of targets; or an iterable of such pairs.
        count: How many to take; ``None`` for all. A loader is not read further.

    Raises:
        InputDataError: It is neither, or there are fewer targets than inputs.

    Example:
        >>> [x.shape for x, _ in samples_of([torch.zeros(3, 4), torch.zeros(3)])]
        [torch.Size([1, 4]), torch.Size([1, 4]), torch.Size([1, 4])]
    """
    if isinstance(data, (list, tuple)) and len(data) == 2 and _are_targets(*data):
        inputs, targets = data[0], tuple(data[1]) if isinstance(data[1], list) else data[1]
        found, wanted = (len(v[0] if isinstance(v, tuple) else v) for v in (inputs, targets))
        if found != wanted:
            message = f"data holds {found} inputs, but {wanted} targets"
            raise InputDataError(message)
        return [(_sample(inputs, i), _sample(targets, i)) for i in range(found)][:count]
    message = "data must be [inputs, targets], or an iterable of such pairs"
    if isinstance(data, (Tensor, str)) or not isinstance(data, Iterable):
        raise InputDataError(message)
    samples = []
    for item in islice(data, count):
        if not isinstance(item, (list, tuple)) or len(item) != 2:
            raise InputDataError(message)
        samples.append((item[0], item[1]))
    return samples


def _are_targets(inputs: Any, targets: Any) -> bool:
    """Say whether both hold all samples; ``[(x, y), (x, y)]`` are two pairs."""
    several = isinstance(inputs, Tensor) and isinstance(targets, (tuple, list)) and bool(targets)
    return isinstance(targets, Tensor) or (
        several and all(isinstance(target, Tensor) for target in targets)
    )


def _sample(inputs: Any, index: int) -> Any:
    if isinstance(inputs, tuple):
        return tuple(part[index : index + 1] for part in inputs)
    return inputs[index : index + 1]


def _l1(output: Any, target: Any) -> Tensor:
    return F.l1_loss(output, target)


def _row_sums(values: Tensor, member: Any) -> Tensor:
    """Sum over everything but the output channels, which transposed convolutions split by group."""
    if member.axis == 0:
        return values.flatten(1).sum(1)
    by_group = values.flatten(2).sum(2) if values.dim() > 2 else values
    rows: Tensor = by_group.unflatten(0, (member.groups, -1)).sum(1).flatten()
    return rows
