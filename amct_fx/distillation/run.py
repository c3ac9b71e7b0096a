"""The verb ``distill``: teach a student block by block. Source: spec/distillation.md section 9.

The recipe: find the groups, record what enters and leaves them in the teacher, calibrate the
student, then train one group after the other.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from amct_fx.copying import shadow_model
from amct_fx.distillation.cache import ActivationCache, Folder, free_memory
from amct_fx.distillation.calibrate import calibrate, calibration_batches
from amct_fx.distillation.cuts import Block, fewest_bits
from amct_fx.distillation.exam import Exam, tensors_of, undo_harmful_groups
from amct_fx.distillation.lessons import (
    CachedLessons,
    Lessons,
    LiveLessons,
    StudentInputs,
    Teacher,
    collect,
)
from amct_fx.distillation.loop import GroupTrainer
from amct_fx.distillation.models import student_model, teacher_model
from amct_fx.distillation.optim import WEIGHT_STEP
from amct_fx.distillation.options import DistillOptions, check_flag, chosen_device
from amct_fx.distillation.plan import check_same_model, cuts_of_config, record_distillation
from amct_fx.distillation.progress import ProgressBar
from amct_fx.distillation.resume import Checkpoint
from amct_fx.distillation.samples import Samples
from amct_fx.distillation.snapshot import ModelSnapshot, TensorSnapshot
from amct_fx.distillation.sync import check_equal_counts

if TYPE_CHECKING:
    import os

    from torch.optim import Optimizer

    from amct_fx.config.distill import DistillConfig
    from amct_fx.config.distill_json import DistillPlan
    from amct_fx.distillation.history import History
    from amct_fx.distillation.optim import OptimizerFactory
    from amct_fx.distillation.options import BnMode, CacheKind, Loss, Schedule, SchedulerFactory
    from amct_fx.distillation.plan import Distillation
    from amct_fx.distillation.samples import SampleFn

__all__ = ["distill"]


def distill(
    teacher: nn.Module,
    student: nn.Module,
    loader: Iterable[Any],
    cfg: str | os.PathLike[str] | Mapping[str, Any] | DistillConfig | DistillPlan | None = None,
    *,
    epochs: int = 1,
    lr: float = 1e-3,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    optimizer_factory: OptimizerFactory | None = None,
    scheduler_factory: SchedulerFactory | None = None,
    sample_fn: SampleFn | None = None,
    device: torch.device | str | None = None,
    schedule: Schedule = "cosine",
    clip_lr: float | None = None,
    clip_headroom: float | None = 0.1,
    weight_step: float | None = WEIGHT_STEP,
    bn_mode: BnMode = "eval",
    keep_best: bool = True,
    cache: CacheKind | None = None,
    cache_bytes: int | None = None,
    dump_dir: str | os.PathLike[str] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    allow_branches: bool = False,
    progress: bool | None = None,
) -> nn.Module:
    """Train each group of ``student`` to follow the same group of ``teacher``; needs no labels.

    The student is calibrated first, unless its ranges are known. Then one group after the other is
    trained on what enters it in the student as it is now (or in the teacher, where the student is
    far off) against what leaves it in the teacher. :func:`amct_fx.distillation.history_of` tells
    the losses. After an error, or Ctrl-C, teacher and student are as before and no file is left.

    Args:
        teacher: The float model; not touched. It computes in eval mode.
        student: What :func:`amct_fx.prepare_distill_amct` made of it, or
            :func:`amct_fx.prepare_qat_amct`; trained in place.
        loader: A ``DataLoader``, or a list of batches. A batch is a tensor, or begins with one, as
            ``(image, label)`` does; otherwise give ``sample_fn``.
        cfg: Path or text of a ``.cfg`` or JSON, as for :func:`amct_fx.prepare_distill_amct`, for
            other groups; what it says of the layers must be true of the student. ``None``: the
            groups of the preparation.
        epochs: Epochs for each group.
        lr: Learning rate of weights, biases and batch norms; see ``weight_step``.
        loss: Any function ``(student, teacher) -> number``; default ``nn.MSELoss()``. The mean over
            the tensors of an output that is a tuple.
        optimizer: An optimizer whose class and hyper-parameters each group's optimizer gets; then
            ``lr``, ``weight_step`` and ``clip_lr`` have no effect. Default: AdamW.
        optimizer_factory: Takes parameter groups, returns an optimizer, in place of ``optimizer``.
        scheduler_factory: Takes the optimizer of a group, returns a learning rate scheduler; it
            steps after every batch.
        schedule: Of the default optimizer: ``"cosine"`` lowers the learning rates to 0 over the
            steps of a group, ``"constant"`` keeps them.
        sample_fn: Takes a batch, returns a tensor, or all arguments of the model.
        device: Where the samples go; default: where the student is.
        clip_lr: Learning rate of the clips; default 0.1, at most a hundredth of the range.
        clip_headroom: No clip is tightened to less than this share beyond the extremes of the
            measured batches, since other data go further; ``None``: no limit.
        weight_step: ``lr`` is lowered to this share of the distance between two codes of the
            quantized weights in the group, or of coarser ones in front of it, since Adam moves
            each weight by about ``lr``, whatever its gradient is; so is the learning rate of
            learned scales, for the largest code. ``None``: no limit.
        bn_mode: ``"eval"``: batch norms use their statistics, and keep them; ``"train"``: those of
            the group that is trained collect new ones.
        keep_best: Keep the best state of each group, as measured on up to 16 batches, so that none
            ends worse than it began. With the default optimizer, a group that no epoch made better
            is trained again with a tenth of the learning rates, at most twice. Groups that made the
            outputs of the whole model worse go back to their calibrated state.
        cache: Where the teacher's activations are kept: ``"ram"`` (up to ``cache_bytes``, the rest
            on disk), ``"disk"``, or ``"none"``: the teacher runs anew for each group. Default: as
            ``data_dump`` of the configuration says, ``"ram"`` or ``"disk"``.
        cache_bytes: Default: half of the free memory.
        dump_dir: Folder of the files; default: a temporary one. Files are removed at the end.
        checkpoint: A file from which the same call goes on at the last finished group if it was
            interrupted; removed at the end.
        allow_branches: Let a group of ``cfg`` hold a closed residual block.
        progress: Show a bar (needs rich); default: if the error output is a terminal.

    Returns:
        ``student``, out of ``DistributedDataParallel``, in eval mode.

    Raises:
        ArgumentError: An argument that cannot be used; an empty loader.
        ArgumentTypeError: An argument of the wrong type.
        CalibrationError: A calibration batch gives NaN or infinity.
        ConfigError: The configuration does not fit the model, or contradicts the student.
        DistillError: A group failed (names it; the cause is chained), a batch does not fit the
            model or gives a loss that is NaN or infinite (names it), or the disk is full.
        ModelStateError: The teacher has quantizers, the student has none, or is of another model.

    Example:
        >>> import amct_fx
        >>> from amct_fx.distillation import history_of
        >>> teacher = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3)).eval()
        >>> student = amct_fx.prepare_distill_amct(teacher)
        >>> batches = [torch.randn(8, 1, 8, 8) for _ in range(4)]
        >>> student = amct_fx.distill(teacher, student, batches, epochs=3)
        >>> [group.after <= group.before for group in history_of(student).groups]
        [True, True]
    """
    options = DistillOptions(
        epochs=epochs,
        lr=lr,
        loss=nn.MSELoss() if loss is None else loss,
        optimizer=optimizer,
        optimizer_factory=optimizer_factory,
        scheduler_factory=scheduler_factory,
        schedule=schedule,
        clip_lr=clip_lr,
        clip_headroom=clip_headroom,
        weight_step=weight_step,
        bn_mode=bn_mode,
        keep_best=keep_best,
        cache=cache,
        cache_bytes=cache_bytes,
        dump_dir=dump_dir,
        checkpoint=checkpoint,
        progress=progress,
    )
    check_flag("allow_branches", allow_branches)
    source, target = teacher_model(teacher), student_model(student)
    check_same_model(source, target)
    plan = cuts_of_config(source, target, cfg, allow_branches=allow_branches)
    where = chosen_device(device, next(target.parameters()).device)
    samples = Samples(loader, sample_fn, where)
    before = ModelSnapshot(target)
    try:
        with torch.inference_mode(False):
            resumable = Checkpoint(checkpoint, plan.cuts, epochs, target)
            run = _Run(source, target, plan, options, where)
            history = run.run(samples, resumable, progress)
    except BaseException:
        before.restore()
        raise
    plan.history = history
    record_distillation(target, plan)
    resumable.remove()
    return target.eval()


class _Run:
    """One distillation."""

    def __init__(
        self,
        teacher: nn.Module,
        student: nn.Module,
        plan: Distillation,
        options: DistillOptions,
        device: torch.device,
    ) -> None:
        self._student = student
        self._cuts = plan.cuts
        self._options = options
        self._device = device
        self._teacher = Teacher(teacher, student, plan.cuts)
        self._cache_kind = options.cache or ("disk" if plan.config.data_dump else "ram")

    def run(self, samples: Samples, resumable: Checkpoint, shown: bool | None) -> History:
        """Calibrate, then train all groups that are not done."""
        started = time.perf_counter()
        state = resumable.load()
        if state.state is not None:
            torch.set_rng_state(state.random)
            self._student.load_state_dict(state.state)
        options = self._options
        with Folder(options.dump_dir) as folder:
            lessons = self._lessons(samples, folder)
            shadow = lessons.students.student
            exam = Exam(shadow, lessons.exam)
            if state.calibrated is None:
                state.calibrated = tensors_of(self._student)
                state.history.model_before = exam.error()
                resumable.save(state, self._student)
            with ProgressBar(lessons.steps * len(self._cuts), shown) as bar:
                trainer = GroupTrainer(options, bar, lessons.steps)
                bits = fewest_bits(shadow, self._cuts)
                for number in range(state.done, len(self._cuts)):
                    bar.describe(str(self._cuts[number]))
                    block = Block(shadow, self._cuts[number])
                    measured, epochs = lessons.measured(number), lessons.epochs(number)
                    group = trainer.train(block, measured, epochs, bits[number])
                    state.history.groups.append(group)
                    state.done = number + 1
                    resumable.save(state, self._student)
                if options.keep_best:
                    undone = undo_harmful_groups(exam, self._cuts, state.calibrated, state.history)
                    if undone:
                        self._train_last_again(trainer, lessons, exam, state.history)
                else:
                    state.history.model_after = exam.error()
        state.history.teacher_passes = self._teacher.passes
        state.history.seconds += time.perf_counter() - started
        return state.history

    def _train_last_again(
        self, trainer: GroupTrainer, lessons: Lessons, exam: Exam, history: History
    ) -> None:
        """Train the last group on what enters it after others were undone."""
        last = len(self._cuts) - 1
        block = Block(exam.student, self._cuts[last])
        before = TensorSnapshot([*block.module.parameters(), *block.module.buffers()])
        lessons.students.forget()
        bits = fewest_bits(exam.student, self._cuts)[last]
        group = trainer.train(block, lessons.measured(last), lessons.epochs(last), bits)
        error = exam.error()
        if history.model_after is not None and error < history.model_after:
            history.model_after = error
            history.groups[last] = group
        else:
            before.restore()

    def _lessons(self, samples: Samples, folder: Folder) -> Lessons:
        """Record the teacher, calibrate the student."""
        options, teacher = self._options, self._teacher
        batch_num = calibration_batches(self._student)
        if self._cache_kind == "none":
            calibrate(self._student, samples)
            students = self._student_inputs(0)
            return LiveLessons(samples, teacher, students, options.epochs, batch_num)
        budget = 0
        if self._cache_kind == "ram":
            budget = free_memory() // 2 if options.cache_bytes is None else options.cache_bytes
        labels = [cut.names[0] for cut in self._cuts]
        cache = ActivationCache(labels, folder, self._device, budget)
        batches, exam = collect(samples, teacher, cache, options.epochs, batch_num)
        check_equal_counts(sum(map(len, batches)), self._device)
        inputs = [batch.inputs for batch in itertools.chain.from_iterable(batches)]
        calibrate(self._student, (read() for read in itertools.cycle(inputs)))
        return CachedLessons(batches, self._student_inputs(cache.memory_left), exam)

    def _student_inputs(self, budget: int) -> StudentInputs:
        shadow = shadow_model(self._student, share_buffers=True).eval()
        return StudentInputs(shadow, self._cuts, budget)
