"""Record files: written like AMCT's, read with every check."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amct_fx import convert_amct, prepare_qat_amct
from amct_fx.config import record_pb2
from amct_fx.errors import AmctError, ConvertError, ModelStateError
from amct_fx.record import (
    execution_order,
    layer_records,
    read_record,
    read_record_message,
    write_record,
    write_record_message,
)
from test.amct_pytorch.test_amct_state import imported
from test.golden.reader import FINAL_STATES, load_final_state


@pytest.mark.parametrize("name", FINAL_STATES)
def test_amcts_record_of_the_same_model_is_met(name: str, tmp_path: Path) -> None:
    final = load_final_state(name)
    model = imported(final)
    write_record(tmp_path / "record.txt", model)
    ours = (tmp_path / "record.txt").read_text().splitlines()
    theirs = final.record_text.splitlines()
    assert len(ours) == len(theirs)
    for a, b in zip(ours, theirs, strict=True):
        if a != b:  # a batch norm folded in another order of operations
            field, _, value = a.partition(": ")
            other, _, expected = b.partition(": ")
            assert field == other == "    scale_w"
            assert float(value) == pytest.approx(float(expected), rel=5e-7)


@pytest.mark.parametrize("name", FINAL_STATES)
def test_amcts_record_can_be_read(name: str, tmp_path: Path) -> None:
    final = load_final_state(name)
    model = imported(final)
    (tmp_path / "record.txt").write_text(final.record_text)
    found = read_record(tmp_path / "record.txt", model)
    for layer, record in layer_records(model).items():
        assert found[layer].scale_d == pytest.approx(record.scale_d, rel=1e-6)
        assert found[layer].scale_w == pytest.approx(record.scale_w, rel=1e-6)
        assert found[layer].offset_d == record.offset_d
        assert found[layer].act_type == record.act_type


class Net(nn.Module):
    """Calls its layers in another order than it registers them."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(6, 2)
        self.rnn = nn.LSTM(4, 6, batch_first=True)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(self.body(x))[0])


def calibrated(cfg: str | None = None, model: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    prepared = prepare_qat_amct(model or Net(), cfg)
    prepared(torch.randn(3, 5, 4))
    return prepared.eval()


def test_layers_stand_in_the_order_of_execution() -> None:
    order = ["body.0", "body.2", "rnn", "head"]
    assert list(layer_records(calibrated())) == order
    assert list(layer_records(convert_amct(calibrated()))) == order


class Island(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if float(x.detach().sum()) > 0 else self.b(self.a(x))


def test_layers_of_untraced_parts_are_listed_too() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Island(), nn.Linear(4, 4))
    prepared = prepare_qat_amct(model)
    for sign in (1, -1):
        prepared[1](sign * torch.ones(1, 4))
    prepared(torch.randn(2, 4))
    assert list(layer_records(prepared)) == ["0", "1.a", "1.b", "2"]
    modules = [module for _, module in execution_order(prepared)]
    assert len(modules) == len(set(modules)) == len(list(prepared.modules()))


def test_what_is_written_is_read(tmp_path: Path) -> None:
    cfg = """
        fakequant_precision_mode: FORCE_FP16_QUANT
        override_layer_configs { layer_name: "body.0"
            retrain_data_quant_config { ulq_quantize { dst_type: INT16 } } }
        override_layer_configs { layer_name: "body.2"
            retrain_weight_quant_config { arq_retrain { dst_type: INT4 } } }
    """
    model = calibrated(cfg)
    write_record(tmp_path / "record.txt", model)
    found = read_record(tmp_path / "record.txt", model)
    assert found == layer_records(model)
    assert found == read_record(tmp_path / "record.txt", convert_amct(model))
    assert found["body.0"].act_type == "INT16"
    assert found["body.2"].wts_type == "INT4"
    assert {record.fakequant_precision_mode for record in found.values()} == {"FORCE_FP16_QUANT"}


@pytest.mark.parametrize(
    ("kind", "gates", "order"), [(nn.LSTM, 4, [0, 3, 1, 2]), (nn.GRU, 3, [1, 0, 2])]
)
@pytest.mark.parametrize("channel_wise", [False, True])
def test_gates_stand_in_the_order_of_onnx(
    kind: Any, gates: int, order: list[int], channel_wise: bool
) -> None:
    text = str(channel_wise).lower()
    half = f"retrain_weight_quant_config {{ arq_retrain {{ channel_wise: {text} }} }}"
    cfg = f'override_layer_types {{ layer_type: "{kind.__name__}" {half} }}'
    model = Net()
    model.rnn = kind(4, 6, batch_first=True)
    converted = convert_amct(calibrated(cfg, model))
    record = layer_records(converted)["rnn"]
    for part, found in (("ih", record.scale_w), ("hh", record.scale_r)):
        scale = getattr(converted.rnn, f"weight_{part}_scale")
        if channel_wise:
            expected = torch.cat([scale.chunk(gates)[index] for index in order])
        else:
            expected = scale.expand(gates)
        assert list(found) == expected.tolist()
    assert record.scale_h == converted.rnn.hidden_quantize.scale.item()
    assert record.offset_h == converted.rnn.hidden_quantize.zero_point.item()


def test_floats_are_the_shortest_that_give_the_same_float32(tmp_path: Path) -> None:
    message = record_pb2.ScaleOffsetRecord()
    scales = [0.1, 1 / 3, 1e-5, 16777216.0, 1.1754944e-38, 0.029482318088412285]
    message.record.add(key="a").value.scale_w.extend(scales)
    write_record_message(tmp_path / "record.txt", message)
    text = (tmp_path / "record.txt").read_text()
    written = [line.split()[1] for line in text.splitlines() if "scale_w" in line]
    assert written == ["0.1", "0.33333334", "1e-05", "16777216.0", "1.1754944e-38", "0.029482318"]
    assert read_record_message(tmp_path / "record.txt") == message


def test_a_model_that_was_never_calibrated_has_no_record(tmp_path: Path) -> None:
    with pytest.raises(ConvertError, match="never calibrated"):
        write_record(tmp_path / "record.txt", prepare_qat_amct(Net()))
    with pytest.raises(ModelStateError, match="is not prepared"):
        write_record(tmp_path / "record.txt", Net())
    assert not (tmp_path / "record.txt").exists()


GOOD = """
scale_d: 0.5 offset_d: -3 scale_w: 0.25 scale_w: 0.125 offset_w: 0 offset_w: 0
"""
LSTM = GOOD.replace(
    "scale_w: 0.25 scale_w: 0.125 offset_w: 0 offset_w: 0", "scale_w: 1 offset_w: 0"
)
HIDDEN = "scale_h: 0.1 offset_h: 1 scale_r: 0.5 offset_r: 0"


def read(folder: Path, key: str, value: str) -> Any:
    path = folder / "record.txt"
    path.write_text(f'record {{ key: "{key}" value {{ {value} }} }}')
    return read_record(path, prepare_qat_amct(Net()))[key]


def test_right_entries_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, "head", GOOD).scale_w == (0.25, 0.125)
    assert read(tmp_path, "rnn", f"{LSTM} {HIDDEN}").scale_r == (0.5,)
    wide = GOOD.replace("-3", "-32768") + 'act_type: "INT16" wts_type: "INT4" skip_fusion: true'
    assert read(tmp_path, "head", wide).offset_d == -32768


def test_the_last_of_two_values_wins(tmp_path: Path) -> None:
    record = read(tmp_path, "head", f"{GOOD} scale_d: 0.75 offset_d: 7")
    assert (record.scale_d, record.offset_d) == (0.75, 7)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("heat", GOOD, "'heat' is no quantized layer of the model; did you mean 'head'"),
        ("body", GOOD, "'body' is no quantized layer"),
        ("head", GOOD.replace("scale_d: 0.5", ""), "'head' has no scale_d"),
        ("head", GOOD.replace("offset_d: -3", ""), "has no offset_d"),
        ("head", "scale_d: 1 offset_d: 1", "has no scale_w"),
        ("head", "scale_d: 1 offset_d: 1 scale_w: 1", "has no offset_w"),
        ("head", GOOD.replace("0.5", "0"), "has scale_d 0.0; scales are finite and greater"),
        ("head", GOOD.replace("0.5", "-1"), "has scale_d -1.0"),
        ("head", GOOD.replace("0.5", "nan"), "has scale_d nan"),
        ("head", GOOD.replace("0.25", "inf"), "has scale_w inf"),
        ("head", GOOD.replace("0.25", "0"), "has scale_w 0.0"),
        ("head", GOOD.replace("-3", "-129"), "has offset_d -129, outside of -128 … 127 for INT8"),
        ("head", GOOD.replace("-3", "128"), "outside of -128 … 127"),
        ("head", GOOD.replace("-3", "32768") + 'act_type: "INT16"', "outside of -32768 … 32767"),
        ("head", GOOD.replace("offset_w: 0", "offset_w: 4"), "has offset_w 4; weights have"),
        ("head", f"{GOOD} offset_w: 0", "has 2 scale_w but 3 offset_w"),
        ("head", f"{GOOD} scale_w: 1 offset_w: 0", "has 3 scale_w; it must have 1 or 2"),
        (
            "head",
            f'{GOOD} act_type: "INT7"',
            "act_type 'INT7'; it must be one of INT4, INT8, INT16",
        ),
        ("head", f'{GOOD} wts_type: "INT16"', "wts_type 'INT16'; it must be one of INT4, INT6"),
        ("head", f"{GOOD} shift_bit: 1", "has a shift_bit"),
        ("head", f"{GOOD} {HIDDEN}", "has values of a hidden state, but is a Linear"),
        ("rnn", LSTM, "'rnn' has no scale_h"),
        ("rnn", f"{LSTM} scale_h: 1 scale_r: 1", "has no offset_h"),
        ("rnn", f"{LSTM} scale_h: 1 offset_h: 1", "has no scale_r"),
        ("rnn", f"{LSTM} {HIDDEN} scale_r: 2", "has 2 scale_r but 1 offset_r"),
        ("rnn", f"{LSTM} {HIDDEN} scale_r: 2 offset_r: 0", "it must have 1 or 4 or 24"),
    ],
)
def test_wrong_values_name_file_and_layer(
    key: str, value: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        read(tmp_path, key, value)
    assert "record.txt: layer" in str(caught.value)
    assert isinstance(caught.value, AmctError)


def test_a_layer_with_two_entries_is_an_error(tmp_path: Path) -> None:
    entry = f'record {{ key: "head" value {{ {GOOD} }} }}'
    (tmp_path / "record.txt").write_text(entry + entry)
    with pytest.raises(ValueError, match="'head' has two entries"):
        read_record(tmp_path / "record.txt")


def test_caches_of_other_tools_are_passed_over(tmp_path: Path) -> None:
    text = 'record { key: "cache" kv_cache_value { scale: 1 offset: 0 } }'
    (tmp_path / "record.txt").write_text(text)
    assert read_record(tmp_path / "record.txt", prepare_qat_amct(Net())) == {}


def test_a_record_fits_a_prepared_model_only(tmp_path: Path) -> None:
    (tmp_path / "record.txt").write_text("")
    assert read_record(tmp_path / "record.txt") == {}
    with pytest.raises(ModelStateError, match="is not prepared"):
        read_record(tmp_path / "record.txt", Net())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"record {", r"record\.txt:1:\d+"),
        (b"recrod { }", r"record\.txt:1:1 .*recrod"),
        (b'record { key: "a" value { scale_d: "x" } }', r"record\.txt:1:"),
        (b"\xff\xfe", "not UTF-8"),
    ],
)
def test_a_file_that_is_no_record_is_a_runtime_error(
    content: bytes, message: str, tmp_path: Path
) -> None:
    (tmp_path / "record.txt").write_bytes(content)
    with pytest.raises(RuntimeError, match=message) as caught:
        read_record(tmp_path / "record.txt")
    assert isinstance(caught.value, AmctError)


def test_a_missing_file_or_a_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no such record file"):
        read_record(tmp_path / "record.txt")
    with pytest.raises(RuntimeError, match="cannot be read"):
        read_record(tmp_path)
