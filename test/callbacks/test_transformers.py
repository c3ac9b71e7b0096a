"""The callback for Hugging Face's Trainer, in real trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amct_fx import prepare_qat_amct
from amct_fx.control import QATSchedule
from test.networks import Net

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (extra 'transformers')"
)
pytest.importorskip("accelerate", reason="accelerate is not installed (extra 'transformers')")
pytestmark = pytest.mark.filterwarnings("ignore")

from amct_fx.callbacks.transformers import QATCallback  # noqa: E402


class Classifier(nn.Module):
    """A network that returns its loss, as the trainer asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.seen: list[bool] = []

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(images)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def data() -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(16, 3, 8, 8, generator=generator)
    return [{"images": image, "labels": torch.tensor(i % 4)} for i, image in enumerate(images)]


def prepared() -> nn.Module:
    torch.manual_seed(0)
    return prepare_qat_amct(Classifier())


def train(
    model: nn.Module, callback: QATCallback, folder: Path, epochs: int, resume: Any = None
) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=epochs,
        per_device_train_batch_size=8,
        learning_rate=0.01,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_strategy="epoch",
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        restore_callback_states_from_checkpoint=resume is not None,
    )
    trainer = transformers.Trainer(model, arguments, train_dataset=data(), callbacks=[callback])
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def schedule() -> QATSchedule:
    return QATSchedule(freeze_bn_epoch=1, freeze_ranges_epoch=2)


def test_clips_and_loss_are_recorded(tmp_path: Path) -> None:
    model, callback = prepared(), QATCallback(record_every=1)
    train(model, callback, tmp_path, 2)
    assert callback.recorder is not None
    history = callback.recorder.history()
    assert history.steps == [1, 2, 3, 4]
    assert history.scalars["loss"][0] == [1, 2, 3, 4]
    assert history.clip_max["net.left"][0] != history.clip_max["net.left"][3]


def test_batch_norms_stay_frozen_although_the_trainer_calls_train(tmp_path: Path) -> None:
    model, callback = prepared(), QATCallback(schedule())
    modes: list[bool] = []
    hooks = len(model._forward_pre_hooks)
    model.net.stem.register_forward_hook(lambda *_: modes.append(model.net.bn.training))
    train(model, callback, tmp_path, 3)
    assert modes == [True, True, False, False, False, False]
    assert callback.phase == "ranges frozen, bn frozen"
    assert not model.net.stem.input_fake_quant.clip_max.requires_grad
    assert len(model._forward_pre_hooks) == hooks


def test_a_part_that_is_prepared_keeps_its_ranges_to_each_process(tmp_path: Path) -> None:
    model = Classifier()
    model.net = prepare_qat_amct(model.net)
    train(model, QATCallback(), tmp_path, 1)
    assert "net.stem.input_fake_quant.calibrated" in model._ddp_params_and_buffers_to_ignore


def test_a_training_that_ends_with_an_error_leaves_one_hook_less_at_the_next(
    tmp_path: Path,
) -> None:
    class Stops(transformers.TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    model, callback = prepared(), QATCallback(schedule())
    hooks = len(model._forward_pre_hooks)
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=2
    )
    trainer = transformers.Trainer(
        model, arguments, train_dataset=data(), callbacks=[callback, Stops()]
    )
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    train(model, callback, tmp_path, 1)
    assert len(model._forward_pre_hooks) == hooks


def test_a_checkpoint_brings_back_schedule_and_record(tmp_path: Path) -> None:
    whole, straight = prepared(), QATCallback(schedule(), record_every=1)
    train(whole, straight, tmp_path / "a", 3)
    first, before = prepared(), QATCallback(schedule(), record_every=1)
    train(first, before, tmp_path / "b", 2)
    checkpoint = str(tmp_path / "b" / "checkpoint-4")
    second, after = prepared(), QATCallback(schedule(), record_every=1)
    trainer = train(second, after, tmp_path / "b", 3, checkpoint)
    for key, value in whole.state_dict().items():
        assert torch.equal(second.state_dict()[key], value), key
    restored = next(c for c in trainer.callback_handler.callbacks if isinstance(c, QATCallback))
    assert restored.phase == straight.phase
    assert restored.recorder.history().steps == [1, 2, 3, 4, 5, 6]
