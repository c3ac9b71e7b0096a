"""Five steps of 2:4 training as the reference tool took them: losses, masks, weights, outputs."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from amct_fx import AmctWarning, convert_amct, prepare_qat_amct

from ..golden import networks
from ..golden.reader import Case, load_cases, load_run


def prepared(case: Case) -> nn.Module:
    network = getattr(networks, case["model"])()
    start = {k.removeprefix("w0/"): case.tensor(k) for k in case.arrays if k.startswith("w0/")}
    network.load_state_dict(start)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmctWarning)  # one network calls a layer twice
        return prepare_qat_amct(network, case["cfg"]).train()


def mask_of(model: nn.Module, layer: str) -> torch.Tensor:
    return model.get_submodule(layer).parametrizations.weight[0].mask


@pytest.mark.parametrize("case", load_cases("f_selective"), ids=lambda case: case["key"])
def test_losses_masks_and_weights_of_the_reference_tool_are_met(case: Case):
    model = prepared(case)
    optimizer = torch.optim.SGD(model.parameters(), lr=case["lr"])
    layers = [key.removeprefix("mask0/") for key in case.arrays if key.startswith("mask0/")]
    for step, expected in enumerate(case["losses"]):
        optimizer.zero_grad()
        loss = model(case.tensor("x")).square().mean()
        loss.backward()
        assert loss.item() == pytest.approx(expected, rel=1e-6)
        for layer in layers:
            assert torch.equal(mask_of(model, layer), case.tensor(f"mask{step}/{layer}"))
        optimizer.step()
    for layer in layers:
        weight = model.get_submodule(layer).parametrizations.weight.original
        assert torch.allclose(weight, case.tensor(f"w5/{layer}"), rtol=1e-5, atol=1e-7)
    output = model.eval()(case.tensor("x"))
    assert torch.allclose(output, case.tensor("y_eval/"[:-1]), rtol=1e-5, atol=1e-6)
    assert torch.equal(convert_amct(model)(case.tensor("x")), output)


def test_the_masks_under_quantization_are_those_of_the_reference_tool():
    run = load_run("compressed_m4n2_quant")
    model = prepare_qat_amct(run.build(), run.cfg)
    assert model.c1.parametrizations.weight[0].density == pytest.approx(2 / 3)
    assert model.c2.parametrizations.weight[0].density == 0.5
