"""Models whose parts take optional arguments, prepared with example inputs that show the form."""

from __future__ import annotations

import copy
from collections import OrderedDict
from dataclasses import dataclass

import onnxruntime
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import disable_fake_quant

from amct_fx import convert_amct, load_checkpoint, prepare_qat_amct, save_checkpoint, summarize
from amct_fx.errors import CheckpointError
from amct_fx.graph import regions
from amct_fx.observers import ULQFakeQuantize


class Attention(nn.Module):
    """Written as transformer libraries write it: a mask, a cache, and a branch on the mode."""

    def __init__(self, branch: bool) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(8, 8) for _ in range(3))
        self.branch = branch

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: object) -> Tensor:
        shape = (*x.shape[:-1], 2, 4)
        q, k, v = (
            layer(x).view(shape).transpose(1, 2) for layer in (self.query, self.key, self.value)
        )
        scores = q @ k.transpose(-1, -2) / 2
        if mask is not None:
            scores = scores + mask
        chance = 0.0 if self.branch and not self.training else 0.1
        weights = F.dropout(scores.softmax(-1), chance, self.training)
        return (weights @ v).transpose(1, 2).reshape(*x.shape[:-1], 8)


class Block(nn.Module):
    """Attention and a network behind it."""

    def __init__(self, branch: bool) -> None:
        super().__init__()
        self.attention = Attention(branch)
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None, **options: object) -> Tensor:
        x = x + self.attention(x, mask=mask, **options)
        return x + self.down(F.gelu(self.up(x)))


class Encoder(nn.Module):
    """Checks its arguments by their values, so it can never be traced."""

    def __init__(self, branch: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(branch) for _ in range(2)])
        self.head = nn.Linear(8, 3)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor | tuple[Tensor, Tensor]:
        if x.shape[-1] != 8:
            message = "eight features, please"
            raise ValueError(message)
        for block in self.blocks:
            x = block(x, mask=mask, cache=None)
        y = self.head(x.mean(1))
        return y if labels is None else (F.cross_entropy(y, labels), y)


IMAGES = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([0.0, 0.0, -1e9, 0.0, 0.0])
BRANCHES = pytest.mark.parametrize("branch", [False, True])


def tokens(batch: int = 2, length: int = 5) -> Tensor:
    return torch.randn(batch, length, 8, generator=torch.Generator().manual_seed(batch))


def quantizers(model: nn.Module) -> list[str]:
    return [name for name, part in model.named_modules() if isinstance(part, ULQFakeQuantize)]


@BRANCHES
def test_query_key_and_value_share_one_quantizer(branch):
    prepared = prepare_qat_amct(Encoder(branch), example_inputs=tokens())
    assert quantizers(prepared) == [
        f"{name}.input_fake_quant"
        for name in (
            "blocks.0.attention.query",
            "blocks.0.up",
            "blocks.0.down",
            "blocks.1.attention.query",
            "blocks.1.up",
            "blocks.1.down",
            "head",
        )
    ]
    rows = {row.name: row for row in summarize(prepared).rows}
    assert len(rows) == 11
    assert "of blocks.0.attention.query" in rows["blocks.0.attention.value"].input


@BRANCHES
@pytest.mark.parametrize("shown", [{}, {"mask": MASK}])
@pytest.mark.parametrize("mask", [None, MASK])
@pytest.mark.parametrize("length", [5, 1])
def test_the_prepared_model_computes_what_the_float_model_does(branch, shown, mask, length):
    model = Encoder(branch).eval()
    prepared = prepare_qat_amct(model, example_inputs={"x": tokens(), **shown})
    prepared.apply(disable_fake_quant)
    mask = None if mask is None else mask[:length]
    assert torch.equal(prepared(tokens(3, length), mask), model(tokens(3, length), mask))


@BRANCHES
def test_modes_stay_alive(branch):
    prepared = prepare_qat_amct(Encoder(branch), example_inputs=tokens())
    assert not torch.equal(prepared(tokens()), prepared(tokens()))
    prepared.eval()
    assert torch.equal(prepared(tokens()), prepared(tokens()))


@BRANCHES
def test_calls_of_another_form_train_all_layers(branch):
    prepared = prepare_qat_amct(Encoder(branch), "batch_num: 2", tokens())
    for _ in range(3):
        prepared.zero_grad()
        prepared(tokens(), MASK, torch.tensor([0, 2]))[0].backward()
    assert all(parameter.grad is not None for parameter in prepared.parameters())


@BRANCHES
def test_one_batch_calibrates_alike_in_both_forms(branch):
    ranges = []
    for shown in ({}, {"mask": MASK}):
        torch.manual_seed(0)
        prepared = prepare_qat_amct(
            Encoder(branch), "batch_num: 2", {"x": tokens(), **shown}
        ).eval()
        for batch in (2, 3):
            prepared(tokens(batch))
        quantizer = prepared.blocks[0].attention.key.input_quantizer
        assert quantizer.is_calibrated
        ranges.append((quantizer.clip_max.item(), quantizer.clip_min.item()))
    assert ranges[0] == pytest.approx(ranges[1], rel=1e-6)


@BRANCHES
@pytest.mark.parametrize("mask", [None, MASK])
def test_conversion_keeps_every_form(branch, mask):
    prepared = prepare_qat_amct(Encoder(branch), example_inputs=tokens())
    prepared(tokens())
    prepared.eval()
    converted = convert_amct(prepared)
    for model in (converted, copy.deepcopy(converted)):
        expected = prepared(tokens(3), mask)
        assert (model(tokens(3), mask) - expected).abs().max() <= 0.02
    assert {row.state for row in summarize(converted).rows} == {"int8"}


def test_compile_and_export_work():
    prepared = prepare_qat_amct(Encoder(branch=True), example_inputs=tokens())
    prepared(tokens())
    prepared.eval()
    expected = prepared(tokens())
    compiled = torch.compile(prepared, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens()), expected)
    torch.testing.assert_close(compiled(tokens(), MASK), prepared(tokens(), MASK))
    program = torch.export.export(convert_amct(prepared), (tokens(),))
    assert (program.module()(tokens()) - expected).abs().max() <= 0.02


@BRANCHES
@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_the_file_computes_what_the_model_does(branch, dynamo, tmp_path):
    prepared = prepare_qat_amct(Encoder(branch), example_inputs=tokens())
    prepared(tokens())
    converted = convert_amct(prepared.eval())
    file = str(tmp_path / "model.onnx")
    torch.onnx.export(converted, (tokens(),), file, dynamo=dynamo, input_names=["x"])
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: tokens().numpy()})
    assert (torch.from_numpy(found) - converted(tokens())).abs().max() <= 0.02


@BRANCHES
def test_a_checkpoint_asks_for_the_example_inputs(branch, tmp_path):
    prepared = prepare_qat_amct(Encoder(branch), example_inputs=tokens())
    prepared(tokens())
    prepared.eval()
    for model in (prepared, convert_amct(prepared)):
        save_checkpoint(model, tmp_path / "model.pt")
        restored, _ = load_checkpoint(
            tmp_path / "model.pt", Encoder(branch), example_inputs=tokens()
        )
        assert torch.equal(restored.eval()(tokens(3), MASK), model(tokens(3), MASK))
        with pytest.raises(CheckpointError, match="example_inputs"):
            load_checkpoint(tmp_path / "model.pt", Encoder(branch))


class Decides(nn.Module):
    """A ReLU and a batch norm that calls of another form leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.norm = nn.BatchNorm2d(4)
        self.last = nn.Conv2d(4, 2, 1)
        self.body = nn.Sequential(
            nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 3, 1)
        )

    def forward(self, x: Tensor, plain: bool = False) -> Tensor:
        y = self.conv(self.body(x))
        return self.last(y if plain else F.relu(self.norm(y)))


@pytest.mark.parametrize("plain", [False, True])
def test_only_what_every_form_does_decides_for_the_layers(plain):
    torch.manual_seed(0)
    model = Decides().eval()
    for norm in (model.norm, model.body[1]):
        nn.init.uniform_(norm.running_mean)
        nn.init.uniform_(norm.running_var, 0.5, 2.0)
    x = torch.randn(4, 3, 6, 6)
    prepared = prepare_qat_amct(model, example_inputs=x)
    assert not prepared.last.input_fake_quant.fixed_min
    assert prepared.body[3].input_fake_quant.fixed_min
    prepared(x, plain)
    expected = prepared(x, plain)
    converted = convert_amct(prepared)
    assert isinstance(converted.norm, nn.BatchNorm2d)
    assert isinstance(converted.body[1], nn.Identity)
    assert (converted(x, plain) - expected).abs().max() <= 0.03 * expected.abs().max()
    assert len(list(regions(prepared))) == 1


@dataclass
class Named(OrderedDict[str, Tensor]):
    """A dict that is a dataclass, as the outputs of transformers are."""

    scores: Tensor
    hidden: Tensor | None = None

    def __post_init__(self) -> None:
        self["scores"] = self.scores


class Special(dict[str, Tensor]):
    """A dict of the user's own."""


@pytest.mark.parametrize(
    "make", [dict, OrderedDict, Special, lambda pairs: Named(**dict(pairs))], ids=str
)
@pytest.mark.parametrize("given", [None, IMAGES], ids=["traced", "with example_inputs"])
def test_dicts_of_any_class_come_back_as_they_were(make, given):
    class Returns(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return make([("scores", self.conv(x))])

    prepared = prepare_qat_amct(Returns(), example_inputs=given)
    output = prepared(IMAGES)
    for made in (output, convert_amct(prepared)(IMAGES)):
        assert type(made) is type(make([("scores", IMAGES)]))
        assert list(made) == ["scores"]
    output["scores"].sum().backward()
    assert prepared.conv.weight.grad is not None
