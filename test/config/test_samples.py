"""The official samples' forms, with their stand-in names replaced by those of three models."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from amct_fx import amct_pytorch, prepare_qat_amct
from amct_fx.backend_config import is_layer, model_facts
from amct_fx.config import FilterPruneConfig, LayerFacts, M4N2PruneConfig, ModelFacts
from amct_fx.graph import capture
from test.config.helpers import conv, linear, model, resolved, table

SAMPLES = Path(__file__).parent / "samples"


def classifier(
    prefix: str, first: str = "conv1", second: str = "conv2", last: str = "fc"
) -> ModelFacts:
    up = LayerFacts(f"{prefix}up", "ConvTranspose2d", in_channels=16, packing_sizes=(16,))
    layers = conv(f"{prefix}{first}", 3), conv(f"{prefix}{second}", 16), up
    return model(*layers, linear(f"{prefix}{last}", 32))


MODELS = {
    "as written": ("", "conv1", "conv2", "fc"),
    "nested": ("backbone.layer1.0.", "conv1", "conv2", "fc"),
    "renamed": ("net.", "stem", "body", "head"),
}


@pytest.fixture(params=MODELS)
def names(request: pytest.FixtureRequest) -> tuple[str, str, str, str]:
    return MODELS[request.param]


def sample(file: str, names: tuple[str, str, str, str]) -> str:
    prefix, *parts = names
    text = (SAMPLES / file).read_text()
    for old, new in zip(("conv1", "conv2", "fc"), parts, strict=True):
        text = text.replace(f'"{old}"', f'"{prefix}{new}"')
    return text


def rows(file: str, names: tuple[str, str, str, str]) -> tuple[list[str], list[str]]:
    resolution, messages = resolved(sample(file, names), classifier(*names))
    return list(table(resolution).values()), messages


def prunings(file: str, names: tuple[str, str, str, str]) -> list[object]:
    resolution, _ = resolved(sample(file, names), classifier(*names))
    return [spec.prune for spec in resolution.layers.values()]


def test_the_quantization_sample(names: tuple[str, str, str, str]) -> None:
    found, messages = rows("quant.cfg", names)
    assert found == [
        "yes 6/-6 INT8 true ARQ INT8 tensor",
        "yes 3/-3 INT8 auto ARQ INT8 tensor",
        "yes 6/-6 INT8 true ARQ INT8 channel",
        "no 6/-6 INT8 true ARQ INT8 tensor",
    ]
    assert len(messages) == 1


def test_the_mindspore_sample(names: tuple[str, str, str, str]) -> None:
    found, _ = rows("mindspore_quant.cfg", names)
    assert found == [
        "yes 6/-6 INT8 true ARQ INT8 tensor",
        "yes 3/-3 INT8 auto ARQ INT8 channel",
        "yes 6/-6 INT8 true ARQ INT8 channel",
        "yes 6/-6 INT8 true ARQ INT8 tensor",
    ]


def test_the_pruning_sample_prunes_and_does_not_quantize(names: tuple[str, str, str, str]) -> None:
    found, _ = rows("prune.cfg", names)
    assert [row[:3] for row in found] == ["no "] * 4
    assert prunings("prune.cfg", names) == [None, FilterPruneConfig(0.5), None, None]


def test_the_sparsity_sample(names: tuple[str, str, str, str]) -> None:
    once, always = M4N2PruneConfig(0), M4N2PruneConfig(1)
    assert prunings("selective_prune.cfg", names) == [None, always, once, once]


def test_the_first_combined_sample(names: tuple[str, str, str, str]) -> None:
    found, _ = rows("compressed1.cfg", names)
    assert found[:2] == ["yes 6/-6 INT8 auto ARQ INT8 tensor"] * 2
    assert [row[:3] for row in found[2:]] == ["no "] * 2
    half = FilterPruneConfig(0.5)
    assert prunings("compressed1.cfg", names) == [half, half, None, None]


def test_the_second_combined_sample(names: tuple[str, str, str, str]) -> None:
    found, _ = rows("compressed2.cfg", names)
    assert found == [
        "yes 6/-6 INT8 auto ARQ INT8 tensor",
        "yes 6/-6 INT8 auto ARQ INT8 tensor",
        "yes IFMR INT8 auto ARQ INT8 channel",
        "yes IFMR INT8 auto ARQ INT8 tensor",
    ]
    once, always = M4N2PruneConfig(0), M4N2PruneConfig(1)
    assert prunings("compressed2.cfg", names) == [always, always, once, once]


class Classifier(nn.Module):
    """The layers that the facts above describe."""

    def __init__(self, names: tuple[str, str, str]) -> None:
        super().__init__()
        self.names = names
        layers = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3), nn.Linear(32, 4)
        for name, layer in zip(names, layers, strict=True):
            self.add_module(name, layer)
            if layer is layers[1]:
                self.up = nn.ConvTranspose2d(16, 32, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        first, second, last = (getattr(self, name) for name in self.names)
        x = self.up(torch.relu(second(torch.relu(first(x)))))
        return last(torch.relu(x).mean((2, 3)))


def network(names: tuple[str, str, str, str]) -> nn.Module:
    """Return a classifier inside of the containers that the prefix names."""
    prefix, *parts = names
    result: nn.Module = Classifier((parts[0], parts[1], parts[2]))
    for part in reversed(prefix.split(".")[:-1]):
        outer = nn.Sequential()
        outer.add_module(part, result)
        result = outer
    return result


def test_the_facts_are_those_of_real_models(names: tuple[str, str, str, str]) -> None:
    net = network(names)
    found = model_facts(net, capture(net, is_layer))
    expected = classifier(*names)
    assert [(layer.name, layer.layer_type, layer.packing_sizes) for layer in found.layers] == [
        (layer.name, layer.layer_type, layer.packing_sizes) for layer in expected.layers
    ]


@pytest.mark.filterwarnings("ignore::amct_fx.errors.AmctWarning")
@pytest.mark.parametrize("file", ["quant.cfg", "mindspore_quant.cfg"])
def test_real_models_train_with_the_samples(file: str, names: tuple[str, str, str, str]) -> None:
    text = sample(file, names)
    prepared = prepare_qat_amct(network(names), text).train()
    expected = [row.startswith("yes") for row in rows(file, names)[0]]
    layers = [prepared.get_submodule(layer.name) for layer in classifier(*names).layers]
    assert [hasattr(layer, "weight_fake_quant") for layer in layers] == expected
    for _ in range(3):
        prepared(torch.rand(2, 3, 8, 8)).sum().backward()


@pytest.mark.filterwarnings("ignore::amct_fx.errors.AmctWarning")
def test_the_distillation_sample(names: tuple[str, str, str, str], tmp_path: Path) -> None:
    prefix, first, second, last = names
    text = (SAMPLES / "distill.cfg").read_text()
    layers = {"layer1": first, "layer2": second, "layer3": second, "layer4": first}
    for old, new in layers.items():
        text = text.replace(f'"{old}"', f'"{prefix}{new}"')
    text = text.replace('"type1"', '"GRU"').replace('"type2"', '"Linear"')
    (tmp_path / "distill.cfg").write_text(text)
    target = tmp_path / "distill.json"
    data = torch.rand(2, 3, 8, 8)
    amct_pytorch.create_distill_config(
        str(target), network(names), data, str(tmp_path / "distill.cfg")
    )
    value = json.loads(target.read_text())
    assert value["data_dump"] is True
    assert value["distill_group"] == [[prefix + first, prefix + second], [prefix + last]]
    enabled = {name: value[prefix + name]["quant_enable"] for name in (first, second, last)}
    assert enabled == {first: True, second: False, last: True}
    assert value[prefix + last]["distill_weight_config"]["algo"] == "ulq_distill"
    assert value[prefix + first]["distill_data_config"]["clip_max"] == 3.0
