"""The batches of a distillation as a group sees them: the teacher's values, and the student's.

Source: spec/distillation.md sections 9.3 and 10. Cost: each batch runs once through the teacher
and, while memory lasts, once through the student, for all groups together.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from amct_fx.config.messages import warn
from amct_fx.copying import shadow_model
from amct_fx.distillation.cache import byte_size
from amct_fx.distillation.cuts import float_graph, region_of
from amct_fx.distillation.frontier import Frontier, FrontierModel
from amct_fx.distillation.loop import Pair
from amct_fx.distillation.samples import naming_batch
from amct_fx.distillation.taps import TappedModel
from amct_fx.graph import GraphForward, fx_graph_of
from amct_fx.graph.region import guard_of

if TYPE_CHECKING:
    from amct_fx.distillation.cache import ActivationCache, Batch
    from amct_fx.distillation.cuts import Cut
    from amct_fx.distillation.samples import Samples
    from amct_fx.distillation.taps import GroupValues

__all__ = ["CachedLessons", "Lessons", "LiveLessons", "StudentInputs", "Teacher", "collect"]

logger = logging.getLogger("amct_fx")

MEASURED = 16
"""States of a group are compared on so many batches at most, and on batch_num at least."""


class Teacher:
    """The teacher in eval mode, without gradients; the model itself is not touched.

    Args:
        model: The float model.
        student: Its student, whose traced parts say where the groups are.
        cuts: The groups.

    Attributes:
        passes: Number of forwards so far.
    """

    def __init__(self, model: nn.Module, student: nn.Module, cuts: Sequence[Cut]) -> None:
        shadow = shadow_model(model, share_buffers=False).eval()
        graphs, guards = {}, {}
        for name in dict.fromkeys(cut.region for cut in cuts):
            region = region_of(student, name)
            graphs[name], guards[name] = float_graph(region), guard_of(region)
        self._tapped = TappedModel(shadow, graphs, cuts, guards, with_outputs=True)
        self.passes = 0

    def values_of_all(self, arguments: Sequence[Any]) -> tuple[list[list[GroupValues]], Any]:
        """Run once for all groups; return their values, and the output of the model."""
        self.passes += 1
        return self._tapped.values_of_all(arguments)

    def values_of(self, group: int, arguments: Sequence[Any]) -> list[GroupValues]:
        """Run as far as one group needs it."""
        self.passes += 1
        return self._tapped.values_of(group, arguments)


class StudentInputs:
    """What enters a group in the student as it is now.

    Args:
        student: A shadow of the student in eval mode.
        cuts: The groups.
        budget: Bytes of main memory for frontiers.
    """

    def __init__(self, student: nn.Module, cuts: Sequence[Cut], budget: int) -> None:
        self.cuts = cuts
        self._left = budget
        self._device = next(student.parameters()).device
        whole = {number: cut for number, cut in enumerate(cuts) if cut.region == ""}
        self._moving = (
            FrontierModel(student, whole) if whole and isinstance(student, GraphForward) else None
        )
        self._frontiers: dict[tuple[int, int], tuple[Frontier, int] | None] = {}
        self.student = student
        self._tapped: TappedModel | None = None

    def of(self, group: int, key: tuple[int, int] | None, batch: Batch) -> list[tuple[Any, ...]]:
        """Return the boundary inputs, for each call of the region.

        Args:
            group: Number of the group.
            key: Epoch and step, if the same batch comes again for other groups.
            batch: The batch.
        """
        if key is None or self._moving is None or self.cuts[group].region != "":
            return self._by_running(group, batch)
        kept = self._frontiers.get(key, (Frontier(None, ()), 0))
        if kept is None:
            return self._by_running(group, batch)
        frontier, size = kept
        if frontier.group is None:
            leaves = self._moving.leaves(batch.inputs())
            if leaves is None:
                self._frontiers[key] = None
                return self._by_running(group, batch)
            frontier.values = leaves
        found = self._moving.inputs(self._to_device(frontier), group)
        new_size = byte_size(frontier.values)
        self._left += size - new_size
        self._frontiers[key] = (_to_host(frontier), new_size)
        if self._left < 0:
            self._frontiers[key] = None
            self._left += new_size
        return [found]

    def forget(self) -> None:
        """Forget all frontiers, after groups behind them have changed."""
        self._left += sum(kept[1] for kept in self._frontiers.values() if kept is not None)
        self._frontiers = {}

    def _to_device(self, frontier: Frontier) -> Frontier:
        frontier.values = _moved(frontier.values, self._device)
        return frontier

    def _by_running(self, group: int, batch: Batch) -> list[tuple[Any, ...]]:
        """Run the student from its inputs."""
        if self._tapped is None:
            shadow = shadow_model(self.student, share_buffers=True)
            graphs, guards = {}, {}
            for name in dict.fromkeys(cut.region for cut in self.cuts):
                region = region_of(shadow, name)
                graphs[name], guards[name] = fx_graph_of(region), guard_of(region)
            self._tapped = TappedModel(shadow, graphs, self.cuts, guards, with_outputs=False)
        values = self._tapped.values_of(group, batch.inputs())
        return [item.inputs for item in values]


@dataclass
class _Live:
    """A batch whose teacher values are computed when they are asked for."""

    number: int
    arguments: tuple[Any, ...]
    teacher: Teacher

    def inputs(self) -> tuple[Any, ...]:
        return self.arguments

    def output(self) -> Any:
        with naming_batch(self.number, self.arguments):
            return self.teacher.values_of_all(self.arguments)[1]

    def group(self, index: int) -> list[GroupValues]:
        with naming_batch(self.number, self.arguments):
            return self.teacher.values_of(index, self.arguments)


class Lessons:
    """What is common to cached and live batches.

    Args:
        students: Gives the student's side.
        epochs: Number of epochs.
        exam: The measured batches with what the teacher returns for them.
    """

    def __init__(
        self, students: StudentInputs, epochs: int, exam: Sequence[tuple[Batch, Any]]
    ) -> None:
        self.students = students
        self.exam = exam
        self._epochs = epochs
        self._uneven: set[int] = set()

    @property
    def steps(self) -> int:
        """Number of steps for each group."""
        raise NotImplementedError

    def measured(self, group: int) -> Callable[[], Iterator[Pair]]:
        """Return what gives the batches on which states of a group are compared."""
        raise NotImplementedError

    def epochs(self, group: int) -> list[Callable[[], Iterator[Pair]]]:
        """Return what gives the batches of each epoch for a group."""
        raise NotImplementedError

    def _pair(self, group: int, key: tuple[int, int] | None, batch: Batch) -> Pair:
        teacher, student = batch.group(group), self.students.of(group, key, batch)
        if len(teacher) != len(student):
            if group not in self._uneven:
                self._uneven.add(group)
                warn(
                    f"the code around group {self.students.cuts[group]} runs it "
                    f"{len(teacher)} times in the teacher and {len(student)} times in the student; "
                    "such batches are left out"
                )
            return Pair([], [])
        return Pair(teacher, student)


class CachedLessons(Lessons):
    """Batches whose teacher values are kept.

    Args:
        batches: By epoch and step.
        students: Gives the student's side.
        exam: As for :class:`Lessons`.
    """

    def __init__(
        self,
        batches: list[list[Batch]],
        students: StudentInputs,
        exam: Sequence[tuple[Batch, Any]],
    ) -> None:
        super().__init__(students, len(batches), exam)
        self._batches = batches

    @property
    def steps(self) -> int:
        """See :class:`Lessons`."""
        return sum(map(len, self._batches))

    def measured(self, group: int) -> Callable[[], Iterator[Pair]]:
        """See :class:`Lessons`."""
        return lambda: itertools.islice(self._epoch(group, 0), len(self.exam))

    def epochs(self, group: int) -> list[Callable[[], Iterator[Pair]]]:
        """See :class:`Lessons`."""
        return [partial(self._epoch, group, number) for number in range(self._epochs)]

    def _epoch(self, group: int, epoch: int) -> Iterator[Pair]:
        for step, batch in enumerate(self._batches[epoch]):
            yield self._pair(group, (epoch, step), batch)


class LiveLessons(Lessons):
    """Batches that are read from the loader anew for each group and epoch.

    Args:
        samples: The loader.
        teacher: Runs for every batch as far as the group needs it.
        students: Gives the student's side.
        epochs: Number of epochs.
        batch_num: Batches that the calibration takes.
    """

    def __init__(
        self,
        samples: Samples,
        teacher: Teacher,
        students: StudentInputs,
        epochs: int,
        batch_num: int,
    ) -> None:
        measured = itertools.islice(samples, max(batch_num, MEASURED))
        batches = [_Live(number, a, teacher) for number, a in enumerate(measured)]
        exam = [(batch, batch.output()) for batch in batches]
        super().__init__(students, epochs, exam)
        self._samples = samples
        self._teacher = teacher
        self._steps = samples.count() * epochs

    @property
    def steps(self) -> int:
        """See :class:`Lessons`."""
        return self._steps

    def measured(self, group: int) -> Callable[[], Iterator[Pair]]:
        """See :class:`Lessons`."""
        return lambda: (self._pair(group, None, batch) for batch, _ in self.exam)

    def epochs(self, group: int) -> list[Callable[[], Iterator[Pair]]]:
        """See :class:`Lessons`."""
        return [lambda: self._epoch(group)] * self._epochs

    def _epoch(self, group: int) -> Iterator[Pair]:
        for number, arguments in enumerate(self._samples):
            yield self._pair(group, None, _Live(number, arguments, self._teacher))


def collect(
    samples: Samples, teacher: Teacher, cache: ActivationCache, epochs: int, batch_num: int
) -> tuple[list[list[Batch]], list[tuple[Batch, Any]]]:
    """Run the teacher over all batches of all epochs, and keep what the groups need.

    Args:
        samples: The loader; a shuffling one is thereby frozen.
        teacher: The teacher.
        cache: Where the values go.
        epochs: How often the loader is read.
        batch_num: Batches that the calibration takes.

    Returns:
        The batches by epoch and step; those that are measured, with the output of the teacher.
    """
    batches: list[list[Batch]] = []
    exam: list[tuple[Batch, Any]] = []
    for epoch in range(epochs):
        batches.append([])
        for step, arguments in enumerate(samples):
            with naming_batch(step, arguments):
                values, output = teacher.values_of_all(arguments)
            batch = cache.add(arguments, values, epoch=epoch, step=step)
            batches[epoch].append(batch)
            if epoch == 0 and step < max(batch_num, MEASURED):
                exam.append((batch, _moved(output, torch.device("cpu"))))
    return batches, exam


def _moved(values: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), values)


def _to_host(frontier: Frontier) -> Frontier:
    frontier.values = _moved(frontier.values, torch.device("cpu"))
    return frontier
