"""Channels as numbers: an atom for every output channel, and classes of atoms that live together.

Source: spec/pruning.md section 3.3.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import torch

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    Indices: TypeAlias = NDArray[np.int64]

__all__ = ["FIXED", "NOBODY", "Atoms", "Pin"]

FIXED = -1
"""The atom of a channel that is never removed."""

NOBODY = ""
"""In place of a layer: channels of one constant, which go only with those of a layer."""


@dataclass(frozen=True)
class Pin:
    """Why a channel is never removed: the node that forbids it, a code, and a sentence."""

    code: str
    node: str
    text: str


class Atoms:
    """Union-find over output channels.

    A class remembers its output channels in the order in which the classes were joined, and the
    first reason why it must stay. All is kept in arrays, so that whole layers move at once.
    """

    def __init__(self) -> None:
        self.total = 0
        """Number of atoms."""
        self._layers: list[str] = []
        self._reasons: list[Pin] = []
        # by atom, with room for more; of those that are no roots only parent, following, layer and
        # row count
        self._parent = _ids(0)
        self._following = _ids(0)  # the next atom of the class, in the order of joining
        self._last = _ids(0)
        self._size = _ids(0)
        self._pin_of = _ids(0)  # number of the reason
        self._layer = _ids(0)
        self._row = _ids(0)
        self._without_row_masks: list[Indices] = []

    def new(self, layer: str, count: int) -> Tensor:
        """Return ``count`` new atoms: the output channels of ``layer``, or of :data:`NOBODY`."""
        first, self.total = self.total, self.total + count
        if self.total > len(self._parent):
            self._grow(max(self.total, 2 * len(self._parent)))
        new, own = np.arange(first, self.total), slice(first, self.total)
        self._parent[own] = self._last[own] = new
        self._following[own] = self._pin_of[own] = FIXED
        self._size[own] = 1
        self._layer[own] = len(self._layers)
        self._row[own] = np.arange(count)
        self._layers.append(layer)
        return torch.from_numpy(new)

    def _grow(self, room: int) -> None:
        kept = len(self._parent)
        for name in ("_parent", "_following", "_last", "_size", "_pin_of", "_layer", "_row"):
            grown = _ids(room)
            grown[:kept] = getattr(self, name)
            setattr(self, name, grown)

    def classes(self, atoms: Indices) -> Indices:
        """Return the root of every atom, of pinned ones too; none may be fixed."""
        parent = self._parent
        found = parent[atoms]
        while bool(((above := parent[found]) != found).any()):
            found = above
        parent[atoms] = found
        return found

    def roots(self, atoms: Tensor) -> Tensor:
        """Return the root of every atom; what is fixed or pinned is :data:`FIXED`."""
        return torch.from_numpy(self.free(atoms)).reshape(atoms.shape)

    def free(self, atoms: Tensor) -> Indices:
        """Return the same as :meth:`roots`, as a flat array."""
        given = atoms.flatten().numpy()
        found = np.full(given.shape, FIXED)
        known = given >= 0
        roots = self.classes(given[known])
        found[known] = np.where(self._pin_of[roots] >= 0, FIXED, roots)
        return found

    def join(self, first: Tensor, second: Tensor, pin: Pin) -> None:
        """Let atoms at equal places live together; ``pin`` explains what meets a fixed channel."""
        pairs = np.stack([first.flatten().numpy(), second.flatten().numpy()])
        known = pairs >= 0
        pairs[known] = self.classes(pairs[known])
        pairs = pairs[:, pairs[0] != pairs[1]]
        used = pairs[pairs >= 0]
        if pairs.shape[1] > 1 and len(np.unique(used)) < len(used):
            pairs = pairs[:, np.sort(np.unique(pairs, axis=1, return_index=True)[1])]
            used = pairs[pairs >= 0]
            if len(np.unique(used)) < len(used):
                for column in range(pairs.shape[1]):  # the pairs meet: one after the other
                    self._join(pairs[:, column : column + 1], pin)
                return
        self._join(pairs, pin)

    def pin(self, atoms: Tensor, pin: Pin) -> None:
        """Never remove these."""
        given = atoms.flatten().numpy()
        self._pin(given[given >= 0], pin)

    def forbid_row_masks(self, atoms: Tensor) -> None:
        """Note that zeros in these channels would make infinities."""
        given = atoms.flatten().numpy()
        self._without_row_masks.append(given[given >= 0])

    def roots_without_row_masks(self) -> set[int]:
        """Return the classes whose producers must not be masked."""
        return {root for atoms in self._without_row_masks for root in self.classes(atoms).tolist()}

    def pin_of(self, atom: int) -> Pin | None:
        """Return why an atom stays, ``None`` if it may go."""
        number = int(self._pin_of[self.classes(np.array([atom]))[0]])
        return None if number < 0 else self._reasons[number]

    def free_classes(self) -> Indices:
        """Return the root of every class that may be removed, by its first atom."""
        own = self._parent[: self.total] == np.arange(self.total)
        return np.flatnonzero(own & (self._pin_of[: self.total] < 0))

    def sizes(self, roots: Indices) -> Indices:
        """Return the number of output channels of classes."""
        return self._size[roots]

    def rows(self, roots: Indices, size: int) -> tuple[Indices, Indices]:
        """Return the output channels of classes of equal size, in the order of joining.

        Returns:
            Numbers of the layers (see :meth:`layer`), and rows, each ``[len(roots), size]``.
        """
        atoms = np.empty((len(roots), size), np.int64)
        for place in range(size):
            atoms[:, place] = roots if place == 0 else self._following[atoms[:, place - 1]]
        return self._layer[atoms], self._row[atoms]

    def layer(self, number: int) -> str:
        """Return the name of a layer."""
        return self._layers[number]

    def _join(self, pairs: Indices, pin: Pin) -> None:
        """Join classes, given by atoms; no class is in two pairs."""
        known = pairs >= 0
        pairs[known] = self.classes(pairs[known])
        fixed = ~known.all(0)
        self._pin(pairs[:, fixed].max(0), pin)
        first, second = pairs[:, ~fixed & (pairs[0] != pairs[1])]
        self._parent[second] = first
        self._following[self._last[first]] = second
        self._last[first] = self._last[second]
        self._size[first] += self._size[second]
        own = self._pin_of[first]
        self._pin_of[first] = np.where(own < 0, self._pin_of[second], own)

    def _pin(self, atoms: Indices, pin: Pin) -> None:
        roots = self.classes(atoms[atoms >= 0])
        self._pin_of[roots[self._pin_of[roots] < 0]] = len(self._reasons)
        self._reasons.append(pin)


def _ids(count: int) -> Indices:
    return np.zeros(count, np.int64)
