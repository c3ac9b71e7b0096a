"""``functional=True``: F.conv* and F.linear on parameters of the model are quantized too."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.ao.quantization import disable_fake_quant

from amct_fx import convert_amct, load_checkpoint, prepare_qat_amct, save_checkpoint, summarize
from amct_fx.nn import qat

from .golden.networks import FunctionalAndUnused
from .networks import example


class Functional(nn.Module):
    """Every kind of functional layer, and two that must stay as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(4, 3, 3, 3) * 0.2)
        self.b1 = nn.Parameter(torch.zeros(4))
        self.bn = nn.BatchNorm2d(4)
        self.w2 = nn.Parameter(torch.randn(4, 3, 2, 2) * 0.2)
        self.w3 = nn.Parameter(torch.randn(5, 6) * 0.2)
        self.scaled = nn.Parameter(torch.randn(5, 5) * 0.2)

    def forward(self, x: Tensor, kernel: Tensor | float = 1.0) -> Tensor:
        x = F.relu(self.bn(F.conv2d(x, self.w1, self.b1, stride=2, padding=(1, 1))))
        x = F.conv_transpose2d(x, self.w2, None, 2, groups=2)
        x = F.linear(x.mean((2, 3)), self.w3)
        return F.linear(x, self.scaled * 0.5) * kernel


def targets(model: nn.Module) -> list[str]:
    return [row.name for row in summarize(model).rows if row.state == "qat"]


def test_functional_layers_are_named_by_their_nodes():
    prepared = prepare_qat_amct(Functional(), functional=True)
    assert targets(prepared) == ["conv2d", "conv_transpose2d", "linear"]
    assert isinstance(prepared.conv2d, qat.Conv2d)
    assert prepared.conv2d.weight is prepared.w1
    assert (prepared.conv2d.stride, prepared.conv_transpose2d.groups) == ((2, 2), 2)


def test_off_is_the_float_model_and_the_default_leaves_them_alone():
    model = Functional().eval()
    prepared = prepare_qat_amct(model, functional=True)
    prepared.apply(disable_fake_quant)
    assert torch.equal(prepared(example()), model(example()))
    with pytest.raises(ValueError, match="no layer"):
        prepare_qat_amct(model)


def test_they_are_addressed_by_name_and_by_type():
    cfg = """quant_skip_layers: "linear"
    override_layer_types { layer_type: "Conv2d"
      retrain_data_quant_config { ulq_quantize { dst_type: INT16 } } }"""
    prepared = prepare_qat_amct(Functional(), cfg, functional=True)
    assert targets(prepared) == ["conv2d", "conv_transpose2d"]
    assert prepared.conv2d.input_fake_quant.num_bits == 16


def test_they_train_copy_resume_and_convert(tmp_path):
    prepared = prepare_qat_amct(Functional(), functional=True)
    before = prepared.w1.detach().clone()
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        prepared(example()).square().mean().backward()
        optimizer.step()
    assert not torch.equal(before, prepared.w1)
    expected = prepared.eval()(example())
    save_checkpoint(prepared, tmp_path / "model.pt")
    restored, _ = load_checkpoint(tmp_path / "model.pt", Functional())
    for clone in (copy.deepcopy(prepared), pickle.loads(pickle.dumps(prepared)), restored.eval()):
        assert torch.equal(clone(example()), expected)
    converted = convert_amct(prepared)
    assert type(converted.bn) is nn.Identity
    assert (converted(example()) - expected).abs().max() <= 0.01 * expected.abs().max()


def test_a_module_used_only_through_its_weight_counts_as_the_functional_layer():
    prepared = prepare_qat_amct(FunctionalAndUnused(), functional=True)
    rows = {row.name: row for row in summarize(prepared).rows}
    assert rows["conv2d"].state == "qat"
    assert "never called" in rows["func"].reason
    assert "'conv2d' computes with its weight" in rows["func"].reason
    assert rows["never"].reason == "it is never called in the traced forward"
    prepared(torch.randn(2, 4, 8, 8))
    convert_amct(prepared)


def test_the_reason_says_what_reads_the_weight_of_a_layer_that_is_never_called():
    class Window(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv = nn.Linear(4, 12)
            self.proj = nn.Linear(12, 4)
            self.mix = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = self.proj(F.linear(x, self.qkv.weight, self.qkv.bias))
            return x @ self.mix.weight

    prepared = prepare_qat_amct(Window())
    reasons = {row.name: row.reason for row in summarize(prepared).rows}
    never = "it is never called in the traced forward; only its weight is read, by "
    assert reasons["qkv"] == never + "'linear', which functional=True quantizes"
    assert reasons["mix"] == never + "'matmul'"
    more = prepare_qat_amct(Window(), functional=True)
    assert targets(more) == ["proj", "linear"]
    x = torch.randn(3, 4)
    expected = more(x)
    assert more.linear.weight is more.qkv.weight
    assert (convert_amct(more)(x) - expected).abs().max() <= 0.02 * expected.abs().max()


def test_a_failed_prepare_in_place_removes_the_new_modules():
    model = Functional()
    with pytest.raises(ValueError, match="nothing"):
        prepare_qat_amct(model, "skip_layers: 'nothing'", functional=True, inplace=True)
    assert repr(model) == repr(Functional())
