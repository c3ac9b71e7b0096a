"""The MindSpore dialect, other layer names, and configurations that may only quantize."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from amct_fx.config import (
    CompressionConfig,
    FilterPruneConfig,
    detect_dialect,
    load_config,
    rename_layers,
    resolve,
    to_pytorch,
)
from amct_fx.errors import AmctWarning, ConfigError, ConfigTypeError
from test.config.helpers import MODEL_A, resolved

SAMPLES = Path(__file__).parent / "samples"
FILTER = "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 } } }"
DATA = "retrain_data_quant_config { ulq_quantize { dst_type: INT8 } }"


@pytest.mark.parametrize(
    ("spelling", "dialect"),
    [
        ("nn.Conv2D", "mindspore"),
        ("nn.Dense", "mindspore"),
        ("Dense", "mindspore"),
        ("mindspore.nn.Conv2d", "mindspore"),
        ("ms.nn.Conv2dTranspose", "mindspore"),
        ("nn.Conv2d", "pytorch"),
        ("Conv2D", "pytorch"),
        ("Linear", "pytorch"),
    ],
)
def test_a_spelling_that_only_mindspore_has_decides(spelling: str, dialect: str) -> None:
    assert detect_dialect(load_config(f'skip_layer_types: "{spelling}"')) == dialect
    override = f'override_layer_types {{ layer_type: "{spelling}" }}'
    assert detect_dialect(load_config(override)) == dialect


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("batch_num: 1", "field 'batch_num'"),
        (DATA, "field 'dst_type' in ulq_quantize"),
        ("retrain_weight_quant_config { arq_retrain { dst_type: INT8 } }", "'dst_type' in arq_re"),
        ("retrain_weight_quant_config { ulq_retrain { } }", "'ulq_retrain'"),
        ("fakequant_precision_mode: FORCE_FP16_QUANT", "'fakequant_precision_mode'"),
        (FILTER, "'prune_config'"),
        (f'override_layer_types {{ layer_type: "Dense" {FILTER} }}', "'prune_config' in override"),
        ('regular_prune_skip_layers: "a"', "'regular_prune_skip_layers'"),
        ('regular_prune_skip_types: "a"', "'regular_prune_skip_types'"),
    ],
)
def test_fields_that_mindspore_lacks_are_refused_with_their_line(text: str, what: str) -> None:
    with pytest.raises(ConfigError, match="the MindSpore dialect has no field") as caught:
        load_config("\n" + text, dialect="mindspore")
    assert what in str(caught.value)
    assert caught.value.line == 2
    load_config("\n" + text, dialect="pytorch")


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (CompressionConfig(batch_num=2), "batch_num"),
        (CompressionConfig(prune=FilterPruneConfig(0.5)), "prune_config"),
        (load_config(DATA.replace("INT8", "INT16")), "dst_type"),
        (load_config("retrain_weight_quant_config { ulq_retrain { } }"), "ulq_retrain"),
        (CompressionConfig(prune_skip_layers=("a",)), "regular_prune_skip_layers"),
    ],
)
def test_so_are_objects_that_say_more(config: CompressionConfig, what: str) -> None:
    with pytest.raises(ConfigError, match=f"the MindSpore dialect has no {what}"):
        load_config(config, dialect="mindspore")
    assert load_config(config) is config


def test_the_sample_reads_alike_in_every_dialect() -> None:
    configs = [
        load_config(SAMPLES / "mindspore_quant.cfg", dialect=dialect)
        for dialect in ("auto", "mindspore", "pytorch")
    ]
    assert configs[0] == configs[1] == configs[2]
    assert load_config(configs[0].to_cfg(), dialect="mindspore") == configs[0]


def test_in_auto_mode_a_foreign_field_is_one_info_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="amct_fx"):
        load_config('skip_layer_types: "nn.Conv2D" batch_num: 2')
        load_config('skip_layer_types: "Conv2d" batch_num: 2')
    assert len(caplog.messages) == 1
    assert "batch_num" in caplog.messages[0]


def test_layers_are_renamed_by_the_map_only() -> None:
    text = """skip_layers: "layer1.0.down_sample_layer.0"
quant_skip_layers: ["a", "b"]
override_layer_configs { layer_name: "a" }"""
    names = {"layer1.0.down_sample_layer.0": "layer1.0.downsample.0", "a": "x"}
    config = load_config(text, name_map=names)
    assert config.skip_layers == ("layer1.0.downsample.0",)
    assert config.quant_skip_layers == ("x", "b")
    assert config.layer_overrides[0].name == "x"
    assert str(config.skip_source("quant_skip_layers", "x")) == "line 2"


def test_names_may_be_swapped_and_clashes_are_found_after_renaming() -> None:
    config = CompressionConfig(skip_layers=("a", "b"))
    assert rename_layers(config, {"a": "b", "b": "a"}).skip_layers == ("b", "a")
    text = """override_layer_configs { layer_name: "c1" }
override_layer_configs { layer_name: "old" }"""
    with (
        pytest.warns(AmctWarning, match="is empty"),
        pytest.raises(ConfigError, match="layer 'c1' is overridden twice"),
    ):
        resolve(load_config(text, name_map={"old": "c1"}), MODEL_A)


def test_a_name_that_the_configuration_lacks_is_a_warning() -> None:
    with pytest.warns(AmctWarning, match="name_map has names .* 'z'"):
        load_config('skip_layers: "a"', name_map={"a": "b", "z": "y"})
    with pytest.raises(ConfigTypeError, match="name_map"):
        load_config('skip_layers: "a"', name_map={"a": 3})  # type: ignore[dict-item]


def test_a_mindspore_file_becomes_a_pytorch_file() -> None:
    config = load_config(SAMPLES / "mindspore_quant.cfg")
    text = to_pytorch(config).to_cfg()
    assert "nn." not in text
    assert detect_dialect(load_config(text)) == "pytorch"
    assert to_pytorch(CompressionConfig(skip_types=("nn.DepthwiseConv2dNative",))).skip_types == (
        "DepthwiseConv2d",
    )


@pytest.mark.parametrize(
    "text",
    [
        FILTER,
        'regular_prune_skip_layers: "c1"',
        'regular_prune_skip_types: "Conv2d"',
        f'override_layer_configs {{ layer_name: "c1" {FILTER} }}',
        f'override_layer_types {{ layer_type: "Conv2d" {FILTER} }}',
    ],
)
def test_pruning_is_refused_where_only_quantization_is_asked_for(text: str) -> None:
    with pytest.raises(ConfigError, match=r":2:.*prune.*only quantizes"):
        load_config("\n" + text, quant_only=True)


def test_an_empty_prune_block_is_ignored_there() -> None:
    text = 'prune_config { } override_layer_configs { layer_name: "c1" prune_config { } }'
    config = load_config(text, quant_only=True)
    assert not config.has_prune_message
    with pytest.raises(ConfigError, match="filter_pruner or n_out_of_m_pruner is missing"):
        load_config(text)
    assert all(spec.quantize for spec in resolved(config)[0].layers.values())
