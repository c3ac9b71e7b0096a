"""What the text format accepts and refuses, with the place of each error."""

from __future__ import annotations

import pytest

from amct_fx.config import CompressionConfig, DataType, M4N2PruneConfig
from amct_fx.config.parser import parse_cfg
from amct_fx.errors import ConfigError

DATA = "retrain_data_quant_config {{ ulq_quantize {{ {} }} }}"
CLIP = DATA.replace("{}", "clip_max_min {{ clip_max: {} clip_min: -1 }}")


def activation(inner: str) -> object:
    return parse_cfg(DATA.format(inner)).activation


@pytest.mark.parametrize(
    ("text", "batch_num"),
    [
        ("batch_num: 2", 2),
        ("batch_num: 2,", 2),
        ("batch_num: 2;", 2),
        ("batch_num:2 # words", 2),
        ("# first\r\nbatch_num: 2\r\n", 2),
        ("batch_num: 0x10", 16),
        ("batch_num: 010", 8),
        ("batch_num: +2", 2),
        ("batch_num: 4294967295", 4294967295),
    ],
)
def test_whole_numbers_separators_and_comments(text: str, batch_num: int) -> None:
    assert parse_cfg(text).batch_num == batch_num


@pytest.mark.parametrize(
    "text",
    [
        "batch_num: 2 // words",
        "batch_num 2",
        "batch_num: 2,,",
        "batch_num: -1",
        "batch_num: 1.5",
        'batch_num: "1"',
        "batch_num: 4294967296",
        "batch_num:",
        "1: 2",
        "}",
        "retrain_data_quant_config {",
        "retrain_data_quant_config <}",
        'skip_layers ["a"]',
        'skip_layers: ["a",]',
        'skip_layers: ["a"',
        "skip_layers: a",
        'skip_layers: "a\nb"',
        'skip_layers: "\\377"',
        'skip_layers: "\\777"',
        'skip_layers: "a\\y"',
        'skip_layers: "a',
        "skip_layers: '",
        "[ext.name]: 1",
        "fakequant_precision_mode: DEFAULT",
        "\ufeffbatch_num: 1",
    ],
)
def test_what_is_no_text_format_is_an_error_with_a_line(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cfg(text, file="quant.cfg")
    assert caught.value.file == "quant.cfg"
    assert caught.value.line is not None


@pytest.mark.parametrize(
    "text",
    [
        "retrain_data_quant_config {ulq_quantize {}}",
        "retrain_data_quant_config: {ulq_quantize: {}}",
        "retrain_data_quant_config <ulq_quantize <>>",
        "retrain_data_quant_config {},",
    ],
)
def test_messages_take_either_bracket_with_or_without_colon(text: str) -> None:
    assert parse_cfg(text) == parse_cfg(DATA.format(""))


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ('skip_layers: ["a","b"]', ("a", "b")),
        ("skip_layers: []", ()),
        ("skip_layers: 'a' skip_layers: \"b\"", ("a", "b")),
        ('skip_layers: "a" "b"', ("ab",)),
        ('skip_layers: "a\\x62"', ("ab",)),
        ("skip_layers: \"a\\142\\n\\\"\" '\\''", ("ab\n\"'",)),
        ('skip_layers: "Schicht_ä"', ("Schicht_ä",)),
    ],
)
def test_strings_and_the_short_form(text: str, names: tuple[str, ...]) -> None:
    assert parse_cfg(text).skip_layers == names


def test_the_short_form_of_messages() -> None:
    config = parse_cfg('override_layer_types: [{layer_type: "a"}, {layer_type: "b"}]')
    assert [override.type for override in config.type_overrides] == ["a", "b"]


@pytest.mark.parametrize(
    ("word", "value"), [(word, True) for word in ("true", "True", "t", "1")]
    + [(word, False) for word in ("false", "False", "f", "0")]
)  # fmt: skip
def test_booleans(word: str, value: bool) -> None:
    assert parse_cfg(DATA.format(f"fixed_min: {word}")).activation.fixed_min is value


@pytest.mark.parametrize("word", ["TRUE", "T", "yes", "2", '"true"'])
def test_other_words_for_booleans_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="fixed_min must be true or false"):
        activation(f"fixed_min: {word}")


@pytest.mark.parametrize(
    ("word", "value"),
    [("6", 6.0), ("6.0", 6.0), ("6e-1", 0.6000000238418579), (".5", 0.5), ("6.0f", 6.0)],
)
def test_floats_are_float32_values(word: str, value: float) -> None:
    assert parse_cfg(CLIP.format(word)).activation.clip_max == value


@pytest.mark.parametrize("word", ["0x10", '"6"', "6..0", "six"])
def test_other_spellings_of_floats_are_refused(word: str) -> None:
    with pytest.raises(ConfigError, match="clip_max must be a number"):
        parse_cfg(CLIP.format(word))


@pytest.mark.parametrize("word", ["inf", "-infinity", "nan", "1e39", "0", "-3"])
def test_clips_are_finite_and_on_their_side_of_zero(word: str) -> None:
    with pytest.raises(ConfigError, match=r"1:59: clip_max must be finite and > 0"):
        parse_cfg(CLIP.format(word))


@pytest.mark.parametrize(
    ("word", "value"), [("INT4", DataType.INT4), ("1", DataType.INT8), ("2", DataType.INT16)]
)
def test_enums_by_name_and_by_number(word: str, value: DataType) -> None:
    assert parse_cfg(DATA.format(f"dst_type: {word}")).activation.dst_type is value


@pytest.mark.parametrize("word", ["int8", '"INT8"', "INT32", "7"])
def test_an_unknown_enum_value_lists_the_valid_ones(word: str) -> None:
    with pytest.raises(ConfigError, match=r"1:54: dst_type must be one of INT4, INT8, INT16, not"):
        activation(f"dst_type: {word}")


def test_an_unknown_field_is_an_error_with_the_close_match_and_the_valid_ones() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_cfg("batch_num: 1\nretrain_data_quant_config {\n  ulq_quantise { } }", file="q.cfg")
    text = str(caught.value)
    assert text.startswith("q.cfg:3:3: unknown field 'ulq_quantise' in retrain_data_quant_config")
    assert "did you mean 'ulq_quantize'?" in text


def test_an_empty_file_means_the_defaults() -> None:
    assert parse_cfg("") == parse_cfg("# words only") == CompressionConfig()


def test_every_prune_field_is_read() -> None:
    config = parse_cfg(
        "prune_config { n_out_of_m_pruner { l1_selective_prune { n_out_of_m_type: M4N2 "
        "update_freq: 3 } } } regular_prune_skip_layers: 'a' regular_prune_skip_types: 'b'"
    )
    assert config.prune == M4N2PruneConfig(3)
    assert (config.prune_skip_layers, config.prune_skip_types) == (("a",), ("b",))


def test_the_precision_mode_is_read() -> None:
    config = parse_cfg("fakequant_precision_mode: FORCE_FP16_QUANT")
    assert config.fakequant_precision_mode == "FORCE_FP16_QUANT"
