"""From the batches of a loader to the inputs of a model.

Source: spec/distillation.md section 9.4.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from amct_fx.errors import AmctError, ArgumentError, ArgumentTypeError, DistillError

__all__ = ["SampleFn", "Samples", "first_tensor", "naming_batch"]

SampleFn = Callable[[Any], Any]
"""Takes a batch of the loader, returns a tensor, or a list or tuple of all arguments."""


def first_tensor(batch: Any) -> Tensor:
    """Return the batch, or its first element; so ``(image, label)`` works.

    Args:
        batch: What a loader gives.

    Raises:
        ArgumentError: There is no tensor in that place.

    Example:
        >>> first_tensor((torch.ones(2, 3), torch.zeros(2))).shape
        torch.Size([2, 3])
    """
    found = batch
    if isinstance(batch, (list, tuple)):
        if not batch:
            message = "the loader gave an empty sample"
            raise ArgumentError(message)
        found = batch[0]
    if isinstance(found, Tensor):
        return found
    message = (
        f"the loader gave {_describe(batch)}, which is no tensor and does not begin with one; pass "
        "sample_fn, a function from a sample to the inputs of the model"
    )
    raise ArgumentError(message)


class Samples:
    """The inputs of the model for every batch of a loader.

    Args:
        loader: A ``DataLoader``, a list of batches, or anything else that can be iterated again.
        sample_fn: Gets a batch, gives the arguments of the model; ``None``: :func:`first_tensor`.
        device: Where the model is.

    Raises:
        ArgumentTypeError: ``loader`` cannot be iterated, or ``sample_fn`` not be called.
    """

    def __init__(self, loader: Any, sample_fn: Any, device: torch.device) -> None:
        if not isinstance(loader, Iterable) or isinstance(loader, (str, bytes, Tensor, dict)):
            message = (
                f"the loader must be a DataLoader or a list of batches, not {type(loader).__name__}"
            )
            raise ArgumentTypeError(message)
        if sample_fn is not None and not callable(sample_fn):
            message = f"sample_fn must be a function, not {type(sample_fn).__name__}"
            raise ArgumentTypeError(message)
        self._loader: Any = loader
        self._sample_fn = sample_fn or first_tensor
        self._device = device

    def __iter__(self) -> Iterator[tuple[Any, ...]]:
        """Yield the arguments of the model, batch by batch, on its device.

        Raises:
            ArgumentError: There is no batch, or one without tensors, or with 0 rows.
        """
        number = -1
        for number, batch in enumerate(self._loader):
            yield self._arguments(batch, number)
        if number < 0:
            again = iter(self._loader) is self._loader
            hint = "; an iterator can be read only once, pass a list or a DataLoader"
            message = f"the loader is empty{hint if again else ''}"
            raise ArgumentError(message)

    def count(self) -> int:
        """Return the number of batches; a loader without a length is read for it."""
        try:
            return len(self._loader)
        except TypeError:  # an iterable data set has none
            return sum(1 for _ in self._loader)

    def _arguments(self, batch: Any, number: int) -> tuple[Any, ...]:
        found = self._sample_fn(batch)
        arguments = tuple(found) if isinstance(found, (list, tuple)) else (found,)
        if not arguments or not all(isinstance(item, Tensor) for item in arguments):
            message = (
                "sample_fn must return a tensor, or a list or tuple of tensors, not "
                f"{_describe(found)}"
            )
            raise ArgumentError(message)
        if not arguments[0].numel():
            message = (
                f"batch {number} of the loader is empty, its shape is {tuple(arguments[0].shape)}; "
                "leave it out"
            )
            raise ArgumentError(message)
        return tuple(_ordinary(item).to(self._device) for item in arguments)


@contextmanager
def naming_batch(number: int, arguments: tuple[Any, ...]) -> Iterator[None]:
    """Name the batch in an error of the user's model, such as one for a wrong shape.

    Args:
        number: Of the batch, from 0.
        arguments: What the model got.

    Raises:
        DistillError: For any other exception than those of this package.
    """
    try:
        yield
    except AmctError:
        raise
    except Exception as error:  # whatever the user's layers raise
        shapes = ", ".join(f"{tuple(item.shape)} {item.dtype}" for item in arguments)
        message = (
            f"the model cannot compute batch {number} of the loader ({shapes}): "
            f"{type(error).__name__}: {error}"
        )
        raise DistillError(message) from error


def _ordinary(tensor: Tensor) -> Tensor:
    """Return a tensor that autograd knows, also for one made in inference mode."""
    return tensor.clone() if tensor.is_inference() else tensor


def _describe(value: Any) -> str:
    """Return the type of a value, with that of its first element."""
    kind = type(value).__name__
    if isinstance(value, (list, tuple)) and value:
        return f"a {kind} of {type(value[0]).__name__}"
    return f"a {kind}"
