"""Channels as numbers: an atom for every output channel, and classes of atoms that live together.

Source: spec/pruning.md section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FIXED", "Atoms", "Pin"]

FIXED = -1
"""The atom of a channel that is never removed."""


@dataclass(frozen=True)
class Pin:
    """Why a channel is never removed: the node that forbids it, a code, and a sentence."""

    code: str
    node: str
    text: str


class Atoms:
    """Union-find over output channels.

    A class remembers its output channels in the order in which the classes were joined, and the
    first reason why it must stay.
    """

    def __init__(self) -> None:
        self._parent: list[int] = []
        self._rows: dict[int, list[tuple[str, int]]] = {}
        self._pins: dict[int, Pin] = {}
        self._without_row_masks: set[int] = set()

    @property
    def total(self) -> int:
        """Number of atoms."""
        return len(self._parent)

    def new(self, layer: str, count: int) -> Tensor:
        """Return ``count`` new atoms: the output channels of ``layer``."""
        first = len(self._parent)
        for row in range(count):
            self._parent.append(first + row)
            self._rows[first + row] = [(layer, row)]
        return torch.arange(first, first + count)

    def root(self, atom: int) -> int:
        """Return the atom that stands for the class of ``atom``."""
        while self._parent[atom] != atom:
            self._parent[atom] = self._parent[self._parent[atom]]
            atom = self._parent[atom]
        return atom

    def roots(self, atoms: Tensor) -> Tensor:
        """Return the root of every atom; what is fixed or pinned is :data:`FIXED`."""
        found = [FIXED if a < 0 else self.root(a) for a in atoms.flatten().tolist()]
        free = [FIXED if root in self._pins else root for root in found]
        return torch.tensor(free, dtype=torch.long).reshape(atoms.shape)

    def join(self, first: Tensor, second: Tensor, pin: Pin) -> None:
        """Let atoms at equal places live together; ``pin`` explains what meets a fixed channel."""
        pairs = dict.fromkeys(zip(first.flatten().tolist(), second.flatten().tolist(), strict=True))
        for a, b in pairs:
            if a < 0 or b < 0:
                self._pin(max(a, b), pin)
            else:
                self._join(self.root(a), self.root(b))

    def pin(self, atoms: Tensor, pin: Pin) -> None:
        """Never remove these."""
        for atom in atoms.unique().tolist():
            self._pin(atom, pin)

    def forbid_row_masks(self, atoms: Tensor) -> None:
        """Note that zeros in these channels would make infinities."""
        self._without_row_masks |= {self.root(a) for a in atoms.unique().tolist() if a >= 0}

    def roots_without_row_masks(self) -> set[int]:
        """Return the classes whose producers must not be masked."""
        return {self.root(atom) for atom in self._without_row_masks}

    def pin_of(self, atom: int) -> Pin | None:
        """Return why an atom stays, ``None`` if it may go."""
        return self._pins.get(self.root(atom))

    def rows(self, root: int) -> list[tuple[str, int]]:
        """Return the output channels ``(layer, row)`` of a class, in the order of joining."""
        return self._rows[root]

    def free_classes(self) -> list[int]:
        """Return the root of every class that may be removed, by its first atom."""
        return [a for a, parent in enumerate(self._parent) if a == parent and a not in self._pins]

    def _join(self, first: int, second: int) -> None:
        if first == second:
            return
        self._parent[second] = first
        self._rows[first] += self._rows.pop(second)
        pin = self._pins.pop(second, None)
        if pin is not None:
            self._pins.setdefault(first, pin)

    def _pin(self, atom: int, pin: Pin) -> None:
        if atom >= 0:
            self._pins.setdefault(self.root(atom), pin)
