"""A callback for Hugging Face's ``Trainer`` (the extra ``transformers``): schedule and record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amct_fx.callbacks._missing import stand_in
from amct_fx.control import QATSchedule, freeze_bn
from amct_fx.distributed import ignore_quantizer_buffers
from amct_fx.report.recorder import TrainingRecorder

try:
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState
except ModuleNotFoundError as missing:
    TrainerCallback, ExportableState = stand_in(missing, "transformers"), object

if TYPE_CHECKING:
    from torch import nn
    from torch.utils.hooks import RemovableHandle

__all__ = ["QATCallback"]


class QATCallback(TrainerCallback, ExportableState):
    """Quantization-aware training in a ``transformers.Trainer``.

    Give the trainer a prepared model. The schedule and the record are saved in the trainer's
    checkpoints; they are restored with ``restore_callback_states_from_checkpoint=True``.

    Args:
        schedule: What to switch at which epoch.
        record_every: Record the clips of one of so many steps; ``None`` for no record. The loss is
            recorded whenever the trainer logs it.

    Attributes:
        schedule: The schedule.
        recorder: The :class:`amct_fx.report.TrainingRecorder`, once the training has begun.
        phase: What the current epoch does, such as ``"learn, bn frozen"``.

    Raises:
        MissingExtraError: transformers is not installed.
    """

    def __init__(
        self, schedule: QATSchedule | None = None, *, record_every: int | None = None
    ) -> None:
        super().__init__()
        self.schedule = schedule or QATSchedule()
        self.record_every = record_every
        self.recorder: TrainingRecorder | None = None
        self.phase = ""
        self._record: dict[str, Any] | None = None
        self._hook: RemovableHandle | None = None

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Let each process keep its own ranges, also where the prepared model is only a part."""
        ignore_quantizer_buffers(model)

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Begin to record, and to keep batch norms frozen: the trainer calls ``model.train()``."""
        self._take_hook_off()  # of a training that ended with an error
        self._hook = model.register_forward_pre_hook(self._freeze)
        if self.record_every is None:
            return
        self.recorder = TrainingRecorder(model, every=self.record_every)
        if self._record is not None:
            self.recorder.load_state_dict(self._record)
            self._record = None

    def on_epoch_begin(
        self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any
    ) -> None:
        """Switch what the schedule says for the epoch of the trainer."""
        self.schedule.epoch = int((state.epoch or 0) + 1e-6)  # is a sum of fractions
        self.phase = self.schedule.apply(model)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Record the clips."""
        if self.recorder is not None:
            self.recorder.step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Record the loss that the trainer logs."""
        if self.recorder is not None and logs and "loss" in logs:
            self.recorder.log(loss=float(logs["loss"]))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Take the hook off the model."""
        self._take_hook_off()

    def _take_hook_off(self) -> None:
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    def state(self) -> dict[str, Any]:
        """Return schedule and record, for the trainer's checkpoint."""
        record = self._record if self.recorder is None else self.recorder.state_dict()
        saved = {"schedule": self.schedule.state_dict(), "record": record}
        return {"args": {"record_every": self.record_every}, "attributes": {"saved": saved}}

    @property
    def saved(self) -> dict[str, Any]:
        """What :meth:`state` saves; setting it continues where that callback was."""
        saved: dict[str, Any] = self.state()["attributes"]["saved"]
        return saved

    @saved.setter
    def saved(self, value: dict[str, Any]) -> None:
        self.schedule.load_state_dict(value["schedule"])
        self._record = value["record"]

    def _freeze(self, model: nn.Module, _inputs: Any) -> None:
        if model.training and "bn frozen" in self.phase:
            freeze_bn(model)
