"""The training of one group: input choice, loss, steps, the best state.

Source: spec/distillation.md section 9.3.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantizeBase
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._pytree import tree_flatten, tree_map

from amct_fx.config.messages import warn
from amct_fx.distillation.headroom import Headroom
from amct_fx.distillation.history import GroupHistory
from amct_fx.distillation.optim import Trained, default_optimizer, rebuilt_optimizer
from amct_fx.distillation.snapshot import TensorSnapshot
from amct_fx.distillation.sync import average_gradients, average_tensors, mean_of_ranks, ranks
from amct_fx.errors import AmctError, DistillError

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

    from amct_fx.distillation.cuts import Block
    from amct_fx.distillation.options import DistillOptions
    from amct_fx.distillation.progress import ProgressBar
    from amct_fx.distillation.taps import GroupValues

__all__ = ["GroupTrainer", "Pair", "choose_inputs"]


@dataclass(frozen=True)
class Pair:
    """What a group sees of one batch.

    Args:
        teacher: What entered and left it in the teacher, for each call of its region.
        student: What enters it in the student, for each call.
    """

    teacher: list[GroupValues]
    student: list[tuple[Any, ...]]


Batches = Callable[[], Iterator[Pair]]
"""Gives the batches of an epoch, anew for each call."""

_FACTORS = (1.0, 0.1, 0.01)
"""Of the learning rates, one after the other while no epoch makes a group better."""


@torch.no_grad()
def choose_inputs(teacher: Sequence[Any], student: Sequence[Any]) -> tuple[Any, ...]:
    """Return the student's inputs of a group, or the teacher's where the student is far off.

    The teacher's are taken if the mean squared difference exceeds half of the smaller mean square.
    The decision of the first input holds for all, is made on the device, and on all ranks at once.

    Args:
        teacher: Boundary inputs in the teacher.
        student: The same in the student.

    Returns:
        Fresh tensors, which the group may change in place.

    Example:
        >>> choose_inputs([torch.tensor([2.0, 2.0])], [torch.tensor([2.0, 1.0])])
        (tensor([2., 1.]),)
        >>> choose_inputs([torch.tensor([2.0, 2.0])], [torch.tensor([9.0, 9.0])])
        (tensor([2., 2.]),)
    """
    firsts = tree_flatten(teacher[:1])[0], tree_flatten(student[:1])[0]
    pair = next((pair for pair in zip(*firsts, strict=True) if isinstance(pair[0], Tensor)), None)
    if pair is None:
        return tuple(student)
    wanted, given = (tensor.detach().float() for tensor in pair)
    squares = ((wanted - given).square(), wanted.square(), given.square())
    distance, power, own = mean_of_ranks(torch.stack([square.mean() for square in squares]))
    far = distance > 0.5 * torch.minimum(power, own)

    def pick(theirs: Any, ours: Any) -> Any:
        return torch.where(far, theirs, ours) if isinstance(ours, Tensor) else ours

    chosen: tuple[Any, ...] = tree_map(pick, tuple(teacher), tuple(student))
    return chosen


class GroupTrainer:
    """Trains the groups of one student, one after the other.

    Args:
        options: How.
        progress: Told of every step.
        steps: Number of steps for each group, for the schedule of the learning rates.
    """

    def __init__(self, options: DistillOptions, progress: ProgressBar, steps: int) -> None:
        self._options = options
        self._progress = progress
        self._steps = steps
        self._loss_scaler: torch.amp.GradScaler | None = None

    def train(
        self,
        block: Block,
        measured: Batches,
        epochs: Sequence[Batches],
        bits: int | None = None,
    ) -> GroupHistory:
        """Train one group.

        Args:
            block: The group in the student.
            measured: Gives the batches on which states are compared.
            epochs: Gives the batches of each epoch.
            bits: Of the coarsest weights up to this group; ``None``: those of the group.

        Raises:
            DistillError: Something in the block failed; names the group.
        """
        history = GroupHistory(block.cut.names, note=_note(block))
        started = time.perf_counter()
        parameters = block.trained_parameters()
        if not parameters:
            warn(f"the group {block.cut} has nothing to train and stays as it is")
            history.note = history.note or "nothing to train"
            self._progress.advance(self._steps)
            return history
        if not any(pair.teacher for pair in measured()):
            warn(f"no batch reaches the group {block.cut}, so it stays as it is")
            history.note = "no batch reaches it"
            self._progress.advance(self._steps)
            return history
        try:
            trained = Trained.of(block.module, parameters, bits)
            self._train(block, trained, measured, epochs, history)
        except AmctError:
            raise
        except Exception as error:  # the user's loss, optimizer or layers
            message = f"the group {block.cut} cannot be distilled: {type(error).__name__}: {error}"
            raise DistillError(message) from error
        finally:
            for parameter in block.module.parameters():
                parameter.grad = None
        history.seconds = time.perf_counter() - started
        return history

    def _train(
        self,
        block: Block,
        trained: Trained,
        measured: Batches,
        epochs: Sequence[Batches],
        history: GroupHistory,
    ) -> None:
        """Train until some epoch has made the group better, with smaller steps each time."""
        headroom = Headroom(block.module, self._options.clip_headroom)
        with headroom.watching():
            history.before = history.after = self._measure(block, measured)
        history.kept_epoch = 0
        kept = _state(block)
        for factor in _FACTORS if self._options.retries else _FACTORS[:1]:
            optimizer = self._optimizer(trained, factor)
            scheduler = self._options.scheduler(optimizer, self._steps)
            step = partial(self._step, block, trained.all(), optimizer, scheduler, headroom)
            for number, epoch in enumerate(epochs, start=1):
                where = f"{block.cut}, epoch {number}"
                self._epoch(epoch, step, history, where)
                self._average_buffers(block)
                now = self._measure(block, measured)
                history.measured.append(now)
                self._progress.describe(f"{block.cut} loss {now:.3g}")
                if now < history.after or not self._options.keep_best:
                    history.after, history.kept_epoch = now, number
                    kept = _state(block)
            kept.restore()
            if history.kept_epoch:
                break

    def _epoch(
        self, epoch: Batches, step: Callable[[Pair], Tensor], history: GroupHistory, where: str
    ) -> None:
        """Do one epoch; the losses are read from the device once, at its end."""
        losses = {}
        for number, pair in enumerate(epoch()):
            if pair.teacher:  # else it does not reach the group
                losses[number] = step(pair)
            self._progress.advance()
        _check_finite(losses, where)
        values = torch.stack([*losses.values()]).tolist() if losses else []
        history.steps += values
        history.losses.append(sum(values) / len(values) if values else float("nan"))

    def _step(
        self,
        block: Block,
        parameters: Sequence[nn.Parameter],
        optimizer: Optimizer,
        scheduler: LRScheduler | None,
        headroom: Headroom,
        pair: Pair,
    ) -> Tensor:
        """Do one optimizer step; return the loss, on the device."""
        optimizer.zero_grad()
        with _training(block, batch_norms=self._options.bn_mode == "train"), torch.enable_grad():
            loss = self._loss(block, pair)
        scaler = self._scaler(loss.device.type)
        if loss.requires_grad:
            (loss if scaler is None else scaler.scale(loss)).backward()
        average_gradients(parameters)
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        if scheduler is not None:
            scheduler.step()
        headroom.apply()
        return loss.detach().float()

    def _loss(self, block: Block, pair: Pair) -> Tensor:
        """Return the loss of a batch, the mean over the calls of the region."""
        losses = []
        for theirs, ours in zip(pair.teacher, pair.student, strict=True):
            output = block(choose_inputs(theirs.inputs, ours))
            losses.append(self._loss_of_output(block, output, theirs.output))
        return torch.stack(losses).mean()

    def _loss_of_output(self, block: Block, output: Any, target: Any) -> Tensor:
        """Return the loss of one output; of a tuple, the mean over its tensors."""
        pairs = [
            (y, t)
            for y, t in zip(tree_flatten(output)[0], tree_flatten(target)[0], strict=True)
            if isinstance(y, Tensor) and y.is_floating_point()
        ]
        if not pairs:
            message = f"the group {block.cut} returns no floating point tensor to compare"
            raise DistillError(message)
        losses = []
        for y, t in pairs:
            if y.numel() != t.numel():
                message = (
                    f"the group {block.cut} returns shape {tuple(y.shape)} in the student and "
                    f"{tuple(t.shape)} in the teacher"
                )
                raise DistillError(message)
            losses.append(self._checked(self._options.loss(y, t.reshape(y.shape)), block))
        return torch.stack(losses).mean()

    def _checked(self, loss: Any, block: Block) -> Tensor:
        if isinstance(loss, Tensor) and loss.numel() == 1:
            return loss.reshape(())
        shape = f"a tensor {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        message = f"the group {block.cut}: the loss must return one number as a tensor, not {shape}"
        raise DistillError(message)

    @torch.no_grad()
    def _measure(self, block: Block, measured: Batches) -> float:
        """Return the mean loss in eval mode."""
        losses = {
            number: self._loss(block, pair).detach().double()
            for number, pair in enumerate(measured())
            if pair.teacher
        }
        return _check_finite(losses, str(block.cut))

    def _average_buffers(self, block: Block) -> None:
        """Give all ranks the same statistics of batch norms that were in training mode."""
        if ranks() > 1 and self._options.bn_mode == "train":
            average_tensors(
                buffer
                for part in block.module.modules()
                if isinstance(part, _BatchNorm)
                for buffer in part.buffers()
            )

    def _scaler(self, device: str) -> torch.amp.GradScaler | None:
        """Return a scaler under autocast to float16, whose gradients underflow, else ``None``."""
        if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
            return None
        if torch.get_autocast_dtype(device) != torch.half:
            return None
        if self._loss_scaler is None:
            self._loss_scaler = torch.amp.GradScaler(device)
        return self._loss_scaler

    def _optimizer(self, trained: Trained, factor: float) -> Optimizer:
        options = self._options
        if options.optimizer_factory is not None:
            return options.optimizer_factory(trained.groups())
        if options.optimizer is not None:
            return rebuilt_optimizer(options.optimizer, trained)
        return default_optimizer(
            trained,
            options.lr,
            options.clip_lr,
            weight_step=options.weight_step,
            factor=factor,
        )


def _check_finite(losses: Mapping[int, Tensor], where: str) -> float:
    """Return the mean over batches and ranks.

    Args:
        losses: Of the batches, by their number.
        where: The group, for the message.

    Raises:
        DistillError: On all ranks if a loss of any of them is NaN or infinite.
    """
    if not losses:
        return float("nan")
    mean = float(mean_of_ranks(torch.stack([*losses.values()]).mean()))
    if math.isfinite(mean):
        return mean
    values = {number: float(loss) for number, loss in losses.items()}
    bad = [f"of batch {n} is {value}" for n, value in values.items() if not math.isfinite(value)]
    what = bad[0] if bad else "of another rank is nan"
    message = (
        f"the group {where}: the loss {what}; look for NaN or infinity in that batch, at what the "
        "loss function returns, or lower the learning rate"
    )
    raise DistillError(message)


def _state(block: Block) -> TensorSnapshot:
    return TensorSnapshot([*block.module.parameters(), *block.module.buffers()])


@contextmanager
def _training(block: Block, *, batch_norms: bool) -> Iterator[None]:
    """Put the quantizers of a block into training mode, and its batch norms if wanted.

    Recurrent layers go with them: cuDNN has no backward for them in eval mode.
    """
    kinds: tuple[type[nn.Module], ...] = (FakeQuantizeBase,)
    kinds += (_BatchNorm,) if batch_norms else ()
    parts = [
        part
        for part in block.module.modules()
        if isinstance(part, kinds) or (isinstance(part, nn.RNNBase) and part.dropout == 0)
    ]
    before = [part.training for part in parts]
    try:
        for part in parts:
            part.training = True
        yield
    finally:
        for part, mode in zip(parts, before, strict=True):
            part.training = mode


def _note(block: Block) -> str:
    """Say which parameters of a group are not trained, and why."""
    return "; ".join(f"{', '.join(names)}: {reason}" for reason, names in block.frozen.items())
