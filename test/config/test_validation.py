"""A configuration meets a model: which names, types and values are errors, which are warnings."""

from __future__ import annotations

import pytest

from amct_fx.config import CompressionConfig, LayerFacts, LayerOverride, ModelFacts, TypeOverride
from amct_fx.config.layer_types import resolve_type
from amct_fx.errors import ConfigError, ModelError
from test.config.helpers import MODEL_A, conv, linear, model, resolved

WEIGHT = "retrain_weight_quant_config { arq_retrain { } }"
FILTER = "prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 } } }"
M4N2 = "prune_config { n_out_of_m_pruner { l1_selective_prune { } } }"
NET = model(
    conv("c1", 3),
    conv("dw", 32, groups=32),
    conv("refl", 32, reason="padding_mode is 'reflect'"),
    LayerFacts("t1", "ConvTranspose1d", in_channels=8, packing_sizes=(8,)),
    linear("fc", 20),
    act="ReLU",
    up="ConvTranspose3d",
)


def by_name(name: str, inner: str = WEIGHT) -> str:
    return f'override_layer_configs {{ layer_name: "{name}" {inner} }}'


def by_type(name: str, inner: str = WEIGHT) -> str:
    return f'override_layer_types {{ layer_type: "{name}" {inner} }}'


@pytest.mark.parametrize(
    ("text", "messages"),
    [
        (by_name("rfl"), ["1:1: the model has no layer 'rfl'", "did you mean 'refl'"]),
        (by_name("zzzzz"), ["no layer 'zzzzz'", "layers: 'c1', 'dw', 't1', 'fc'"]),
        (by_name("c2", ""), ["no layer 'c2'"]),
        (by_name("refl"), ["1:1: layer 'refl'", "padding_mode is 'reflect'"]),
        (by_name("act"), ["layer 'act'", "a ReLU is not quantized"]),
        (by_type("Conv2"), ["1:1: unknown layer type 'Conv2'", "'Conv2d'", "accepted:"]),
        (by_type("conv2d"), ["unknown layer type 'conv2d'", "did you mean 'Conv2d'", "case"]),
        (by_type("Conv"), ["unknown layer type 'Conv'"]),
        (by_type("Gemm"), ["unknown layer type 'Gemm'"]),
        (by_type("InnerProduct"), ["unknown layer type"]),
        (by_type("ReLU"), ["type 'ReLU' cannot be set", "quantizable: Conv1d"]),
        (by_type("nn.SequentialCell"), ["type 'nn.SequentialCell' cannot be set"]),
        (by_type("ConvTranspose3d"), ["type 'ConvTranspose3d' cannot be set"]),
        (by_type("MatMul"), ["'MatMul' has no weight layer", "use Linear"]),
        ('skip_layers: "cc1"', ["1:14: skip_layers has 'cc1'", "did you mean 'c1'"]),
        ('quant_skip_layers: "nope"', ["quant_skip_layers has 'nope'", "not in the model"]),
        ('regular_prune_skip_layers: "nope" ' + FILTER, ["prune_skip_layers has 'nope'"]),
        ('skip_layer_types: "conv2d"', ["1:19: unknown layer type", "did you mean 'Conv2d'"]),
        (by_name("c1") + "\n" + by_name("c1"), ["2:1: layer 'c1' is overridden twice", "line 1"]),
        (
            by_type("nn.Conv2D") + "\n" + by_type("Conv2d"),
            ["2:1: type 'nn.Conv2D' alias 'Conv2d' is overridden twice", "line 1", "line 2"],
        ),
        ('skip_layer_types: ["Conv2d", "ConvTranspose1d", "Linear"]', ["all are skipped"]),
        ('skip_layers: ["c1", "fc", "dw"] ' + M4N2, ["no layer is left to be pruned"]),
        (by_name("dw", FILTER), ["layer 'dw' cannot be pruned", "fewer groups"]),
        (by_name("t1", FILTER), ["layer 't1' cannot be pruned", "Conv2d, Linear"]),
        (by_type("ConvTranspose1d", M4N2), ["type 'ConvTranspose1d' cannot be pruned"]),
        (
            "retrain_weight_quant_config { ulq_retrain { dst_type: INT16 } }",
            ["1:1: INT8 activations with INT16 weights", "'c1', 'dw', 't1', 'fc'"],
        ),
        (
            "retrain_data_quant_config { ulq_quantize { dst_type: INT16 } } "
            "retrain_weight_quant_config { arq_retrain { dst_type: INT16 } }",
            ["INT16 activations with INT16 weights"],
        ),
        (
            "retrain_data_quant_config { ulq_quantize { dst_type: INT4 } } "
            "retrain_weight_quant_config { arq_retrain { dst_type: INT4 } }",
            ["INT4 activations with INT4 weights"],
        ),
    ],
)
def test_what_does_not_fit_the_model_is_an_error(text: str, messages: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        resolved(text, NET)
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('skip_layers: "refl"', "skip_layers has 'refl', which has no effect: padding_mode"),
        ('skip_layers: "act"', "skip_layers has 'act', which has no effect: a ReLU"),
        ('quant_skip_layers: "refl"', "quant_skip_layers has 'refl', which has no effect"),
        ('skip_layer_types: "ReLU"', "skip_layer_types has 'ReLU', which has no effect"),
        ('skip_layer_types: "nn.MaxPool2d"', "has 'nn.MaxPool2d', which has no effect"),
        ('skip_layer_types: "ConvTranspose3d"', "has 'ConvTranspose3d', which has no effect"),
        ('skip_layers: ["c1", "c1"]', "line 1: skip_layers has 'c1' more than once"),
        ('skip_layer_types: ["nn.Conv2D", "Conv2d"]', "'Conv2d' more than once (as 'nn.Conv2D')"),
        (by_type("LSTM"), "type 'LSTM' has no effect, the model has no such layer"),
        (by_type("ConvTranspose2d"), "has no effect, the model has no such layer"),
        (by_name("c1", ""), "layer 'c1' is empty and changes nothing"),
        (by_type("Linear", ""), "type 'Linear' is empty and changes nothing"),
        (by_type("DepthwiseConv2dNative"), "an internal name"),
        ('skip_layer_types: "Conv2dBackpropInput"', "MindSpore's QAT never supported it"),
    ],
)
def test_what_has_no_effect_is_one_warning(text: str, message: str) -> None:
    (found,) = resolved(text, NET)[1]
    assert message in found


def test_a_quantizable_type_that_the_model_lacks_may_be_skipped() -> None:
    assert resolved('skip_layer_types: "LSTM"', NET)[1] == []
    assert len(resolved('skip_layer_types: "LSTM"', NET, dialect="mindspore")[1]) == 1


def test_a_common_skip_that_reaches_one_of_two_features_is_accepted() -> None:
    text = f'skip_layers: "t1" {WEIGHT} {FILTER}'
    resolution, messages = resolved(text, NET)
    assert messages == []
    assert not resolution.layers["t1"].quantize


def test_a_prune_skip_of_a_layer_that_is_not_pruned_anyway_is_a_warning() -> None:
    _, messages = resolved(f'regular_prune_skip_layers: "t1" {FILTER}', NET)
    (message,) = messages
    assert "prune_skip_layers has 't1', which has no effect" in message


def test_a_model_without_an_eligible_layer_is_a_model_error() -> None:
    with pytest.raises(ModelError, match=r"no layer that can be quantized"):
        resolved(None, ModelFacts((), {"": "Net", "act": "ReLU"}))
    facts = model(conv("c", 3, reason="it is never called"))
    with pytest.raises(ModelError, match=r"'c': it is never called"):
        resolved(None, facts)


def test_a_model_without_a_prunable_layer_is_a_model_error() -> None:
    with pytest.raises(ModelError, match="no layer that can be pruned"):
        resolved(FILTER, model(LayerFacts("c", "Conv1d")))


def test_a_depthwise_spelling_reaches_depthwise_layers_only() -> None:
    text = by_type("DepthwiseConv2d", "retrain_weight_quant_config { ulq_retrain { } }")
    layers = resolved(text, NET)[0].layers
    ulq = [name for name, spec in layers.items() if spec.weight.algo == "ulq_retrain"]
    assert ulq == ["dw"]


def test_a_depthwise_override_is_stronger_than_one_for_all_convolutions() -> None:
    text = by_type("Conv2d", "retrain_weight_quant_config { ulq_retrain { } }")
    text += by_type("DepthwiseConv2d")
    layers = resolved(text, NET)[0].layers
    assert [layers[name].weight.algo for name in ("c1", "dw")] == ["ulq_retrain", "arq_retrain"]


def test_an_override_without_a_quant_half_neither_enables_nor_resets() -> None:
    text = (
        f'skip_layers: "fc" retrain_weight_quant_config {{ ulq_retrain {{ }} }}{by_name("fc", "")}'
    )
    resolution, _ = resolved(text, NET)
    assert not resolution.layers["fc"].quantize
    assert resolution.layers["fc"].weight.algo == "ulq_retrain"


def test_recurrent_layers_need_both_packing_axes_even() -> None:
    facts = model(LayerFacts("lstm", "LSTM", in_channels=8, packing_sizes=(8, 5)), linear("fc", 8))
    text = "retrain_weight_quant_config { arq_retrain { dst_type: INT4 } }"
    resolution, messages = resolved(text, facts)
    widths = [spec.weight.dst_type.name for spec in resolution.layers.values()]
    assert widths == ["INT8", "INT4"]
    assert "'lstm' (" in messages[0]


def test_mindspore_warns_of_convolutions_that_its_tool_left_float() -> None:
    facts = model(
        conv("dilated", 4, dilation=(2, 2)),
        conv("grouped", 8, groups=2),
        conv("depthwise", 8, groups=8),
        conv("plain", 8, dilation=(1, 1)),
    )
    (message,) = resolved("# nothing", facts, dialect="mindspore")[1]
    assert message.endswith("'dilated', 'grouped'")


def test_errors_about_objects_need_no_place() -> None:
    twice = CompressionConfig(type_overrides=(TypeOverride("Conv2d"), TypeOverride("nn.Conv2d")))
    with pytest.raises(ConfigError, match=r"^type 'Conv2d' alias 'nn.Conv2d' is overridden twice;"):
        resolved(twice, MODEL_A)
    missing = CompressionConfig(layer_overrides=(LayerOverride("c9"),))
    with pytest.raises(ConfigError, match=r"^the model has no layer 'c9'"):
        resolved(missing, MODEL_A)


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("Conv2d", "Conv2d"),
        (" torch.nn.Conv2d ", "Conv2d"),
        ("torch.nn.modules.conv.Conv2d", "Conv2d"),
        ("nn.Conv2D", "Conv2d"),
        ("mindspore.nn.Dense", "Linear"),
        ("ms.nn.Conv2dTranspose", "ConvTranspose2d"),
        ("Conv2DTranspose", "ConvTranspose2d"),
        ("Conv2dBackpropInput", "ConvTranspose2d"),
        ("Conv1D", "Conv1d"),
        ("Conv1dTranspose", "ConvTranspose1d"),
        ("Conv3D", "Conv3d"),
        ("GRU", "GRU"),
        ("nn.LSTM", "LSTM"),
    ],
)
def test_layer_types_may_be_spelled_in_every_dialect(spelling: str, name: str) -> None:
    layer_type = resolve_type(spelling)
    assert (layer_type.name, layer_type.quantizable) == (name, True)


@pytest.mark.parametrize("spelling", ["nn.nn.Conv2d", "nn.", "", "CONV2D", "linear", "dense"])
def test_nothing_is_folded_or_stripped_twice(spelling: str) -> None:
    with pytest.raises(ConfigError, match="unknown layer type"):
        resolve_type(spelling)
