"""Rows of the tables of rules that need a test of their own, in the order of the tables."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from amct_fx.config import DataType, FilterPruneConfig, M4N2PruneConfig, load_config
from amct_fx.config.parser import parse_cfg
from amct_fx.errors import AmctWarning, ConfigError, ModelError
from test.config.golden_facts import other
from test.config.helpers import MODEL_A, MODEL_C, conv, linear, model, resolved, table

FILTER = "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 } } }"
M4N2 = "prune_config { n_out_of_m_pruner { l1_selective_prune { update_freq: 3 } } }"
WEIGHT = "retrain_weight_quant_config { arq_retrain { } }"


def widths(activation: str, weight: str) -> str:
    return (
        f"retrain_data_quant_config {{ ulq_quantize {{ dst_type: {activation} }} }} "
        f"retrain_weight_quant_config {{ arq_retrain {{ dst_type: {weight} }} }}"
    )


# Reading rules


def test_of_two_kinds_of_pruning_the_last_wins_with_a_warning() -> None:
    text = f"{FILTER} {M4N2}".replace("} } } prune_config { n_out", "} } n_out")
    with pytest.warns(AmctWarning, match="n_out_of_m_pruner wins"):
        assert parse_cfg(text).prune == M4N2PruneConfig(3)


@pytest.mark.parametrize(
    ("inner", "field"),
    [
        ("prune_config { }", "filter_pruner or n_out_of_m_pruner"),
        ("prune_config { filter_pruner { } }", "balanced_l2_norm_filter_prune"),
        ("prune_config { n_out_of_m_pruner { } }", "l1_selective_prune"),
        (
            "prune_config { filter_pruner { balanced_l2_norm_filter_prune { } } }",
            "prune_ratio is missing",
        ),
        (
            "retrain_data_quant_config { ulq_quantize { clip_max_min { clip_min: -1 } } }",
            "clip_max is missing",
        ),
        (
            "retrain_data_quant_config { ulq_quantize "
            "{ clip_max_min { clip_max: 1 clip_min: 0 } fixed_min: true } }",
            "clip_min must be finite and < 0",
        ),
    ],
)
@pytest.mark.parametrize(("kind", "key"), [("layer_configs", "name"), ("layer_types", "type")])
def test_an_error_inside_an_override_names_field_owner_and_line(
    inner: str, field: str, kind: str, key: str
) -> None:
    text = f'\noverride_{kind} {{ layer_{key}: "Conv2d" {inner} }}'
    with pytest.raises(ConfigError) as caught:
        parse_cfg(text)
    owner = {"name": "layer 'Conv2d'", "type": "type 'Conv2d'"}[key]
    assert field in str(caught.value)
    assert owner in str(caught.value)
    assert caught.value.line == 2


@pytest.mark.parametrize("ratio", ["0", "1", "1.5", "-0.3", "nan", "inf", "1e-60"])
def test_prune_ratio_is_between_zero_and_one(ratio: str) -> None:
    with pytest.raises(ConfigError, match=r"1:64: prune_ratio must be between 0 and 1"):
        parse_cfg(FILTER.replace("0.5", ratio))


# Layer-type spellings


@pytest.mark.parametrize(
    "spelling",
    [
        *("AvgPool2d", "MaxPool2d", "BatchNorm2d", "ReLU", "ReLU6", "Flatten", "SequentialCell"),
        *("CellList", "nn.ReLU", "mindspore.nn.BatchNorm2d", "ConvTranspose3d"),
    ],
)
def test_types_that_are_not_quantized_are_a_warning_in_a_skip_list_and_an_error_elsewhere(
    spelling: str,
) -> None:
    (message,) = resolved(f'skip_layer_types: "{spelling}"')[1]
    assert message.startswith(f"line 1: skip_layer_types has '{spelling}', which has no effect")
    text = f'\noverride_layer_types {{ layer_type: "{spelling}" {WEIGHT} }}'
    with pytest.raises(ConfigError, match=rf":2:1: layers of type '{spelling}' cannot be set"):
        resolved(text)


@pytest.mark.parametrize("spelling", ["MatMul", "BatchMatMul", "nn.MatMul"])
def test_products_without_a_weight_are_an_error_everywhere(spelling: str) -> None:
    for text in (
        f'skip_layer_types: "{spelling}"',
        f'override_layer_types {{ layer_type: "{spelling}" {WEIGHT} }}',
    ):
        with pytest.raises(ConfigError, match=rf"1:\d+: '{spelling}' has no weight.*use Linear"):
            resolved(text)


@pytest.mark.parametrize(
    ("spelling", "close"),
    [
        ("conv2d", "'Conv2d'"),
        ("ConvTranspose3d", "'ConvTranspose"),
        ("Conv", "'Conv"),
        ("Liner", "'Linear'"),
        ("Gemm", ""),
        ("InnerProduct", ""),
    ],
)
def test_an_unknown_type_is_an_error_with_the_accepted_spellings(spelling: str, close: str) -> None:
    facts = model(conv("c1", 3))
    for text in (
        f'skip_layer_types: "{spelling}"',
        f'quant_skip_types: "{spelling}"',
        f'override_layer_types {{ layer_type: "{spelling}" }}',
    ):
        with pytest.raises(ConfigError) as caught:
            resolved(text, facts)
        message = str(caught.value)
        assert f"unknown layer type '{spelling}'" in message
        assert "accepted: " in message
        assert close in message
        assert ("did you mean" in message) is bool(close)


# Which features are on


@pytest.mark.parametrize(
    ("text", "quantize", "prune"),
    [
        ("", True, False),
        ("batch_num: 2", True, False),
        ('skip_layers: "c1"', True, False),
        ('quant_skip_types: "Conv2d"', True, False),
        (FILTER, False, True),
        (f"{FILTER} batch_num: 2", False, True),
        (f'override_layer_configs {{ layer_name: "c2" {FILTER} }}', False, True),
        (f'override_layer_types {{ layer_type: "Conv2d" {FILTER} }}', False, True),
        (f"{FILTER} retrain_data_quant_config {{ }}", True, True),
        (
            f'{FILTER} override_layer_configs {{ layer_name: "c2" '
            "retrain_weight_quant_config { } }",
            True,
            True,
        ),
    ],
)
def test_messages_switch_the_features_on(text: str, quantize: bool, prune: bool) -> None:
    resolution, _ = resolved(text + "\n# end")
    assert (resolution.quantize, resolution.prune) == (quantize, prune)


def test_quant_messages_in_overrides_reach_other_layers_unless_the_file_prunes() -> None:
    text = f'override_layer_configs {{ layer_name: "c2" {WEIGHT} }}'
    assert all(spec.quantize for spec in resolved(text)[0].layers.values())
    layers = resolved(f"{text} {FILTER}")[0].layers
    assert [name for name, spec in layers.items() if spec.quantize] == ["c2"]


# Pruning


def test_a_convolution_of_one_channel_is_not_pruned_by_filters() -> None:
    facts = model(conv("gray", 1), conv("dw", 8, groups=8), conv("c", 8), linear("fc", 8))
    layers = resolved(FILTER, facts)[0].layers
    assert [name for name, spec in layers.items() if spec.prune] == ["c", "fc"]
    layers = resolved(M4N2, facts)[0].layers
    assert all(spec.prune == M4N2PruneConfig(3) for spec in layers.values())


def test_without_global_pruning_only_overridden_layers_are_pruned_each_in_its_way() -> None:
    text = f"""override_layer_configs {{ layer_name: "c2" {FILTER} }}
override_layer_types {{ layer_type: "Linear" {M4N2} }}"""
    layers = resolved(text)[0].layers
    prune = [layers[name].prune for name in ("c1", "c2", "c3", "fc")]
    assert prune == [None, FilterPruneConfig(0.5), None, M4N2PruneConfig(3)]


def test_for_pruning_an_override_falls_through_and_a_skip_wins() -> None:
    text = f"""{FILTER}
override_layer_configs {{ layer_name: "c2" {WEIGHT} }}
override_layer_configs {{ layer_name: "c3" {M4N2} }}
regular_prune_skip_layers: "c3" skip_layer_types: "Linear" """
    resolution, messages = resolved(text)
    prune = {name: spec.prune for name, spec in resolution.layers.items()}
    half = FilterPruneConfig(0.5)
    assert prune == {"c1": half, "c2": half, "c3": None, "fc": None}
    assert resolution.layers["c2"].quantize
    (message,) = messages
    assert message.endswith("so these are not pruned: 'c3'")


# Derived settings


ACCEPTED = {("INT8", "INT4"), ("INT8", "INT8"), ("INT16", "INT8")}


@pytest.mark.parametrize("pair", [*itertools.product(["INT4", "INT8", "INT16"], repeat=2)])
def test_pairs_of_widths(pair: tuple[str, str]) -> None:
    facts = model(conv("c", 8), linear("skipped", 8))
    text = widths(*pair) + ' skip_layers: "skipped"'
    if pair in ACCEPTED:
        spec = resolved(text, facts)[0].layers["c"]
        assert (spec.activation.dst_type.name, spec.weight.dst_type.name) == pair
        return
    with pytest.raises(ConfigError, match=f"{pair[0]} activations with {pair[1]} weights") as error:
        resolved(text, facts)
    assert "layers 'c')" in str(error.value)


def json_widths(activation: str, weight: str, **entry: Any) -> dict[str, Any]:
    halves = {
        "retrain_data_config": {"dst_type": activation},
        "retrain_weight_config": {"dst_type": weight},
    }
    return {"version": 1, "c2": {**entry, **halves}, "c3": {}}


def test_json_falls_back_from_int4_like_a_cfg_and_does_not_check_disabled_pairs() -> None:
    resolution, messages = resolved(json_widths("INT8", "INT4"), MODEL_C)
    assert resolution.layers["c2"].weight.dst_type is DataType.INT8
    assert "'c2' (4 groups)" in messages[0]
    with pytest.raises(ConfigError, match="INT4 activations with INT4 weights"):
        resolved(json_widths("INT4", "INT4"), MODEL_C)
    disabled = resolved(json_widths("INT4", "INT8", retrain_enable=False), MODEL_C)[0]
    assert disabled.layers["c2"].activation.dst_type is DataType.INT4


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (conv("x", 3), "3 input channels"),
        (conv("x", 8, groups=2), "2 groups"),
        (linear("x", 7), "7 input channels"),
        (other("ConvTranspose2d", "x", 5), "5 input channels"),
        (other("Conv1d", "x", 9), "9 input channels"),
        (other("Conv3d", "x", 8), None),
        (linear("x", 8), None),
    ],
)
def test_int4_weights_need_pairs(layer: Any, reason: str | None) -> None:
    facts = model(layer, conv("even", 8))
    resolution, messages = resolved(widths("INT8", "INT4"), facts)
    assert resolution.layers["x"].weight.dst_type.name == ("INT8" if reason else "INT4")
    assert resolution.layers["even"].weight.dst_type is DataType.INT4
    assert [reason in message for message in messages if reason] == [True] * bool(reason)
    with pytest.raises(ConfigError, match="INT16 activations with INT4 weights"):
        resolved(widths("INT16", "INT4"), facts)


def test_recurrent_layers_are_channel_wise_by_default() -> None:
    facts = model(other("LSTM", "lstm", 8), other("GRU", "gru", 8))
    assert set(table(resolved(None, facts)[0]).values()) == {"yes IFMR INT8 auto ARQ INT8 channel"}


# The order of the checks


def test_the_order_of_the_checks() -> None:
    nothing = model(bn="BatchNorm2d")
    bad_pair = widths("INT4", "INT4")
    unknown = 'skip_layers: "nope"'
    with pytest.raises(ConfigError, match="unknown field"):
        resolved("batch: 1", nothing)
    with pytest.raises(ModelError, match="no layer that can be quantized"):
        resolved(f"{unknown} {bad_pair}", nothing)
    with pytest.raises(ConfigError, match="not in the model"):
        resolved(f"{unknown} {bad_pair}", MODEL_A)
    with pytest.raises(ConfigError, match="INT4 activations"):
        resolved(f'{bad_pair} skip_layers: "c1"', MODEL_A)
    everything = 'skip_layer_types: ["Conv2d", "Linear"]'
    with pytest.raises(ConfigError, match="no layer is left to be quantized"):
        resolved(f"{bad_pair} {everything}", MODEL_A)


def test_a_layer_is_skipped_present_but_ineligible_or_absent() -> None:
    """The three are told apart, for skips as for overrides."""
    facts = model(conv("c1", 3), conv("c2", 3), conv("old", 3, reason="it is never called"))
    resolution, messages = resolved('skip_layers: ["c1", "old"]', facts)
    assert resolution.layers["c1"].reason == "skip_layers has 'c1' (line 1)"
    assert messages == [
        "line 1: skip_layers has 'old', which has no effect: it is never called",
    ]
    with pytest.raises(ConfigError, match="skip_layers has 'odl', which is not in the model; did"):
        resolved('skip_layers: "odl"', facts)
    override = f'override_layer_configs {{ layer_name: "NAME" {WEIGHT} }}'
    with pytest.raises(ConfigError, match="layer 'old' cannot be set: it is never called"):
        resolved(override.replace("NAME", "old"), facts)
    with pytest.raises(ConfigError, match="no layer 'odl'; did you mean 'old'"):
        resolved(override.replace("NAME", "odl"), facts)


def test_a_json_layer_that_is_not_eligible_is_an_error_with_matches() -> None:
    facts = model(conv("conv1", 3), conv("conv2", 3, reason="it is never called"))
    with pytest.raises(ConfigError, match="layer 'conv2' cannot be set: it is never called"):
        resolved({"version": 1, "conv1": {}, "conv2": {}}, facts)
    with pytest.raises(ConfigError, match="no layer 'conv'; did you mean 'conv1'"):
        resolved({"version": 1, "conv": {}}, facts)
    assert load_config({"version": 1, "conv1": {}}).batch_num == 1
