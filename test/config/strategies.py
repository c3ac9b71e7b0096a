"""Random configurations for the property tests."""

from __future__ import annotations

from hypothesis import strategies as st

from amct_fx.config import (
    ActivationConfig,
    CompressionConfig,
    DataType,
    FilterPruneConfig,
    LayerOverride,
    M4N2PruneConfig,
    TypeOverride,
    WeightConfig,
)

_optional_bool = st.none() | st.booleans()
_types = st.sampled_from(DataType)
_clip = st.floats(min_value=1e-30, max_value=1e30)
_names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
_spellings = (
    st.sampled_from(["Conv2d", "nn.Conv2D", "Linear", "mindspore.nn.Dense", "GRU"]) | _names
)


@st.composite
def activations(draw: st.DrawFn) -> ActivationConfig:
    clips = draw(st.none() | st.tuples(_clip, _clip.map(lambda value: -value)))
    high, low = clips or (None, None)
    return ActivationConfig(high, low, draw(_optional_bool), draw(_types))


weights = st.builds(
    WeightConfig,
    algo=st.sampled_from(["arq_retrain", "ulq_retrain"]),
    dst_type=_types,
    channel_wise=_optional_bool,
)
prunes = st.builds(
    FilterPruneConfig,
    prune_ratio=st.floats(min_value=1e-6, max_value=1 - 1e-6),
    ascend_optimized=st.booleans(),
) | st.builds(M4N2PruneConfig, update_freq=st.integers(0, 2**32 - 1))


def _override(cls: type, key: str, names: st.SearchStrategy[str]) -> st.SearchStrategy:
    return st.builds(
        cls,
        **{key: names},
        activation=st.none() | activations(),
        weight=st.none() | weights,
        prune=st.none() | prunes,
    )


_batch_nums = st.integers(1, 2**32 - 1)
_modes = st.sampled_from([None, "FORCE_FP16_QUANT"])
_lists = st.lists(_names, max_size=3)

configs = st.builds(
    CompressionConfig,
    batch_num=_batch_nums,
    activation=st.none() | activations(),
    weight=st.none() | weights,
    prune=st.none() | prunes,
    skip_layers=_lists,
    skip_types=st.lists(_spellings, max_size=3),
    quant_skip_layers=_lists,
    quant_skip_types=st.lists(_spellings, max_size=2),
    prune_skip_layers=_lists,
    prune_skip_types=st.lists(_spellings, max_size=2),
    layer_overrides=st.lists(_override(LayerOverride, "name", _names), max_size=3),
    type_overrides=st.lists(_override(TypeOverride, "type", _spellings), max_size=3),
    fakequant_precision_mode=_modes,
)


@st.composite
def resolved_configs(draw: st.DrawFn) -> CompressionConfig:
    keys = {"version", "batch_num", "fakequant_precision_mode"}
    free = _names.filter(lambda name: name not in keys and not name.startswith("regular_prune_"))
    names = draw(st.lists(free, max_size=4, unique=True))
    halves = st.tuples(st.none() | activations(), st.none() | weights)
    overrides = [LayerOverride(name, *draw(halves)) for name in names]
    disabled = [name for name in names if draw(st.booleans())]
    return CompressionConfig(
        batch_num=draw(_batch_nums),
        fakequant_precision_mode=draw(_modes),
        layer_overrides=tuple(overrides),
        quant_skip_layers=tuple(disabled),
        resolved=True,
    )
