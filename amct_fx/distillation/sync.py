"""Keeping the ranks of a distributed distillation equal.

Every rank distils on its own batches. After the backward of a block all ranks average its
gradients; decisions (input choice, best state) are made on averages, so that all ranks make the
same ones. Source: spec/distillation.md section 11.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from amct_fx.errors import ArgumentError

__all__ = ["average_gradients", "average_tensors", "check_equal_counts", "mean_of_ranks", "ranks"]


def ranks() -> int:
    """Return the number of processes; 1 without a process group."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def mean_of_ranks(values: Tensor) -> Tensor:
    """Return the mean of a tensor over all ranks, the same on each of them.

    Args:
        values: Any shape; the same shape on all ranks.
    """
    if ranks() == 1:
        return values
    total = values.detach().clone()
    dist.all_reduce(total)
    return total / ranks()


def average_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Replace the gradients by their mean over the ranks, in one reduction per dtype.

    Args:
        parameters: The same on all ranks; where a rank has no gradient, it counts as zero.
    """
    if ranks() == 1:
        return
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    average_tensors([parameter.grad for parameter in parameters if parameter.grad is not None])


@torch.no_grad()
def average_tensors(tensors: Iterable[Tensor]) -> None:
    """Replace floating point tensors by their mean over the ranks, in place."""
    if ranks() == 1:
        return
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.is_floating_point():
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    for same in by_dtype.values():
        joined = mean_of_ranks(torch.cat([tensor.reshape(-1) for tensor in same]))
        parts = joined.split([tensor.numel() for tensor in same])
        for tensor, part in zip(same, parts, strict=True):
            tensor.copy_(part.view_as(tensor))


def check_equal_counts(count: int, device: torch.device) -> None:
    """Refuse ranks with different numbers of batches, which would wait for each other for ever.

    Raises:
        ArgumentError: On all ranks, with all numbers.
    """
    if ranks() == 1:
        return
    own = torch.tensor([count], device=device)
    found = [torch.zeros_like(own) for _ in range(ranks())]
    dist.all_gather(found, own)
    counts = [int(item) for item in found]
    if len(set(counts)) > 1:
        message = (
            f"the loaders of the ranks give {counts} batches; every rank needs equally many, as "
            "DistributedSampler arranges"
        )
        raise ArgumentError(message)
