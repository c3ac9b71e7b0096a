"""``analyze``: models and data of any form, and mistakes."""

from __future__ import annotations

import io
import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn

from amct_fx import (
    ArgumentTypeError,
    InputDataError,
    ModelStateError,
    ModelTypeError,
    analyze,
    convert_amct,
    load_config,
    prepare_qat_amct,
)
from test.networks import NetWithIsland, example
from test.report.chain import (
    NAMES,
    Chain,
    mse,
    prepared_and_float,
    quiet,
    with_only,
)


def test_islands_are_measured() -> None:
    prepared, model = prepared_and_float(NetWithIsland)
    x = example(4)
    found = quiet(prepared, model, x)
    assert {layer.name for layer in found.layers} == {
        "stem",
        "middle.conv",
        "middle.tail.0",
        "head",
    }
    expected = mse(with_only(prepared, ["middle.conv"], x), model(x))
    sensitivity = found.layer("middle.conv").sensitivity
    assert sensitivity is not None
    assert sensitivity.alone_quantized == pytest.approx(expected, rel=1e-4)


def test_layers_that_no_batch_reaches_are_named() -> None:
    prepared, model = prepared_and_float(NetWithIsland)
    found = quiet(prepared, model, example(2))
    assert "middle.tail.0" in found.notes[-1]
    assert "middle.tail.0" not in found.ranking


class Twice(nn.Module):
    """Calls one layer twice, on different values, and returns a tuple."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, dict[str, Any]]:
        y = self.again(self.first(x))
        return self.again(y), {"hidden": y, "n": 3}


@pytest.mark.filterwarnings("ignore:one forward calls:amct_fx.AmctWarning")
def test_reused_layers_and_tuples_are_measured() -> None:
    torch.manual_seed(0)
    model = Twice()
    prepared = prepare_qat_amct(model, reused="quantize")
    x = torch.randn(16, 4)
    prepared(x)
    found = quiet(prepared, model, x)
    assert found.layer("again").calls == 2
    on = with_only(prepared, ["again"], x)
    off = model(x)
    pair = [torch.cat([out[0].flatten(), out[1]["hidden"].flatten()]) for out in (on, off)]  # type: ignore[index]
    sensitivity = found.layer("again").sensitivity
    assert sensitivity is not None
    assert sensitivity.alone_quantized == pytest.approx(mse(*pair), rel=1e-4)


@pytest.mark.parametrize("cls", [nn.LSTM, nn.GRU])
def test_recurrent_layers_are_measured(cls: type[nn.Module]) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rnn = cls(4, 8, batch_first=True)
            self.head = nn.Linear(8, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.rnn(x)[0][:, -1])

    torch.manual_seed(0)
    model = Recurrent()
    prepared = prepare_qat_amct(model)
    x = torch.randn(8, 5, 4)
    prepared(x)
    found = quiet(prepared, model, x)
    expected = mse(with_only(prepared, ["rnn"], x), model(x))
    layer = found.layer("rnn")
    assert layer.sensitivity is not None
    assert layer.sensitivity.alone_quantized == pytest.approx(expected, rel=1e-3)
    assert layer.output is not None
    assert 20 < layer.output.sqnr < 80


def test_mappings_are_keyword_arguments() -> None:
    class Keywords(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 2)

        def forward(self, x: Tensor, scale: Tensor | None = None) -> dict[str, Tensor]:
            return {"logits": self.fc(x if scale is None else x * scale)}

    model = Keywords()
    prepared = prepare_qat_amct(model)
    batch = {"x": torch.randn(8, 4), "scale": torch.tensor(2.0)}
    prepared(**batch)
    assert quiet(prepared, model, [batch, batch]).layer("fc").calls == 2
    assert quiet(prepared, model, batch).samples == 8


def test_forward_lets_batches_have_any_form() -> None:
    prepared, model = prepared_and_float()

    class Sample:
        image = example(4)

    found = quiet(prepared, model, [Sample()], forward=lambda m, batch: m(batch.image))
    assert found.layer("a").calls == 1


def test_an_iterator_can_be_used_and_only_so_far_as_wanted() -> None:
    prepared, model = prepared_and_float()
    taken: list[int] = []

    def endless() -> Iterator[Tensor]:
        while True:
            taken.append(1)
            yield example()

    assert quiet(prepared, model, endless(), num_batches=2).batches == 2
    assert len(taken) == 2


def test_layers_that_the_float_model_passes_by_are_compared_all_the_same() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.encoder(x)  # in eval mode one fused operator

    torch.manual_seed(0)
    model = Encoder().eval()
    prepared = prepare_qat_amct(model)
    x = torch.randn(4, 6, 16)
    prepared(x)
    for layer in quiet(prepared, model, x).layers:
        assert layer.output is not None
        assert layer.output.sqnr > 20


def test_wrapped_and_compiled_models_are_looked_into() -> None:
    prepared, model = prepared_and_float()
    wrapped = nn.DataParallel(torch.compile(prepared))
    found = quiet(wrapped, torch.compile(model), example(4))
    assert found.ranking == quiet(prepared, model, example(4)).ranking
    assert found.summary.rows[0].name == "a"


def test_sensitivity_can_be_left_out() -> None:
    prepared, model = prepared_and_float()
    found = quiet(prepared, model, example(), sensitivity=False, max_skips=0)
    assert found.layer("a").sensitivity is None
    assert found.layer("a").output is not None
    assert "harm alone" not in str(found)


def test_the_dictionary_is_json_without_numbers_that_are_not_finite() -> None:
    torch.manual_seed(0)
    model = Chain().eval()
    with torch.no_grad():
        model.a.weight.zero_()
        model.a.bias.zero_()
    prepared = prepare_qat_amct(model)
    prepared(example(4))
    found = quiet(prepared, model, example(4))
    assert found.layer("a").weight.sqnr == math.inf  # type: ignore[union-attr]
    data = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert [layer["layer"] for layer in data["layers"]] == NAMES
    assert data["layers"][0]["weight_sqnr"] is None


def test_bf16_models_can_be_analyzed() -> None:
    torch.manual_seed(0)
    model = Chain().eval().bfloat16()
    prepared = prepare_qat_amct(model)
    x = example(4).bfloat16()
    prepared(x)
    assert len(quiet(prepared, model, x).ranking) == 4


def test_only_a_prepared_and_calibrated_model_can_be_analyzed() -> None:
    prepared, model = prepared_and_float()
    with pytest.raises(ModelStateError, match="not prepared"):
        analyze(model, model, example())
    with pytest.raises(ModelStateError, match="already converted; analyze the prepared"):
        analyze(convert_amct(prepared), model, example())
    with pytest.raises(ModelStateError, match="never calibrated"):
        analyze(prepare_qat_amct(model), model, example())
    with pytest.raises(ModelTypeError, match="Module, not str"):
        analyze("model", model, example())  # type: ignore[arg-type]
    with pytest.raises(ModelTypeError, match="float_model"):
        analyze(prepared, example(), example())  # type: ignore[arg-type]


def test_a_float_model_without_any_of_the_layers_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 4)).eval()
    prepared = prepare_qat_amct(model)
    x = torch.randn(4, 8)
    prepared(x)
    other = nn.Sequential(OrderedDict(other=nn.Linear(8, 4)))
    with pytest.raises(InputDataError, match=r"none of the layers of the prepared model \('0'\)"):
        quiet(prepared, other, x)


def test_a_layer_that_was_not_calibrated_is_measured_as_float() -> None:
    torch.manual_seed(0)
    model = NetWithIsland().eval()
    prepared = prepare_qat_amct(model)
    prepared(example(2))  # takes the way around the tail
    found = quiet(prepared, model, example(4))
    assert found.notes == ("not calibrated, so measured as float: middle.tail.0",)
    assert not prepared.get_submodule("middle.tail.0.input_fake_quant").is_calibrated


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([], "no batch"),
        (iter(()), "no batch"),
        (5, "iterable of batches"),
        ("images", "iterable of batches"),
        ([torch.randn(2, 5, 8, 8)], r"batch 0 \(Tensor with shapes \[2, 5, 8, 8\]\)"),
        ([(1, 2)], "cannot run on batch 0"),
        ([{"y": torch.randn(2, 3, 8, 8)}], "unexpected keyword argument 'y'.*forward=lambda"),
    ],
)
def test_data_that_cannot_be_used_is_refused_with_what_to_do(data: Any, message: str) -> None:
    prepared, model = prepared_and_float()
    with pytest.raises(InputDataError, match=message):
        analyze(prepared, model, data)


def test_a_metric_that_is_no_number_is_refused() -> None:
    prepared, model = prepared_and_float()
    with pytest.raises(InputDataError, match="must return one number"):
        analyze(prepared, model, example(), metric=lambda output, batch: output)


def test_a_model_without_float_outputs_needs_a_metric() -> None:
    class Classes(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x).argmax(1)

    prepared, model = prepared_and_float(Classes)
    with pytest.raises(InputDataError, match="metric="):
        analyze(prepared, model, example())
    data = [(example(), model(example()))]
    found = quiet(
        prepared, model, data, metric=lambda output, batch: (output == batch[1]).double().mean()
    )
    assert found.float_value == 1.0


def test_an_override_that_beats_the_suggested_skip_is_named() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    cfg = """
      override_layer_types { layer_type: "Linear" retrain_weight_quant_config { ulq_retrain { } } }
      override_layer_configs { layer_name: "0" retrain_data_quant_config { ulq_quantize { } } }
    """
    prepared = prepare_qat_amct(net, cfg)
    x = torch.randn(16, 8)
    prepared(x)
    found = analyze(prepared, net, x, wanted=0.0, progress=False)
    (last,) = found.suggestions[-1:]
    assert set(last.overrides) == {"layer '0'", "type 'Linear'"}
    assert "# the override for type 'Linear' beats a skip" in last.cfg
    assert load_config(last.cfg).quant_skip_layers == last.layers


def test_without_an_override_there_is_nothing_to_say_of_it() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    prepared = prepare_qat_amct(net, "batch_num: 1")
    x = torch.randn(16, 8)
    prepared(x)
    found = analyze(prepared, net, x, wanted=0.0, progress=False)
    assert [item.overrides for item in found.suggestions] == [()] * len(found.suggestions)


def test_a_model_of_which_no_layer_runs_has_a_report_all_the_same(tmp_path: Path) -> None:
    class Passes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if x.shape[0] > 9 else x * 1

    prepared = prepare_qat_amct(Passes().eval())
    prepared(torch.randn(10, 4))
    found = analyze(prepared, None, torch.randn(2, 4), progress=False)
    assert found.layers == ()
    assert "no batch reached fc" in found.to_markdown()
    found.save_html(tmp_path / "page.html")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"metric": "accuracy"}, r"metric must be a function metric\(output, batch\)"),
        ({"num_batches": "2"}, "num_batches must be a number or None, not '2'"),
    ],
)
def test_arguments_of_the_wrong_type_are_named(options: dict[str, Any], message: str) -> None:
    prepared = prepare_qat_amct(nn.Sequential(nn.Linear(4, 4)))
    x = torch.randn(2, 4)
    prepared(x)
    with pytest.raises(ArgumentTypeError, match=message):
        analyze(prepared, None, x, progress=False, **options)


def test_a_batch_without_samples_is_named() -> None:
    prepared = prepare_qat_amct(nn.Sequential(nn.Linear(4, 4)))
    prepared(torch.randn(2, 4))
    with pytest.raises(InputDataError, match=r"batch 1 holds no sample \(Tensor with"):
        analyze(prepared, None, [torch.randn(2, 4), torch.zeros(0, 4)], progress=False)


def test_nan_in_the_data_is_said_in_a_note() -> None:
    prepared = prepare_qat_amct(nn.Sequential(nn.Linear(4, 4)))
    prepared(torch.randn(2, 4))
    found = analyze(prepared, None, torch.full((2, 4), torch.nan), progress=False)
    assert "the metric is NaN or infinite" in found.notes[-1]


@pytest.mark.parametrize("width", [40, 80, 250])
def test_a_terminal_shows_as_many_figures_as_fit_and_folds_none(width: int) -> None:
    prepared, model = prepared_and_float()
    found = quiet(prepared, model, example(4), each_quantizer=True)
    file = io.StringIO()
    Console(file=file, width=width, force_terminal=True, no_color=True).print(found)
    text = file.getvalue()
    text = re.sub("\x1b\\[[0-9;]*m", "", text)
    assert max(map(len, text.splitlines())) <= width
    assert all(line[-1] in "┓┃┩│┘" for line in text.splitlines() if line[0] in "┏┃┡│└")
    sqnr = f"{found.layers[0].input.sqnr:.1f}"  # type: ignore[union-attr]
    assert (f"│ {sqnr}" in text) == (width > 40)
    assert ("not shown, for want of room: " in text) == (width < 250)
    harm = found.layer(found.ranking[0]).sensitivity.harm  # type: ignore[union-attr]
    assert f"{harm:.4g}" in text
