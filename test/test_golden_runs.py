"""Whole training runs of the reference tool, followed from the same weights and batches.

Recorded with one torch thread; the sums of the quantizers are taken in the literal order, so every
loss must be met to 1e-6 relative, and usually is met to the last digit. Source: golden/README.md.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amct_fx import convert_amct, prepare_qat_amct

from .golden.reader import RUNS, Run, load_run


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=RUNS)
def run(request) -> Run:
    return load_run(request.param)


def prepared_model(run: Run) -> nn.Module:
    return prepare_qat_amct(run.build(), run.cfg)


def quantizers(model: nn.Module) -> dict[str, nn.Module]:
    suffix = ".input_fake_quant"
    found = {name: m for name, m in model.named_modules() if name.endswith(suffix)}
    return {name.removesuffix(suffix): module for name, module in found.items()}


def train(model: nn.Module, run: Run) -> Iterator[tuple[int, float]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=run.lr)
    for step, (x, y) in enumerate(zip(run.inputs, run.targets, strict=True)):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        yield step, loss.item()
        optimizer.step()


def test_every_loss_clip_and_gradient_is_met(run):
    model = prepared_model(run)
    for step, loss in train(model, run):
        expected = run.steps[step]
        assert loss == pytest.approx(expected["loss"], rel=1e-6), step
        for name, quantizer in quantizers(model).items():
            clips = expected["acts"][name]
            assert quantizer.clip_max.item() == pytest.approx(clips["clip_max"], rel=1e-6)
            assert quantizer.clip_min.item() == pytest.approx(clips["clip_min"], rel=1e-6, abs=1e-9)
            scale, offset = quantizer.calculate_qparams()
            assert scale.item() == pytest.approx(clips["scale"], rel=1e-6)
            assert offset.item() == clips["offset"]
            for end in ("max", "min"):
                gradient = getattr(quantizer, f"clip_{end}").grad.item()
                assert gradient == pytest.approx(clips[f"grad_clip_{end}"], rel=1e-5, abs=1e-6)


def test_the_final_state_and_the_eval_output_are_met(run):
    model = prepared_model(run)
    for _ in train(model, run):
        pass
    for name, clips in run.final.items():
        quantizer = quantizers(model)[name]
        assert quantizer.clip_max.item() == pytest.approx(clips["clip_max"], rel=1e-6)
        assert quantizer.clip_min.item() == pytest.approx(clips["clip_min"], rel=1e-6, abs=1e-9)
    output = model.eval()(run.x_fixed)
    assert (output - run.y_eval).abs().max() <= output_step(run)


def test_the_converted_model_has_the_recorded_scales(run):
    model = prepared_model(run)
    for _ in train(model, run):
        pass
    converted = convert_amct(model)
    for name, record in run.eval.items():
        layer = converted.get_submodule(name)
        assert layer.input_quantize.scale.item() == pytest.approx(record["scale_d"], rel=1e-6)
        assert layer.input_quantize.zero_point.item() == record["offset_d"]
        expected = torch.tensor(record["scale_w"])
        assert torch.allclose(layer.weight_scale.expand_as(expected), expected, rtol=1e-5)
    output = converted(run.x_fixed)
    spread = float(run.y_eval.max() - run.y_eval.min())
    # int32 biases move values, and so a code here and there, also of the last layer's input
    assert (output - run.y_eval).abs().max() <= 0.01 * spread + effect_of_one_code(layer)


def effect_of_one_code(layer: nn.Module) -> float:
    """Return how far one input code that falls to the other side can move an output."""
    weights = layer.weight_codes.abs().amax() * layer.weight_scale.amax()
    return float(layer.input_quantize.scale * weights)


def output_step(run: Run) -> float:
    """One step of an eight-bit output that spans the recorded values."""
    return 2 * float(run.y_eval.abs().max()) / 255
