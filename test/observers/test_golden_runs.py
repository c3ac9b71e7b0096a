"""Training with the quantizers alone follows the recorded runs, step by step."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx.observers import ARQFakeQuantize, ULQFakeQuantize

from ..golden.reader import RUNS, Run, load_run


class QuantizedLayer(nn.Module):
    """A layer with both quantizers around it, the smallest thing that can train."""

    def __init__(self, layer: nn.Module, config: dict[str, Any], *, fixed_min: bool) -> None:
        super().__init__()
        data, weight = config["retrain_data_config"], config["retrain_weight_config"]
        self.layer = layer
        self.input_fake_quant = ULQFakeQuantize(
            fixed_min=fixed_min, clip_max=data.get("clip_max"), clip_min=data.get("clip_min")
        )
        rows = {"ch_axis": 0, "num_channels": len(layer.weight)}
        self.weight_fake_quant = ARQFakeQuantize(**(rows if weight["channel_wise"] else {}))

    def forward(self, x: Tensor) -> Tensor:
        x, weight = self.input_fake_quant(x), self.weight_fake_quant(self.layer.weight)
        if isinstance(self.layer, nn.Linear):
            return F.linear(x, weight, self.layer.bias)
        return self.layer._conv_forward(x, weight, self.layer.bias)


def prepare(run: Run) -> tuple[nn.Module, dict[str, ULQFakeQuantize]]:
    network, quantizers = run.build(), {}
    for name, recorded in run.steps[0]["acts"].items():
        layer = QuantizedLayer(
            network.get_submodule(name), run.config[name], fixed_min=recorded["clip_min"] == 0
        )
        parent, _, child = name.rpartition(".")
        setattr(network.get_submodule(parent), child, layer)
        quantizers[name] = layer.input_fake_quant
    return network, quantizers


@pytest.mark.parametrize("name", RUNS)
def test_a_recorded_run_is_followed(name: str) -> None:
    run = load_run(name)
    network, quantizers = prepare(run)
    optimizer = torch.optim.SGD(network.parameters(), lr=run.lr)
    for step, x, target in zip(run.steps, run.inputs, run.targets, strict=True):
        optimizer.zero_grad()
        loss = F.cross_entropy(network(x), target)
        loss.backward()
        assert loss.item() == pytest.approx(step["loss"], rel=1e-6)
        for layer, recorded in step["acts"].items():
            quantizer = quantizers[layer]
            assert quantizer.clip_max.item() == pytest.approx(recorded["clip_max"], rel=1e-6)
            assert quantizer.clip_min.item() == pytest.approx(recorded["clip_min"], rel=1e-6)
            assert quantizer.scale.item() == pytest.approx(recorded["scale"], rel=1e-6)
            assert quantizer.zero_point.item() == recorded["offset"]
        optimizer.step()
    for layer, final in run.final.items():
        assert quantizers[layer].clip_max.item() == pytest.approx(final["clip_max"], rel=1e-6)
        assert quantizers[layer].clip_min.item() == pytest.approx(final["clip_min"], abs=1e-6)
    y = network.eval()(run.x_fixed)
    torch.testing.assert_close(y, run.y_eval, rtol=1e-5, atol=1e-6)
