"""Where the channels of a tensor lie: an array of atoms over its axes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from amct_fx.prune.channels.atoms import FIXED

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Record", "Space", "compressed"]


@dataclass(eq=False)
class Record:
    """AMCT's unit of coupling: what one layer makes, joined by adds.

    Attributes:
        balance: Blocks in which equal numbers stay.
        linear: The channels lie on the last axis.
        matmul: Every producer is a Linear that AMCT sees as a MatMul.
        into: The record that absorbed this one.
    """

    balance: int = 1
    linear: bool = False
    matmul: bool = False
    into: Record | None = None

    @property
    def root(self) -> Record:
        """The record that this one became part of."""
        return self if self.into is None else self.into.root

    def absorb(self, other: Record) -> None:
        """Take over the producers of another record."""
        own, theirs = self.root, other.root
        if own is not theirs:
            own.balance = math.lcm(own.balance, theirs.balance)
            own.matmul = own.matmul and theirs.matmul
            theirs.into = own


@dataclass(frozen=True)
class Space:
    """The channels of a tensor.

    Attributes:
        atoms: int64, of the rank of the tensor: along each axis the size of the tensor where atoms
            differ, else 1.
        axis: The axis along which channels are removed. Other axes with different atoms keep their
            size; blocks along them lose equally many.
        zero: A channel whose producer rows and biases are 0 is 0 here.
        records: In mode ``"amct"`` the records of the tensor, in order.
    """

    atoms: Tensor
    axis: int
    zero: bool = True
    records: tuple[Record, ...] = field(default=(), compare=False)

    @property
    def axes(self) -> tuple[int, ...]:
        """The axes along which atoms differ, and the one along which channels are removed."""
        return tuple(
            a for a in range(self.atoms.dim()) if self.atoms.shape[a] > 1 or a == self.axis
        )

    @property
    def free(self) -> bool:
        """Whether any channel was not fixed from the start."""
        return bool((self.atoms != FIXED).any())

    def aligned(self, rank: int) -> Tensor:
        """Return the atoms with axes of size 1 in front, as broadcasting does."""
        return self.atoms.reshape((1,) * (rank - self.atoms.dim()) + tuple(self.atoms.shape))


def compressed(atoms: Tensor) -> Tensor:
    """Return ``atoms`` with size 1 along each axis where they do not differ."""
    for axis in range(atoms.dim()):
        first = atoms.narrow(axis, 0, 1)
        if atoms.shape[axis] > 1 and bool((atoms == first).all()):
            atoms = first
    return atoms.contiguous()
