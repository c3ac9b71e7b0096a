"""The teacher's activations, computed once per batch for all groups, in memory or on disk.

On disk they have AMCT's file names. The folder is a fresh temporary one or the user's, and nothing
stays behind, also after an error. Source: spec/distillation.md section 10.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten

from amct_fx.distillation.taps import GroupValues
from amct_fx.errors import DistillError

if TYPE_CHECKING:
    from types import TracebackType

    from torch.utils._pytree import TreeSpec
    from typing_extensions import Self

__all__ = ["ActivationCache", "Batch", "Folder", "free_memory"]


class Batch(Protocol):
    """One batch of one epoch."""

    def inputs(self) -> tuple[Any, ...]:
        """Return the arguments of the model."""

    def group(self, index: int) -> list[GroupValues]:
        """Return what entered and left a group in the teacher, for each call of its region."""


@dataclass(frozen=True)
class _InMemory:
    """A batch whose tensors are held in main memory."""

    arguments: tuple[Any, ...]
    groups: list[list[GroupValues]]
    device: torch.device

    def inputs(self) -> tuple[Any, ...]:
        return tuple(_moved(self.arguments, self.device))

    def group(self, index: int) -> list[GroupValues]:
        return [
            GroupValues(_moved(values.inputs, self.device), _moved(values.output, self.device))
            for values in self.groups[index]
        ]


@dataclass(frozen=True)
class _Dumped:
    """Some values whose tensors are in files."""

    files: list[tuple[Path, torch.dtype] | None]
    others: list[Any]
    spec: TreeSpec

    def load(self, device: torch.device) -> Any:
        """Return the values, tensors on ``device``."""
        leaves = [
            other if file is None else _read(*file).to(device)
            for file, other in zip(self.files, self.others, strict=True)
        ]
        return tree_unflatten(leaves, self.spec)


@dataclass(frozen=True)
class _OnDisk:
    """A batch whose tensors are in files."""

    arguments: _Dumped
    groups: list[list[tuple[_Dumped, _Dumped]]]
    device: torch.device

    def inputs(self) -> tuple[Any, ...]:
        return tuple(self.arguments.load(self.device))

    def group(self, index: int) -> list[GroupValues]:
        return [
            GroupValues(tuple(inputs.load(self.device)), output.load(self.device))
            for inputs, output in self.groups[index]
        ]


class Folder:
    """The folder of the files; it is made at the first file, and empty again afterwards.

    Args:
        path: Where; ``None``: a fresh temporary folder. One that exists already stays.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._given = None if path is None else Path(path)
        self._path: Path | None = None
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Remove all files, and the folder if it was not there before."""
        self._undo.close()

    def write(self, name: str, tensor: Tensor) -> Path:
        """Write one tensor.

        Args:
            name: Name of the file.
            tensor: Any dtype and device.

        Raises:
            DistillError: The file exists already, or cannot be written, such as on a full disk.
        """
        content = tensor.detach().cpu().contiguous()
        path = Path(name)
        try:
            path = self._folder() / name
            with path.open("xb") as file:
                self._undo.callback(path.unlink, missing_ok=True)
                np.save(file, _as_numpy(content), allow_pickle=False)
        except FileExistsError as error:
            message = f"{path} exists already; give an empty dump_dir"
            raise DistillError(message) from error
        except OSError as error:
            message = (
                f"the activations of the teacher cannot be written to {path}: "
                f"{error.strerror or error}; free some space, or give another dump_dir, or "
                'cache="none"'
            )
            raise DistillError(message) from error
        return path

    def _folder(self) -> Path:
        if self._path is None:
            if self._given is None:
                temporary = tempfile.TemporaryDirectory(prefix="amct-fx-distill-")
                self._undo.callback(temporary.cleanup)
                self._path = Path(temporary.name)
            else:
                for folder in _missing(self._given):
                    folder.mkdir()
                    self._undo.callback(_remove_if_empty, folder)
                self._path = self._given
        return self._path


class ActivationCache:
    """Keeps batches in memory within a budget, and the others on disk.

    Args:
        labels: Name of the first module of each group, for the names of the files.
        folder: Where files go.
        device: Where the model is; the values are handed out there.
        budget: Bytes of main memory; 0: everything goes to disk.
    """

    def __init__(
        self, labels: Sequence[str], folder: Folder, device: torch.device, budget: int
    ) -> None:
        self._labels = _unique([label.replace("/", "_") for label in labels])
        self._folder = folder
        self._device = device
        self._left = budget

    @property
    def memory_left(self) -> int:
        """Bytes of the budget that nothing takes yet."""
        return max(self._left, 0)

    def add(
        self,
        arguments: tuple[Any, ...],
        groups: list[list[GroupValues]],
        *,
        epoch: int,
        step: int,
    ) -> Batch:
        """Keep one batch.

        Args:
            arguments: Inputs of the model.
            groups: What :meth:`amct_fx.distillation.taps.TappedModel.values_of_all` gave.
            epoch: Counts from 0.
            step: Counts from 0 in each epoch.
        """
        size = byte_size([arguments, [[(v.inputs, v.output) for v in calls] for calls in groups]])
        if size <= self._left:
            self._left -= size
            host = _OnceMoved(torch.device("cpu"))
            kept = [
                [GroupValues(host(v.inputs), host(v.output)) for v in calls] for calls in groups
            ]
            return _InMemory(host(arguments), kept, self._device)
        self._left = 0  # what follows goes to disk too, so that the order of the files is plain
        return self._dump(arguments, groups, f"{epoch}_{step}_cpu.npy")

    def _dump(
        self, arguments: tuple[Any, ...], groups: list[list[GroupValues]], ending: str
    ) -> Batch:
        dumped = [
            [
                (
                    self._write(f"data_dump_input_{label}{_nth(call)}", values.inputs, ending),
                    self._write(f"data_dump_output_{label}{_nth(call)}", values.output, ending),
                )
                for call, values in enumerate(calls)
            ]
            for label, calls in zip(self._labels, groups, strict=True)
        ]
        written = self._write("data_dump_input_model_input", arguments, ending)
        return _OnDisk(written, dumped, self._device)

    def _write(self, stem: str, values: Any, ending: str) -> _Dumped:
        leaves, spec = tree_flatten(values)
        several = sum(isinstance(leaf, Tensor) for leaf in leaves) > 1
        files: list[tuple[Path, torch.dtype] | None] = []
        for index, leaf in enumerate(leaves):
            if not isinstance(leaf, Tensor):
                files.append(None)
                continue
            number = f"_{index}" if several else ""
            path = self._folder.write(f"{stem}{number}_{ending}", leaf)
            files.append((path, leaf.dtype))
        others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return _Dumped(files, others, spec)


class _OnceMoved:
    """Moves tensors; one that leaves a group and enters the next stays one."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._moved: dict[int, Tensor] = {}

    def __call__(self, values: Any) -> Any:
        return tree_map_only(Tensor, self._move, values)

    def _move(self, tensor: Tensor) -> Tensor:
        return self._moved.setdefault(id(tensor), tensor.to(self._device))


def byte_size(values: Any) -> int:
    """Return the bytes of all different tensors in some nested values.

    Example:
        >>> x = torch.zeros(2, 3)
        >>> byte_size([x, (x, torch.zeros(1))])
        28
    """
    tensors = [leaf for leaf in tree_flatten(values)[0] if isinstance(leaf, Tensor)]
    return sum(tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values())


def free_memory() -> int:
    """Return the bytes of main memory that are free now, or 4 GiB where nobody tells."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return 4 * 2**30


def _moved(values: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), values)


def _as_numpy(tensor: Tensor) -> Any:
    """Return an array; numpy has no bfloat16 or float8, their bytes go in as integers."""
    if tensor.is_floating_point() and tensor.dtype not in _NUMPY_FLOATS:
        sizes = {1: torch.uint8, 2: torch.int16}
        tensor = tensor.view(sizes[tensor.element_size()])
    return tensor.numpy()


def _read(path: Path, dtype: torch.dtype) -> Tensor:
    tensor = torch.from_numpy(np.load(path, allow_pickle=False))
    return tensor if tensor.dtype == dtype else tensor.view(dtype)


def _nth(call: int) -> str:
    """Return a suffix for the second and later calls of a region in one forward."""
    return f"_call{call}" if call else ""


def _unique(labels: Sequence[str]) -> list[str]:
    """Number labels that occur again, so that no file is written twice."""
    seen = {"model_input": 1}  # the name of the files with the inputs of the model
    result = []
    for label in labels:
        seen[label] = seen.get(label, 0) + 1
        result.append(label if seen[label] == 1 else f"{label}.{seen[label]}")
    return result


def _missing(folder: Path) -> list[Path]:
    """Return the folders to make, outermost first."""
    chain = [folder, *folder.parents]
    return [path for path in reversed(chain) if not path.exists()]


def _remove_if_empty(folder: Path) -> None:
    if folder.exists() and not any(folder.iterdir()):
        folder.rmdir()


_NUMPY_FLOATS = (torch.float16, torch.float32, torch.float64)
