"""What a run on example inputs leaves behind: nothing."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn

from amct_fx import prepare_qat_amct, summarize
from amct_fx.graph.shapes import propagate_shapes


class Stateful(nn.Module):
    """Moves buffers and attributes in eval mode, too."""

    def __init__(self):
        super().__init__()
        self.fc, self.calls, self.last = nn.Linear(4, 4), 0, None
        self.register_buffer("steps", torch.zeros(1))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        y = self.fc(x + self.steps)
        self.steps.add_(1)
        self.mean = 0.5 * self.mean + y.detach().mean(0)
        self.calls, self.last = self.calls + 1, y
        return y + self.mean


@pytest.mark.parametrize(
    "look",
    [
        partial(prepare_qat_amct, example_inputs=torch.ones(2, 4), inplace=True),
        partial(propagate_shapes, regions=[], example_inputs=torch.ones(2, 4)),
    ],
)
def test_a_run_on_example_inputs_leaves_buffers_and_attributes_alone(look):
    model = Stateful()
    steps, mean = model.steps, model.mean
    look(model)
    assert (model.steps is steps, model.mean is mean) == (True, True)
    assert (float(steps), float(mean.abs().sum()), model.calls, model.last) == (0, 0, 0, None)


def test_a_buffer_written_through_data_comes_back():
    class Decaying(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("factor", torch.ones(4))
            self.register_buffer("seen", torch.ones(4))

        def forward(self, x):
            self.factor.data.mul_(0.5)
            self.seen.data = x
            return self.fc(x) * self.factor

    model = Decaying()
    factor, seen = model.factor, model.seen
    prepare_qat_amct(model, example_inputs=torch.zeros(2, 4), inplace=True)
    assert (model.factor is factor, model.seen is seen) == (True, True)
    assert torch.equal(torch.stack([factor, seen]), torch.ones(2, 4))


def test_lists_and_dicts_of_a_module_keep_their_content():
    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.scales, self.seen = nn.Linear(4, 4), [1.0], {}

        def forward(self, x):
            self.scales[0] += 1
            self.seen[len(self.seen)] = x.shape
            return self.fc(x) * self.scales[0]

    model = Counting()
    scales = model.scales
    prepare_qat_amct(model, example_inputs=torch.zeros(2, 4), inplace=True)
    assert (model.scales is scales, scales, model.seen) == (True, [1.0], {})


def test_a_buffer_that_moves_does_not_make_its_graph_compute_something_else():
    class Steps(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(4, 4)
            self.register_buffer("steps", torch.zeros(1))

        def forward(self, x):
            return self.fc(x + self.steps.add_(1))

    prepared = prepare_qat_amct(Steps(), example_inputs=torch.ones(2, 4))
    assert not summarize(prepared).islands
    assert float(prepared.steps) == 0


def test_what_a_first_forward_makes_stays():
    class Lazy(nn.Module):
        def __init__(self):
            super().__init__()
            self.proj = None

        def forward(self, x):
            if self.proj is None:
                self.proj = nn.Linear(4, 4)
            return self.proj(x)

    prepared = prepare_qat_amct(Lazy(), example_inputs=torch.ones(2, 4))
    layer = prepared.proj
    prepared(torch.ones(2, 4))
    assert prepared.proj is layer
