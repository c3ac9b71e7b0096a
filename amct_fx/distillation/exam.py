"""The error of the whole student, and undoing the groups that made it larger.

A group that follows its teacher more closely need not bring the model closer: errors that averaged
out before may add up after the training. So the outputs of the model are compared before and after,
and where they became worse, groups go back to their calibrated state.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from amct_fx.distillation.cuts import Block
from amct_fx.distillation.snapshot import TensorSnapshot
from amct_fx.distillation.sync import mean_of_ranks

if TYPE_CHECKING:
    from amct_fx.distillation.cache import Batch
    from amct_fx.distillation.cuts import Cut
    from amct_fx.distillation.history import History

__all__ = ["Exam", "tensors_of", "undo_harmful_groups"]


class Exam:
    """Compares the outputs of student and teacher.

    Args:
        student: A shadow of the student, in eval mode.
        questions: Batches with what the teacher returns for them.
    """

    def __init__(self, student: nn.Module, questions: Sequence[tuple[Batch, Any]]) -> None:
        self.student = student
        self._questions = questions

    @torch.no_grad()
    def error(self) -> float:
        """Return the mean squared error of the outputs, over all batches and ranks."""
        errors = [
            _squared_error(self.student(*batch.inputs()), target)
            for batch, target in self._questions
        ]
        found = [error for error in errors if error is not None]
        return float(mean_of_ranks(torch.stack(found).mean())) if found else float("nan")


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Return copies of the parameters and buffers of a model, by name."""
    return {name: tensor.detach().clone() for name, tensor in _named(model)}


def undo_harmful_groups(
    exam: Exam,
    cuts: Sequence[Cut],
    calibrated: Mapping[str, Tensor],
    history: History,
) -> bool:
    """Bring groups back to their calibrated state until the model is no worse than calibrated.

    Args:
        exam: Of the distilled student.
        cuts: The groups.
        calibrated: What :func:`tensors_of` gave before the first group.
        history: Says the error before; told what was undone.

    Returns:
        Whether anything was undone.
    """
    limit = history.model_before
    now = start = exam.error()
    saved = {id(tensor): calibrated[name] for name, tensor in _named(exam.student)}
    for cut, group in zip(cuts, history.groups, strict=True):
        if limit is None or not now > limit:
            break
        if not group.kept_epoch:
            continue
        tensors = _tensors_of_block(Block(exam.student, cut))
        distilled = TensorSnapshot(tensors)
        _put_back(tensors, saved)
        error = exam.error()
        if error < now:
            now = error
            group.undo()
        else:
            distilled.restore()
    if limit is not None and now > limit:
        _put_back([tensor for _, tensor in _named(exam.student)], saved)
        now = limit
        for group in history.groups:
            group.undo()
    history.model_after = now
    return now < start


def _named(model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    yield from model.named_parameters()
    yield from model.named_buffers()


def _tensors_of_block(block: Block) -> list[Tensor]:
    return [*block.trained_parameters(), *block.module.buffers()]


@torch.no_grad()
def _put_back(tensors: Iterable[Tensor], saved: Mapping[int, Tensor]) -> None:
    for tensor in tensors:
        if id(tensor) in saved:
            tensor.copy_(saved[id(tensor)])


def _squared_error(ours: Any, theirs: Any) -> Tensor | None:
    """Return the error over all floating point tensors of an output, ``None`` without any."""
    pairs = zip(tree_leaves(ours), tree_leaves(theirs), strict=False)
    errors = [
        (y.double() - t.to(y.device).double()).square().mean()
        for y, t in pairs
        if isinstance(y, Tensor) and y.is_floating_point() and y.shape == t.shape
    ]
    return torch.stack(errors).mean() if errors else None
