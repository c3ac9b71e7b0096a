"""Tables and carets for people."""

from __future__ import annotations

from pathlib import Path

import pytest

from amct_fx.config import load_config
from amct_fx.config.show import format_rows, point_at, rows
from amct_fx.errors import ConfigError
from test.config.helpers import conv, linear, model, resolved

NET = model(
    conv("stem", 3),
    conv("body", 32),
    conv("old", 32, reason="it is never called"),
    linear("head", 20),
)
TEXT = """skip_layers: "stem"
retrain_data_quant_config { ulq_quantize { clip_max_min { clip_max: 6 clip_min: -6 } } }
override_layer_types { layer_type: "Linear"
  retrain_weight_quant_config { ulq_retrain { } }
  prune_config { n_out_of_m_pruner { l1_selective_prune { update_freq: 2 } } } }
"""


def test_the_table_tells_what_happens_to_each_layer_and_from_where() -> None:
    table = format_rows(rows(resolved(TEXT, NET)[0], NET)).splitlines()
    assert table[0].split() == [
        *("layer", "type", "activation", "from", "weight", "from", "pruning", "from", "reason"),
    ]
    assert "skip_layers has 'stem' (line 1)" in table[1]
    assert "INT8 (-6 … 6)  global, line 2  INT8 ARQ channel  default " in table[2]
    assert table[3].split()[:5] == ["old", "Conv2d", "float", "float", "-"]
    assert table[3].endswith("it is never called")
    assert "2:4, refresh 2" in table[4]
    assert "type 'Linear', line 4  2:4, refresh 2  type 'Linear', line 5" in table[4]


def test_the_table_tells_why_a_layer_is_not_pruned() -> None:
    text = """regular_prune_skip_layers: "head" retrain_weight_quant_config { }
prune_config { filter_pruner { balanced_l2_norm_filter_prune { prune_ratio: 0.5 } } }"""
    found = rows(resolved(text, NET)[0], NET)
    assert [row.pruning for row in found] == ["filter 0.5", "filter 0.5", "-", "-"]
    assert found[3].reason == "not pruned: regular_prune_skip_layers has 'head' (line 1)"
    assert found[3].weight_from == "global, line 1"


def failing(source: object) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        load_config(source)  # type: ignore[arg-type]
    return caught.value


def test_the_caret_stands_under_the_column(tmp_path: Path) -> None:
    path = tmp_path / "quant.cfg"
    path.write_text("batch_num: 1\n\tskip_layer: 'a'\r\n")
    assert point_at(failing(path)).splitlines()[1:] == ["\tskip_layer: 'a'", "\t^"]


def test_long_lines_are_cut_around_the_column(tmp_path: Path) -> None:
    path = tmp_path / "quant.cfg"
    path.write_text("batch_num: 1 " + " " * 500 + "batch_num: x")
    line, caret = point_at(failing(path)).splitlines()[1:]
    assert len(line) <= 100
    assert line[caret.index("^")] == "x"


def test_without_a_place_there_is_only_the_message(tmp_path: Path) -> None:
    assert point_at(failing("")).count("\n") == 0
    assert point_at(ConfigError("wrong", file=str(tmp_path / "gone"), line=3)).endswith("wrong")
    assert point_at(ConfigError("wrong", line=9), text="one line").endswith("wrong")
    assert point_at(ConfigError("wrong", line=1), text="one line").endswith("one line")
