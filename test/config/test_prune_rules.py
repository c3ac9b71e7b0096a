"""Which layers can be pruned: apart from quantization, and by mode."""

from __future__ import annotations

import pytest

from amct_fx.config import (
    FilterPruneConfig,
    LayerFacts,
    M4N2PruneConfig,
    ModelFacts,
    PruneMode,
    load_config,
    resolve,
)

FILTER = "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 } } } "
SPARSE = "prune_config { n_out_of_m_pruner { l1_selective_prune { } } } "


def facts(*layers: LayerFacts, mode: PruneMode = "native") -> ModelFacts:
    return ModelFacts(layers, {layer.name: layer.layer_type for layer in layers}, mode)


def conv(name: str, kind: str = "Conv2d", **given: object) -> LayerFacts:
    return LayerFacts(name, kind, **{"in_channels": 8, "prune_mode": "native", **given})


def test_a_layer_that_is_not_quantized_may_be_pruned() -> None:
    circular = conv("c", reason="padding_mode='circular'", prune_reason=None)
    found = resolve(load_config(FILTER), facts(circular, conv("d"))).layers["c"]
    assert found.prune == FilterPruneConfig(0.5)
    assert not found.quantize
    assert found.reason == "padding_mode='circular'"


def test_a_layer_that_is_quantized_may_be_barred_from_pruning() -> None:
    barred = conv("c", prune_reason="its input has no batch axis")
    found = resolve(load_config(FILTER), facts(barred, conv("d"))).layers["c"]
    assert found.prune is None
    assert found.prune_reason == "its input has no batch axis"


@pytest.mark.parametrize("kind", ["Conv1d", "Conv3d", "ConvTranspose2d", "ConvTranspose3d"])
def test_native_mode_prunes_channels_of_more_types(kind: str) -> None:
    native, amct = conv("c", kind), conv("c", kind, prune_mode="amct")
    assert native.why_not_prunable(FilterPruneConfig(0.5)) is None
    assert "filter pruning is for" in str(amct.why_not_prunable(FilterPruneConfig(0.5)))


def test_more_types_are_sparse_where_an_override_asks_for_it() -> None:
    layer = conv("c", "Conv1d")
    assert layer.why_not_prunable(M4N2PruneConfig()) is None
    assert "2:4 pruning is for" in str(layer.why_not_prunable(M4N2PruneConfig(), requested=False))


def test_layers_that_are_used_twice_share_channels_but_no_2_4_mask() -> None:
    layer = conv("c", uses=2)
    assert layer.why_not_prunable(FilterPruneConfig(0.5)) is None
    assert layer.why_not_prunable(M4N2PruneConfig()) == "one forward uses its weight 2 times"


@pytest.mark.parametrize(
    ("mode", "groups", "inputs", "prunable"),
    [
        ("amct", 1, 1, False),
        ("native", 1, 1, True),
        ("amct", 8, 8, False),
        ("native", 8, 8, False),
        ("amct", 4, 8, True),
        ("native", 4, 8, True),
    ],
)
def test_convolutions_by_groups(mode: PruneMode, groups: int, inputs: int, prunable: bool) -> None:
    layer = conv("c", groups=groups, in_channels=inputs, prune_mode=mode)
    assert (layer.why_not_prunable(FilterPruneConfig(0.5)) is None) == prunable


def test_a_layer_may_have_the_other_kind_and_a_skip_beats_an_override() -> None:
    override = f'override_layer_configs {{ layer_name: "b" {SPARSE} }}'
    model = facts(conv("a"), conv("b"), conv("c"))
    found = resolve(load_config(FILTER + override), model).prune_settings
    assert found == {
        "a": FilterPruneConfig(0.5),
        "b": M4N2PruneConfig(),
        "c": FilterPruneConfig(0.5),
    }
    with pytest.warns(UserWarning, match="skip lists beat an override"):
        skipped = resolve(
            load_config(f'{FILTER}{override} regular_prune_skip_layers: "b"'), model
        ).prune_settings
    assert set(skipped) == {"a", "c"}


def test_only_overridden_layers_are_pruned_without_a_global_block() -> None:
    override = f'override_layer_configs {{ layer_name: "b" {FILTER} }}'
    resolution = resolve(load_config(override), facts(conv("a"), conv("b")))
    assert set(resolution.prune_settings) == {"b"}
    assert not resolution.quantize
