"""What one run on example inputs shows, and that the trial of the graph computes little anew."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from amct_fx.graph import capture, recording
from amct_fx.graph.recording import record_calls
from amct_fx.graph.shapes import propagate_shapes


def is_layer(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, nn.Conv2d)


class Convolutions(TorchDispatchMode):
    """Counts convolutions."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        self.count += func is torch.ops.aten.convolution.default
        return func(*args, **(kwargs or {}))


class Branches(nn.Module):
    """Reads one value twice, and changes values in place."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.left, self.right = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.last = nn.Conv2d(4, 2, 1)

    def forward(self, x: Tensor, scale: float = 2.0, bias: float = 1.0) -> dict[str, Any]:
        x = F.relu(self.stem(x), inplace=True)
        y = self.left(x)
        y += self.right(x)
        return {"y": [self.last(y.mul_(scale)), (y + bias,)]}


def test_the_trial_of_the_graph_takes_results_of_layers_from_the_run():
    model, images = Branches(), torch.randn(1, 3, 8, 8)
    with Convolutions() as run:
        calls = record_calls(model, images, dry=False)
    with Convolutions() as both:
        captured = capture(
            model, is_layer, example_inputs=images, calls=record_calls(model, images, dry=False)
        )
    assert not captured.islands
    # the stem and the left one were changed in place since
    assert (run.count, both.count) == (4, 6)
    assert calls.dry is None


def test_results_are_forgotten_where_memory_is_short(monkeypatch: pytest.MonkeyPatch):
    images = torch.randn(1, 3, 8, 8)
    assert len(record_calls(Branches(), images, dry=False).results) == 4
    monkeypatch.setattr(recording, "_MEMORY", 4 * (3 + 4) * 64)
    model = Branches()
    assert list(record_calls(model, images, dry=False).results) == [model.stem]


def test_a_layer_that_hooks_change_is_run():
    model = Branches()
    model.last.register_forward_hook(lambda *_: None)
    assert model.last not in record_calls(model, torch.randn(1, 3, 8, 8), dry=False).results


@pytest.mark.parametrize(
    "inputs",
    [
        torch.randn(2, 3, 8, 8),
        (torch.randn(2, 3, 8, 8), 3.0),
        {"x": torch.randn(2, 3, 8, 8), "bias": 0.5},
        {"bias": 0.5, "scale": 3.0, "x": torch.randn(2, 3, 8, 8)},
    ],
)
def test_the_trial_finds_the_shapes_that_fake_tensors_find(inputs: Any):
    model = Branches()
    captured = capture(model, is_layer, example_inputs=inputs)
    assert not captured.islands
    assert captured.facts == propagate_shapes(model, captured.regions, inputs)
    assert captured.facts is not None
    assert captured.facts.values[""]["last"].shape == (2, 2, 8, 8)


def test_a_result_answers_for_equal_values_until_something_changes():
    x, y = torch.ones(2, 3), torch.ones(2, 4)
    result = recording.Result.of(x, y)
    assert result is not None
    assert result.answers(x)
    assert result.answers(x.clone())
    assert not result.answers(x + 1)
    assert not result.answers(x.double())
    assert not result.answers(torch.ones(3, 2).t())
    y.add_(1)
    assert not result.answers(x)
