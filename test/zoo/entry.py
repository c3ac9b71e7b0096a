"""One model of the zoo: how to build it and what it reads."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["Entry", "image"]

Inputs = tuple[Tensor, ...] | Mapping[str, Tensor]


@dataclass(frozen=True)
class Entry:
    """A float model with random weights and its inputs, both made when asked for.

    ``refused_by`` says of an exporter why it cannot write the float model either, where it writes
    something else without an error.
    """

    group: str
    library: str
    name: str
    build: Callable[[], nn.Module]
    inputs: Callable[[int], Inputs]
    input_text: str
    refused_by: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.group}/{self.name}"

    def arguments(self, batch: int = 2) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Return the positional and the keyword arguments of one batch."""
        inputs = self.inputs(batch)
        return ((), dict(inputs)) if isinstance(inputs, Mapping) else (inputs, {})


def image(size: int) -> Callable[[int], tuple[Tensor, ...]]:
    """Return a maker of one batch of square images."""

    def make(batch: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        return (torch.randn(batch, 3, size, size, generator=generator),)

    return make
