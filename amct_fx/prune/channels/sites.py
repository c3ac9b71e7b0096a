"""The places in parameters that belong to channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Role", "Site", "SiteKey"]

SiteKey: TypeAlias = tuple[str, int]
"""Name of a parameter or buffer in the model, and its axis."""

Role: TypeAlias = Literal["row", "column", "attached"]


@dataclass
class Site:
    """One axis of a parameter or buffer.

    Attributes:
        layer: Name of the module.
        tensor: Name of the parameter or buffer in the module.
        axis: The axis.
        role: ``"row"`` of a producer, ``"column"`` of a consumer, ``"attached"`` to channels.
        atoms: int64, the atom of every index. For grouped convolutions the indices of all groups,
            group after group: ``groups`` times the size of the axis.
        groups: Blocks of the other axis that have their own indices.
    """

    layer: str
    tensor: str
    axis: int
    role: Role
    atoms: Tensor
    groups: int = 1

    @property
    def key(self) -> SiteKey:
        """Name of the tensor in the model, and axis."""
        return (f"{self.layer}.{self.tensor}" if self.layer else self.tensor), self.axis
