"""The JSON form: its layout, and every row of the table of what is accepted when it is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from amct_fx.config import (
    CompressionConfig,
    dump_json,
    load_config,
    resolution_to_dict,
    resolve,
    save_json_config,
)
from amct_fx.errors import ConfigError, ConfigTypeError
from test.config.helpers import MODEL_A, resolved, table

LAYOUT = """{
    "version":1,
    "fakequant_precision_mode":"FORCE_FP16_QUANT",
    "batch_num":2,
    "c1":{
        "retrain_enable":true,
        "retrain_data_config":{
            "algo":"ulq_quantize",
            "clip_max":0.10000000149011612,
            "clip_min":-6.0,
            "fixed_min":true,
            "dst_type":"INT8"
        },
        "retrain_weight_config":{
            "algo":"ulq_retrain",
            "dst_type":"INT8",
            "channel_wise":true
        }
    },"""


def layers(**entry: Any) -> dict[str, Any]:
    return {"version": 1, "batch_num": 1, "fc": {}, "c1": entry}


def test_the_layout_is_the_same_to_the_byte() -> None:
    text = """batch_num: 2 fakequant_precision_mode: FORCE_FP16_QUANT
retrain_data_quant_config { ulq_quantize { clip_max_min { clip_max: 0.1 clip_min: -6 }
  fixed_min: true } }
retrain_weight_quant_config { ulq_retrain { } }"""
    written = dump_json(resolution_to_dict(resolved(text)[0]))
    assert written.startswith(LAYOUT)
    assert written.endswith(
        '"dst_type":"INT8",\n            "channel_wise":false\n        }\n    }\n}'
    )


def test_disabled_layers_are_written_with_their_halves() -> None:
    written = resolution_to_dict(resolved('skip_layers: "c1"')[0])
    assert written["c1"]["retrain_enable"] is False
    assert list(written["c1"]) == [
        "retrain_enable",
        "retrain_data_config",
        "retrain_weight_config",
    ]


def test_saving_replaces_the_file_and_makes_folders(tmp_path: Path) -> None:
    path = tmp_path / "new" / "config.json"
    save_json_config(path, resolved(None)[0])
    assert load_config(path).resolved
    assert path.stat().st_mode & 0o777 == 0o640
    assert path.parent.stat().st_mode & 0o777 == 0o750


def test_pruning_cannot_be_written() -> None:
    text = "prune_config { n_out_of_m_pruner { l1_selective_prune { } } }"
    with pytest.raises(ConfigError, match="cannot hold pruning"):
        resolution_to_dict(resolved(text)[0])


def test_what_is_absent_means_the_defaults_and_an_absent_layer_is_disabled() -> None:
    resolution, messages = resolved({"version": 1, "fc": {}, "c1": {"retrain_enable": False}})
    assert messages == []
    assert table(resolution) == {
        "c1": "no IFMR INT8 auto ARQ INT8 channel",
        "c2": "no IFMR INT8 auto ARQ INT8 channel",
        "c3": "no IFMR INT8 auto ARQ INT8 channel",
        "fc": "yes IFMR INT8 auto ARQ INT8 tensor",
    }
    assert resolution.layers["c2"].reason == "the configuration does not list it"


def test_the_mindspore_form_without_batch_num_and_types_is_read() -> None:
    entry = {
        "retrain_enable": True,
        "retrain_data_config": {"algo": "ulq_quantize"},
        "retrain_weight_config": {"algo": "arq_retrain", "channel_wise": False},
    }
    resolution, _ = resolved({"version": 1, "c1": entry})
    assert table(resolution)["c1"] == "yes IFMR INT8 auto ARQ INT8 tensor"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"version": 2, "fc": {}}, "version must be 1, not 2"),
        ({"version": 1, "batch_num": 0, "fc": {}}, "batch_num must be at least 1"),
        ({"version": 1, "fc": []}, "layer 'fc': an object is expected"),
        (layers(retrain_enabled=True), "unknown key 'retrain_enabled'; did you mean 'retrain_ena"),
        (layers(retrain_data_config=3), "retrain_data_config: an object is expected"),
        (layers(retrain_data_config={"foo": 1}), "retrain_data_config: unknown key 'foo'"),
        (layers(retrain_weight_config={"clip_max": 1}), "unknown key 'clip_max'"),
        (layers(retrain_data_config={"algo": "x"}), "algo must be ulq_quantize, not 'x'"),
        (layers(retrain_weight_config={"algo": "arq"}), "algo must be arq_retrain or ulq_retrain"),
        (
            layers(retrain_data_config={"dst_type": "INT7"}),
            "dst_type must be INT4 or INT8 or INT16",
        ),
        (layers(retrain_data_config={"clip_max": 1.0}), "layer 'c1'.*clip_min is missing"),
        (layers(retrain_data_config={"clip_max": 1.0, "clip_min": 1.0}), "clip_min must be finite"),
        (layers(retrain_data_config={"dst_type": "INT4"}), "INT4 activations with INT8 weights"),
        ({"version": 1, "zzz": {}}, "the model has no layer 'zzz'"),
        ({"version": 1, "r1": {}}, "layer 'r1' cannot be set: a ReLU"),
        ({"version": 1, "fc": {"retrain_weight_config": {"channel_wise": True}}}, "linear_channel"),
        ({"version": 1, "fc": {"retrain_enable": False}}, "no layer is left to be quantized"),
        ({"version": 1}, "no layer is left to be quantized"),
        ({"version": 1, "regular_prune_skip_layers": ["c1"]}, "cannot hold pruning"),
        ({"version": 1, "c1": {"regular_prune_enable": True}}, "unknown key"),
        ({"version": 1, "fakequant_precision_mode": "FP16", "fc": {}}, "FORCE_FP16_QUANT"),
    ],
)
def test_a_wrong_value_is_an_error(value: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(load_config(value), MODEL_A)
    with pytest.raises(ConfigError, match=message):
        resolve(load_config(json.dumps(value)), MODEL_A)


@pytest.mark.parametrize(
    "value",
    [
        {"version": 1, "batch_num": 1.0, "fc": {}},
        {"version": 1, "batch_num": True, "fc": {}},
        {"version": 1, "batch_num": "1", "fc": {}},
        layers(retrain_enable=1),
        layers(retrain_data_config={"clip_max": 6, "clip_min": -6}),
        layers(retrain_data_config={"fixed_min": 0}),
        layers(retrain_data_config={"fixed_min": None}),
        layers(retrain_weight_config={"channel_wise": 1}),
        {"version": 1, 3: {}},
    ],
)
def test_a_value_of_the_wrong_type_is_a_type_error(value: dict[Any, Any]) -> None:
    with pytest.raises(ConfigTypeError):
        load_config(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"1:2: not JSON"),
        ('{"version": 1,}', "not JSON"),
        ('{"version": 1, "version": 1}', "'version' is given twice"),
        (
            '{"c1": {"retrain_enable": true, "retrain_enable": true}}',
            "'retrain_enable' is given tw",
        ),
        ('{"c1": {"retrain_data_config": {"algo": "x", "algo": "x"}}}', "'algo' is given twice"),
        ('{"batch_num": ' + "9" * 5000 + "}", "not JSON"),
    ],
)
def test_what_is_no_json_or_says_things_twice_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(text)


def test_a_json_file_is_known_by_its_name_or_its_content(tmp_path: Path) -> None:
    for name, text in (("a.json", "[]"), ("b.json", "")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match="JSON"):
            load_config(tmp_path / name)
    (tmp_path / "c.cfg").write_text('\n {"version": 1, "fc": {}}')
    assert load_config(tmp_path / "c.cfg").resolved


def test_errors_in_a_json_file_name_the_line(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    text = dump_json(resolution_to_dict(resolved(None)[0])).replace('"c2"', '"c22"')
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"config.json:16: the model has no layer 'c22'.*'c2'"):
        resolve(load_config(path), MODEL_A)


def test_a_dict_with_the_fields_of_a_cfg_file_is_read() -> None:
    config = load_config(
        {
            "batch_num": 2,
            "skip_layers": ["c1"],
            "retrain_data_quant_config": {"ulq_quantize": {"dst_type": "INT16"}},
        }
    )
    text = (
        'batch_num: 2 skip_layers: "c1" retrain_data_quant_config { ulq_quantize { dst_type: 2 } }'
    )
    assert config == load_config(text)
    assert load_config({}) == CompressionConfig()


def test_errors_in_such_a_dict_have_no_line() -> None:
    with pytest.raises(ConfigError, match=r"^dst_type must be one of INT4, INT8, INT16"):
        load_config({"retrain_data_quant_config": {"ulq_quantize": {"dst_type": "INT7"}}})
    with pytest.raises(ConfigTypeError, match=r"^skip_layers cannot be None"):
        load_config({"skip_layers": None})
    with pytest.raises(ConfigError, match=r"^the model has no layer 'c9'"):
        resolve(load_config({"override_layer_configs": [{"layer_name": "c9"}]}), MODEL_A)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        ({"skip_layers": ("c1",)}, "no skip_layers"),
        ({"quant_skip_layers": ("c1",)}, "lists each layer once"),
    ],
)
def test_a_resolved_configuration_has_nothing_to_inherit(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        CompressionConfig(resolved=True, **make)


def test_a_json_file_that_lists_nothing_quantizes_nothing(tmp_path):
    (tmp_path / "empty.json").write_text("{}")
    assert load_config(tmp_path / "empty.json").resolved
    assert not load_config({}).resolved
