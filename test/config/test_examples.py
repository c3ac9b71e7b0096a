"""The six worked examples of the configuration rules, with their variants."""

from __future__ import annotations

import pytest

from amct_fx.config import FilterPruneConfig, M4N2PruneConfig
from amct_fx.errors import ConfigError
from test.config.helpers import MODEL_A, MODEL_B, MODEL_C, resolved, table

INHERITED = """
retrain_data_quant_config { ulq_quantize {
  clip_max_min { clip_max: 5.0 clip_min: -4.0 } fixed_min: true } }
retrain_weight_quant_config { arq_retrain { channel_wise: true } }
skip_layers: "c1"
override_layer_types { layer_type: "Linear"
  retrain_weight_quant_config { arq_retrain { channel_wise: false } } }
override_layer_configs { layer_name: "c2" retrain_data_quant_config {
  ulq_quantize { clip_max_min { clip_max: 2.5 clip_min: -2.0 } } } }
"""
BEATS_SKIP = """
skip_layer_types: "Conv2d"  quant_skip_layers: "fc"
retrain_data_quant_config { ulq_quantize { fixed_min: false } }
override_layer_types { layer_type: "Conv2d"
  retrain_weight_quant_config { ulq_retrain { channel_wise: false } } }
override_layer_configs { layer_name: "c3"
  retrain_data_quant_config { ulq_quantize { dst_type: INT16 } } }
"""
MINDSPORE = """
retrain_data_quant_config: { ulq_quantize: {
  clip_max_min: { clip_max: 6.0 clip_min: -6.0 } fixed_min: true } }
skip_layers: "conv1"
skip_layer_types: "nn.Conv2D"
override_layer_types: { layer_type: "nn.Conv2D"
  retrain_weight_quant_config: { arq_retrain: { channel_wise: false } } }
override_layer_configs: { layer_name: "conv2"
  retrain_data_quant_config: { ulq_quantize: {
    clip_max_min: { clip_max: 3.0 clip_min: -3.0 } } } }
"""
COMBINED = """
prune_config { filter_pruner { balanced_l2_norm_filter_prune {
  prune_ratio: 0.25 ascend_optimized: false } } }
retrain_weight_quant_config { arq_retrain { channel_wise: true } }
skip_layers: "c1"  quant_skip_layers: "c3"
override_layer_types { layer_type: "Linear"
  prune_config { n_out_of_m_pruner { l1_selective_prune { update_freq: 2 } } } }
override_layer_configs { layer_name: "c1" retrain_data_quant_config { ulq_quantize { } }
  prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 } } } }
"""
WIDTHS = """
retrain_weight_quant_config { arq_retrain { dst_type: INT4 channel_wise: true } }
override_layer_configs { layer_name: "l2"
  retrain_data_quant_config { ulq_quantize { dst_type: INT16 } }
  retrain_weight_quant_config { arq_retrain { } } }
"""


@pytest.mark.parametrize("text", [None, "# only a comment\n"])
def test_without_settings_every_layer_is_quantized_by_the_defaults(text: str | None) -> None:
    resolution, messages = resolved(text)
    assert table(resolution) == {
        "c1": "yes IFMR INT8 auto ARQ INT8 channel",
        "c2": "yes IFMR INT8 auto ARQ INT8 channel",
        "c3": "yes IFMR INT8 auto ARQ INT8 channel",
        "fc": "yes IFMR INT8 auto ARQ INT8 tensor",
    }
    assert messages == []
    assert (resolution.quantize, resolution.prune, resolution.batch_num) == (True, False, 1)


def test_a_half_that_an_override_leaves_out_is_inherited() -> None:
    resolution, messages = resolved(INHERITED)
    assert table(resolution) == {
        "c1": "no 5/-4 INT8 true ARQ INT8 channel",
        "c2": "yes 2.5/-2 INT8 auto ARQ INT8 channel",
        "c3": "yes 5/-4 INT8 true ARQ INT8 channel",
        "fc": "yes 5/-4 INT8 true ARQ INT8 tensor",
    }
    assert messages == []


def test_the_spec_tells_the_level_and_line_that_each_half_came_from() -> None:
    layers = resolved(INHERITED)[0].layers
    assert str(layers["c2"].activation_origin) == "layer 'c2' (line 8)"
    assert str(layers["c2"].weight_origin) == "global (line 4)"
    assert str(layers["fc"].weight_origin) == "type 'Linear' (line 7)"
    assert layers["c1"].reason == "skip_layers has 'c1' (line 5)"


def test_an_override_beats_a_skip_and_one_warning_lists_the_layers() -> None:
    resolution, messages = resolved(BEATS_SKIP)
    assert table(resolution) == {
        "c1": "yes IFMR INT8 false ULQ INT8 tensor",
        "c2": "yes IFMR INT8 false ULQ INT8 tensor",
        "c3": "yes IFMR INT16 auto ULQ INT8 tensor",
        "fc": "no IFMR INT8 false ARQ INT8 tensor",
    }
    (message,) = messages
    assert "'c1', 'c2', 'c3'" in message


@pytest.mark.parametrize("spelling", ["nn.Conv2D", "Conv2d"])
def test_the_mindspore_spelling_gives_the_same_table(spelling: str) -> None:
    resolution, messages = resolved(MINDSPORE.replace("nn.Conv2D", spelling), MODEL_B)
    assert table(resolution) == {
        "conv1": "yes 6/-6 INT8 true ARQ INT8 tensor",
        "conv2": "yes 3/-3 INT8 auto ARQ INT8 tensor",
        "dw": "yes 6/-6 INT8 true ARQ INT8 tensor",
        "fc": "yes 6/-6 INT8 true ARQ INT8 tensor",
    }
    (message,) = messages
    assert "'conv1', 'conv2', 'dw'" in message


def test_batch_num_is_an_error_only_when_the_mindspore_dialect_is_asked_for() -> None:
    text = MINDSPORE + "batch_num: 2\n"
    assert resolved(text, MODEL_B)[0].batch_num == 2
    with pytest.raises(ConfigError, match=r":11:1: the MindSpore dialect has no field 'batch_num'"):
        resolved(text, MODEL_B, dialect="mindspore")


def test_pruning_and_quantization_are_resolved_side_by_side() -> None:
    resolution, messages = resolved(COMBINED)
    rows = table(resolution)
    assert rows["c1"] == "yes IFMR INT8 auto ARQ INT8 channel"
    assert rows["c2"] == "yes IFMR INT8 auto ARQ INT8 channel"
    assert rows["c3"].startswith("no ")
    assert rows["fc"] == "yes IFMR INT8 auto ARQ INT8 tensor"
    quarter = FilterPruneConfig(0.25, ascend_optimized=False)
    prune = {name: spec.prune for name, spec in resolution.layers.items()}
    assert prune == {"c1": None, "c2": quarter, "c3": quarter, "fc": M4N2PruneConfig(2)}
    assert len(messages) == 3
    assert any("beats the skip lists" in text and "'c1'" in text for text in messages)
    assert any("skip lists beat an override" in text and "'c1'" in text for text in messages)
    assert any("channel_wise" in text and "'fc'" in text for text in messages)


def test_in_a_combined_file_without_global_halves_only_overridden_layers_are_quantized() -> None:
    lines = [line for line in COMBINED.splitlines() if not line.startswith("retrain_weight")]
    layers = resolved("\n".join(lines))[0].layers
    assert [name for name, spec in layers.items() if spec.quantize] == ["c1"]


def test_a_file_with_prune_messages_only_switches_quantization_off() -> None:
    lines = [line for line in COMBINED.splitlines() if not line.startswith("retrain_weight")]
    text = "\n".join(lines).replace("retrain_data_quant_config { ulq_quantize { } }", "")
    resolution, _ = resolved(text)
    assert (resolution.quantize, resolution.prune) == (False, True)
    assert not any(spec.quantize for spec in resolution.layers.values())
    prune = [spec.prune for spec in resolution.layers.values()]
    quarter = FilterPruneConfig(0.25, ascend_optimized=False)
    assert prune == [None, quarter, quarter, M4N2PruneConfig(2)]


def test_int4_weights_fall_back_where_two_codes_do_not_fit_into_a_byte() -> None:
    resolution, messages = resolved(WIDTHS, MODEL_C)
    assert table(resolution) == {
        "c1": "yes IFMR INT8 auto ARQ INT8 channel",
        "c2": "yes IFMR INT8 auto ARQ INT8 channel",
        "c3": "yes IFMR INT8 auto ARQ INT4 channel",
        "l1": "yes IFMR INT8 auto ARQ INT4 tensor",
        "l2": "yes IFMR INT16 auto ARQ INT8 tensor",
    }
    assert len(messages) == 2
    assert any("'c1' (3 input channels" in text and "'c2' (4 groups)" in text for text in messages)
    assert any("channel_wise" in text and text.endswith("'l1'") for text in messages)


def test_an_inherited_int4_weight_under_int16_activations_is_an_error() -> None:
    text = WIDTHS.replace("retrain_weight_quant_config { arq_retrain { } }", "")
    with pytest.raises(ConfigError, match=r"INT16 activations with INT4 weights.*'l2'"):
        resolved(text, MODEL_C)


def test_the_widths_of_a_skipped_layer_are_not_checked() -> None:
    text = """
retrain_data_quant_config { ulq_quantize { dst_type: INT16 } }
override_layer_types { layer_type: "Conv2d"
  retrain_data_quant_config { ulq_quantize { } } }
retrain_weight_quant_config { arq_retrain { dst_type: INT4 } }
skip_layer_types: "Linear"
"""
    layers = resolved(text, MODEL_C)[0].layers
    assert [name for name, spec in layers.items() if spec.quantize] == ["c1", "c2", "c3"]


def test_channel_wise_for_one_linear_by_name_needs_the_option() -> None:
    text = """override_layer_configs { layer_name: "l1"
  retrain_weight_quant_config { arq_retrain { channel_wise: true } } }"""
    with pytest.raises(ConfigError, match=r":2:3: layer 'l1'.*linear_channel_wise=True"):
        resolved(text, MODEL_C)
    resolution, messages = resolved(text, MODEL_C, linear_channel_wise=True)
    assert resolution.layers["l1"].weight.channel_wise is True
    assert messages == []


@pytest.mark.parametrize("value", ["", "channel_wise: true", "channel_wise: false"])
def test_all_linears_have_a_scale_per_output_unless_the_file_says_false(value: str) -> None:
    text = f"""retrain_weight_quant_config {{ arq_retrain {{ {value} }} }}
override_layer_configs {{ layer_name: "l2"
  retrain_weight_quant_config {{ arq_retrain {{ channel_wise: false }} }} }}"""
    resolution, messages = resolved(text, MODEL_C, linear_channel_wise="all")
    wise = {name: spec.weight.channel_wise for name, spec in resolution.layers.items()}
    assert wise == {name: name != "l2" and "false" not in value for name in wise}
    assert messages == []


def test_another_value_of_linear_channel_wise_is_named() -> None:
    with pytest.raises(ConfigError, match=r"linear_channel_wise must be .*'all', not 'each'"):
        resolved(None, MODEL_C, linear_channel_wise="each")


def test_a_data_half_by_name_leaves_a_global_channel_wise_global() -> None:
    text = """retrain_weight_quant_config { arq_retrain { channel_wise: true } }
override_layer_configs { layer_name: "fc" retrain_data_quant_config { ulq_quantize { } } }"""
    resolution, messages = resolved(text, MODEL_A)
    assert resolution.layers["fc"].weight.channel_wise is False
    assert len(messages) == 1


def test_int4_activations_are_an_error_that_names_the_enabled_layers() -> None:
    text = 'skip_layers: "c2"\nretrain_data_quant_config { ulq_quantize { dst_type: INT4 } }'
    with pytest.raises(ConfigError, match=r":2:1: INT4 activations") as caught:
        resolved(text, MODEL_A)
    assert "'c1', 'c3', 'fc'" in str(caught.value)
