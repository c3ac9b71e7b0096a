"""What users run into; each test names its entry of spec/situations.md.

Entries tested elsewhere, too: 1 in test_forms.py, 4, 5, 17-20, 23, 26-28, 37-42 in test_loops.py
and test_prepare.py, 7 in nn/test_rnn.py, 9, 13, 16, 31 in test_convert.py, 11 and 12 in config/ and
observers/, 15 in observers/, 21 in report/, 22 in test_distributed.py, 44, 45 in test_bad_input.py.
"""

from __future__ import annotations

import copy
import json
import os
import shutil
import subprocess
import sys
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import disable_fake_quant
from torch.distributed import checkpoint

from amct_fx import convert_amct, prepare_qat_amct, summarize
from amct_fx.control import freeze_bn
from amct_fx.graph import fx_graph_of
from amct_fx.observers import ULQFakeQuantize

from .networks import Net, example


class Flags(nn.Module):
    """A flag and an optional tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.b = nn.Linear(4, 4)

    def forward(
        self, x: Tensor, flag: bool = True, mask: Tensor | None = None, **extra: float
    ) -> Tensor:
        y = self.a(x) if flag else self.b(x)
        y = y if mask is None else y * mask
        return y * extra.get("gain", 1.0)


@pytest.mark.parametrize("flag", [True, False])
@pytest.mark.parametrize("mask", [None, torch.tensor([1.0, 0.0, 1.0, 0.0])])
@pytest.mark.parametrize("extra", [{}, {"gain": 2.0}])
def test_flags_and_optional_tensors_keep_every_value(flag, mask, extra):
    """(1)"""
    model = Flags()
    prepared = prepare_qat_amct(model)
    prepared.apply(disable_fake_quant)
    x = torch.randn(3, 4)
    assert torch.equal(prepared(x, flag, mask, **extra), model(x, flag, mask, **extra))
    assert torch.equal(prepared(x), model(x))
    assert sum(isinstance(m, ULQFakeQuantize) for m in prepared.modules()) == 2


class Guarded(nn.Module):
    """Checks the shape of its input and decides by it."""

    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Conv2d(3, 4, 1)
        self.wide = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        if x.size(1) != 3:
            message = "three channels, please"
            raise ValueError(message)
        return self.wide(x) if x.shape[-1] > 16 else self.narrow(x)


def test_shape_guards_and_shape_branches_stay_alive():
    """(2)"""
    prepared = prepare_qat_amct(Guarded())
    prepared(example())
    assert prepared.narrow.input_fake_quant.is_calibrated
    assert not prepared.wide.input_fake_quant.is_calibrated
    prepared(example(size=20))
    assert prepared.wide.input_fake_quant.is_calibrated
    with pytest.raises(ValueError, match="three channels, please"):
        prepared(example()[:, :2])
    (island,) = summarize(prepared).islands
    assert island.source is not None
    assert Path(__file__).name in island.source


class Reads(nn.Module):
    """Reads attributes of its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.fc = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x.to(self.conv.weight.dtype))
        y = y.reshape(len(x), self.conv.out_channels, -1).mean(-1)
        return self.fc(y) - self.fc.bias


def test_attributes_that_forward_reads_survive_both_verbs():
    """(3)"""
    model = Reads().eval()
    prepared = prepare_qat_amct(model)
    assert prepared(example()).requires_grad
    expected = prepared(example())
    assert (convert_amct(prepared)(example()) - expected).abs().max() <= 0.01
    prepared.apply(disable_fake_quant)
    assert torch.equal(prepared(example()), model(example()))


@dataclass
class Result:
    """What some detection models return."""

    scores: Tensor
    note: str


def test_dataclasses_come_back_as_they_were():
    """(6)"""

    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> Result:
            return Result(self.conv(x), "kept")

    output = prepare_qat_amct(Returns())(example())
    assert isinstance(output, Result)
    assert output.note == "kept"
    output.scores.sum().backward()


def test_a_linear_tied_to_an_embedding_is_quantized_and_stays_tied():
    """(8)"""

    class Language(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb = nn.Embedding(10, 8)
            self.fc = nn.Linear(8, 10, bias=False)
            self.fc.weight = self.emb.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.fc(self.emb(tokens))

    prepared = prepare_qat_amct(Language())
    tokens = torch.randint(0, 10, (2, 5))
    prepared(tokens).square().mean().backward()
    torch.optim.SGD(prepared.parameters(), lr=0.1).step()
    assert prepared.fc.weight is prepared.emb.weight
    assert summarize(prepared).rows[0].state == "qat"
    other = prepare_qat_amct(Language())
    other.load_state_dict(prepared.state_dict())
    assert torch.equal(other.eval()(tokens), prepared.eval()(tokens))
    converted = convert_amct(prepared)
    assert (converted(tokens) - prepared(tokens)).abs().max() <= 0.05


def test_a_convolution_behind_a_concat_owns_one_quantizer_for_the_joined_tensor():
    """(10)"""

    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 4, 1)
            self.b = nn.Conv2d(3, 4, 1)
            self.conv = nn.Conv2d(8, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.conv(torch.cat([torch.relu(self.a(x)), torch.relu(self.b(x))], 1))

    prepared = prepare_qat_amct(Joined())
    assert not prepared.conv.input_fake_quant.fixed_min
    more = prepare_qat_amct(Joined(), fixed_min_rule="nonnegative")
    assert more.conv.input_fake_quant.fixed_min
    nodes = [str(node.target) for node in fx_graph_of(prepared).nodes if node.op == "call_module"]
    assert [n for n in nodes if "fake" in n] == ["a.input_fake_quant", "conv.input_fake_quant"]


@pytest.mark.parametrize("row", [0.0, 1e-30])
@pytest.mark.parametrize("bias", [0.013, 0.0])
def test_dead_channels_have_codes_0_and_keep_their_bias(row, bias):
    """(14)"""
    model = nn.Sequential(nn.Conv2d(3, 4, 1))
    with torch.no_grad():
        model[0].weight[1] = row
        model[0].bias[1] = bias
    prepared = prepare_qat_amct(model)
    output = prepared(example())
    output.sum().backward()
    assert torch.isfinite(output).all()
    assert torch.isfinite(prepared[0].weight.grad).all()
    assert prepared[0].weight_scale()[1] == 1
    converted = convert_amct(prepared)
    layer = converted[0]
    assert (layer.weight_codes[1] == 0).all()
    assert abs(layer.bias[1] - bias) <= 1e-6 * bias
    assert (layer.weight_scale >= torch.finfo(torch.float32).tiny).all()


def test_the_start_keeps_the_loss_near_float():
    """(21)"""
    torch.manual_seed(0)
    model = Net()
    y = torch.arange(32) % 4
    x = example(32) + y[:, None, None, None]
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    loss = nn.functional.cross_entropy(model(x), y)
    prepared = prepare_qat_amct(model)
    assert nn.functional.cross_entropy(prepared(x), y) < 1.5 * loss + 0.02


def test_no_compiler_is_needed_and_little_is_imported():
    """(24)"""
    code = (
        "import json, sys, torch; before = set(sys.modules); import amct_fx;"
        "from torch import nn; p = amct_fx.prepare_qat_amct(nn.Sequential(nn.Linear(4, 2)));"
        "p(torch.randn(3, 4)).sum().backward(); amct_fx.convert_amct(p)(torch.randn(3, 4));"
        "print(json.dumps(sorted(set(sys.modules) - before)))"
    )
    environment = {**os.environ, "PATH": "/nonexistent"}
    result = subprocess.run(
        [sys.executable, "-c", code],
        check=True,
        capture_output=True,
        text=True,
        env=environment,
        cwd=Path(__file__).parents[1],
    )
    loaded = {name.split(".")[0] for name in json.loads(result.stdout.splitlines()[-1])}
    assert not loaded & {"onnx", "matplotlib", "torch_npu", "typer", "onnxruntime", "sklearn"}


def test_state_dict_keys_follow_layer_names_only():
    """(25) An unrelated layer upstream changes no other key."""

    class More(Net):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Conv2d(3, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.first(x))

    keys = set(prepare_qat_amct(Net()).state_dict())
    assert keys < set(prepare_qat_amct(More()).state_dict())


def test_the_exported_program_of_a_converted_model_holds_no_fake_quant():
    """(29)"""
    prepared = prepare_qat_amct(Net()).eval()
    prepared(example())
    batch = torch.export.Dim("batch")
    program = torch.export.export(
        convert_amct(prepared), (example(3),), dynamic_shapes=({0: batch},)
    )
    text = str(program.graph)
    assert "cachemask" not in text
    assert "quantized_decomposed.quantize_per_tensor" in text


def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: range) -> None:
    """Train on batches that depend on nothing but their numbers."""
    for number in numbers:
        x = example(4 + number % 2) * (1 + number / 10)
        optimizer.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        optimizer.step()


def test_statistics_of_batch_norms_move_in_train_mode_only():
    """(4)"""
    prepared = prepare_qat_amct(Net())
    before = prepared.bn.running_mean.clone()
    prepared.eval()(example())
    assert torch.equal(prepared.bn.running_mean, before)
    prepared.train()(example())
    assert not torch.equal(prepared.bn.running_mean, before)


def test_a_loader_may_end_with_a_smaller_batch():
    """(5)"""
    data = torch.utils.data.TensorDataset(example(11))
    prepared = prepare_qat_amct(Net(), "batch_num: 2", example(4))
    sizes = [len(prepared(x)) for (x,) in torch.utils.data.DataLoader(data, batch_size=4)]
    assert sizes == [4, 4, 3]
    assert prepared.stem.input_fake_quant.is_calibrated


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = (nn.Linear(4, 4) for _ in range(3))
        self.b.weight = self.a.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.c(self.b(torch.relu(self.a(x))))


def test_two_layers_with_one_weight_stay_float_and_tied():
    """(8)"""
    prepared = prepare_qat_amct(Tied())
    assert prepared.a.weight is prepared.b.weight
    rows = {row.name: row for row in summarize(prepared).rows}
    assert [rows[name].state for name in "abc"] == ["float", "float", "qat"]
    assert "shared" in rows["a"].reason
    assert "shared" in rows["b"].reason
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    before = prepared.a.weight.detach().clone()
    for _ in range(3):
        prepared(torch.ones(2, 4)).square().mean().backward()
        optimizer.step()
    assert prepared.a.weight is prepared.b.weight
    assert not torch.equal(prepared.a.weight, before)
    cfg = (
        "override_layer_configs { layer_name: 'a' retrain_weight_quant_config { arq_retrain {} } }"
    )
    with pytest.raises(ValueError, match="'a' cannot be set: its weight is shared"):
        prepare_qat_amct(Tied(), cfg)


def test_sync_batch_norm_may_come_before_or_after_prepare():
    """(9)"""
    sync = nn.SyncBatchNorm.convert_sync_batchnorm
    torch.manual_seed(0)
    model = Net()
    before = prepare_qat_amct(sync(copy.deepcopy(model)))
    after = sync(prepare_qat_amct(model))
    assert type(after.bn) is nn.SyncBatchNorm
    assert list(before.state_dict()) == list(after.state_dict())
    for prepared in (before, after):
        steps(prepared, torch.optim.SGD(prepared.parameters(), lr=0.01), range(1))
    for key, value in before.state_dict().items():
        assert torch.equal(value, after.state_dict()[key]), key
    for prepared in (before, after):
        assert type(convert_amct(prepared).bn) is nn.Identity


def test_the_wheel_is_pure_python(tmp_path):
    """(24)"""
    pytest.importorskip("setuptools", minversion="77")
    root = Path(__file__).parents[1]
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(root / name, tmp_path)
    for name in ("amct_fx", "examples"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / name, tmp_path / name, ignore=ignore)
    code = "from setuptools import build_meta; print(build_meta.build_wheel('.'))"
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    assert result.stdout.splitlines()[-1].endswith("-py3-none-any.whl")


def in_a_new_process(code: str, *arguments: str) -> str:
    """Run ``code`` in the folder of the repository and return what it prints."""
    imports = (
        "import sys, torch; from amct_fx import prepare_qat_amct; from amct_fx.control import "
        "freeze_bn; from test.networks import Net, example; from test.test_situations import steps;"
    )
    root = Path(__file__).parents[1]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    result = subprocess.run(
        [sys.executable, "-c", imports + code, *arguments],
        check=True,
        capture_output=True,
        text=True,
        cwd=root,
        # As many threads as here: others add in another order.
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": str(torch.get_num_threads())},
    )
    return result.stdout


def test_another_process_makes_the_same_keys_in_the_same_order():
    """(25)"""
    printed = in_a_new_process("print(*prepare_qat_amct(Net()).state_dict())")
    assert printed.split() == list(prepare_qat_amct(Net()).state_dict())


def test_loaders_that_take_what_fits_and_distributed_checkpoints_take_everything(tmp_path):
    """(27)"""
    trained, fresh = prepare_qat_amct(Net()), prepare_qat_amct(Net())
    shapes = {key: value.shape for key, value in fresh.state_dict().items()}
    steps(trained, torch.optim.SGD(trained.parameters(), lr=0.01), range(2))
    assert {key: value.shape for key, value in trained.state_dict().items()} == shapes
    state = trained.state_dict()
    checkpoint.save(state, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    loaded = fresh.state_dict()
    checkpoint.load(loaded, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    assert not fresh.load_state_dict(loaded).missing_keys
    assert torch.equal(fresh.eval()(example()), trained.eval()(example()))


RESUMED = """batch_num: 3
retrain_weight_quant_config { ulq_retrain { } }"""


def test_a_training_goes_on_in_another_process_as_if_it_had_not_stopped(tmp_path):
    """(28)"""
    torch.manual_seed(0)
    straight = prepare_qat_amct(Net(), RESUMED)
    freeze_bn(straight)
    optimizer = torch.optim.SGD(straight.parameters(), lr=0.01, momentum=0.9)
    steps(straight, optimizer, range(5))
    torch.save((straight.state_dict(), optimizer.state_dict()), tmp_path / "stopped.pt")
    code = (
        "model = prepare_qat_amct(Net(), sys.argv[2]); freeze_bn(model);"
        "optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9);"
        "state, other = torch.load(sys.argv[1] + '/stopped.pt');"
        "model.load_state_dict(state); optimizer.load_state_dict(other);"
        "steps(model, optimizer, range(5, 10));"
        "torch.save(model.state_dict(), sys.argv[1] + '/resumed.pt')"
    )
    in_a_new_process(code, str(tmp_path), RESUMED)
    resumed = torch.load(tmp_path / "resumed.pt")
    steps(straight, optimizer, range(5, 10))
    for key, value in straight.state_dict().items():
        assert torch.equal(value, resumed[key]), key


def test_the_torchscript_exporter_has_nothing_to_warn_of(tmp_path):
    """(29)"""
    prepared = prepare_qat_amct(Net()).eval()
    prepared(example())
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        torch.onnx.export(
            convert_amct(prepared), (example(),), str(tmp_path / "m.onnx"), dynamo=False
        )


def test_offsets_saved_as_floats_load_by_casting():
    """(32)"""
    prepared = prepare_qat_amct(Net())
    prepared(example())
    state = {
        key: value.float() if "zero_point" in key else value
        for key, value in prepared.state_dict().items()
    }
    fresh = prepare_qat_amct(Net())
    fresh.load_state_dict(state)
    assert torch.equal(fresh.eval()(example()), prepared.eval()(example()))
    types = {key: value.dtype for key, value in prepared.state_dict().items()}
    assert {key: value.dtype for key, value in fresh.state_dict().items()} == types


def test_the_older_of_two_models_of_one_float_model_converts_last():
    """(42)"""
    model = Net()
    state = copy.deepcopy(model.state_dict())
    older, newer = prepare_qat_amct(model), prepare_qat_amct(model, "batch_num: 2")
    for prepared in (older, newer):
        steps(prepared, torch.optim.SGD(prepared.parameters(), lr=0.05), range(3))
    expected = [prepared.eval()(example()) for prepared in (older, newer)]
    for prepared, output in ((newer, expected[1]), (older, expected[0])):
        assert (convert_amct(prepared)(example()) - output).abs().max() <= 0.05
    assert not torch.equal(*expected)
    assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())


def test_a_model_in_eval_mode_stays_so_and_trains_when_asked():
    """(43)"""
    model = Net().eval()
    random = torch.get_rng_state()
    prepared = prepare_qat_amct(model, example_inputs=example())
    assert not any(part.training for part in prepared.modules())
    assert torch.equal(torch.get_rng_state(), random)
    prepared.train()
    before = prepared.stem.weight.detach().clone()
    steps(prepared, torch.optim.SGD(prepared.parameters(), lr=0.1), range(2))
    assert not torch.equal(prepared.stem.weight, before)
