"""Layers called past the graph, by methods of the user or sub-modules on their own."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from amct_fx import convert_amct, prepare_qat_amct

from .networks import example


class Autoencoder(nn.Module):
    """Has public parts besides ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 1))
        self.mean = nn.Linear(4, 3)
        self.spread = nn.Linear(4, 3)
        self.state = nn.GRU(3, 5, batch_first=True)
        self.decoder = nn.Linear(5, 2)

    def encode(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.features(x).mean((2, 3))
        return self.mean(y), self.spread(y)

    def decode(self, code: Tensor) -> Tensor:
        return self.decoder(self.state(code[:, None])[0][:, 0])

    def forward(self, x: Tensor) -> Tensor:
        mean, spread = self.encode(x)
        return self.decode(mean * spread)


@pytest.fixture(params=["prepared", "converted", "deepcopy", "pickle"])
def model(request) -> nn.Module:
    prepared = prepare_qat_amct(Autoencoder())
    prepared(example())
    prepared.eval()
    if request.param == "prepared":
        return prepared
    converted = convert_amct(prepared)
    if request.param == "deepcopy":
        return copy.deepcopy(converted)
    return pickle.loads(pickle.dumps(prepared)) if request.param == "pickle" else converted


def test_methods_compute_what_forward_computes(model):
    mean, spread = model.encode(example())
    assert torch.equal(model.decode(mean * spread), model(example()))


def test_a_layer_that_shares_a_quantizer_finds_it(model):
    y = model.features(example()).mean((2, 3))
    assert torch.equal(model.spread(y), model.encode(example())[1])


def test_sharing_adds_no_entry_to_state_dict_and_modules():
    prepared = prepare_qat_amct(Autoencoder())
    assert not any(key.startswith("spread.input") for key in prepared.state_dict())
    names = [name for name, _ in prepared.named_modules(remove_duplicate=False)]
    assert not any(name.startswith("spread.input") for name in names)


def test_a_forward_pre_hook_runs_before_the_input_is_quantized():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    model[2].register_forward_pre_hook(lambda _, args: (args[0] * 10,))
    prepared = prepare_qat_amct(model)
    x = torch.randn(8, 4)
    prepared(x)
    assert prepared[2].input_fake_quant.clip_max > prepared[0].input_fake_quant.clip_max
    expected = prepared.eval()(x)
    assert (convert_amct(prepared)(x) - expected).abs().max() <= 0.01 * expected.abs().max()


@pytest.mark.parametrize("place", [0, 1])
def test_a_batch_norm_pair_with_a_hook_is_not_folded(place):
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4)).eval()
    model[place].register_forward_hook(lambda _, __, output: output * 2)
    prepared = prepare_qat_amct(model)
    expected = prepared(example())
    converted = convert_amct(prepared)
    assert type(converted[1]) is nn.BatchNorm2d
    assert (converted(example()) - expected).abs().max() <= 0.01 * expected.abs().max()
