"""The official samples' forms, with their stand-in names replaced by those of three models."""

from __future__ import annotations

from pathlib import Path

import pytest

from amct_fx.config import FilterPruneConfig, LayerFacts, M4N2PruneConfig, ModelFacts
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
