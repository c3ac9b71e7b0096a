"""The history of a training: loss and clips, step by step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from amct_fx.control import plain_name
from amct_fx.errors import ArgumentError, ModelStateError
from amct_fx.observers import ULQFakeQuantize

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer
    from torch.utils.hooks import RemovableHandle

__all__ = ["History", "ScalarWriter", "TrainingRecorder", "history_of"]


class ScalarWriter(Protocol):
    """What writes scalars, such as ``torch.utils.tensorboard.SummaryWriter``."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> Any:
        """Write one value."""


@dataclass
class History:
    """What a recorder saw, as plain numbers.

    Attributes:
        steps: The steps at which clips were recorded.
        clip_max: Upper clips at these steps, by layer; the hidden state of a recurrent layer stands
            under ``"<layer> (hidden state)"``.
        clip_min: Lower clips.
        scalars: Steps and values of the loss and whatever else was given, by name.
    """

    steps: list[int] = field(default_factory=list)
    clip_max: dict[str, list[float]] = field(default_factory=dict)
    clip_min: dict[str, list[float]] = field(default_factory=dict)
    scalars: dict[str, tuple[list[int], list[float]]] = field(default_factory=dict)


class TrainingRecorder:
    """Records loss and clips during a training.

    It reads nothing back from the device while the training runs, unless a ``writer`` is given;
    then at every recorded step. When ``max_records`` steps are recorded, every second one is
    forgotten and half as many are recorded from then on.

    Args:
        model: The prepared model, wrapped or not.
        every: Record one of so many steps.
        max_records: At most so many steps, and values of each scalar, are kept.
        writer: Gets each recorded value at once, for example TensorBoard's ``SummaryWriter``.

    Raises:
        ArgumentError: ``every`` is below 1 or ``max_records`` below 2.
        ModelStateError: The model has no learned ranges.

    Example:
        >>> from torch import nn
        >>> from amct_fx import prepare_qat_amct
        >>> model = prepare_qat_amct(nn.Sequential(nn.Linear(4, 2)))
        >>> recorder = TrainingRecorder(model)
        >>> for step in range(3):
        ...     loss = model(torch.ones(8, 4)).mean()
        ...     recorder.step(loss)
        >>> recorder
        TrainingRecorder(3 steps, 3 recorded, 1 quantizers, every=1)
        >>> history = recorder.history()
        >>> history.steps, list(history.scalars), len(history.clip_max["0"])
        ([1, 2, 3], ['loss'], 3)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 1,
        max_records: int = 1000,
        writer: ScalarWriter | None = None,
    ) -> None:
        if every < 1 or max_records < 2:
            message = "every must be at least 1 and max_records at least 2"
            raise ArgumentError(message)
        self._quantizers = {
            _shown(name): module
            for name, module in model.named_modules()
            if isinstance(module, ULQFakeQuantize)
        }
        if not self._quantizers:
            message = "the model has no learned ranges to record; call prepare_qat_amct first"
            raise ModelStateError(message)
        self.every, self.max_records, self.writer = every, max_records, writer
        self.count = 0
        self._steps: list[int] = []
        self._clips: list[list[Tensor]] = []
        self._scalars: dict[str, list[tuple[int, Any]]] = {}

    def step(self, loss: Tensor | float | None = None, **scalars: Tensor | float) -> None:
        """Count one training step, and record it if it is its turn.

        Args:
            loss: Loss of the step; a tensor is kept on its device until the history is read.
            scalars: Other values, such as ``accuracy=…`` or ``learning_rate=…``.
        """
        self.count += 1
        if self.count % self.every:
            return
        values = scalars if loss is None else {"loss": loss, **scalars}
        values = {name: _detached(value) for name, value in values.items()}
        self._steps.append(self.count)
        self._clips.append(self._clips_now())
        for name, value in values.items():
            self._keep(name, value)
        if self.writer is not None:
            self._write(self.writer, values)
        if len(self._steps) >= self.max_records:
            self._forget_every_second()

    def attach(self, optimizer: Optimizer) -> RemovableHandle:
        """Count each step of an optimizer by itself; the loss is then given by :meth:`log`.

        Returns:
            A handle whose ``remove()`` ends it.
        """
        handle: RemovableHandle = optimizer.register_step_post_hook(
            lambda _optimizer, _args, _kwargs: self.step()
        )
        return handle

    def log(self, **scalars: Tensor | float) -> None:
        """Keep values for the current step, whether or not its clips are recorded."""
        for name, value in scalars.items():
            kept = _detached(value)
            self._keep(name, kept)
            if self.writer is not None:
                self.writer.add_scalar(name, float(kept), self.count)

    def history(self) -> History:
        """Return everything as plain numbers; reads the device."""
        rows = [[value for part in parts for value in part.tolist()] for parts in self._clips]
        columns = list(zip(*rows, strict=True)) or [()] * (2 * len(self._quantizers))
        scalars = {
            name: ([step for step, _ in values], _numbers(value for _, value in values))
            for name, values in self._scalars.items()
        }
        names = [self._names[index // 2] for index in range(len(columns))]
        return History(
            list(self._steps),
            {name: list(column) for name, column in zip(names[::2], columns[::2], strict=True)},
            {name: list(column) for name, column in zip(names[1::2], columns[1::2], strict=True)},
            scalars,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the history as plain data, for JSON."""
        return asdict(self.history())

    def state_dict(self) -> dict[str, Any]:
        """Return all that is recorded, as plain data, for a checkpoint."""
        return {"count": self.count, "every": self.every, "history": self.to_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue what another recorder, of a model with the same quantizers, recorded.

        Raises:
            ModelStateError: The quantizers are others.
        """
        history = History(**state["history"])
        if set(history.clip_max) != set(self._names):
            message = "the recorded history is of a model with other quantizers"
            raise ModelStateError(message)
        self.count, self.every, self._steps = state["count"], state["every"], list(history.steps)
        columns = [
            clips[name] for name in self._names for clips in (history.clip_max, history.clip_min)
        ]
        self._clips = [[torch.tensor(row)] for row in zip(*columns, strict=True)]
        self._scalars = {
            name: list(zip(*pair, strict=True)) for name, pair in history.scalars.items()
        }

    def __repr__(self) -> str:
        """Return how much was recorded."""
        recorded, quantizers = len(self._steps), len(self._quantizers)
        return (
            f"TrainingRecorder({self.count} steps, {recorded} recorded, {quantizers} quantizers, "
            f"every={self.every})"
        )

    @property
    def _names(self) -> list[str]:
        """The quantizers in the order of the recorded values: those of one device together."""
        return [name for group in self._groups() for name in group]

    def _groups(self) -> list[list[str]]:
        groups: dict[torch.device, list[str]] = {}
        for name, quantizer in self._quantizers.items():
            groups.setdefault(quantizer.clip_max.device, []).append(name)
        return list(groups.values())

    @torch.no_grad()
    def _clips_now(self) -> list[Tensor]:
        """Return upper and lower clip of each quantizer in turn, one tensor for each device."""
        return [
            torch.cat(
                [
                    clip.detach()
                    for name in group
                    for clip in (self._quantizers[name].clip_max, self._quantizers[name].clip_min)
                ]
            )
            for group in self._groups()
        ]

    def _write(self, writer: ScalarWriter, values: dict[str, Any]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, float(value), self.count)
        clips = [value for part in self._clips[-1] for value in part.tolist()]
        for index, name in enumerate(self._names):
            writer.add_scalar(f"clip_max/{name}", clips[2 * index], self.count)
            writer.add_scalar(f"clip_min/{name}", clips[2 * index + 1], self.count)

    def _forget_every_second(self) -> None:
        self.every *= 2
        kept = [index for index, step in enumerate(self._steps) if step % self.every == 0]
        self._steps = [self._steps[index] for index in kept]
        self._clips = [self._clips[index] for index in kept]

    def _keep(self, name: str, value: Any) -> None:
        """Add a value to its series, which is thinned out by its own length."""
        pairs = self._scalars.setdefault(name, [])
        pairs.append((self.count, value))
        while len(pairs) >= self.max_records:
            del pairs[::2]


def history_of(recorder: TrainingRecorder | History) -> History:
    """Return the history that a recorder holds, or the history that was given."""
    return recorder if isinstance(recorder, History) else recorder.history()


def _detached(value: Tensor | float) -> Tensor | float:
    """Return a value that later steps do not change, still on its device."""
    return value.detach().clone() if isinstance(value, Tensor) else value


def _shown(name: str) -> str:
    """Return the layer of a quantizer, and whether it is that of a hidden state."""
    layer, _, kind = plain_name(name).rpartition(".")
    return f"{layer} (hidden state)" if kind == "hidden_fake_quant" else layer or "the model"


def _numbers(values: Iterable[Any]) -> list[float]:
    """Return numbers; tensors of one device are read at once."""
    found = list(values)
    if found and all(isinstance(value, Tensor) for value in found):
        stacked: list[float] = torch.stack([value.reshape(()).float() for value in found]).tolist()
        return stacked
    return [float(value) for value in found]
