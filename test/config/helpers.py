"""Facts of the models in the worked examples, and short ways to resolve a text."""

from __future__ import annotations

import warnings
from typing import Any

from amct_fx.config import (
    CompressionConfig,
    LayerFacts,
    LayerSpec,
    ModelFacts,
    Resolution,
    load_config,
    resolve,
)
from amct_fx.errors import AmctWarning


def conv(name: str, channels: int, **facts: Any) -> LayerFacts:
    return LayerFacts(name, "Conv2d", in_channels=channels, packing_sizes=(channels,), **facts)


def linear(name: str, features: int, **facts: Any) -> LayerFacts:
    return LayerFacts(name, "Linear", in_channels=features, packing_sizes=(features,), **facts)


def model(*layers: LayerFacts, **modules: str) -> ModelFacts:
    names = {"": "Net", **modules}
    return ModelFacts(layers, {**names, **{layer.name: layer.layer_type for layer in layers}})


MODEL_A = model(
    conv("c1", 3),
    conv("c2", 32),
    conv("c3", 48),
    linear("fc", 20),
    b1="BatchNorm2d",
    r1="ReLU",
    mp="MaxPool2d",
    up3="ConvTranspose3d",
)
MODEL_B = model(
    conv("conv1", 3), conv("conv2", 32), conv("dw", 32, groups=32), linear("fc", 32), r1="ReLU"
)
MODEL_C = model(
    conv("c1", 3), conv("c2", 32, groups=4), conv("c3", 32), linear("l1", 64), linear("l2", 64)
)


def resolved(
    text: str | CompressionConfig | None, facts: ModelFacts = MODEL_A, **options: Any
) -> tuple[Resolution, list[str]]:
    """Resolve and return the warnings, too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = load_config(text, dialect=options.get("dialect", "auto"))
        resolution = resolve(config, facts, **options)
    for item in caught:
        assert issubclass(item.category, AmctWarning), item
        assert item.filename == __file__, "a warning must point at the caller"
    return resolution, [str(item.message) for item in caught]


def row(spec: LayerSpec) -> str:
    """Return a spec as one line: enabled, data half, fixed_min, weight half, pruning."""
    data, weight = spec.activation, spec.weight
    start = "IFMR" if data.clip_max is None else f"{data.clip_max:g}/{data.clip_min:g}"
    fixed = "auto" if data.fixed_min is None else str(data.fixed_min).lower()
    algo = {"arq_retrain": "ARQ", "ulq_retrain": "ULQ"}[weight.algo]
    shape = "channel" if weight.channel_wise else "tensor"
    enabled = "yes" if spec.quantize else "no"
    return f"{enabled} {start} {data.dst_type.name} {fixed} {algo} {weight.dst_type.name} {shape}"


def table(resolution: Resolution) -> dict[str, str]:
    return {name: row(spec) for name, spec in resolution.layers.items()}
