"""The callback for Lightning, in real trainings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from amct_fx import ModelStateError, convert_amct, prepare_qat_amct
from amct_fx.control import QATSchedule
from amct_fx.nn.qat import QATLayer
from test.networks import Net

lightning = pytest.importorskip(
    "lightning.pytorch", reason="Lightning is not installed (extra 'lightning')"
)
pytestmark = pytest.mark.filterwarnings("ignore")

from amct_fx.callbacks.lightning import QATCallback  # noqa: E402


class Module(lightning.LightningModule):  # type: ignore[misc, name-defined]
    """An ordinary Lightning module; knows nothing of quantization."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.seen: list[tuple[int, bool, float]] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images, labels = batch
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.seen.append((self.current_epoch, self.model.bn.training, loss.item()))
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.model(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def loader() -> DataLoader[Any]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(16, 3, 8, 8, generator=generator)
    return DataLoader(TensorDataset(images, torch.arange(16) % 4), 8)


def fit(
    module: Module, callback: QATCallback, folder: Path, epochs: int, resume: str | None = None
) -> Any:
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="cpu",
        callbacks=[callback],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        val_check_interval=1,
    )
    trainer.fit(module, loader(), loader(), ckpt_path=resume)
    return trainer


def module() -> Module:
    torch.manual_seed(0)
    return Module(Net())


def schedule() -> QATSchedule:
    return QATSchedule(freeze_bn_epoch=1, freeze_ranges_epoch=2)


def test_the_model_is_prepared_before_the_optimizer_and_learns_its_ranges(tmp_path: Path) -> None:
    trained = module()
    callback = QATCallback('quant_skip_layers: "head"', attribute="model", record_every=1)
    fit(trained, callback, tmp_path, 2)
    assert isinstance(trained.model.stem, QATLayer)
    assert not isinstance(trained.model.head, QATLayer)
    assert callback.recorder is not None
    history = callback.recorder.history()
    assert history.steps == [1, 2, 3, 4]
    clips = history.clip_max["model.left"]
    assert clips[1] != clips[3]
    assert history.scalars["loss"][1] == pytest.approx([loss for _, _, loss in trained.seen])
    assert convert_amct(trained.model)(torch.randn(1, 3, 8, 8)).shape == (1, 4)


def test_the_schedule_switches_by_epoch_and_validation_does_not_undo_it(tmp_path: Path) -> None:
    trained = module()
    callback = QATCallback(attribute="model", schedule=schedule())
    fit(trained, callback, tmp_path, 3)
    assert [bn for _, bn, _ in trained.seen] == [True, True, False, False, False, False]
    assert callback.phase == "ranges frozen, bn frozen"
    assert not trained.model.stem.input_fake_quant.clip_max.requires_grad


def test_a_checkpoint_brings_back_model_schedule_and_record(tmp_path: Path) -> None:
    whole, first, second = module(), module(), module()
    straight = QATCallback(attribute="model", schedule=schedule(), record_every=1)
    fit(whole, straight, tmp_path, 3)
    before = QATCallback(attribute="model", schedule=schedule(), record_every=1)
    trainer = fit(first, before, tmp_path, 2)
    trainer.save_checkpoint(tmp_path / "half.ckpt")
    after = QATCallback(attribute="model", schedule=schedule(), record_every=1)
    fit(second, after, tmp_path, 3, str(tmp_path / "half.ckpt"))
    for key, value in whole.state_dict().items():
        assert torch.equal(second.state_dict()[key], value), key
    assert after.phase == straight.phase
    assert after.recorder is not None
    assert straight.recorder is not None
    assert after.recorder.history().steps == straight.recorder.history().steps


def test_a_module_that_holds_a_prepared_model_needs_no_configuration(tmp_path: Path) -> None:
    trained = Module(prepare_qat_amct(Net()))
    fit(trained, QATCallback(), tmp_path, 1)
    assert trained.model.stem.input_fake_quant.is_calibrated


def test_mistakes_say_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ModelStateError, match="attribute="):
        fit(module(), QATCallback(), tmp_path, 1)
    with pytest.raises(ModelStateError, match=r"no part 'modle'; did you mean 'model'"):
        fit(module(), QATCallback(attribute="modle"), tmp_path, 1)
    with pytest.raises(ValueError, match="attribute="):
        QATCallback("batch_num: 2")
