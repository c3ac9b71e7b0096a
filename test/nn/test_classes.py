"""One list of layer types: what a configuration may name is what there are classes for."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from amct_fx.config.layer_types import QUANTIZABLE_TYPES
from amct_fx.nn import qat, quantized
from amct_fx.nn.qat import qat_class_of
from amct_fx.nn.quantized import quantized_class_of


@pytest.mark.parametrize("name", QUANTIZABLE_TYPES)
def test_every_type_has_a_class_for_training_and_one_for_the_converted_model(name: str) -> None:
    float_class = getattr(nn, name)
    assert qat_class_of(float_class) is getattr(qat, name)
    assert quantized_class_of(float_class) is getattr(quantized, name)


@pytest.mark.parametrize("module", [qat, quantized])
def test_there_are_no_other_classes(module: Any) -> None:
    found = {name for name in module.__all__ if hasattr(getattr(module, name), "float_class")}
    assert found - {"QATLayer", "QuantizedLayer"} == set(QUANTIZABLE_TYPES)
