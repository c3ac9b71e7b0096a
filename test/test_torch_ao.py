"""Our configuration and quantizers in torch's own FX mode."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import FakeQuantizeBase
from torch.ao.quantization.quantize_fx import convert_to_reference_fx, prepare_qat_fx

from amct_fx import get_backend_config, get_qconfig_mapping, prepare_qat_amct
from amct_fx.observers import ARQFakeQuantize, ULQFakeQuantize, ULQWeightFakeQuantize
from amct_fx.torch_ao import use_trained_ranges

FIXED = "retrain_data_quant_config { ulq_quantize { fixed_min: false } }"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 6, 2, groups=2)
        self.fc = nn.Linear(6, 5)
        self.last = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.conv(x)))
        return self.last(self.fc(self.up(x).mean((2, 3))))


def stock(model: nn.Module, cfg: str | None, x: Tensor) -> Any:
    mapping = get_qconfig_mapping(cfg, model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.ao is deprecated
        backend = get_backend_config()
        return prepare_qat_fx(copy.deepcopy(model).train(), mapping, (x,), backend_config=backend)


def train(model: nn.Module, x: Tensor, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(x * (1 + step)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def example() -> tuple[Net, Tensor]:
    torch.manual_seed(0)
    return Net(), torch.randn(2, 3, 8, 8)


@pytest.mark.parametrize("algorithm", ["arq_retrain", "ulq_retrain"])
def test_it_trains_as_our_own_prepare(algorithm: str) -> None:
    model, x = example()
    cfg = f"{FIXED} batch_num: 2 retrain_weight_quant_config {{ {algorithm} {{ }} }}"
    ours = train(prepare_qat_amct(copy.deepcopy(model).train(), cfg), x)
    assert train(stock(model, cfg, x), x) == pytest.approx(ours, rel=1e-5)


def test_inputs_are_quantized_once_and_outputs_are_not() -> None:
    model, x = example()
    prepared = stock(model, 'quant_skip_layers: "last"', x)
    quantized = [str(n.args[0]) for n in prepared.graph.nodes if "post_process" in str(n.target)]
    assert quantized == ["x", "relu", "mean"]
    kinds = [type(m) for m in prepared.modules() if isinstance(m, FakeQuantizeBase)]
    assert kinds.count(ULQFakeQuantize) == kinds.count(ARQFakeQuantize) == 3
    assert type(prepared.last) is nn.Linear
    assert isinstance(prepared.norm, nn.BatchNorm2d)


def test_settings_of_single_layers_arrive() -> None:
    model, x = example()
    half = "retrain_data_quant_config { ulq_quantize { dst_type: INT16 } }"
    weight = "retrain_weight_quant_config { ulq_retrain { } }"
    cfg = f'override_layer_configs {{ layer_name: "fc" {half} {weight} }}'
    prepared = stock(model, cfg, x)
    bits = [m.num_bits for m in prepared.modules() if isinstance(m, ULQFakeQuantize)]
    assert sorted(bits) == [8, 8, 8, 16]
    assert isinstance(prepared.fc.weight_fake_quant, ULQWeightFakeQuantize)
    assert prepared.up.weight_fake_quant.groups == 2


@pytest.mark.parametrize(
    ("layer", "shape"),
    [
        (nn.Conv1d(2, 4, 3), (2, 2, 8)),
        (nn.Conv2d(2, 4, 3), (2, 2, 8, 8)),
        (nn.Conv3d(2, 4, 3), (2, 2, 5, 5, 5)),
        (nn.ConvTranspose1d(2, 4, 3, output_padding=1, stride=2), (2, 2, 8)),
        (nn.ConvTranspose2d(2, 4, 3), (2, 2, 8, 8)),
        (nn.Linear(2, 4), (3, 2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_the_reference_model_has_the_learned_ranges(
    layer: nn.Module, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape)
    prepared = stock(nn.Sequential(layer), FIXED, x)
    train(prepared, x)
    expected = prepared.eval()(x)
    scale, _ = prepared.activation_post_process_0.calculate_qparams()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        converted = convert_to_reference_fx(
            use_trained_ranges(prepared), backend_config=get_backend_config()
        )
    assert "quantize_per_tensor_dynamic" not in converted.code
    assert torch.isclose(getattr(converted, "0_scale_0", scale), scale).all()
    assert (converted(x) - expected).abs().max() <= 0.01 * expected.abs().max()


def test_a_batch_norm_of_weight_0_stays_finite() -> None:
    model, x = example()
    with torch.no_grad():
        model.norm.weight.zero_()
    assert all(loss == loss for loss in train(stock(model, None, x), x))  # no NaN


def test_each_call_returns_a_configuration_of_its_own() -> None:
    first, second = get_backend_config(), get_backend_config()
    assert first is not second
    assert len(first.configs) == 12
