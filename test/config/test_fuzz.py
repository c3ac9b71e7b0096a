"""Damaged files give a result or an exception of the package, never another, and never hang."""

from __future__ import annotations

import contextlib
import os
import random
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from amct_fx.config import dump_json, load_config, resolution_to_dict, resolve
from amct_fx.config.distill import load_distill_config
from amct_fx.config.distill_json import parse_distill_json
from amct_fx.config.json_object import load_json
from amct_fx.config.parser import parse_cfg
from amct_fx.config.show import point_at
from amct_fx.errors import AmctError, AmctWarning, ConfigError
from test.config.test_samples import classifier

SAMPLES = Path(__file__).parent / "samples"
MODEL = classifier("", "conv1", "conv2", "fc")
SCRAPS = (
    *"{}<>[]:;,#\"'\\\n\r\t \0-+.",
    *("batch_num", "clip_max", "INT16", "true", "0x", "1e999", "nan", "-", '"a', "\\777", "\\u0"),
    *(
        "prune_config",
        "ulq_retrain { }",
        "[a.b/c]",
        "1:",
        "\u2028",
        "\ufeff",
        "\ud800",
        "é",
        "9" * 5000,
    ),
    *('{"version":1', "null", "[[]]", "NaN", "true,"),
)
#: Other damage than that of every test run.
SEED = int(os.environ.get("AMCT_FX_FUZZ_SEED", "0"))


def mutate(source: random.Random, text: str) -> str:
    """Damage a text in a few places."""
    for _ in range(source.randint(1, 4)):
        start = source.randrange(len(text) + 1)
        end = min(len(text), start + source.choice((0, 1, 1, 2, 5, 20, 200)))
        piece = text[start:end]
        new = source.choice(("", piece * 2, source.choice(SCRAPS), piece[::-1], piece.upper()))
        text = text[:start] + new + text[end:]
    return text


def run(read: Callable[[str], object], seeds: list[str], count: int) -> None:
    """Read damaged texts; whatever else than the package's exceptions comes out is a failure."""
    source = random.Random(SEED)
    outcomes = {"read": 0, "refused": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmctWarning)
        for _ in range(count):
            text = mutate(source, source.choice(seeds))
            start = time.monotonic()
            try:
                read(text)
            except ConfigError as error:
                point_at(error, text=text)
                outcomes["refused"] += 1
            except AmctError:
                outcomes["refused"] += 1
            else:
                outcomes["read"] += 1
            assert time.monotonic() - start < 10, text
    assert min(outcomes.values()) > count // 100, outcomes


def samples(pattern: str = "[!d]*.cfg") -> list[str]:
    return [path.read_text() for path in sorted(SAMPLES.glob(pattern))]


def json_seeds() -> list[str]:
    texts = ["batch_num: 2", samples()[3], samples()[4]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmctWarning)
        resolutions = [resolve(load_config(text), MODEL) for text in texts if "prune" not in text]
    return [dump_json(resolution_to_dict(item)) for item in resolutions]


def test_ten_thousand_damaged_cfg_files() -> None:
    run(lambda text: resolve(parse_cfg(text), MODEL), samples(), 10_000)


def test_damaged_json_files() -> None:
    def read(text: str) -> object:
        return resolve(load_config("\n" + text), MODEL)

    run(read, json_seeds(), 3_000)


def test_damaged_dicts() -> None:
    config = load_config(samples()[5])

    def read(text: str) -> object:
        return load_config(load_json(text))

    run(read, [dump_json(config.to_json_dict())], 2_000)


def test_damaged_distillation_files() -> None:
    run(lambda text: load_distill_config("\n" + text), samples("distill.cfg"), 2_000)
    seed = """{"version": 1, "batch_num": 1, "group_size": 1, "data_dump": false,
"distill_group": [["a", "b"], ["fc"]], "fc": {"quant_enable": true,
"distill_data_config": {"algo": "ulq_quantize", "clip_max": 1.0, "clip_min": -1.0},
"distill_weight_config": {"algo": "arq_distill", "channel_wise": true}}}"""
    run(lambda text: parse_distill_json(load_json(text), text=text), [seed], 1_000)


@pytest.mark.parametrize(
    "text",
    [
        "retrain_data_quant_config {" * 100_000,
        "override_layer_configs: [" * 100_000,
        "[" * 1_000_000,
        '{"a":' * 500_000,
        '"' * 1_000_000,
        "#" * 1_000_000,
        "batch_num: 1 " * 10_000,
        "skip_layers: " + '"a" ' * 20_000,
        "batch_num: " + "9" * 1_000_000,
        "skip_layers: '" + "\\" * 999_999 + "'",
        '{"batch_num": ' + "9" * 1_000_000 + "}",
        '{"version": 1, ' + ", ".join(f'"l{i}": {{}}' for i in range(10_000)) + "}",
    ],
    ids=lambda text: text[:14],
)
def test_large_and_deep_texts_are_refused_or_read_quickly(text: str) -> None:
    start = time.monotonic()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmctWarning)
        with contextlib.suppress(AmctError):
            load_config("\n" + text)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    "text",
    [
        "a" * 1_000_000 + ": 1",
        "batch_num: " + "a" * 1_000_000,
        '{"version": 1, "' + "a" * 1_000_000 + '": 3}',
    ],
    ids=["field", "value", "key"],
)
def test_a_message_never_repeats_a_very_long_name(text: str) -> None:
    with pytest.raises(AmctError) as caught:
        load_config("\n" + text)
    assert len(str(caught.value)) < 3_000


def test_a_deeply_nested_dict_is_refused() -> None:
    value: dict[str, object] = {}
    for _ in range(100_000):
        value = {"prune_config": value}
    with pytest.raises(AmctError, match="nested too deeply"):
        load_config(value)
