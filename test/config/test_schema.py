"""The dataclasses check themselves."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

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
from amct_fx.errors import ConfigError, ConfigTypeError


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ActivationConfig(clip_max=1.0), "clip_min is missing"),
        (lambda: ActivationConfig(clip_min=-1.0), "clip_max is missing"),
        (lambda: ActivationConfig(-1.0, -2.0), "clip_max must be finite and > 0"),
        (lambda: ActivationConfig(1.0, 0.0), "clip_min must be finite and < 0"),
        (lambda: ActivationConfig(float("inf"), -1.0), "clip_max must be finite"),
        (lambda: ActivationConfig(1e39, -1.0), "clip_max must be finite"),
        (lambda: ActivationConfig(1.0, float("nan")), "clip_min must be finite"),
        (lambda: WeightConfig("lsq"), "algo must be 'arq_retrain' or 'ulq_retrain'"),
        (lambda: FilterPruneConfig(0.0), "prune_ratio must be between 0 and 1"),
        (lambda: FilterPruneConfig(1.0), "prune_ratio must be between 0 and 1"),
        (lambda: FilterPruneConfig(0.999999999), "prune_ratio must be between 0 and 1"),
        (lambda: FilterPruneConfig(float("nan")), "prune_ratio must be between 0 and 1"),
        (lambda: M4N2PruneConfig(-1), "update_freq must be a whole number"),
        (lambda: CompressionConfig(batch_num=0), "batch_num must be at least 1"),
        (lambda: CompressionConfig(batch_num=2**32), "batch_num must be a whole number"),
        (lambda: CompressionConfig(fakequant_precision_mode="DEFAULT"), "FORCE_FP16_QUANT"),
    ],
)
def test_a_value_out_of_range_is_an_error(make: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ActivationConfig(dst_type="INT8"), "write DataType.INT8"),
        (lambda: ActivationConfig(fixed_min=1), "fixed_min must be bool or None"),
        (lambda: ActivationConfig(True, -1.0), "clip_max must be float or int or None"),
        (lambda: WeightConfig(channel_wise=1), "channel_wise must be bool or None"),
        (lambda: FilterPruneConfig("0.3"), "prune_ratio must be float or int"),
        (lambda: M4N2PruneConfig(True), "update_freq must be int"),
        (lambda: LayerOverride(3), "name must be str"),
        (lambda: TypeOverride("Conv2d", weight=ActivationConfig()), "weight must be WeightConfig"),
        (lambda: CompressionConfig(batch_num=1.0), "batch_num must be int"),
        (lambda: CompressionConfig(skip_layers="c1"), "skip_layers must be a tuple of str"),
        (lambda: CompressionConfig(skip_layers=(1,)), r"skip_layers\[0\] must be str"),
        (lambda: CompressionConfig(layer_overrides=("c1",)), "must be LayerOverride"),
    ],
)
def test_a_value_of_the_wrong_type_is_a_type_error(make: Any, message: str) -> None:
    with pytest.raises(ConfigTypeError, match=message):
        make()


def test_configurations_are_frozen_and_hashable() -> None:
    config = CompressionConfig(skip_layers=["c1"], layer_overrides=[LayerOverride("c2")])
    assert config.skip_layers == ("c1",)
    assert len({config, CompressionConfig(skip_layers=("c1",)), config}) == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.batch_num = 2  # type: ignore[misc]


def test_data_types_know_their_bits() -> None:
    assert [item.bits for item in DataType] == [4, 8, 16]
