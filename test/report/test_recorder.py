"""``TrainingRecorder``: what it keeps, at which steps, and that it reads nothing back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from amct_fx import ModelStateError, prepare_qat_amct
from amct_fx.report import TrainingRecorder
from test.networks import Net, example


def training(
    steps: int, recorder_options: dict[str, Any] | None = None
) -> tuple[nn.Module, TrainingRecorder, list[tuple[float, float]]]:
    """Train, and return the model, the recorder, and the clips and losses as they really were."""
    torch.manual_seed(0)
    model = prepare_qat_amct(Net())
    recorder = TrainingRecorder(model, **(recorder_options or {}))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    real = []
    for _ in range(steps):
        loss = model(example(4)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        recorder.step(loss)
        real.append((model.stem.input_fake_quant.clip_max.item(), loss.item()))
    return model, recorder, real


def test_clips_and_loss_of_each_step_are_kept() -> None:
    model, recorder, real = training(4)
    history = recorder.history()
    assert history.steps == [1, 2, 3, 4]
    assert set(history.clip_max) == {"stem", "left", "head"}
    assert history.clip_max["stem"] == pytest.approx([clip for clip, _ in real])
    assert history.scalars["loss"] == ([1, 2, 3, 4], pytest.approx([loss for _, loss in real]))
    assert history.clip_min["head"][-1] == pytest.approx(
        model.head.input_fake_quant.clip_min.item()
    )


def test_only_one_of_so_many_steps_is_recorded() -> None:
    _, recorder, _ = training(7, {"every": 3})
    assert recorder.history().steps == [3, 6]


def test_a_long_training_is_thinned_out_and_stays_within_its_limit() -> None:
    model = prepare_qat_amct(nn.Sequential(nn.Linear(4, 2)))
    recorder = TrainingRecorder(model, max_records=8)
    for step in range(100):
        recorder.step(float(step))
    history = recorder.history()
    assert len(history.steps) < 8
    assert history.steps == [step for step in range(1, 101) if step % recorder.every == 0]
    assert history.scalars["loss"][0] == history.steps


def test_values_logged_at_other_steps_are_thinned_out_by_their_own_number() -> None:
    model = prepare_qat_amct(nn.Sequential(nn.Linear(4, 2)))
    recorder = TrainingRecorder(model, max_records=8)
    for step in range(1, 101):
        recorder.step()
        if step % 15 == 0:
            recorder.log(loss=float(step))
        recorder.log(often=float(step))
    history = recorder.history()
    assert history.scalars["loss"][0] == [15, 30, 45, 60, 75, 90]
    assert 3 < len(history.scalars["often"][0]) < 8


def test_nothing_is_read_from_the_device_while_the_training_runs() -> None:
    _, recorder, _ = training(1)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("item", "tolist", "__float__", "cpu", "numpy"):
            patch.setattr(torch.Tensor, name, lambda *_: pytest.fail("read from the device"))
        recorder.step(torch.tensor(1.0), accuracy=torch.tensor(0.5))
    assert recorder.history().scalars["accuracy"] == ([2], [0.5])


def test_it_follows_an_optimizer_and_takes_the_loss_from_elsewhere() -> None:
    model = prepare_qat_amct(nn.Sequential(nn.Linear(4, 2)))
    recorder = TrainingRecorder(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle = recorder.attach(optimizer)
    for step in range(3):
        model(torch.ones(8, 4)).mean().backward()
        optimizer.step()
        recorder.log(loss=float(step))
    handle.remove()
    optimizer.step()
    assert recorder.history().steps == [1, 2, 3]
    assert recorder.history().scalars["loss"] == ([1, 2, 3], [0, 1, 2])


def test_a_writer_gets_each_recorded_value() -> None:
    class Writer:
        def __init__(self) -> None:
            self.found: list[tuple[str, float, int]] = []

        def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
            self.found.append((tag, scalar_value, global_step))

    writer = Writer()
    _, _, real = training(2, {"writer": writer})
    assert ("clip_max/stem", pytest.approx(real[1][0]), 2) in writer.found
    assert ("loss", pytest.approx(real[0][1]), 1) in writer.found
    assert {tag for tag, _, _ in writer.found} == {"loss"} | {
        f"{clip}/{name}" for clip in ("clip_max", "clip_min") for name in ("stem", "left", "head")
    }


def test_tensorboard_can_be_the_writer(tmp_path: Any) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        training(2, {"writer": writer})
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert "clip_min/left" in events.Tags()["scalars"]
    assert [event.step for event in events.Scalars("loss")] == [1, 2]


def test_a_recorder_continues_after_a_checkpoint() -> None:
    model, recorder, _ = training(2)
    state = recorder.state_dict()
    other = TrainingRecorder(model)
    other.load_state_dict(state)
    other.step(1.5)
    assert other.history().steps == [1, 2, 3]
    assert other.history().clip_max["stem"][:2] == recorder.history().clip_max["stem"]
    assert other.history().scalars["loss"][1][-1] == 1.5


def test_a_history_of_another_model_is_refused() -> None:
    _, recorder, _ = training(1)
    other = TrainingRecorder(prepare_qat_amct(nn.Sequential(nn.Linear(4, 2))))
    with pytest.raises(ModelStateError, match="other quantizers"):
        other.load_state_dict(recorder.state_dict())


def test_names_are_those_of_the_layers_also_in_a_wrapped_model() -> None:
    model = torch.nn.Sequential()
    model.add_module("module", prepare_qat_amct(nn.Sequential(nn.LSTM(4, 8))))
    assert set(TrainingRecorder(model).history().clip_max) == {"0", "0 (hidden state)"}


def test_a_model_without_learned_ranges_is_refused() -> None:
    with pytest.raises(ModelStateError, match="no learned ranges"):
        TrainingRecorder(Net())
    with pytest.raises(ValueError, match="at least 1"):
        TrainingRecorder(prepare_qat_amct(Net()), every=0)
