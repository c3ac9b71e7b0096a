"""One file restores a prepared or converted model in another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx import (
    AmctWarning,
    CheckpointError,
    ModelStateError,
    convert_amct,
    get_qconfig_mapping,
    load_checkpoint,
    prepare_qat_amct,
    save_checkpoint,
    summarize,
)

from .networks import Net, NetWithIsland, Pyramid, example

CFG = """batch_num: 2 skip_layers: "right"
retrain_weight_quant_config { ulq_retrain { } }"""


def trained(model: nn.Module, cfg: str | None = CFG, **options: object) -> nn.Module:
    prepared = prepare_qat_amct(model, cfg, **options)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    for _ in range(3):
        outputs = prepared(example(4))
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        sum(output.square().mean() for output in outputs).backward()
        optimizer.step()
    return prepared


@pytest.mark.parametrize("stage", ["prepared", "converted"])
@pytest.mark.parametrize("network", [Net, NetWithIsland])
def test_recipe_and_state_come_back(tmp_path, stage, network):
    model = trained(network(), CFG.replace("right", "stem"))
    if stage == "converted":
        model = convert_amct(model)
    save_checkpoint(model, tmp_path / "model.pt", extra={"epoch": 7})
    restored, extra = load_checkpoint(tmp_path / "model.pt", network())
    assert extra == {"epoch": 7}
    assert torch.equal(restored.eval()(example()), model.eval()(example()))
    assert repr(restored) == repr(model)


def test_a_scale_for_each_output_of_every_linear_comes_back_and_converts(tmp_path):
    model = trained(Net(), None, linear_channel_wise="all")
    assert model.head.weight_fake_quant.scale.shape == (4,)
    save_checkpoint(model, tmp_path / "model.pt")
    restored, _ = load_checkpoint(tmp_path / "model.pt", Net())
    expected = model.eval()(example())
    assert torch.equal(restored.eval()(example()), expected)
    torch.testing.assert_close(convert_amct(restored)(example()), expected, rtol=1e-3, atol=1e-3)


def test_options_come_back(tmp_path):
    model = trained(Pyramid(), None, reused="quantize", fixed_min_rule="nonnegative")
    save_checkpoint(model, tmp_path / "model.pt")
    restored, _ = load_checkpoint(tmp_path / "model.pt", Pyramid())
    for one, other in zip(restored.eval()(example()), model.eval()(example()), strict=True):
        assert torch.equal(one, other)


def test_a_fresh_process_restores_it(tmp_path):
    model = trained(Net()).eval()
    save_checkpoint(model, tmp_path / "model.pt")
    code = (
        "import sys, torch, amct_fx; from test.networks import Net, example;"
        "model, _ = amct_fx.load_checkpoint(sys.argv[1], Net());"
        "torch.save(model.eval()(example()).detach(), sys.argv[2])"
    )
    root = Path(__file__).parents[1]
    arguments = [str(tmp_path / "model.pt"), str(tmp_path / "out.pt")]
    subprocess.run([sys.executable, "-c", code, *arguments], check=True, cwd=root)
    assert torch.equal(torch.load(tmp_path / "out.pt"), model(example()))


def test_the_file_loads_with_weights_only(tmp_path):
    save_checkpoint(trained(Net()), tmp_path / "model.pt")
    assert torch.load(tmp_path / "model.pt", weights_only=True)["stage"] == "prepared"


def test_another_architecture_is_refused_with_the_first_difference(tmp_path):
    save_checkpoint(trained(Net()), tmp_path / "model.pt")
    other = Net()
    other.head = nn.Linear(8, 5)
    with pytest.raises(CheckpointError, match=r"head\.weight has shape \(4, 8\)"):
        load_checkpoint(tmp_path / "model.pt", other)


def test_what_is_no_checkpoint_is_refused(tmp_path):
    torch.save(Net().state_dict(), tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match="not written by save_checkpoint"):
        load_checkpoint(tmp_path / "state.pt", Net())
    torch.save(Net(), tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="it holds Python objects, such as a whole model"):
        load_checkpoint(tmp_path / "model.pt", Net())
    with pytest.raises(CheckpointError, match="is a folder; give the path of a checkpoint"):
        load_checkpoint(tmp_path, Net())
    with pytest.raises(FileNotFoundError, match="there is no such checkpoint"):
        load_checkpoint(tmp_path / "missing.pt", Net())


@pytest.mark.parametrize(
    "content", [b"", b"hello", b'skip_layers: "nope*"\n', b"PK\x03\x04 cut off"]
)
def test_whatever_bytes_a_file_holds_the_message_is_that_it_is_no_checkpoint(tmp_path, content):
    (tmp_path / "junk.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"junk\.pt is no checkpoint: \w"):
        load_checkpoint(tmp_path / "junk.pt", Net())


def test_a_checkpoint_that_is_cut_off_anywhere_is_no_checkpoint(tmp_path):
    save_checkpoint(prepare_qat_amct(Net()), tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    for size in (1, 100, 5000, len(whole) // 2, len(whole) - 10):
        (tmp_path / "cut.pt").write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"cut\.pt is no checkpoint: \w"):
            load_checkpoint(tmp_path / "cut.pt", Net())


def test_a_newer_format_is_refused(tmp_path):
    torch.save({"amct_fx_checkpoint": 99}, tmp_path / "new.pt")
    with pytest.raises(CheckpointError, match="format 99"):
        load_checkpoint(tmp_path / "new.pt", Net())


def test_what_cannot_stand_in_a_file_is_refused(tmp_path):
    with pytest.raises(ModelStateError, match="never prepared"):
        save_checkpoint(Net(), tmp_path / "model.pt")
    model = Net()
    prepared = prepare_qat_amct(model, get_qconfig_mapping(None, model))
    with pytest.raises(ModelStateError, match="QConfigMapping"):
        save_checkpoint(prepared, tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())


def test_a_failed_save_keeps_the_old_file(tmp_path, monkeypatch):
    model = trained(Net())
    save_checkpoint(model, tmp_path / "model.pt")
    before = (tmp_path / "model.pt").read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="No space"):
        save_checkpoint(model, tmp_path / "model.pt")
    assert (tmp_path / "model.pt").read_bytes() == before
    assert len(list(tmp_path.iterdir())) == 1


class Recurrent(nn.Module):
    """An LSTM and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 4, batch_first=True)
        self.gru = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.gru(self.lstm(x.flatten(2).transpose(1, 2)[..., :8].reshape(-1, 3, 8))[0])[0]


class ZeroHead(nn.Module):
    """The head starts at zero, as in detectors and diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(8, 4)
        self.head = nn.Linear(4, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.body(x[:, 0, 0])))


class Reads(nn.Module):
    """An island that reads the weight of one of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.called = nn.Linear(8, 4)
        self.read = nn.Linear(8, 4)
        self.register_buffer("table", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor, **_: object) -> Tensor:
        return self.called(x) + F.linear(x, self.read.weight) + self.table


class Normed(nn.Module):
    """Its batch norm cannot be folded once its statistics have overflowed."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))


def saved_and_restored(converted: nn.Module, fresh: nn.Module, folder: Path) -> nn.Module:
    save_checkpoint(converted, folder / "model.pt")
    return load_checkpoint(folder / "model.pt", fresh)[0]


@pytest.mark.parametrize("weights", ["arq_retrain", "ulq_retrain"])
@pytest.mark.parametrize("network", [Recurrent, ZeroHead, Net])
def test_converted_models_come_back_whatever_the_fresh_weights_are(tmp_path, network, weights):
    model = network().requires_grad_(False)  # what is zero stays zero
    converted = convert_amct(trained(model, f"retrain_weight_quant_config {{ {weights} {{ }} }}"))
    restored = saved_and_restored(converted, network(), tmp_path)
    assert torch.equal(restored(example()), converted(example()))
    assert repr(restored) == repr(converted)


def test_a_zero_head_that_was_trained_comes_back(tmp_path):
    converted = convert_amct(trained(ZeroHead(), None))
    assert converted.head.weight_scale.numel() == 1
    restored = saved_and_restored(converted, ZeroHead(), tmp_path)
    assert torch.equal(restored(example()), converted(example()))


def test_layers_that_stayed_float_at_conversion_come_back(tmp_path):
    prepared = prepare_qat_amct(Reads())
    prepared(example())
    with pytest.warns(AmctWarning, match="read stay float"):
        converted = convert_amct(prepared)
    restored = saved_and_restored(converted, Reads(), tmp_path)
    assert torch.equal(restored(example()), converted(example()))
    assert str(summarize(restored)) == str(summarize(converted))


def test_fresh_batch_norms_of_any_values_do_not_matter(tmp_path):
    converted = convert_amct(trained(Normed(), None))
    fresh = Normed()
    nn.init.constant_(fresh.norm.weight, 1e-6)
    nn.init.constant_(fresh.norm.bias, 10.0)
    restored = saved_and_restored(converted, fresh, tmp_path)
    assert torch.equal(restored(example()), converted(example()))


def test_a_batch_norm_that_could_not_be_folded_comes_back(tmp_path):
    prepared = trained(Normed(), None)
    prepared.norm.running_mean[1] = torch.inf
    with pytest.warns(AmctWarning):
        converted = convert_amct(prepared)
    restored = saved_and_restored(converted, Normed(), tmp_path)
    assert isinstance(restored.norm, nn.BatchNorm2d)
    expected = converted(example())
    assert torch.equal(restored(example()).nan_to_num(), expected.nan_to_num())


class Hidden(nn.Module):
    """Looks at the values behind the back of the tracer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.factor


@pytest.mark.parametrize("stage", ["prepared", "converted"])
def test_a_model_that_is_traced_differently_is_refused(tmp_path, stage, monkeypatch):
    model = trained(Hidden(), None)
    if stage == "converted":
        model = convert_amct(model)
    save_checkpoint(model, tmp_path / "model.pt")

    def forward(self: Hidden, x: Tensor) -> Tensor:
        return self.layer(x) * (self.factor if bool(x.sum() < 1e6) else 1.0)

    monkeypatch.setattr(Hidden, "forward", forward)
    with pytest.raises(CheckpointError, match=r"'<model>' stays Python now; pass the same"):
        load_checkpoint(tmp_path / "model.pt", Hidden())


def test_the_example_inputs_of_the_preparation_can_be_given_again(tmp_path, monkeypatch):
    given = []
    model = trained(Net())
    save_checkpoint(model, tmp_path / "model.pt")

    def prepare(model: nn.Module, cfg: object, example_inputs: object, **options: object):
        given.append(example_inputs)
        return prepare_qat_amct(model, cfg, example_inputs, **options)

    monkeypatch.setattr("amct_fx.checkpoint.prepare_qat_amct", prepare)
    load_checkpoint(tmp_path / "model.pt", Net(), example_inputs=example())
    assert given[0] is not None


def test_the_file_is_readable_by_the_group(tmp_path):
    save_checkpoint(trained(Net()), tmp_path / "new" / "model.pt")
    assert (tmp_path / "new" / "model.pt").stat().st_mode & 0o777 == 0o640


class Lazy(nn.Module):
    """Makes a table at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.last = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        if not hasattr(self, "table"):
            self.table = torch.linspace(0.0, 1.0, 4)
        return self.last(F.relu(self.first(x)) + self.table)


class AroundLazy(nn.Module):
    """Holds a part that makes a table at its first call."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Lazy()
        self.head = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.part(x))


@pytest.mark.parametrize("network", [Lazy, AroundLazy])
@pytest.mark.parametrize("stage", ["prepared", "converted"])
def test_a_model_that_ran_before_loading_is_left_python_where_it_was(tmp_path, network, stage):
    x = torch.randn(8, 4)
    model = prepare_qat_amct(network())
    model(x)
    model.eval()
    model = convert_amct(model) if stage == "converted" else model
    save_checkpoint(model, tmp_path / "model.pt")
    ran = network()
    ran(x)
    restored, _ = load_checkpoint(tmp_path / "model.pt", ran)
    assert torch.equal(restored.eval()(x), model(x))
    assert [i.name for i in summarize(restored).islands] == [
        i.name for i in summarize(model).islands
    ]
    for part in (*ran.modules(), *restored.modules()):
        assert not any("kept_python" in name for name in vars(part))


def test_a_model_that_ran_before_prepare_must_run_before_loading(tmp_path):
    x = torch.randn(8, 4)
    ran = Lazy()
    ran(x)
    model = prepare_qat_amct(ran)
    assert not summarize(model).islands
    model(x)
    save_checkpoint(model, tmp_path / "model.pt")
    with pytest.raises(CheckpointError, match="had run before, run it before"):
        load_checkpoint(tmp_path / "model.pt", Lazy())
    again = Lazy()
    again(x)
    restored, _ = load_checkpoint(tmp_path / "model.pt", again)
    assert torch.equal(restored.eval()(x), model.eval()(x))


FROZEN = Path(__file__).parent / "data" / "checkpoint_v1.pt"


def test_a_checkpoint_of_format_1_stays_readable():
    """Made once by ``save_checkpoint`` of version 0.1; never regenerate it."""
    restored, extra = load_checkpoint(FROZEN, Net())
    assert torch.allclose(restored.eval()(example()), extra["output"], atol=1e-6)
    assert restored.left.input_fake_quant.is_calibrated
    assert not restored.stem.input_fake_quant.fixed_min
