"""Configurations that AMCT was run on: its JSON byte for byte, its errors, and where we differ."""

from __future__ import annotations

import functools
import gzip
import json
import warnings
from pathlib import Path
from typing import Any

import pytest

from amct_fx.config import (
    CompressionConfig,
    Resolution,
    dump_json,
    load_config,
    resolution_to_dict,
    resolve,
)
from amct_fx.config.parser import parse_cfg
from amct_fx.errors import AmctWarning
from test.config.golden_facts import NETWORKS

FOLDER = Path(__file__).parents[1] / "golden" / "g_config"
CLIPS = {"clip_max": 6.0, "clip_min": -6.0, "fixed_min": True}
DATA = {"algo": "ulq_quantize", **CLIPS, "dst_type": "INT8"}
PER_TENSOR = {"algo": "arq_retrain", "channel_wise": False, "dst_type": "INT8"}

#: A half that an override leaves out is inherited; AMCT resets it to the defaults.
#: By tag: the layers (all, when None), the half, and its right value.
INHERITED: dict[str, tuple[set[str] | None, str, dict[str, Any]]] = {
    "override type Conv2d only weights": (None, "retrain_data_config", DATA),
    "documentation-style example, no skipped type": ({"fc"}, "retrain_data_config", DATA),
    "documentation-style example, override a Linear by name": (
        {"stem", "c1", "c2", "c3"},
        "retrain_data_config",
        DATA,
    ),
    "documentation-style example on the transposed conv": ({"up"}, "retrain_data_config", DATA),
    "override only the data config of one layer (weight config becomes default, not global)": (
        {"c2"},
        "retrain_weight_config",
        PER_TENSOR,
    ),
    "override with empty body": ({"c2"}, "retrain_weight_config", PER_TENSOR),
}


def cases(name: str) -> list[dict[str, Any]]:
    with gzip.open(FOLDER / f"{name}.json.gz", "rt", encoding="utf-8") as file:
        return list(json.load(file))


CASES = cases("config")
ERRORS = [
    case
    for case in cases("errors")
    if case["kind"] == "json" or case["cfg"] or case["model"] == "NoLayers"
]
NOT_TRACEABLE = "FunctionalAndUnused"  # AMCT cannot export it; we quantize what is called.


def label(case: dict[str, Any]) -> str:
    return f"{case['model']}: {case['tag']}"


@functools.cache
def run(model: str, cfg: str | None) -> tuple[Resolution, list[str]]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AmctWarning)
        config = CompressionConfig() if cfg is None else parse_cfg(cfg)
        resolution = resolve(config, NETWORKS[model])
    return resolution, [str(item.message) for item in caught]


def ours(case: dict[str, Any]) -> str:
    return dump_json(resolution_to_dict(run(case["model"], case["cfg"])[0]))


def expected(case: dict[str, Any]) -> str:
    """Return AMCT's JSON, with inherited halves put right."""
    if case["tag"] not in INHERITED:
        return str(case["json_text"])
    value = json.loads(case["json_text"])
    layers, half, right = INHERITED[case["tag"]]
    for name, layer in value.items():
        if isinstance(layer, dict) and (layers is None or name in layers):
            layer[half] = right
    return dump_json(value)


@pytest.mark.parametrize("case", [c for c in CASES if not c["error"]], ids=label)
def test_the_json_equals_the_recorded_one_byte_for_byte(case: dict[str, Any]) -> None:
    assert ours(case) == expected(case)


@pytest.mark.parametrize("case", [c for c in CASES if not c["error"]], ids=label)
def test_the_recorded_json_is_read_and_written_again_unchanged(case: dict[str, Any]) -> None:
    config = load_config(case["json_text"])
    resolution = resolve(config, NETWORKS[case["model"]])
    assert dump_json(resolution_to_dict(resolution)) == case["json_text"]
    assert load_config(config.to_json_dict()) == config


CHANNEL_WISE = [
    case
    for case in CASES
    if case["error"] == "ValueError" and "channel_wise: true" in (case["cfg"] or "")
    if case["model"] not in ("NoLayers", NOT_TRACEABLE)
]


@pytest.mark.parametrize("case", CHANNEL_WISE, ids=label)
def test_channel_wise_from_above_means_per_tensor_for_a_linear(case: dict[str, Any]) -> None:
    resolution, messages = run(case["model"], case["cfg"])
    for spec in resolution.layers.values():
        by_type = 'layer_type: "Conv2d"' in case["cfg"] and spec.layer_type == "Conv2d"
        by_name = 'layer_name: "c2" retrain_weight' in case["cfg"] and spec.name == "c2"
        assert spec.weight.channel_wise is (
            (spec.layer_type != "Linear" and not by_type) or by_name
        )
    is_linear_on = any(s.layer_type == "Linear" and s.quantize for s in resolution.layers.values())
    assert any("channel_wise" in message for message in messages) is is_linear_on


@pytest.mark.parametrize(
    "case",
    [c for c in CASES if c["error"] and c not in CHANNEL_WISE and c["model"] != NOT_TRACEABLE],
    ids=label,
)
def test_what_amct_refuses_is_refused(case: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"no layer|batch_num"):
        run(case["model"], case["cfg"])


@pytest.mark.parametrize("case", [c for c in CASES if c["model"] == NOT_TRACEABLE], ids=label)
def test_a_network_that_amct_cannot_export_is_quantized(case: dict[str, Any]) -> None:
    assert list(run(case["model"], case["cfg"])[0].layers) == ["used", "lin"]


#: By tag: our decision, where it is not AMCT's.
ACCEPTED = {
    "Linear channel_wise true by type",
    "global channel_wise true with a Linear in the net",
    "skip type ReLU",
    "json: no version",
    "json: no batch_num",
}
REFUSED = {"clip inf", "prune in an override TYPE of a quant config"}


@pytest.mark.parametrize("case", ERRORS, ids=label)
@pytest.mark.filterwarnings("ignore::amct_fx.errors.AmctWarning")
def test_bad_input_raises_what_a_caller_of_amct_expects(
    case: dict[str, Any], tmp_path: Path
) -> None:
    is_json = case["kind"] == "json"
    path = tmp_path / ("config.json" if is_json else "quant.cfg")
    content = case["config_json"] if is_json else case["cfg"] or ""
    path.write_text(content if isinstance(content, str) else json.dumps(content))

    def check() -> None:
        resolve(load_config(path, quant_only=True), NETWORKS[case["model"]])

    raised = case["raised"]
    if case["tag"] in ACCEPTED or (raised is None and case["tag"] not in REFUSED):
        check()
    elif raised == "TypeError":
        with pytest.raises(TypeError):
            check()
    else:
        with pytest.raises(ValueError):  # noqa: PT011 - the messages are tested where they are made
            check()


@pytest.mark.parametrize("name", ["ResidualAdd", "DepthwiseNet", "MLP"])
def test_the_facts_of_these_tests_are_those_of_the_real_networks(name: str) -> None:
    from amct_fx.backend_config import is_layer, model_facts
    from amct_fx.graph import capture
    from test.golden import networks

    network = getattr(networks, name)()
    found = model_facts(network, capture(network, is_layer)).layers
    expected = NETWORKS[name].layers
    assert [(layer.name, layer.layer_type) for layer in found] == [
        (layer.name, layer.layer_type) for layer in expected
    ]
    assert all(layer.eligible for layer in found)
    assert [layer.packing_sizes for layer in found] == [layer.packing_sizes for layer in expected]
    assert [layer.groups for layer in found] == [layer.groups for layer in expected]
