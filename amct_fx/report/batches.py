"""How data meets a model: batches of any usual form, devices, outputs of any structure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn

from amct_fx.errors import ArgumentTypeError, InputDataError, first_line

__all__ = ["Batches", "Forward", "device_of", "moved", "run_batch", "samples_in", "tensors_in"]

Forward = Callable[[nn.Module, Any], Any]
"""Calls a model with a batch."""


class Batches:
    """Batches that can be run through several times.

    Args:
        data: A tensor or mapping (one batch), or an iterable of batches, such as a ``DataLoader``.
        number: At most so many batches; ``None`` for all.

    Raises:
        ArgumentTypeError: ``number`` is none.
        InputDataError: It is nothing of these, or holds no batch.

    Example:
        >>> [batch.shape for batch in Batches(torch.zeros(4, 3))]
        [torch.Size([4, 3])]
        >>> len(Batches(iter([1, 2, 3]), 2))
        2
    """

    def __init__(self, data: Any, number: int | None = None) -> None:
        if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
            message = f"num_batches must be a number or None, not {number!r}"
            raise ArgumentTypeError(message)
        if number is not None and number < 1:
            message = f"num_batches must be at least 1, got {number}"
            raise InputDataError(message)
        if isinstance(data, (Tensor, Mapping)):
            data = [data]
        if not isinstance(data, Iterable) or isinstance(data, (str, bytes)):
            message = (
                f"data must be a tensor or an iterable of batches, such as a DataLoader, not "
                f"{type(data).__name__}"
            )
            raise InputDataError(message)
        once = isinstance(data, Iterator)
        self._data = list(itertools.islice(data, number)) if once or number else data
        if self.length == 0:
            raise InputDataError(_EMPTY)

    @property
    def length(self) -> int | None:
        """Number of batches, ``None`` if it is not known."""
        try:
            return len(self._data)  # type: ignore[arg-type]
        except TypeError:
            return None

    def __len__(self) -> int:
        """Return the number of batches, 0 if it is not known."""
        return self.length or 0

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches.

        Raises:
            InputDataError: There is none, or one without any sample.
        """
        number = -1
        for number, batch in enumerate(self._data):
            if samples_in(batch) == 0:
                message = f"batch {number} holds no sample ({_shapes(batch)})"
                raise InputDataError(message)
            yield batch
        if number < 0:
            raise InputDataError(_EMPTY)


_EMPTY = "data holds no batch; an iterator that was used up before gives none"


def call_model(model: nn.Module, batch: Any) -> Any:
    """Call a model with a batch.

    Mappings become keyword arguments. Of a tuple or list the first item is the input (itself a
    tensor, a tuple of arguments, or a mapping), and the rest is left to the metric.

    Example:
        >>> call_model(nn.Flatten(), (torch.zeros(2, 3, 4), torch.zeros(2))).shape
        torch.Size([2, 12])
    """
    inputs = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if isinstance(inputs, Mapping):
        return model(**inputs)
    if isinstance(inputs, (tuple, list)):
        return model(*inputs)
    return model(inputs)


def run_batch(model: nn.Module, batch: Any, number: int, forward: Forward | None) -> Any:
    """Call a model with a batch, and say what to do if it cannot take it.

    Raises:
        InputDataError: The model raised an error; it is the cause.
    """
    try:
        return (forward or call_model)(model, batch)
    except Exception as error:  # whatever the user's model or function raises
        if isinstance(error, InputDataError):
            raise
        message = (
            f"the model cannot run on batch {number} ({_shapes(batch)}): "
            f"{type(error).__name__}: {first_line(error)}; a tuple or list is read as (input, "
            "targets …), a mapping as keyword arguments; for anything else pass "
            "forward=lambda model, batch: …"
        )
        raise InputDataError(message) from error


def _shapes(batch: Any) -> str:
    """Describe a batch in few words."""
    found = list(itertools.islice(tensors_in(batch), 4))
    shapes = ", ".join(str(list(tensor.shape)) for tensor in found)
    return f"{type(batch).__name__} with shapes {shapes}" if found else type(batch).__name__


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a value of any structure, in a fixed order.

    Example:
        >>> [t.item() for t in tensors_in({"a": torch.tensor(1), "b": (torch.tensor(2), None)})]
        [1, 2]
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from tensors_in(item)
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))


def device_of(model: nn.Module) -> torch.device:
    """Return where a model is: of a converted one only buffers may be left to tell."""
    tensors = itertools.chain(model.parameters(), model.buffers())
    return next((tensor.device for tensor in tensors), torch.device("cpu"))


def moved(value: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on ``device``; what has another structure stays."""
    if isinstance(value, Tensor) or (isinstance(value, Mapping) and hasattr(value, "to")):
        return value.to(device)
    if isinstance(value, Mapping):
        return {key: moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(item, device) for item in value))
    if isinstance(value, (list, tuple)):
        return type(value)(moved(item, device) for item in value)
    return value


def samples_in(batch: Any) -> int:
    """Return the length of the first axis of the first tensor that has one; 1 without any."""
    return next((len(tensor) for tensor in tensors_in(batch) if tensor.dim() > 0), 1)
