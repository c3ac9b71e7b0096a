"""Reading rules: what is missing, what is given twice, where things were read."""

from __future__ import annotations

import copy
import pickle

import pytest

from amct_fx.config import ActivationConfig, DataType, WeightConfig
from amct_fx.config.parser import parse_cfg
from amct_fx.errors import AmctWarning, ConfigError


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            'override_layer_configs { layer_name: "c2"\n retrain_data_quant_config { ulq_quantize {'
            " clip_max_min { clip_max: 1 } } } }",
            "q.cfg:2:45: layer 'c2': clip_min is missing in clip_max_min",
        ),
        (
            "retrain_data_quant_config { ulq_quantize { clip_max_min { } } }",
            "q.cfg:1:44: clip_max is missing in clip_max_min",
        ),
        (
            "override_layer_configs { retrain_weight_quant_config { } }",
            "q.cfg:1:1: layer_name is missing in override_layer_configs",
        ),
        ("\noverride_layer_types { }", "q.cfg:2:1: layer_type is missing"),
        ("prune_config { }", "filter_pruner or n_out_of_m_pruner is missing inside prune_config"),
        (
            'override_layer_types { layer_type: "Conv2d" prune_config { filter_pruner { } } }',
            "type 'Conv2d': balanced_l2_norm_filter_prune is missing inside filter_pruner",
        ),
        (
            "prune_config { n_out_of_m_pruner { } }",
            "l1_selective_prune is missing inside n_out_of_m_pruner",
        ),
        (
            "prune_config { filter_pruner { balanced_l2_norm_filter_prune { } } }",
            "prune_ratio is missing",
        ),
        (
            "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 1 } } }",
            "q.cfg:1:64: prune_ratio must be between 0 and 1",
        ),
        ("batch_num: 2 batch_num: 0", "q.cfg:1:14: batch_num must be at least 1"),
    ],
)
@pytest.mark.filterwarnings("ignore::amct_fx.errors.AmctWarning")
def test_what_is_missing_or_out_of_range_is_named_with_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cfg(text, file="q.cfg")
    assert message in str(caught.value)


def test_of_two_scalars_the_last_wins_with_a_warning() -> None:
    with pytest.warns(AmctWarning, match=r"q.cfg:2:1: batch_num is given 2 times; the last"):
        assert parse_cfg("batch_num: 2\nbatch_num: 3", file="q.cfg").batch_num == 3


def test_two_messages_are_merged_with_a_warning() -> None:
    text = """retrain_data_quant_config { ulq_quantize { fixed_min: true dst_type: INT4 } }
retrain_data_quant_config { ulq_quantize { dst_type: INT16 } }"""
    with pytest.warns(AmctWarning, match=r"line 2: retrain_data_quant_config is given 2 times"):
        config = parse_cfg(text)
    assert config.activation == ActivationConfig(fixed_min=True, dst_type=DataType.INT16)


def test_of_two_members_of_a_oneof_the_last_wins_even_when_empty() -> None:
    text = "retrain_weight_quant_config { arq_retrain { channel_wise: true } ulq_retrain { } }"
    with pytest.warns(AmctWarning, match="exclude each other; ulq_retrain wins"):
        assert parse_cfg(text).weight == WeightConfig("ulq_retrain")


def test_of_two_names_in_an_override_the_last_wins_with_a_warning() -> None:
    text = 'override_layer_configs { layer_name: "a" layer_name: "b" }'
    with pytest.warns(AmctWarning, match="layer_name is given 2 times"):
        assert parse_cfg(text).layer_overrides[0].name == "b"


def test_repeated_fields_may_be_repeated() -> None:
    assert parse_cfg('skip_layers: "a"\nskip_layers: "b"').skip_layers == ("a", "b")


def test_prune_ratio_stays_the_decimal_that_was_written() -> None:
    for ratio in (0.1, 0.3, 0.35, 0.7, 0.123456):
        config = parse_cfg(
            f"prune_config {{ filter_pruner {{ balanced_l2_norm_filter_prune {{ "
            f"prune_ratio: {ratio} }} }} }}"
        )
        assert config.prune.prune_ratio == ratio


def test_clips_are_widened_from_float32() -> None:
    text = (
        "retrain_data_quant_config { ulq_quantize { clip_max_min { clip_max: .1 clip_min: -.3 } } }"
    )
    config = parse_cfg(text)
    assert config.activation.clip_max == 0.10000000149011612
    assert config.activation.clip_min == -0.30000001192092896


def test_places_take_no_part_in_equality_or_hash() -> None:
    text = 'skip_layers: "a" override_layer_configs { layer_name: "b" prune_config { \
n_out_of_m_pruner { l1_selective_prune { } } } }'
    first, second = parse_cfg(text, file="x.cfg"), parse_cfg("\n\n" + text, file="y.cfg")
    assert first == second
    assert hash(first) == hash(second)
    assert repr(first) == repr(second)
    assert first.layer_overrides[0].source != second.layer_overrides[0].source


def test_a_configuration_can_be_copied_and_pickled() -> None:
    config = parse_cfg('skip_layers: "a" batch_num: 3', file="x.cfg")
    for other in (copy.deepcopy(config), pickle.loads(pickle.dumps(config))):
        assert other == config
        assert str(other.skip_source("skip_layers", "a")) == "x.cfg:1:14"
