"""What a distillation configuration means for a model, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from amct_fx import amct_pytorch as amct
from amct_fx.backend_config import is_layer
from amct_fx.config import LayerFacts, Resolution, resolve
from amct_fx.config.distill import load_distill_config, parse_distill_cfg, resolve_distill
from amct_fx.config.distill_json import DistillPlan, load_distill_json, parse_distill_json
from amct_fx.config.rules import DISTILL
from amct_fx.distillation import distill_facts, groups_of_names
from amct_fx.errors import AmctWarning, ConfigError, ConfigFileNotFoundError, ModelError
from amct_fx.graph import capture
from test.config.golden_facts import other
from test.config.helpers import MODEL_A, MODEL_C, conv, linear, model, table
from test.golden.networks import PlainChain

NET = model(
    conv("c1", 3),
    conv("c2", 8),
    conv("refl", 8, reason="padding_mode is 'reflect'"),
    other("Conv1d", "line", 8, reason="distillation quantizes Conv2d and Linear, not Conv1d"),
    linear("fc", 8),
    r1="ReLU",
)
WEIGHT = "distill_weight_quant_config { arq_distill { channel_wise: true } }"


def by_name(name: str, inner: str = WEIGHT) -> str:
    return f'distill_override_layers {{ layer_name: "{name}" {inner} }}'


def by_type(name: str, inner: str = WEIGHT) -> str:
    return f'distill_override_layer_types {{ layer_type: "{name}" {inner} }}'


def met(text: str, facts: Any = NET, **options: Any) -> Resolution:
    return resolve_distill(load_distill_config("\n" + text), facts, **options)


def test_precedence_is_skip_then_name_then_type_then_global() -> None:
    def clips(value: int) -> str:
        return (
            "distill_data_quant_config { ulq_quantize { clip_max_min "
            f"{{ clip_max: {value} clip_min: -{value} }} }} }}"
        )

    text = f"""{clips(1)}
{by_type("Conv2d", clips(2))}
{by_name("c2", clips(3))}
{by_name("c3", clips(4))}
quant_skip_layers: "c3" """
    assert table(met(text, MODEL_A)) == {
        "c1": "yes 2/-2 INT8 auto ARQ INT8 channel",
        "c2": "yes 3/-3 INT8 auto ARQ INT8 channel",
        "c3": "no 4/-4 INT8 auto ARQ INT8 channel",
        "fc": "yes 1/-1 INT8 auto ARQ INT8 tensor",
    }
    rows = table(met(by_type("Conv2d", clips(2)) + 'quant_skip_layer_types: "Conv2d"', MODEL_A))
    assert [row[:3] for row in rows.values()] == ["no ", "no ", "no ", "yes"]


def test_a_missing_half_is_inherited_and_the_json_shows_it(tmp_path: Path) -> None:
    text = """distill_data_quant_config { ulq_quantize {
  clip_max_min { clip_max: 6 clip_min: -6 } fixed_min: true } }
distill_override_layers { layer_name: "c2"
  distill_weight_quant_config { ulq_distill { channel_wise: false } } }"""
    (tmp_path / "distill.cfg").write_text(text)
    target = str(tmp_path / "distill.json")
    data = torch.rand(1, 3, 8, 8)
    amct.create_distill_config(target, PlainChain(), data, str(tmp_path / "distill.cfg"))
    assert json.loads(Path(target).read_text())["c2"] == {
        "quant_enable": True,
        "distill_data_config": {
            "algo": "ulq_quantize",
            "clip_max": 6.0,
            "clip_min": -6.0,
            "fixed_min": True,
            "dst_type": "INT8",
        },
        "distill_weight_config": {
            "algo": "ulq_distill",
            "channel_wise": False,
            "dst_type": "INT8",
        },
    }


@pytest.mark.parametrize("text", [WEIGHT, by_type("Linear")])
def test_channel_wise_from_above_is_per_tensor_for_a_linear_with_one_warning(text: str) -> None:
    with pytest.warns(AmctWarning, match="channel_wise: true is not for Linear.*'fc'") as caught:
        layers = met(text).layers
    assert len(caught) == 1
    assert layers["fc"].weight.channel_wise is False
    assert layers["c1"].weight.channel_wise is True


def test_channel_wise_by_name_needs_the_option() -> None:
    with pytest.raises(ConfigError, match=r":2:.*layer 'fc'.*linear_channel_wise=True"):
        met(by_name("fc"))
    layers = met(by_name("fc"), linear_channel_wise=True).layers
    assert layers["fc"].weight.channel_wise is True


def widths(activation: str, weight: str) -> str:
    return (
        f"distill_data_quant_config {{ ulq_quantize {{ dst_type: {activation} }} }} "
        f"distill_weight_quant_config {{ arq_distill {{ dst_type: {weight} }} }}"
    )


def test_pairs_of_widths() -> None:
    assert table(met(widths("INT8", "INT8")))["c2"].count("INT8") == 2
    with pytest.warns(AmctWarning, match=r"INT4 weights become INT8.*'c1' \(3 input channels"):
        rows = table(met(widths("INT8", "INT4")))
    assert rows["c2"] == "yes IFMR INT8 auto ARQ INT4 channel"
    assert rows["c1"] == "yes IFMR INT8 auto ARQ INT8 channel"
    for weight in ("INT4", "INT8"):
        with pytest.raises(ConfigError, match=f"INT4 activations with {weight}") as caught:
            met(widths("INT4", weight) + 'quant_skip_layers: "c1"')
        assert "(layers 'c2', 'fc')" in str(caught.value)
        assert "INT16" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        ("batch_num: 0", ["2:1: batch_num must be at least 1"]),
        ("group_size: 0", ["2:1: group_size must be at least 1"]),
        (by_name("c9"), ["2:1: the model has no layer 'c9'"]),
        (by_name("rfl"), ["no layer 'rfl'; did you mean 'refl'"]),
        (by_name("refl"), ["layer 'refl' cannot be set: padding_mode"]),
        (by_name("line"), ["layer 'line' cannot be set: distillation quantizes Conv2d"]),
        (by_type("Conv2"), ["2:1: unknown layer type 'Conv2'; did you mean 'Conv2d'"]),
        (by_type("ReLU"), ["type 'ReLU' cannot be set", "(quantizable: Conv2d, Linear)"]),
        (by_type("Conv1d"), ["type 'Conv1d' cannot be set", "(quantizable: Conv2d, Linear)"]),
        (by_type("LSTM"), ["type 'LSTM' cannot be set"]),
        (by_name("c1") + "\n" + by_name("c1"), ["3:1: layer 'c1' is overridden twice", "line 2"]),
        (
            by_type("nn.Dense") + "\n" + by_type("Linear"),
            ["3:1: type 'nn.Dense' alias 'Linear' is overridden twice"],
        ),
        ('quant_skip_layers: "fcc"', ["2:20: quant_skip_layers has 'fcc'", "did you mean 'fc'"]),
        ('quant_skip_layer_types: "Conv"', ["2:25: unknown layer type 'Conv'"]),
        ('quant_skip_layer_types: ["Conv2d", "Linear"]', ["no layer is left to be quantized"]),
        ('quant_skip_layers: ["c1", "c2", "fc"]', ["no layer is left to be quantized"]),
        (
            by_name("c1", "distill_data_quant_config { ulq_quantize { clip_max_min { } } }"),
            ["layer 'c1': clip_max is missing in clip_max_min"],
        ),
        (
            by_name(
                "c1",
                "distill_data_quant_config { ulq_quantize { clip_max_min "
                "{ clip_max: -1 clip_min: -1 } } }",
            ),
            ["layer 'c1': clip_max must be finite and > 0"],
        ),
        (
            "distill_data_quant_config { ulq_quantize { clip_max_min "
            "{ clip_max: 1 clip_min: 0 } } }",
            ["2:71: clip_min must be finite and < 0"],
        ),
    ],
)
def test_what_does_not_fit_is_an_error(text: str, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        met(text)
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('quant_skip_layers: "refl"', "quant_skip_layers has 'refl', which has no effect: padding"),
        ('quant_skip_layers: "line"', "'line', which has no effect: distillation quantizes"),
        ('quant_skip_layers: "r1"', "has 'r1', which has no effect: a ReLU"),
        ('quant_skip_layer_types: "ReLU"', "quant_skip_layer_types has 'ReLU', which has no eff"),
        ('quant_skip_layer_types: "Conv1d"', "quant_skip_layer_types has 'Conv1d', which has no"),
        ('quant_skip_layers: ["c1", "c1"]', "quant_skip_layers has 'c1' more than once"),
        (
            'quant_skip_layer_types: ["Linear", "nn.Dense"]',
            "quant_skip_layer_types has 'nn.Dense' more than once (as 'Linear')",
        ),
        ("batch_num: 1 batch_num: 2", "batch_num is given 2 times; the last one wins"),
        (
            "distill_data_quant_config { } distill_data_quant_config { ulq_quantize { } }",
            "distill_data_quant_config is given 2 times; they are merged",
        ),
        (
            "distill_weight_quant_config { arq_distill { } ulq_distill { } }",
            "exclude each other; ulq_distill wins",
        ),
    ],
)
def test_what_has_no_effect_is_one_warning(text: str, message: str) -> None:
    with pytest.warns(AmctWarning) as caught:
        met(text)
    (found,) = caught
    assert message in str(found.message)


def test_a_type_that_the_model_lacks_is_a_warning_for_an_override_and_nothing_for_a_skip() -> None:
    lines = model(linear("fc", 8), linear("fc2", 8))
    with pytest.warns(AmctWarning, match="type 'Conv2d' has no effect, the model has no such"):
        met(by_type("Conv2d"), lines)
    assert met('quant_skip_layer_types: "Conv2d"', lines).layers["fc"].quantize
    assert met('quant_skip_layer_types: "GRU"', lines).layers["fc"].quantize


def test_a_model_without_a_supported_layer_is_an_error() -> None:
    facts = model(LayerFacts("line", "Conv1d", reason="distillation quantizes Conv2d"))
    with pytest.raises(ModelError, match="these types can: Conv2d, Linear"):
        met("batch_num: 2", facts)


def test_the_facts_give_a_reason_for_other_types() -> None:
    net = nn.Sequential(nn.Conv1d(3, 3, 1), nn.Conv2d(3, 3, 1), nn.ConvTranspose2d(3, 3, 1))
    layers = distill_facts(net, capture(net, is_layer)).layers
    assert [layer.eligible for layer in layers] == [False, True, False]
    assert "not ConvTranspose2d" in (layers[2].reason or "")


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("distill_group { end_layer_name: 'a' }", "start_layer_name"),
        ("distill_group { start_layer_name: 'a' }", "end_layer_name"),
        ("distill_override_layers { distill_data_quant_config { } }", "layer_name"),
        ("distill_override_layer_types { }", "layer_type"),
    ],
)
def test_a_missing_field_is_named_with_its_line(text: str, field: str) -> None:
    with pytest.raises(ConfigError, match=f"{field} is missing") as caught:
        parse_distill_cfg(f"\n\n{text}", file="d.cfg")
    assert (caught.value.file, caught.value.line) == ("d.cfg", 3)


# The JSON


HEAD = {"version": 1, "batch_num": 1, "group_size": 1, "data_dump": False}


def plan(groups: Any = (("c1", "b1"),), **layers: Any) -> DistillPlan:
    listed = [list(group) for group in groups]
    return parse_distill_json(HEAD | {"distill_group": listed} | layers)


def test_a_json_file_is_read_with_its_name_and_lines(tmp_path: Path) -> None:
    path = tmp_path / "distill.json"
    with pytest.raises(ConfigFileNotFoundError):
        load_distill_json(path)
    with pytest.raises(ConfigError, match="is empty"):
        load_distill_json("")
    path.write_text("{")
    with pytest.raises(ConfigError, match=r"distill.json:1:2: not JSON"):
        load_distill_json(path)
    path.write_text('{"version": 1, "fc": {"quant_enable": true, "quant_enable": true}}')
    with pytest.raises(ConfigError, match=r"distill.json: .*'quant_enable' is given twice"):
        load_distill_json(path)
    text = json.dumps(HEAD | {"distill_group": [["fc"]], "fc": {"algo": 1}}, indent=1)
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"distill.json:11: layer 'fc': unknown key 'algo'"):
        load_distill_json(path)
    path.write_text(text.replace('"algo": 1', '"quant_enable": true'))
    assert load_distill_json(path).groups == (("fc",),)


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ({"c22": {}}, "the model has no layer 'c22'; did you mean 'c2'"),
        ({"group_sice": {}}, "the model has no layer 'group_sice'"),
        ({"r1": {}}, "layer 'r1' cannot be set: a ReLU is not quantized"),
        ({"c1": {"quant_enable": False}}, "no layer is left to be quantized"),
        ({}, "no layer is left to be quantized"),
    ],
)
def test_the_layers_of_a_json_meet_the_model(layers: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(plan(**layers).quantization, MODEL_A, rules=DISTILL)


def test_a_layer_that_the_json_lacks_is_disabled_and_one_without_quant_enable_is_on() -> None:
    layers = resolve(plan(l1={}, l2={"quant_enable": True}).quantization, MODEL_C).layers
    assert [name for name, spec in layers.items() if spec.quantize] == ["l1", "l2"]
    assert layers["c1"].reason == "the configuration does not list it"


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([["c1", "zz"]], "no module 'zz'"),
        ([["b1", "c1"]], "'c1' is listed in the wrong order"),
        ([["c1", "b1"], ["b1", "r1"]], "'b1' in common"),
    ],
)
def test_the_groups_of_a_json_meet_the_model(groups: list[list[str]], message: str) -> None:
    network = PlainChain()
    with pytest.raises(ConfigError, match=message):
        groups_of_names(network, capture(network, is_layer), plan(groups).groups)
