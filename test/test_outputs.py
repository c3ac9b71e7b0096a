"""``outputs="quantize"``: where results are quantized, and that they train, convert and restore."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from amct_fx import (
    ConfigError,
    convert_amct,
    load_checkpoint,
    prepare_qat_amct,
    save_checkpoint,
)
from amct_fx.graph import fx_graph_of
from amct_fx.observers import ULQFakeQuantize

from .networks import Net, NetWithIsland, example


class Residual(nn.Module):
    """In-place activations and an in-place addition, as in many model libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.a = nn.Conv2d(8, 8, 3, padding=1)
        self.b = nn.Conv2d(8, 8, 3, padding=1)
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(self.relu(self.norm(self.stem(x))))
        out = self.b(self.relu(self.a(x)))
        out += x
        return self.head(self.mean(self.relu(out)).flatten(1))


def prepared(model: nn.Module, **options) -> nn.Module:
    made = prepare_qat_amct(model, outputs="quantize", **options)
    made(example(4))
    return made


def calls(model: nn.Module) -> list[str]:
    return [str(node.target) for node in fx_graph_of(model).nodes if node.op == "call_module"]


def test_every_convolution_has_a_quantized_result_and_no_tensor_two_quantizers():
    assert calls(prepared(Residual())) == [
        "stem.input_fake_quant",
        "stem",
        "norm",
        "relu",
        "pool",
        "a.input_fake_quant",  # also what the addition reads
        "a",
        "relu",
        "b.input_fake_quant",
        "b",
        "b.output_fake_quant",
        "relu",
        "add_output_fake_quant",
        "mean",
        "head.input_fake_quant",
        "head",
    ]


def test_a_convolution_at_the_end_and_two_readers_with_own_settings_get_one_quantizer():
    class Fork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.a, self.b = (nn.Conv2d(3, 3, 1) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.stem(x)
            return self.a(x), self.b(x)

    cfg = """override_layer_configs { layer_name: "b" retrain_data_quant_config {
        ulq_quantize { clip_max_min { clip_max: 2.0 clip_min: -2.0 } } } }"""
    model = prepared(Fork(), cfg=cfg)
    found = {n for n, m in model.named_modules() if isinstance(m, ULQFakeQuantize)}
    assert {n for n in found if "output" in n} == {
        "stem.output_fake_quant",
        "a.output_fake_quant",
        "b.output_fake_quant",
    }
    readers = [n for n in fx_graph_of(model).nodes if str(n.target).endswith("input_fake_quant")]
    assert [str(n.args[0].target) for n in readers[1:]] == ["stem.output_fake_quant"] * 2


def test_ranges_that_cannot_be_negative_start_at_zero():
    model = prepared(Residual())
    fixed = {n for n, m in model.named_modules() if getattr(m, "fixed_min", None)}
    assert fixed == {
        "a.input_fake_quant",
        "b.input_fake_quant",
        "add_output_fake_quant",
        "head.input_fake_quant",
    }


def test_the_ranges_of_results_learn_and_the_converted_model_agrees():
    model = prepared(Residual()).train()
    quantizer = model.b.output_fake_quant
    before = quantizer.clip_max.item()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        model(example(4)).square().mean().backward()
        optimizer.step()
    assert quantizer.clip_max.item() != before
    converted = convert_amct(model)
    expected = model.eval()(example(4))
    assert torch.allclose(
        converted(example(4)), expected, atol=0.01 * float(expected.detach().abs().max())
    )
    assert not any(isinstance(m, ULQFakeQuantize) for m in converted.modules())
    assert converted.b.output_quantize.zero_point.dtype == torch.int8
    assert converted.add_output_quantize.zero_point == -128


def test_without_the_option_nothing_changes():
    plain = prepare_qat_amct(Residual())
    assert not any("output" in name for name, _ in plain.named_modules())
    assert calls(plain) == calls(prepare_qat_amct(Residual(), outputs="float"))


def test_islands_keep_float_results():
    model = prepared(NetWithIsland())
    assert "middle.conv" in dict(model.named_modules())
    assert not any(name.startswith("middle.conv.output") for name, _ in model.named_modules())
    assert hasattr(model.stem, "output_fake_quant")


@pytest.mark.parametrize("convert", [False, True], ids=["prepared", "converted"])
def test_a_checkpoint_keeps_the_option(convert, tmp_path):
    model = prepared(Residual())
    model = convert_amct(model) if convert else model.eval()
    save_checkpoint(model, tmp_path / "m.pt")
    restored, _ = load_checkpoint(tmp_path / "m.pt", Residual())
    assert torch.equal(restored.eval()(example(4)), model(example(4)))


def test_copies_and_graph_capture_work():
    model = prepared(Residual()).eval()
    expected = model(example(4))
    assert torch.equal(copy.deepcopy(model)(example(4)), expected)
    program = torch.export.export(model, (example(4),), strict=False)
    assert torch.allclose(program.module()(example(4)), expected, atol=1e-6)


def test_an_unknown_value_is_refused():
    with pytest.raises(ConfigError, match="outputs must be 'float' or 'quantize'"):
        prepare_qat_amct(Net(), outputs="int8")
