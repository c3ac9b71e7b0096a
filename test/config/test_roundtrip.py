"""Any configuration survives the way through a file."""

from __future__ import annotations

import pickle
import warnings

from hypothesis import given, settings

from amct_fx.config import (
    CompressionConfig,
    dump_json,
    load_config,
    resolution_to_dict,
    resolve,
)
from amct_fx.config.parser import parse_cfg
from test.config.helpers import MODEL_A, MODEL_C
from test.config.strategies import configs, resolved_configs

FEW = settings(max_examples=80, deadline=None)


@FEW
@given(configs)
def test_through_a_cfg_file(config: CompressionConfig) -> None:
    assert parse_cfg(config.to_cfg()) == config


@FEW
@given(configs)
def test_through_a_dict_and_its_json(config: CompressionConfig) -> None:
    assert CompressionConfig.from_any(config.to_json_dict()) == config
    assert load_config(dump_json(config.to_json_dict())) == config


@FEW
@given(resolved_configs())
def test_a_resolved_one_through_its_json(config: CompressionConfig) -> None:
    assert load_config(dump_json(config.to_json_dict())) == config
    assert load_config(config.to_json_dict()) == config


@FEW
@given(configs)
def test_through_pickle(config: CompressionConfig) -> None:
    copy = pickle.loads(pickle.dumps(config))
    assert copy == config
    assert hash(copy) == hash(config)


def test_every_form_of_a_configuration_resolves_alike() -> None:
    text = """batch_num: 3
quant_skip_layers: "c2"
retrain_data_quant_config { ulq_quantize { clip_max_min { clip_max: 0.1 clip_min: -0.3 } } }
override_layer_types { layer_type: "nn.Dense" retrain_weight_quant_config { ulq_retrain { } } }
fakequant_precision_mode: FORCE_FP16_QUANT
"""
    config = load_config(text)
    first = resolution_to_dict(resolve(config, MODEL_A))
    json_text = dump_json(first)
    for source in (config, config.to_cfg(), config.to_json_dict(), json_text, first):
        assert resolution_to_dict(resolve(load_config(source), MODEL_A)) == first


def test_the_cfg_made_from_json_means_the_same_for_its_model() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        text = """retrain_weight_quant_config { arq_retrain { dst_type: INT4 channel_wise: true } }
quant_skip_layers: "l2" """
        first = resolve(load_config(text), MODEL_C)
    config = load_config(dump_json(resolution_to_dict(first)))
    again = resolve(load_config(config.to_cfg()), MODEL_C)
    for name, spec in first.layers.items():
        assert again.layers[name].quantize is spec.quantize
        if spec.quantize:
            assert again.layers[name].weight == spec.weight
            assert again.layers[name].activation == spec.activation
