"""A file from which an interrupted distillation goes on at the last finished group."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amct_fx.config.files import replacing
from amct_fx.distillation.history import History
from amct_fx.distillation.sync import ranks
from amct_fx.errors import CheckpointError, first_line
from amct_fx.observers._base import AmctFakeQuantize

if TYPE_CHECKING:
    import os

    from amct_fx.distillation.cuts import Cut

__all__ = ["Checkpoint", "Progress", "fingerprint"]

_FORMAT = 1


@dataclass
class Progress:
    """How far a distillation has come.

    Attributes:
        done: Number of finished groups.
        random: State of torch's random numbers before the first batch was read, so that a shuffling
            loader gives the same batches again.
        history: Of the finished groups.
        state: State dict of the student; ``None`` at the start.
        calibrated: Parameters and buffers of the student before the first group.
    """

    done: int
    random: Tensor
    history: History
    state: dict[str, Any] | None = None
    calibrated: dict[str, Tensor] | None = None


class Checkpoint:
    """Writes and reads the file; without a path it does nothing.

    Args:
        path: The file; with several ranks each has its own, with the number of the rank behind.
        cuts: The groups.
        epochs: Epochs of the training; a file of another training is refused.
        student: The student as it was given; a file of another one is refused, since its state
            would replace this one's.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None,
        cuts: Sequence[Cut],
        epochs: int,
        student: nn.Module,
    ) -> None:
        self._path = None if path is None else Path(path)
        if self._path is not None and ranks() > 1:
            rank = torch.distributed.get_rank()
            self._path = self._path.with_name(f"{self._path.name}.{rank}")
        self._training = {"groups": [list(cut.names) for cut in cuts], "epochs": epochs}
        self._student = "" if self._path is None else fingerprint(student)

    def load(self) -> Progress:
        """Return where to go on; the start if there is no file.

        Raises:
            CheckpointError: The file is no such file, or of another distillation.
        """
        if self._path is None or not self._path.exists():
            return Progress(0, torch.get_rng_state(), History())
        try:
            content = torch.load(self._path, map_location="cpu", weights_only=True)
        except Exception as error:  # unpickling foreign bytes raises many classes
            if isinstance(error, OSError) and error.filename is not None:
                raise
            reason = first_line(error)
            message = f"{self._path} cannot be read: {reason}"
            raise CheckpointError(message) from error
        if not isinstance(content, dict) or content.get("amct_fx_distillation") != _FORMAT:
            message = f"{self._path} was not written by distill; give another checkpoint"
            raise CheckpointError(message)
        if content["training"] != self._training:
            message = (
                f"{self._path} is of a distillation with other groups or epochs; remove it, or "
                "give another checkpoint"
            )
            raise CheckpointError(message)
        if content.get("student") != self._student:
            message = (
                f"{self._path} is of a distillation of another student, with other weights, ranges "
                "or settings of layers; remove it, or give another checkpoint"
            )
            raise CheckpointError(message)
        history = History.from_dict(content["history"])
        return Progress(
            content["done"], content["random"], history, content["state"], content["calibrated"]
        )

    def save(self, progress: Progress, student: nn.Module) -> None:
        """Write the file after a group; a crash leaves the one of the group before."""
        if self._path is None:
            return
        content = {
            "amct_fx_distillation": _FORMAT,
            "training": self._training,
            "student": self._student,
            "done": progress.done,
            "random": progress.random,
            "history": progress.history.to_dict(),
            "state": student.state_dict(),
            "calibrated": progress.calibrated,
        }
        with replacing(self._path) as file:
            torch.save(content, file)

    def remove(self) -> None:
        """Remove the file when all groups are done."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def fingerprint(student: nn.Module) -> str:
    """Return a hash of all tensors of a student and of the settings of its quantizers.

    Args:
        student: A prepared model, on any device.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> before = fingerprint(layer)
        >>> _ = nn.init.zeros_(layer.bias)
        >>> fingerprint(layer) == before
        False
    """
    digest = hashlib.sha256()
    for name, value in student.state_dict().items():
        if isinstance(value, Tensor):
            digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(f"{name} {value!r}".encode())
    for name, part in student.named_modules():
        if isinstance(part, AmctFakeQuantize):
            digest.update(f"{name} {type(part).__name__} {part.extra_repr()}".encode())
    return digest.hexdigest()
