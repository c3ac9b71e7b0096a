"""The families of torchvision at 0.3: small ones always, those of torchvision where it is."""

from __future__ import annotations

import importlib.util

import pytest
import torch
from torch import nn

from test.prune.families import FAMILIES
from test.prune.helpers import assert_exact, kept, plan_for


def randomized(model: nn.Module) -> nn.Module:
    """Give batch norms the parameters and statistics of a trained network; drop nothing."""
    torch.manual_seed(0)
    for module in model.modules():
        if isinstance(module, nn.modules.dropout._DropoutNd):
            module.p = 0.0  # other draws for other numbers of channels
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.uniform_(module.bias, -0.5, 0.5)
            module.running_mean.uniform_(-0.5, 0.5)
            module.running_var.uniform_(0.5, 1.5)
    return model.eval()


@pytest.mark.parametrize("mode", ["native", "amct"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_is_pruned_exactly(family: str, mode: str) -> None:
    model = randomized(FAMILIES[family]())
    example = torch.randn(2, 3, 16, 16)
    assert_exact(model, plan_for(model, example, mode=mode, ratio=0.3), example)


@pytest.mark.parametrize("family", FAMILIES)
def test_native_mode_keeps_whole_only_what_it_must(family: str) -> None:
    model = randomized(FAMILIES[family]())
    plan = plan_for(model, torch.randn(2, 3, 16, 16), ratio=0.3)
    stays = {layer.name for layer in plan.pinned}
    codes = {layer.code for layer in plan.pinned}
    if family == "vision transformer":
        assert {layer.code for layer in plan.pinned} <= {"graph_output", "norm_statistics"}
        assert {"attention.qkv", "mlp.0"} <= set(kept(plan))
    else:
        assert codes == {"graph_output"}
        assert len(stays) == 1
    assert plan.macs_after < 0.75 * plan.macs


@pytest.mark.parametrize("family", FAMILIES)
def test_the_pruned_model_takes_other_input_sizes(family: str) -> None:
    if family == "vision transformer":
        pytest.skip("its position embedding has one size")
    model = randomized(FAMILIES[family]())
    plan = plan_for(model, torch.randn(2, 3, 16, 16), ratio=0.3)
    assert_exact(model, plan, torch.randn(3, 3, 24, 32))


TORCHVISION = [
    *("resnet18", "resnet50", "resnext50_32x4d", "densenet121", "mobilenet_v2"),
    *(
        "mobilenet_v3_small",
        "efficientnet_b0",
        "regnet_y_400mf",
        "shufflenet_v2_x1_0",
        "mnasnet1_0",
    ),
    *("squeezenet1_1", "googlenet", "inception_v3", "vgg11_bn", "convnext_tiny", "alexnet"),
]


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="no torchvision")
@pytest.mark.parametrize("name", TORCHVISION)
def test_a_network_of_torchvision_is_pruned_exactly(name: str) -> None:
    from test.zoo.libraries import declare_torchvision_operators

    declare_torchvision_operators()
    from torchvision.models import get_model

    model = randomized(get_model(name, weights=None))
    side = {"inception_v3": 299, "alexnet": 224, "vgg11_bn": 224}.get(name, 64)
    example = torch.randn(2, 3, side, side)
    plan = plan_for(model, example, ratio=0.3)
    assert_exact(model, plan, example)
