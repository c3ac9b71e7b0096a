"""A callback for Lightning (the extra ``lightning``): prepare, schedule, record, resume."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amct_fx.callbacks._missing import stand_in
from amct_fx.control import QATSchedule
from amct_fx.distributed import ignore_quantizer_buffers
from amct_fx.errors import ArgumentError, ModelStateError, did_you_mean
from amct_fx.nn.qat import QATLayer
from amct_fx.prepare import prepare_qat_amct
from amct_fx.report.recorder import TrainingRecorder

try:
    from lightning.pytorch import Callback
except ModuleNotFoundError as missing:
    Callback = stand_in(missing, "lightning")

if TYPE_CHECKING:
    from torch import nn

    from amct_fx.prepare import Config

__all__ = ["QATCallback"]


class QATCallback(Callback):
    """Quantization-aware training in a ``lightning.Trainer``.

    With ``attribute`` it prepares that part of the module itself, before the optimizers are made
    and before a checkpoint is loaded. Without, the module must hold a prepared model already. The
    schedule and the record are saved in Lightning's checkpoints and restored from them.

    Args:
        cfg: Configuration for :func:`amct_fx.prepare_qat_amct`.
        attribute: Name of the float model in the module, such as ``"model"`` or ``"net.backbone"``.
        schedule: What to switch at which epoch.
        record_every: Record loss and clips of one of so many batches; ``None`` for no record.
        options: Keyword arguments for :func:`amct_fx.prepare_qat_amct`.

    Attributes:
        schedule: The schedule.
        recorder: The :class:`amct_fx.report.TrainingRecorder`, once the training has begun.
        phase: What the current epoch does, such as ``"learn, bn frozen"``.

    Raises:
        ArgumentError: There is a configuration, but no ``attribute``.
        MissingExtraError: Lightning is not installed.
    """

    def __init__(
        self,
        cfg: Config = None,
        *,
        attribute: str | None = None,
        schedule: QATSchedule | None = None,
        record_every: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if attribute is None and (cfg is not None or options):
            message = "say by attribute= which part of the module to prepare"
            raise ArgumentError(message)
        self.cfg, self.attribute, self.options = cfg, attribute, options
        self.schedule = schedule or QATSchedule()
        self.record_every = record_every
        self.recorder: TrainingRecorder | None = None
        self.phase = ""
        self._record: dict[str, Any] | None = None

    def setup(self, trainer: Any, pl_module: nn.Module, stage: str) -> None:
        """Prepare the model, unless it is prepared.

        Raises:
            ModelStateError: There is no prepared model, and no attribute to prepare.
        """
        if self.attribute is not None:
            parent, _, name = self.attribute.rpartition(".")
            owner, model = _find(pl_module, parent, name)
            if not _is_prepared(model):
                setattr(owner, name, prepare_qat_amct(model, self.cfg, **self.options))
        if not _is_prepared(pl_module):
            message = (
                f"{type(pl_module).__name__} holds no prepared model; name the float one by "
                "QATCallback(cfg, attribute=...)"
            )
            raise ModelStateError(message)
        ignore_quantizer_buffers(pl_module)

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Begin to record, or go on where the checkpoint was."""
        if self.record_every is None:
            return
        self.recorder = TrainingRecorder(pl_module, every=self.record_every)
        if self._record is not None:
            self.recorder.load_state_dict(self._record)
            self._record = None

    def on_train_epoch_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """Switch what the schedule says for the epoch of the trainer."""
        self.schedule.epoch = int(trainer.current_epoch)
        self.phase = self.schedule.apply(pl_module)

    def on_train_batch_end(
        self, trainer: Any, pl_module: nn.Module, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record loss and clips."""
        if self.recorder is not None:
            self.recorder.step(outputs.get("loss") if isinstance(outputs, dict) else outputs)

    def state_dict(self) -> dict[str, Any]:
        """Return schedule and record, for Lightning's checkpoint."""
        record = self._record if self.recorder is None else self.recorder.state_dict()
        return {"schedule": self.schedule.state_dict(), "record": record}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the callback of the checkpoint was."""
        self.schedule.load_state_dict(state_dict["schedule"])
        self._record = state_dict["record"]


def _find(module: nn.Module, parent: str, name: str) -> tuple[nn.Module, nn.Module]:
    """Return a part of a module and its owner."""
    parts = dict(module.named_modules())
    full = f"{parent}.{name}" if parent else name
    if full not in parts:
        message = f"{type(module).__name__} has no part {full!r}{did_you_mean(full, parts)}"
        raise ModelStateError(message)
    return parts[parent], parts[full]


def _is_prepared(module: nn.Module) -> bool:
    return any(isinstance(part, QATLayer) for part in module.modules())
