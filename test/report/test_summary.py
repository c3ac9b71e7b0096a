"""``summarize``: columns, totals, and its forms: text, rich, Markdown, data."""

from __future__ import annotations

import importlib
import io
import json
from collections import OrderedDict
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from amct_fx import MissingExtraError, convert_amct, prepare_qat_amct, summarize
from test.networks import Net, NetWithIsland, example

INT4 = """skip_layers: "head"
    override_layer_configs {
      layer_name: "left"
      retrain_weight_quant_config { arq_retrain { dst_type: INT4 channel_wise: true } }
    }
"""


def trained(cfg: str | None = None) -> nn.Module:
    prepared = prepare_qat_amct(Net(), cfg)
    prepared(example())
    return prepared


def test_a_row_holds_clips_scale_and_offset_of_the_quantizer() -> None:
    prepared = trained()
    quantizer = prepared.get_submodule("stem.input_fake_quant")
    found = summarize(prepared).rows[0].input_quantizer
    assert found is not None
    assert found.clip_max == pytest.approx(quantizer.clip_max.item())
    assert found.clip_min == pytest.approx(quantizer.clip_min.item())
    assert found.scale == pytest.approx(quantizer.scale.item())
    assert found.offset == quantizer.zero_point.item()
    assert found.shared_with is None


def test_a_converted_row_has_the_range_that_its_codes_reach() -> None:
    prepared = trained()
    before = summarize(prepared).rows[0].input_quantizer
    after = summarize(convert_amct(prepared)).rows[0].input_quantizer
    assert before is not None
    assert after is not None
    assert (after.scale, after.offset) == (before.scale, before.offset)
    assert after.clip_max == pytest.approx((127 - after.offset) * after.scale)
    assert after.clip_min == pytest.approx((-128 - after.offset) * after.scale)


def test_a_layer_that_shares_a_quantizer_names_its_owner() -> None:
    rows = {row.name: row.to_dict() for row in summarize(trained()).rows}
    assert rows["right"]["input_shared_with"] == "left"
    assert rows["left"]["input_shared_with"] is None


def test_weights_of_four_bits_show_as_int4_after_conversion() -> None:
    converted = convert_amct(trained(INT4))
    row = summarize(converted).rows[1]
    assert row.state == "int4"
    assert row.weight == "int4, 8 scales"
    assert "weight=int4 per channel" in repr(converted.left)


@pytest.mark.parametrize(("kind", "name"), [("arq_retrain", "ARQ"), ("ulq_retrain", "ULQ")])
def test_the_algorithm_of_the_weight_is_named(kind: str, name: str) -> None:
    half = f"retrain_weight_quant_config {{ {kind} {{ channel_wise: true }} }}"
    cfg = f'{half} skip_layers: "head"'
    weight = summarize(trained(cfg)).rows[0].weight_quantizer
    assert weight is not None
    assert (weight.algorithm, weight.per_channel, weight.bits, weight.scales) == (name, True, 8, 8)


def test_the_totals_count_layers_and_parts_that_were_not_traced() -> None:
    assert summarize(trained(INT4)).totals == "3 of 4 layers quantized"
    totals = summarize(prepare_qat_amct(NetWithIsland())).totals
    assert totals == "4 of 4 layers quantized, 1 part not traced"


def test_the_dictionary_is_json_and_says_why_a_layer_is_float() -> None:
    found = json.loads(json.dumps(summarize(trained(INT4)).to_dict(), allow_nan=False))
    head = found["layers"][-1]
    assert (head["layer"], head["state"], head["input_bits"]) == ("head", "float", None)
    assert head["reason"] == "skip_layers has 'head' (line 1)"
    assert {"layers", "others", "islands", "totals"} == set(found)


def test_markdown_has_one_line_for_each_layer_and_ends_with_the_totals() -> None:
    text = summarize(trained(INT4)).to_markdown()
    lines = text.splitlines()
    assert sum(line.startswith("| ") for line in lines) == 2 + 4
    assert lines[-1] == "3 of 4 layers quantized"
    assert "skip\\_layers has 'head'" in text


def test_markdown_escapes_what_the_names_of_islands_could_mean() -> None:
    text = summarize(prepare_qat_amct(NetWithIsland())).to_markdown()
    assert "- not traced: middle (Branching)" in text


def test_a_terminal_gets_a_table_of_rich_and_a_file_plain_text() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    summary = summarize(trained(INT4))
    plain, terminal = io.StringIO(), Terminal()
    summary.show(plain)
    summary.show(terminal)
    assert plain.getvalue() == f"{summary}\n"
    assert "━" in terminal.getvalue()
    assert "3 of 4 layers quantized" in terminal.getvalue()


def test_brackets_in_names_are_no_markup_for_rich() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module("[red]", nn.Linear(4, 2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return getattr(self, "[red]")(x)

    console = Console(file=io.StringIO(), width=200)
    console.print(summarize(prepare_qat_amct(Odd())))
    assert "[red]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_without_rich_a_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "rich")
    file = io.StringIO()
    file.isatty = lambda: True  # type: ignore[method-assign]
    summary = summarize(trained())
    summary.show(file)
    assert file.getvalue() == f"{summary}\n"


def test_a_dataframe_has_a_row_for_each_layer() -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    frame = summarize(trained(INT4)).to_dataframe()
    assert list(frame["layer"]) == ["stem", "left", "right", "head"]


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    hide(monkeypatch, "pandas")
    with pytest.raises(MissingExtraError, match="pip install 'pandas'"):
        summarize(trained()).to_dataframe()


FILTER = """prune_config { filter_pruner {
    balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }
    retrain_data_quant_config { ulq_quantize { } }
"""
M4N2 = "prune_config { n_out_of_m_pruner { l1_selective_prune { n_out_of_m_type: M4N2 } } }"


@pytest.mark.parametrize("stage", ["prepared", "converted"])
def test_pruned_channels_are_counted_and_layers_that_keep_theirs_say_why(stage: str) -> None:
    model = prepare_qat_amct(Net(), FILTER, example())
    model(example())
    if stage == "converted":
        model = convert_amct(model)
        assert model.stem.out_channels == 4
    summary = summarize(model)
    records = {row.name: row.to_dict() for row in summary.rows}
    assert [records["left"][f"pruning_{key}"] for key in ("kept", "total", "pattern")] == [
        4,
        8,
        "filter",
    ]
    assert records["head"]["not_pruned"] == "it is an output of the model"
    assert summary.totals == "4 of 4 layers quantized, 3 pruned (filter)"
    assert "none: it is an output of the model" in str(summary)


@pytest.mark.parametrize("stage", ["prepared", "converted"])
def test_two_of_four_weights_are_a_pattern(stage: str) -> None:
    model = prepare_qat_amct(Net(), M4N2 + " skip_layers: 'head'", example())
    model(example())
    rows = {row.name: row for row in summarize(convert_amct(model)).rows}
    if stage == "prepared":
        rows = {row.name: row for row in summarize(model).rows}
    assert str(rows["left"].pruning) == "2/4 2:4"
    assert rows["head"].pruning is None


def hide(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    """Let importing ``library`` fail as if it were not installed."""
    real = importlib.import_module

    def without(name: str, package: str | None = None) -> Any:
        if name.partition(".")[0] == library:
            raise ModuleNotFoundError(name=library)
        return real(name, package)

    monkeypatch.setattr(importlib, "import_module", without)


def test_a_name_takes_one_line_whatever_signs_it_has() -> None:
    names = ("two\nlines", "\u202eright to left", "宽度")
    model = nn.Sequential(OrderedDict((name, nn.Linear(2, 2)) for name in names))
    text = str(summarize(prepare_qat_amct(model)))
    rows = text.splitlines()[1:4]
    assert [row.split("  ")[0] for row in rows] == [r"two\nlines", r"\u202eright to left", "宽度"]
    columns = {row.index("Linear") + row.count("宽") + row.count("度") for row in rows}
    assert len(columns) == 1
