"""One file restores a prepared or converted model in another process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from amct_fx import (
    CheckpointError,
    ModelStateError,
    convert_amct,
    get_qconfig_mapping,
    load_checkpoint,
    prepare_qat_amct,
    save_checkpoint,
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
    (tmp_path / "text.pt").write_text("hello")
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load_checkpoint(tmp_path / "text.pt", Net())
    with pytest.raises(FileNotFoundError):
        load_checkpoint(tmp_path / "missing.pt", Net())


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


FROZEN = Path(__file__).parent / "data" / "checkpoint_v1.pt"


def test_a_checkpoint_of_format_1_stays_readable():
    """Made once by ``save_checkpoint`` of version 0.1; never regenerate it."""
    restored, extra = load_checkpoint(FROZEN, Net())
    assert torch.allclose(restored.eval()(example()), extra["output"], atol=1e-6)
    assert restored.left.input_fake_quant.is_calibrated
    assert not restored.stem.input_fake_quant.fixed_min
