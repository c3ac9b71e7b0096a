"""The arguments of a distillation, checked before anything happens."""

from __future__ import annotations

import numbers
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler

from amct_fx.choices import check_choices
from amct_fx.distillation.optim import WEIGHT_STEP
from amct_fx.errors import ArgumentError, ArgumentTypeError, first_line

if TYPE_CHECKING:
    from amct_fx.distillation.optim import OptimizerFactory

__all__ = [
    "BnMode",
    "CacheKind",
    "DistillOptions",
    "Loss",
    "Schedule",
    "SchedulerFactory",
    "check_flag",
    "chosen_device",
]

Loss = Callable[[Tensor, Tensor], Tensor]
"""Takes the student's and the teacher's output, returns one number."""

SchedulerFactory = Callable[[Optimizer], LRScheduler]
"""Takes the optimizer of a group."""

CacheKind = Literal["ram", "disk", "none"]
BnMode = Literal["eval", "train"]
Schedule = Literal["cosine", "constant"]


@dataclass(frozen=True)
class DistillOptions:
    """How to distil; see :func:`amct_fx.distill`.

    Raises:
        ArgumentTypeError: A value of the wrong type; names the argument.
        ArgumentError: A value that cannot be used.

    Example:
        >>> DistillOptions(epochs=0)
        Traceback (most recent call last):
        amct_fx.errors.ArgumentError: epochs must be at least 1, not 0
    """

    epochs: int = 1
    lr: float = 1e-3
    loss: Loss = field(default_factory=nn.MSELoss)
    optimizer: Optimizer | None = None
    optimizer_factory: OptimizerFactory | None = None
    scheduler_factory: SchedulerFactory | None = None
    schedule: Schedule = "cosine"
    clip_lr: float | None = None
    clip_headroom: float | None = 0.1
    weight_step: float | None = WEIGHT_STEP
    bn_mode: BnMode = "eval"
    keep_best: bool = True
    cache: CacheKind | None = None
    cache_bytes: int | None = None
    dump_dir: str | os.PathLike[str] | None = None
    checkpoint: str | os.PathLike[str] | None = None
    progress: bool | None = None

    def __post_init__(self) -> None:
        """Check every value."""
        _check_epochs(self.epochs)
        _check_rate("lr", self.lr, optional=False)
        _check_rate("clip_lr", self.clip_lr)
        _check_rate("clip_headroom", self.clip_headroom)
        _check_rate("weight_step", self.weight_step)
        _check_loss(self.loss)
        _check_function("optimizer_factory", self.optimizer_factory)
        _check_function("scheduler_factory", self.scheduler_factory)
        _check_kind("optimizer", self.optimizer, Optimizer, "a torch.optim.Optimizer")
        _check_bytes("cache_bytes", self.cache_bytes)
        _check_kind("dump_dir", self.dump_dir, (str, os.PathLike), "a path")
        _check_kind("checkpoint", self.checkpoint, (str, os.PathLike), "a path")
        check_flag("keep_best", self.keep_best)
        _check_kind("progress", self.progress, bool, "True, False or None")
        if self.optimizer is not None and self.optimizer_factory is not None:
            message = "give optimizer or optimizer_factory, not both"
            raise ArgumentError(message)
        check_choices(
            bn_mode=(self.bn_mode, ("eval", "train")),
            schedule=(self.schedule, ("cosine", "constant")),
            cache=(self.cache, ("ram", "disk", "none", None)),
        )

    @property
    def default_training(self) -> bool:
        """Whether the user chose neither an optimizer nor a scheduler."""
        chosen = (self.optimizer, self.optimizer_factory, self.scheduler_factory)
        return all(choice is None for choice in chosen)

    @property
    def retries(self) -> bool:
        """Whether a group that got no better is trained again with smaller steps."""
        return self.keep_best and self.default_training

    def scheduler(self, optimizer: Optimizer, steps: int) -> LRScheduler | None:
        """Return the scheduler of a group: the user's, or the one of ``schedule``.

        Args:
            optimizer: Of the group.
            steps: How many it will do.
        """
        if self.scheduler_factory is not None:
            return self.scheduler_factory(optimizer)
        if self.schedule == "constant" or not self.default_training or not steps:
            return None
        return CosineAnnealingLR(optimizer, steps)


def check_flag(name: str, value: object) -> None:
    """Refuse what is neither ``True`` nor ``False``.

    Raises:
        ArgumentTypeError: Names the argument.
    """
    if not isinstance(value, bool):
        message = f"{name} must be True or False, not {type(value).__name__} ({value!r})"
        raise ArgumentTypeError(message)


def chosen_device(value: object, default: torch.device) -> torch.device:
    """Return the device for the samples.

    Args:
        value: What the user gave; ``None``: the default.
        default: Where the student is.

    Raises:
        ArgumentTypeError: It is nothing that names a device.
        ArgumentError: There is no such device, or it cannot be used here.

    Example:
        >>> chosen_device("cpu", torch.device("cpu"))
        device(type='cpu')
    """
    if value is None:
        return default
    if not isinstance(value, (str, torch.device)):
        message = f"device must be a name such as 'cuda:0', not {type(value).__name__} ({value!r})"
        raise ArgumentTypeError(message)
    try:
        device = torch.device(value)
        torch.empty(0, device=device)
    except Exception as error:  # every backend raises its own classes
        reason = first_line(error)
        message = (
            f"device {str(value)!r} cannot be used ({reason}); leave it out for {str(default)!r}, "
            "where the student is"
        )
        raise ArgumentError(message) from error
    return device


def _check_bytes(name: str, value: Any) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        message = f"{name} must be int, not {type(value).__name__}"
        raise ArgumentTypeError(message)
    if value < 0:
        message = f"{name} must not be negative, not {value}"
        raise ArgumentError(message)


def _check_epochs(value: Any) -> None:
    if type(value) is not int:
        message = f"epochs must be int, not {type(value).__name__}"
        raise ArgumentTypeError(message)
    if value < 1:
        message = f"epochs must be at least 1, not {value}"
        raise ArgumentError(message)


def _check_rate(name: str, value: Any, *, optional: bool = True) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        message = f"{name} must be a real number, not {type(value).__name__}"
        raise ArgumentTypeError(message)
    if not 0 <= float(value) < float("inf"):
        message = f"{name} must be finite and not negative, not {value}"
        raise ArgumentError(message)


def _check_loss(value: Any) -> None:
    if isinstance(value, type):
        message = f"loss must be an object, not the class {value.__name__}: {value.__name__}()"
        raise ArgumentTypeError(message)
    if not callable(value):
        message = f"loss must be a torch.nn loss or a function, not {type(value).__name__}"
        raise ArgumentTypeError(message)


def _check_function(name: str, value: Any) -> None:
    if not (value is None or callable(value)):
        message = f"{name} must be a function, not {type(value).__name__}"
        raise ArgumentTypeError(message)


def _check_kind(name: str, value: Any, kinds: type | tuple[type, ...], what: str) -> None:
    if not (value is None or isinstance(value, kinds)):
        message = f"{name} must be {what}, not {type(value).__name__}"
        raise ArgumentTypeError(message)
