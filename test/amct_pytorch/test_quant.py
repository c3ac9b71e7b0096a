"""Creating, restoring and saving models with AMCT's functions."""

from __future__ import annotations

import inspect
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
import torch.distributed as dist
from onnx import helper
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

import amct_fx.amct_pytorch as amct
from amct_fx import prepare_qat_amct
from amct_fx.errors import AmctError, AmctWarning
from amct_fx.record import layer_records, read_record
from test.golden.networks import NoLayers, PlainChain
from test.golden.reader import load_final_state, load_run, networks

ROOT = Path(__file__).parents[2]
X = torch.rand(2, 3, 8, 8)


class Folder:
    """Paths of the files of one script."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = str(path / "config.json")
        self.record = str(path / "out" / "record.txt")
        self.pth = str(path / "model.pth")
        self.save = str(path / "out" / "net")

    def configure(self, model: nn.Module, cfg: str | None = None) -> None:
        definition = None
        if cfg is not None:
            definition = str(self.path / "quant.cfg")
            Path(definition).write_text(cfg)
        amct.create_quant_retrain_config(self.config, model, X, definition)

    def create(self, model: nn.Module, cfg: str | None = None) -> nn.Module:
        self.configure(model, cfg)
        return amct.create_quant_retrain_model(self.config, model, self.record, X)

    def restore(self, model: nn.Module, name: str | None = None) -> nn.Module:
        return amct.restore_quant_retrain_model(self.config, model, self.record, X, self.pth, name)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for seed in range(steps):
        optimizer.zero_grad()
        torch.manual_seed(seed)
        model(torch.rand(2, 3, 8, 8)).square().mean().backward()
        optimizer.step()


def test_the_signatures_are_amcts() -> None:
    head = ["config_file", "model", "record_file"]
    tail = ["input_names", "output_names", "dynamic_axes"]
    expected = {
        amct.create_quant_retrain_model: [*head, "input_data"],
        amct.restore_quant_retrain_model: [*head, "input_data", "pth_file", "state_dict_name"],
        amct.save_quant_retrain_model: [*head, "save_path", "input_data", *tail],
    }
    for function, names in expected.items():
        parameters = inspect.signature(function).parameters
        assert list(parameters) == names
        optional = [name for name, p in parameters.items() if p.default is None]
        assert optional == [name for name in names if name in (*tail, "state_dict_name")]


def test_create_prepares_a_copy_and_empties_the_record(folder: Folder) -> None:
    model = PlainChain()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    Path(folder.record).parent.mkdir()
    Path(folder.record).write_text("old")
    prepared = folder.create(model, "batch_num: 2")
    assert prepared.c1.input_fake_quant.batch_num == 2
    assert prepared.training == model.training
    assert type(model) is PlainChain
    assert type(model.c1) is nn.Conv2d
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    assert Path(folder.record).read_text() == ""
    assert Path(folder.record).stat().st_mode & 0o777 == 0o640


def test_a_cfg_file_is_taken_as_well_as_json(folder: Folder) -> None:
    path = folder.path / "quant.cfg"
    path.write_text("batch_num: 3")
    prepared = amct.create_quant_retrain_model(str(path), PlainChain(), folder.record, X)
    assert prepared.c1.input_fake_quant.batch_num == 3


def test_a_restored_model_trains_on_as_if_never_stopped(folder: Folder) -> None:
    torch.manual_seed(0)
    float_model = PlainChain()
    model = folder.create(float_model, "batch_num: 2")
    train(model)
    torch.save({"net": model.state_dict(), "epoch": 3}, folder.pth)
    torch.manual_seed(1)
    restored = folder.restore(PlainChain(), "net")
    for twin in (model, restored):
        train(twin.train())
    pairs = zip(model.state_dict().values(), restored.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_a_checkpoint_of_amct_is_restored(folder: Folder) -> None:
    final = load_final_state("tiny_default")
    torch.save(dict(final.state), folder.pth)
    network = getattr(networks, final.network)()
    folder.configure(network)
    restored = folder.restore(network).eval()
    with torch.no_grad():
        assert torch.allclose(restored(final.x), final.y, atol=5e-3)
    assert restored.c1.input_fake_quant.is_calibrated


@pytest.fixture
def process_group() -> Any:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("process_group")
def test_ddp_models_are_unwrapped(folder: Folder) -> None:
    model = DistributedDataParallel(PlainChain())
    prepared = folder.create(model)
    train(prepared)
    torch.save(DistributedDataParallel(prepared).state_dict(), folder.pth)
    restored = folder.restore(model)
    pairs = zip(prepared.state_dict().values(), restored.state_dict().values(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


class Prepared:
    """Stands for a prepared model in the table below."""


CREATE_ERRORS: list[Any] = [
    ({"config_file": 3}, TypeError, "config_file must be str, not int"),
    ({"config_file": Path("a.json")}, TypeError, "config_file must be str"),
    ({"config_file": ""}, ValueError, "config_file must name a file"),
    ({"config_file": "out/"}, ValueError, "config_file must name a file"),
    ({"config_file": "missing.json"}, FileNotFoundError, "no such configuration file"),
    ({"config_file": "batch_num: 2"}, FileNotFoundError, "no such configuration file"),
    ({"model": 3}, TypeError, "must be a torch.nn.Module"),
    ({"model": nn.Conv2d(3, 3, 1)}, RuntimeError, "the model is a single Conv2d"),
    ({"model": DataParallel(PlainChain())}, RuntimeError, "is wrapped in DataParallel"),
    ({"model": Prepared}, RuntimeError, "already prepared"),
    ({"record_file": None}, TypeError, "record_file must be str, not NoneType"),
    ({"record_file": ""}, ValueError, "record_file must name a file"),
    ({"record_file": "out/"}, ValueError, "record_file must name a file"),
    ({"input_data": [X]}, RuntimeError, "input_data must be a tensor or a tuple.*not list"),
    ({"input_data": torch.rand(2, 5, 8, 8)}, RuntimeError, "cannot run on"),
]
RESTORE_ERRORS: list[Any] = [
    ({"pth_file": 3}, TypeError, "pth_file must be str, not int"),
    ({"pth_file": "missing.pth"}, FileNotFoundError, "no such checkpoint"),
    ({"state_dict_name": 3}, TypeError, "state_dict_name must be str or None"),
    ({"state_dict_name": "net"}, KeyError, "has no 'net'"),
    ({"pth_file": "other.pth"}, RuntimeError, "it has no 'c1.weight'"),
]


@pytest.fixture
def arguments(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.chdir(folder.path)
    model = PlainChain()
    folder.configure(model)
    torch.save(prepare_qat_amct(model).state_dict(), folder.pth)
    torch.save(nn.Linear(2, 2).state_dict(), "other.pth")
    return {
        "config_file": folder.config,
        "model": model,
        "record_file": "record.txt",
        "input_data": X,
    }


def refused(
    function: Any, given: dict[str, Any], kind: type[Exception], message: str, folder: Folder
) -> None:
    """The call raises, and no file is new."""
    if given["model"] is Prepared:
        given["model"] = prepare_qat_amct(PlainChain())
    before = sorted(folder.path.rglob("*"))
    with pytest.raises(kind, match=message) as caught:
        function(**given)
    assert isinstance(caught.value, AmctError)
    assert sorted(folder.path.rglob("*")) == before


def test_no_file_is_lost_under_another_one(arguments: dict[str, Any], folder: Folder) -> None:
    config, text = Path(folder.config), Path(folder.config).read_text()
    same = arguments | {"record_file": f"{config.parent}/./{config.name}"}
    refused(
        amct.create_quant_retrain_model, same, ValueError, "config_file and record_file are", folder
    )
    same = arguments | {"record_file": folder.pth, "pth_file": folder.pth}
    refused(
        amct.restore_quant_retrain_model, same, ValueError, "pth_file and record_file are", folder
    )
    with pytest.raises(ValueError, match="config_file and config_defination are the same file"):
        amct.create_quant_retrain_config(str(config), PlainChain(), X, str(config))
    assert config.read_text() == text


@pytest.mark.parametrize(("changes", "kind", "message"), CREATE_ERRORS)
def test_wrong_arguments_of_create(
    changes: Any, kind: Any, message: str, arguments: dict[str, Any], folder: Folder
) -> None:
    refused(amct.create_quant_retrain_model, arguments | changes, kind, message, folder)


@pytest.mark.parametrize(("changes", "kind", "message"), [*CREATE_ERRORS, *RESTORE_ERRORS])
def test_wrong_arguments_of_restore(
    changes: Any, kind: Any, message: str, arguments: dict[str, Any], folder: Folder
) -> None:
    given = arguments | {"pth_file": folder.pth} | changes
    refused(amct.restore_quant_retrain_model, given, kind, message, folder)


def test_a_configuration_that_prunes_or_is_of_another_model_is_refused(folder: Folder) -> None:
    folder.configure(PlainChain())
    with pytest.raises(ValueError, match="no layer"):
        amct.create_quant_retrain_model(folder.config, NoLayers(), folder.record, X)
    pruning = folder.path / "prune.cfg"
    pruning.write_text(
        "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 } } }"
    )
    with pytest.raises(ValueError, match="only quantizes"):
        amct.create_quant_retrain_model(str(pruning), PlainChain(), folder.record, X)
    assert not Path(folder.record).exists()


def test_a_full_disk_leaves_the_old_record(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    folder.create(PlainChain())
    Path(folder.record).write_text("old")

    def full(_descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        amct.create_quant_retrain_model(folder.config, PlainChain(), folder.record, X)
    assert Path(folder.record).read_text() == "old"


def test_nothing_is_warned_of(folder: Folder) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder.create(PlainChain())


def script(stage: str, name: str, folder: Path) -> Any:
    """Run one process of the script."""
    path = os.pathsep.join([str(ROOT), str(ROOT / "examples")])
    done = subprocess.run(
        [sys.executable, "-m", "test.amct_pytorch.script", stage, name, str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["tiny_default", "tiny_clip6"])
def test_a_script_of_amct_meets_the_recorded_run(name: str, tmp_path: Path) -> None:
    run = load_run(name)
    first, second = (script(stage, name, tmp_path) for stage in ("train", "resume"))
    losses = first["losses"] + second["losses"]
    assert losses == pytest.approx([step["loss"] for step in run.steps], rel=1e-6)

    found = read_record(tmp_path / "record.txt")
    for layer, expected in run.eval.items():  # late training is in the file
        assert found[layer].scale_d == pytest.approx(expected["scale_d"], rel=1e-6)
        assert found[layer].offset_d == expected["offset_d"]
        assert found[layer].scale_w == pytest.approx(expected["scale_w"], rel=1e-5)

    step = 2 * float(run.y_fake_quant.abs().max()) / 255
    session = onnxruntime.InferenceSession(str(tmp_path / "out" / "net_fake_quant_model.onnx"))
    for batch in (run.x_fixed, run.x_fixed.repeat(3, 1, 1, 1)):
        (output,) = session.run(["y"], {"x": batch.numpy()})
        assert abs(output - run.y_fake_quant.numpy()).max() <= step
    deploy = onnx.load(str(tmp_path / "out" / "net_deploy_model.onnx"))
    quantizers = {n.name: n for n in deploy.graph.node if n.op_type == "AscendQuant"}
    assert sorted(quantizers) == sorted(f"{layer}.quant" for layer in run.eval)
    for layer, expected in run.eval.items():
        scale = helper.get_node_attr_value(quantizers[f"{layer}.quant"], "scale")
        assert scale == pytest.approx(1 / expected["scale_d"], rel=1e-6)


@pytest.fixture
def trained(folder: Folder) -> nn.Module:
    torch.manual_seed(0)
    model = folder.create(PlainChain())
    train(model, 1)
    return model


def save(folder: Folder, model: nn.Module, **changes: Any) -> None:
    given = {
        "config_file": folder.config,
        "model": model,
        "record_file": folder.record,
        "save_path": folder.save,
        "input_data": X,
    }
    amct.save_quant_retrain_model(**given | changes)


def test_save_writes_three_files_and_leaves_the_model(folder: Folder, trained: nn.Module) -> None:
    trained.train()
    before = {key: value.clone() for key, value in trained.state_dict().items()}
    assert save(folder, trained) is None
    assert trained.training
    assert all(torch.equal(before[key], value) for key, value in trained.state_dict().items())
    written = sorted(path.name for path in (folder.path / "out").iterdir())
    assert written == ["net_deploy_model.onnx", "net_fake_quant_model.onnx", "record.txt"]
    for name in written:
        assert (folder.path / "out" / name).stat().st_mode & 0o777 == 0o640


def test_train_mode_and_evaluations_before_change_nothing(
    folder: Folder, trained: nn.Module
) -> None:
    trained.eval()(X)
    save(folder, trained)
    names = ("net_deploy_model.onnx", "net_fake_quant_model.onnx", "record.txt")
    first = {name: (folder.path / "out" / name).read_bytes() for name in names}
    with pytest.warns(AmctWarning, match="exists and is replaced"):
        save(folder, trained.train())
    assert first == {name: (folder.path / "out" / name).read_bytes() for name in names}


def test_the_files_hold_the_values_of_the_moment(folder: Folder, trained: nn.Module) -> None:
    save(folder, trained)
    early = read_record(folder.record, trained)
    train(trained)
    with pytest.warns(AmctWarning, match="exists and is replaced"):
        save(folder, trained)
    late = read_record(folder.record, trained)
    assert early != late
    assert late == layer_records(trained)


def test_without_a_prefix_the_files_lie_in_the_folder(folder: Folder, trained: nn.Module) -> None:
    save(folder, trained, save_path=f"{folder.path}/deep/new/")
    names = sorted(path.name for path in (folder.path / "deep" / "new").iterdir())
    assert names == ["deploy_model.onnx", "fake_quant_model.onnx"]


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"config_file": 3}, TypeError, "config_file must be str"),
        ({"config_file": ""}, ValueError, "config_file must name a file"),
        ({"config_file": "out/"}, ValueError, "config_file must name a file"),
        ({"config_file": "missing.json"}, FileNotFoundError, "no such configuration file"),
        ({"record_file": 3}, TypeError, "record_file must be str"),
        ({"record_file": ""}, ValueError, "record_file must name a file"),
        ({"record_file": "out/"}, ValueError, "record_file must name a file"),
        ({"save_path": None}, TypeError, "save_path must be str"),
        ({"save_path": "n" * 242}, ValueError, "too long"),
        ({"input_data": [X]}, RuntimeError, "input_data must be"),
        ({"input_names": "x"}, TypeError, "input_names must be list or None"),
        ({"output_names": ("y",)}, TypeError, "output_names must be list or None"),
        ({"dynamic_axes": [0]}, TypeError, "dynamic_axes must be dict or None"),
        ({"input_names": [3]}, RuntimeError, "input_names must be a list of names"),
        ({"dynamic_axes": {"x": {-1: "n"}}}, RuntimeError, r"dynamic_axes\['x'\] must be"),
        ({"model": 3}, TypeError, "model must be a torch.nn.Module"),
        ({"model": PlainChain()}, RuntimeError, "is not prepared"),
        ({"model": "fresh"}, RuntimeError, "never calibrated"),
        ({"input_data": torch.rand(1, 5, 8, 8)}, RuntimeError, "."),
        ({"input_names": ["a", "b"]}, RuntimeError, "."),
    ],
)
def test_wrong_arguments_of_save_write_nothing(
    changes: dict[str, Any], kind: Any, message: str, folder: Folder, trained: nn.Module
) -> None:
    if changes.get("model") == "fresh":
        changes = {"model": prepare_qat_amct(PlainChain())}
    changes = {"save_path": f"{folder.path}/new/net"} | changes
    before = sorted(folder.path.rglob("*"))
    with pytest.raises(kind, match=message) as caught:
        save(folder, changes.pop("model", trained), **changes)
    assert isinstance(caught.value, AmctError)
    assert sorted(folder.path.rglob("*")) == before
    assert Path(folder.record).read_text() == ""


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda c: c["c2"].update(retrain_enable=False),
            "layer 'c2' is quantized in the model, and",
        ),
        (lambda c: c.pop("c2"), "layer 'c2' is quantized in the model, and not enabled"),
        (lambda c: c.update(batch_num=2), "layer 'c1' has batch_num 2 in the file, 1 in the model"),
        (
            lambda c: c["c2"]["retrain_data_config"].update(dst_type="INT16"),
            "layer 'c2' has input dst_type INT16 in the file, INT8 in the model",
        ),
        (
            lambda c: c["fc"]["retrain_weight_config"].update(algo="ulq_retrain"),
            "'fc' has weight algo ulq_retrain in the file, arq_retrain in the model",
        ),
        (
            lambda c: c["c2"]["retrain_weight_config"].update(channel_wise=False),
            "'c2' has channel_wise False in the file, True in the model",
        ),
        (
            lambda c: c["c2"]["retrain_weight_config"].update(dst_type="INT4"),
            "'c2' has weight dst_type INT4 in the file, INT8 in the model",
        ),
        (
            lambda c: c["c1"]["retrain_data_config"].update(fixed_min=True),
            "'c1' has fixed_min True in the file, False in the model",
        ),
        (lambda c: c.update(c9=c["c1"]), "layer 'c9' is enabled in the file, and not quantized"),
    ],
)
def test_a_configuration_that_contradicts_the_model_is_named(
    change: Any, message: str, folder: Folder, trained: nn.Module
) -> None:
    content = json.loads(Path(folder.config).read_text())
    change(content)
    Path(folder.config).write_text(json.dumps(content))
    with pytest.raises(RuntimeError, match=message) as caught:
        save(folder, trained)
    assert isinstance(caught.value, AmctError)
    assert not list(folder.path.rglob("*.onnx"))


def test_the_configuration_may_be_a_cfg_file_too(folder: Folder) -> None:
    path = folder.path / "quant.cfg"
    path.write_text("batch_num: 1")
    model = amct.create_quant_retrain_model(str(path), PlainChain(), folder.record, X)
    train(model, 1)
    save(folder, model, config_file=str(path))
    folder.configure(PlainChain(), "batch_num: 1")
    with pytest.warns(AmctWarning, match="exists"):
        save(folder, model)  # the JSON that says the same
    path.write_text("batch_num: 2")
    with pytest.raises(RuntimeError, match=r"differs from the .cfg file"):
        save(folder, model, config_file=str(path))


@pytest.mark.parametrize("part", ["record_text", "_move"])
def test_an_error_in_the_middle_leaves_the_old_files(
    part: str, folder: Folder, trained: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(folder, trained)
    files = [path for path in folder.path.rglob("*") if path.is_file()]
    before = {path: path.read_bytes() for path in files}
    train(trained)

    def full(*_args: Any, **_kwargs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(f"amct_fx.amct_pytorch._save.{part}", full)
    with pytest.raises(OSError, match="No space left"):
        save(folder, trained)
    now = [path for path in folder.path.rglob("*") if path.is_file()]
    assert {path: path.read_bytes() for path in now} == before
