"""Layers whose weight is computed: parametrizations and the old weight_norm."""

from __future__ import annotations

import copy
import warnings
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from amct_fx import convert_amct, prepare_qat_amct, prune_plan, summarize
from amct_fx.nn import qat, quantized

from ..networks import example


class Mask(nn.Module):
    """Keeps every second weight."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        mask = torch.zeros(shape)
        mask.view(-1)[::2] = 1
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        return weight * self.mask


def masked(layer: nn.Module) -> nn.Module:
    return parametrize.register_parametrization(layer, "weight", Mask(layer.weight.shape))


def old_weight_norm(layer: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return nn.utils.weight_norm(layer)


@pytest.mark.parametrize(
    "wrap",
    [masked, nn.utils.parametrizations.weight_norm, old_weight_norm],
    ids=lambda w: w.__name__,
)
@pytest.mark.parametrize("channel_wise", [True, False])
def test_a_layer_with_a_computed_weight_trains_and_converts(wrap, channel_wise):
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    model[0] = wrap(model[0])
    model(example())  # the old weight_norm then holds a weight that copy.deepcopy refuses
    cfg = f"retrain_weight_quant_config {{ arq_retrain {{ channel_wise: {channel_wise} }} }}"
    prepared = prepare_qat_amct(model, cfg)
    assert isinstance(prepared[0], qat.Conv2d)
    assert summarize(prepared).rows[0].type == "Conv2d"
    before = {name: p.detach().clone() for name, p in prepared[0].named_parameters()}
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        prepared(example()).square().mean().backward()
        optimizer.step()
    moved = [name for name, p in prepared[0].named_parameters() if not torch.equal(before[name], p)]
    assert any("weight" in name or "original" in name for name in moved)
    expected = prepared.eval()(example())
    converted = convert_amct(prepared)
    assert torch.equal(prepared(example()), expected)
    assert type(converted[0]) is quantized.Conv2d
    assert not parametrize.is_parametrized(converted[0])
    assert (converted(example()) - expected).abs().max() <= 0.01 * expected.abs().max()
    assert torch.equal(copy.deepcopy(converted)(example()), converted(example()))


def test_arq_sees_the_masked_weight():
    model = nn.Sequential(masked(nn.Linear(4, 2)))
    with torch.no_grad():
        model[0].parametrizations.weight.original[:, 1] = 100.0
    prepared = prepare_qat_amct(model)
    assert prepared[0].weight_scale().item() < 0.1
    prepared(torch.randn(3, 4))
    assert (convert_amct(prepared)[0].weight_codes.view(-1)[1::2] == 0).all()


def test_copies_of_a_prepared_parametrized_model_work():
    prepared = prepare_qat_amct(nn.Sequential(masked(nn.Linear(4, 2)), nn.Linear(2, 2)))
    x = torch.randn(3, 4)
    expected = prepared(x)
    clone = copy.deepcopy(prepared)
    assert torch.equal(clone(x), expected)
    assert isinstance(clone[0], qat.Linear)


PRUNE = """prune_config { filter_pruner {
    balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }"""


@pytest.mark.parametrize("verb", [prepare_qat_amct, partial(prune_plan, cfg=PRUNE)])
def test_a_look_at_a_weight_is_no_power_iteration(verb):
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 3))
    for layer in model:
        torch.nn.utils.parametrizations.spectral_norm(layer)
    before = copy.deepcopy(dict(model.named_buffers()))
    found = verb(model)
    seen = found if isinstance(found, nn.Module) else model
    after = dict(seen.named_buffers())
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert all(part.training for part in seen.modules())
