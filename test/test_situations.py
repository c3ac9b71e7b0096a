"""What users run into; each test names its entry of spec/situations.md.

Entries tested elsewhere: 4, 5, 17-20, 23, 26-28, 37-42 in test_loops.py and test_prepare.py, 7 in
nn/test_rnn.py, 9, 13, 16, 31 in test_convert.py, 11 and 12 in config/ and observers/, 15 in
observers/, 22 in test_distributed.py, 43-45 in test_prepare.py and test_bad_input.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import disable_fake_quant

from amct_fx import convert_amct, prepare_qat_amct, summarize
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
