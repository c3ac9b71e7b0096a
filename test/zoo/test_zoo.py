"""Real architectures: trained for two steps, converted, exported, and run in onnxruntime.

A dozen runs with ``-m slow``, every model with ``AMCT_FX_ZOO=all``; ``docs/model_zoo.md`` holds
the results of all of them.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from amct_fx.nn.quantized import Quantize

from . import pipeline
from .agreement import agreement_of
from .catalog import LIBRARIES, entries_of
from .layerwise import Layerwise, calls_in_file, compare_file
from .libraries import is_installed

if TYPE_CHECKING:
    from .entry import Entry

DOZEN = [
    ("torchvision", "googlenet"),
    ("torchvision", "mobilenet_v3_small"),
    ("torchvision", "resnet18"),
    ("torchvision", "squeezenet1_1"),
    ("timm", "test_convnext"),
    ("timm", "test_nfnet"),
    ("timm", "test_vit"),
    ("transformers", "BERT"),
    ("transformers", "CLIP"),
    ("transformers", "GPT-2"),
    ("transformers", "Llama"),
    ("transformers", "Wav2Vec2"),
]
ALL = os.environ.get("AMCT_FX_ZOO") == "all"


def everything() -> list[Entry | None]:
    """Return all entries when they are asked for: to list them imports the libraries."""
    return [entry for library in LIBRARIES for entry in entries_of(library)] if ALL else [None]


def check(entry: Entry) -> None:
    record = pipeline.run(entry)
    assert record.passed, f"{record.result}: {record.detail}"
    assert record.quantized > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("library", "name"), DOZEN, ids=[name for _, name in DOZEN])
def test_a_dozen_models_go_from_float_to_onnxruntime(library, name):
    if not is_installed(library):
        pytest.skip(f"{library} is not installed; the extra zoo brings it")
    check(next(entry for entry in entries_of(library) if entry.name == name))


@pytest.mark.slow
@pytest.mark.timeout(0)
@pytest.mark.skipif(not ALL, reason="takes hours; set AMCT_FX_ZOO=all")
@pytest.mark.parametrize("entry", everything(), ids=str)
def test_every_model_goes_from_float_to_onnxruntime(entry):
    check(entry)


def test_codes_are_counted_by_the_quantizer_that_is_worst():
    found = Layerwise()
    found.add("first", torch.zeros(1000), torch.zeros(1000))
    found.add("second", torch.zeros(10), torch.tensor([1.0, *[0.0] * 9]))
    assert (found.worst, found.worst_equal, found.steps) == ("second", 0.9, 1)
    found.require()
    found.add("third", torch.zeros(10), torch.full((10,), 3.0))
    with pytest.raises(ValueError, match=r"0\.98.* of the codes are equal; 0\.0000 at third"):
        found.require()


def test_outputs_are_compared_by_their_range():
    left, right = torch.tensor([0.0, 4.0]), torch.tensor([1.0, 4.0])
    assert agreement_of([left], [right]).difference == pytest.approx(0.25)
    with pytest.raises(ValueError, match="shapes"):
        agreement_of([left], [left, right])


class _Merged(nn.Module):
    """Two quantizers of one tensor, and two that make the same codes of different tensors."""

    def __init__(self):
        super().__init__()
        self.one, self.two, self.three, self.four = (Quantize(0.5, 0) for _ in range(4))

    def forward(self, x):
        tensors = self.one(x), self.two(x), self.three(x.relu()), self.four(x * 1.0078125)
        return torch.stack(tensors).float()


def test_a_file_with_merged_quantizers_is_compared_by_their_names(tmp_path):
    pytest.importorskip("onnxruntime")
    model, x = _Merged().eval(), torch.tensor([1.0, 2.0, 3.0])
    path = tmp_path / "model.onnx"
    torch.onnx.export(model, (x,), path, input_names=["x"], dynamo=True, verbose=False)
    found = compare_file(model, path, (x,), {}, {"x": x})
    found.require()
    assert found.quantizers == 3


def test_only_calls_that_repeat_another_may_be_missing_in_a_file():
    model = _Merged()
    made = [("one", torch.zeros(2)), ("two", torch.zeros(2)), ("three", torch.zeros(2))]
    assert calls_in_file(made, ["one", "three"], model) == made[::2]
    assert calls_in_file(made, [None, None, None], model) == made
    made[1] = ("two", torch.ones(2))
    for names in (["one", "three"], ["one", "three", "two"], [None, None]):
        with pytest.raises(ValueError, match=f"{len(names)} quantizers in the file, 3 calls"):
            calls_in_file(made, names, model)
    twice = [("one", torch.zeros(2)), ("one", torch.zeros(2)), ("one", torch.ones(2))]
    assert calls_in_file(twice, ["one", "one"], model) == twice[::2]
