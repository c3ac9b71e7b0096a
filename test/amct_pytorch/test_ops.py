"""Single operators with quantization-aware training."""

from __future__ import annotations

import copy
import inspect
import pickle
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from torch import Tensor, nn

import amct_fx.amct_pytorch as amct
from amct_fx import convert_amct, export_onnx
from amct_fx.errors import AmctError
from amct_fx.observers.functional import (
    arq_fake_quantize,
    arq_qparams,
    ifmr_range,
    ulq_fake_quantize,
    ulq_qparams,
)

#: Class, arguments of the float layer, shape of an input, ch_axis and groups of the weight.
CONVOLUTIONS: list[Any] = [
    (amct.Conv1dQAT, (4, 6, 3), {"groups": 2}, (2, 4, 9), 0, 1),
    (amct.Conv2dQAT, (4, 6, 3), {"padding": 1, "bias": False}, (2, 4, 5, 5), 0, 1),
    (amct.Conv3dQAT, (2, 4, 3), {}, (2, 2, 4, 5, 5), 0, 1),
    (amct.ConvTranspose1dQAT, (4, 6, 3), {"stride": 2, "output_padding": 1}, (2, 4, 5), 1, 1),
    (amct.ConvTranspose2dQAT, (4, 6, 3), {"groups": 2, "stride": 2}, (2, 4, 5, 5), 1, 2),
]
LAYERS: list[Any] = [
    *CONVOLUTIONS,
    (amct.LinearQAT, (4, 3), {}, (2, 5, 4), None, 1),
    (amct.LSTMQAT, (4, 3), {"batch_first": True}, (2, 5, 4), 0, 1),
    (amct.GRUQAT, (4, 3), {}, (5, 2, 4), 0, 1),
]
WEIGHTED = [pytest.param(*case, id=case[0].__name__) for case in LAYERS]
RECURRENT = (amct.LSTMQAT, amct.GRUQAT)


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output


def example(shape: tuple[int, ...]) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(shape)


def test_all_operators_are_there() -> None:
    names = {name for name in amct.__all__ if name.endswith("QAT")}
    assert {case[0].__name__ for case in LAYERS} | {"MatMulQAT"} == names


@pytest.mark.parametrize(("cls", "args", "kwargs", "shape", "axis", "groups"), WEIGHTED)
class TestEveryOperator:
    def test_the_signature_is_torchs_and_config(
        self, cls: Any, args: Any, kwargs: Any, shape: Any, axis: Any, groups: Any
    ) -> None:
        ours = list(inspect.signature(cls).parameters)
        theirs = list(inspect.signature(cls.float_class).parameters)
        assert [name for name in ours if name != "config"] == theirs
        assert "config" in ours

    def test_the_output_is_the_float_operator_on_quantized_tensors(
        self, cls: Any, args: Any, kwargs: Any, shape: Any, axis: Any, groups: Any
    ) -> None:
        if cls in RECURRENT:
            pytest.skip("its formula is tested in test/nn/test_rnn.py")
        layer, x = cls(*args, **kwargs), example(shape)
        plain = cls.float_class(*args, **kwargs)
        plain.load_state_dict(layer.state_dict(), strict=False)
        with torch.no_grad():
            weight = arq_fake_quantize(layer.weight, ch_axis=axis, groups=groups)
            plain.weight.copy_(weight)
            expected = plain(ulq_fake_quantize(x, *ifmr_range(x)))
        assert torch.equal(layer(x), expected)

    def test_from_float_shares_parameters_and_keeps_every_attribute(
        self, cls: Any, args: Any, kwargs: Any, shape: Any, axis: Any, groups: Any
    ) -> None:
        source = cls.float_class(*args, **kwargs).eval()
        source.tag = "mine"
        config = {"retrain_data_config": {"batch_num": 2}}
        kept = copy.deepcopy(config)
        layer = cls.from_float(source, config)
        assert config == kept
        assert type(source) is cls.float_class
        assert layer.tag == "mine"
        assert not any(module.training for module in layer.modules())
        for name, parameter in source.named_parameters():
            assert layer.get_parameter(name) is parameter
        for name in ("stride", "padding", "output_padding", "dilation", "groups", "hidden_size"):
            assert getattr(layer, name, None) == getattr(source, name, None)
        assert layer.input_fake_quant.batch_num == 2

    def test_the_weights_are_never_overwritten(
        self, cls: Any, args: Any, kwargs: Any, shape: Any, axis: Any, groups: Any
    ) -> None:
        layer = cls(*args, **kwargs)
        before = {name: p.clone() for name, p in layer.named_parameters() if "clip" not in name}
        for mode in (True, False, True):
            layer.train(mode)(example(shape))
        assert all(torch.equal(layer.get_parameter(name), p) for name, p in before.items())

    @pytest.mark.parametrize("algorithm", ["arq_retrain", "ulq_retrain"])
    def test_everything_learns(
        self, cls: Any, args: Any, kwargs: Any, shape: Any, axis: Any, groups: Any, algorithm: str
    ) -> None:
        config = {"retrain_weight_config": {"weights_retrain_algo": algorithm}}
        layer = cls(*args, **kwargs, config=config)
        first(layer(example(shape))).square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None, name
            if not name.startswith("hidden_fake_quant"):
                assert float(parameter.grad.abs().sum()) > 0, name
        assert any("weight" in n and "scale" in n for n, _ in layer.named_parameters()) == (
            algorithm == "ulq_retrain"
        )

    def test_a_disabled_operator_is_the_float_layer(
        self, cls: Any, args: Any, kwargs: Any, shape: Any, axis: Any, groups: Any
    ) -> None:
        source = cls.float_class(*args, **kwargs)
        layer = cls.from_float(source, {"retrain_enable": False})
        x = example(shape)
        assert torch.equal(first(layer(x)), first(source(x)))
        assert list(layer.state_dict()) == list(source.state_dict())

    def test_a_state_dict_restores_everything(
        self, cls: Any, args: Any, kwargs: Any, shape: Any, axis: Any, groups: Any
    ) -> None:
        layer, other, x = cls(*args, **kwargs), cls(*args, **kwargs), example(shape)
        layer(x)
        other.load_state_dict(layer.state_dict())
        assert torch.equal(first(other.eval()(x)), first(layer.eval()(x)))

    def test_copies_and_pickles_are_independent(
        self, cls: Any, args: Any, kwargs: Any, shape: Any, axis: Any, groups: Any
    ) -> None:
        layer, x = cls(*args, **kwargs), example(shape)
        expected = first(layer(x)).detach()
        for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
            assert type(twin) is cls
            assert torch.allclose(first(twin.eval()(x)), expected, atol=1e-6)
            assert {id(p) for p in twin.parameters()}.isdisjoint(map(id, layer.parameters()))

    def test_the_converted_operator_computes_the_same(
        self, cls: Any, args: Any, kwargs: Any, shape: Any, axis: Any, groups: Any
    ) -> None:
        model, x = nn.ModuleDict({"op": cls(*args, **kwargs)}), example(shape)
        with torch.no_grad():
            for _ in range(2):
                expected = first(model["op"].eval()(x))
            output = first(convert_amct(model)["op"](x))
        assert (output - expected).abs().max() <= 0.02 * expected.abs().max()

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_works(
        self, cls: Any, args: Any, kwargs: Any, shape: Any, axis: Any, groups: Any, dtype: Any
    ) -> None:
        layer = cls(*args, **kwargs, dtype=dtype)
        output = first(layer(example(shape).to(dtype)))
        assert output.dtype == dtype
        assert torch.isfinite(output).all()


def test_an_int16_operator_has_int16_offsets() -> None:
    layer = amct.Conv2dQAT(3, 2, 1, config={"retrain_data_config": {"dst_type": "INT16"}})
    layer(example((1, 3, 4, 4)))
    assert layer.acts_offset_deploy.dtype == torch.int16
    assert layer.input_fake_quant.num_bits == 16


def test_amcts_names_hold_the_values_of_the_moment() -> None:
    layer = amct.Conv2dQAT(3, 2, 1)
    x = example((4, 3, 4, 4))
    layer(x)
    scale, offset = ulq_qparams(*ifmr_range(x))
    assert layer.acts_scale.tolist() == [scale.item()]
    assert layer.acts_offset_deploy.tolist() == [offset.item()]
    assert layer.acts_offset_deploy.dtype == torch.int8
    assert torch.equal(layer.wts_scales, arq_qparams(layer.weight.detach(), ch_axis=0))
    assert layer.wts_offsets_deploy.tolist() == [0, 0]
    assert layer.wts_offsets_deploy.dtype == torch.int8
    assert layer.cur_batch.item() == 1
    assert layer.cur_batch.dtype == torch.int64
    assert {"acts_scale", "wts_scales", "cur_batch"} < set(layer.state_dict())
    with torch.no_grad():
        layer.weight.mul_(2)
    assert torch.equal(layer.wts_scales, arq_qparams(layer.weight.detach(), ch_axis=0))
    with pytest.raises(AttributeError, match="acts_offset"):
        _ = layer.acts_offset


@pytest.mark.parametrize(("upper", "lower", "divisor"), [(2.0, -1.0, 127), (1.0, -2.0, 128)])
def test_a_symmetric_range_has_offset_0(upper: float, lower: float, divisor: int) -> None:
    data = {"asymmetric": False, "clip_max": upper, "clip_min": lower}
    layer = amct.LinearQAT(3, 2, config={"retrain_data_config": data})
    x = example((4, 3))
    layer(x)
    assert layer.acts_scale.item() == pytest.approx(2 / divisor)
    assert layer.acts_offset_deploy.item() == 0
    quantized = layer.input_fake_quant(x)
    clips = torch.tensor([upper]), torch.tensor([lower])
    assert torch.equal(quantized, ulq_fake_quantize(x, *clips, symmetric=True))


def test_fixed_min_is_false_without_a_graph() -> None:
    layer = amct.Conv2dQAT(3, 2, 1)
    layer(example((1, 3, 4, 4)).relu())
    assert layer.input_fake_quant.clip_min.item() < 0
    layer = amct.Conv2dQAT(3, 2, 1, config={"retrain_data_config": {"fixed_min": True}})
    layer(example((1, 3, 4, 4)).relu())
    assert layer.input_fake_quant.clip_min.item() == 0


DATA, WEIGHT = "retrain_data_config", "retrain_weight_config"


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        ([], TypeError, "config must be a dict, not list"),
        ({"retrain_enabled": True}, ValueError, "unknown key 'retrain_enabled'; did you mean"),
        ({DATA: {"dst_typ": "INT8"}}, ValueError, "did you mean 'dst_type'"),
        ({WEIGHT: {"fixed_min": True}}, ValueError, "unknown key 'fixed_min'"),
        ({DATA: 3}, TypeError, r"config\['retrain_data_config'\] must be a dict"),
        ({"retrain_enable": 1}, TypeError, "must be bool, not 1"),
        ({DATA: {"dst_type": "INT4"}}, ValueError, "must be 'INT8' or 'INT16', not 'INT4'"),
        ({DATA: {"batch_num": 0}}, ValueError, "at least 1, not 0"),
        ({DATA: {"batch_num": True}}, ValueError, "must be int, not True"),
        ({DATA: {"batch_num": 1.0}}, ValueError, "must be int"),
        ({DATA: {"fixed_min": 1}}, ValueError, "must be bool"),
        ({DATA: {"fixed_min": None}}, ValueError, "must be bool"),
        ({DATA: {"clip_max": 1, "clip_min": -1.0}}, ValueError, "must be float, not 1"),
        ({DATA: {"clip_max": 1.0}}, ValueError, "gives clip_max but not clip_min"),
        ({DATA: {"clip_min": -1.0}}, ValueError, "gives clip_min but not clip_max"),
        ({DATA: {"clip_max": -1.0, "clip_min": -2.0}}, ValueError, "clip_max"),
        ({DATA: {"clip_max": 1.0, "clip_min": 0.0}}, ValueError, "clip_min"),
        ({DATA: {"clip_max": float("inf"), "clip_min": -1.0}}, ValueError, "clip_max"),
        ({DATA: {"asymmetric": "yes"}}, ValueError, "must be bool"),
        ({WEIGHT: {"dst_type": "INT4"}}, ValueError, "must be 'INT8', not 'INT4'"),
        ({WEIGHT: {"weights_retrain_algo": "arq"}}, ValueError, "must be 'arq_retrain' or"),
        ({WEIGHT: {"channel_wise": 0}}, ValueError, "must be bool"),
    ],
)
def test_wrong_configurations_are_refused(config: Any, kind: type[Exception], message: str) -> None:
    for make in (
        lambda: amct.Conv2dQAT(3, 2, 1, config=config),
        lambda: amct.LSTMQAT.from_float(nn.LSTM(3, 2), config),
    ):
        with pytest.raises(kind, match=message) as caught:
            make()
        assert isinstance(caught.value, AmctError)


def test_a_linear_has_one_scale() -> None:
    assert amct.LinearQAT(3, 2, config={WEIGHT: {"channel_wise": False}}).wts_scales.shape == (1,)
    with pytest.raises(RuntimeError, match="a Linear has one weight scale"):
        amct.LinearQAT(3, 2, config={WEIGHT: {"channel_wise": True}})
    per_tensor = amct.Conv2dQAT(3, 2, 1, config={WEIGHT: {"channel_wise": False}})
    assert per_tensor.wts_scales.shape == (1,)


@pytest.mark.parametrize("algorithm", ["ulq_retrain", "ulq_quantize"])
def test_both_spellings_of_weight_ulq_are_taken(algorithm: str) -> None:
    layer = amct.Conv2dQAT(3, 2, 1, config={WEIGHT: {"weights_retrain_algo": algorithm}})
    assert isinstance(layer.weight_fake_quant.scale, nn.Parameter)


@pytest.mark.parametrize("case", LAYERS, ids=lambda case: case[0].__name__)
def test_a_layer_of_another_class_is_both_errors(case: Any) -> None:
    class Own(case[0].float_class):  # type: ignore[misc,name-defined]
        pass

    for kind in (TypeError, RuntimeError):
        for wrong in (nn.ReLU(), Own(*case[1], **case[2]), case[0](*case[1], **case[2]), 3):
            with pytest.raises(kind, match=r"from_float takes a torch\.nn\."):
                case[0].from_float(wrong)


def test_other_paddings_are_refused_where_they_are_quantized() -> None:
    options = {"padding": 1, "padding_mode": "reflect"}
    with pytest.raises(ValueError, match="padding_mode 'reflect'"):
        amct.Conv2dQAT(3, 2, 3, **options)
    off = {"retrain_enable": False}
    x = example((1, 3, 4, 4))
    layer = amct.Conv2dQAT(3, 2, 3, **options, config=off)
    plain = nn.Conv2d(3, 2, 3, **options)  # type: ignore[arg-type]
    plain.load_state_dict(layer.state_dict())
    assert torch.equal(layer(x), plain(x))
    for wrong in ({"padding": 1, "padding_mode": "replicate"}, {"dilation": (2, 1, 1)}):
        with pytest.raises(RuntimeError, match="Conv3dQAT takes padding_mode 'zeros'"):
            amct.Conv3dQAT(3, 2, 3, **wrong, config=off)
    amct.Conv3dQAT(3, 2, 3, dilation=(1, 2, 2))


@pytest.mark.parametrize("case", CONVOLUTIONS, ids=lambda case: case[0].__name__)
def test_an_input_without_a_batch_axis_is_refused(case: Any) -> None:
    layer = case[0](*case[1], **case[2])
    with pytest.raises(RuntimeError, match="batch first"):
        layer(example(case[3])[0])


def test_two_layers_of_an_lstm_are_refused() -> None:
    with pytest.raises(ValueError, match="num_layers=2"):
        amct.LSTMQAT(3, 2, num_layers=2)
    amct.LSTMQAT(3, 2, num_layers=2, config={"retrain_enable": False})


def test_a_disabled_operator_converts_to_the_float_layer() -> None:
    off = {"retrain_enable": False}
    model = nn.Sequential(amct.LinearQAT(3, 3), nn.ReLU(), amct.LinearQAT(3, 2, config=off))
    model(example((4, 3)))
    converted = convert_amct(model)
    assert type(converted[2]) is nn.Linear
    assert converted[0].weight_codes.dtype == torch.int8


class Written(nn.Module):
    """A model that is written with quantized operators."""

    def __init__(self, *, recurrent: bool) -> None:
        super().__init__()
        lstm = {"retrain_enable": recurrent}
        self.conv = amct.Conv2dQAT(3, 8, 3, padding=1)
        self.up = amct.ConvTranspose2dQAT(8, 4, 2, stride=2)
        self.fc = amct.LinearQAT(4, 6)
        self.rnn = amct.LSTMQAT(6, 4, batch_first=True, config=lstm)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.up(torch.relu(self.conv(x)))).mean(3)
        return self.rnn(self.fc(x.transpose(1, 2)[:, :3]))[0]


@pytest.mark.parametrize("format", ["qdq", "qdq_pairs", "fake_quant", "ascend"])
def test_a_model_of_operators_goes_into_every_file(format: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    # amct_onnx takes no quantized LSTM
    model, x = Written(recurrent=format != "qdq_pairs"), example((2, 3, 8, 8))
    model(x)
    expected = model.eval()(x).detach()
    path = str(tmp_path / "model.onnx")
    export_onnx(model, x, path, format=format, input_names=["x"])
    graph = onnx.load(path).graph
    if format == "ascend":
        names = {node.name for node in graph.node if node.op_type == "AscendQuant"}
        assert names == {"conv.quant", "up.quant", "fc.quant"}
        return
    (output,) = onnxruntime.InferenceSession(path).run(None, {"x": x.numpy()})
    assert abs(output - expected.numpy()).max() <= 0.02 * float(expected.abs().max())


class TestMatMul:
    @pytest.mark.parametrize("axes", [2, 3, 6])
    def test_both_inputs_are_quantized_symmetrically(self, axes: int) -> None:
        lead = (2,) * (axes - 2)
        a, b = example((*lead, 3, 4)), 3 * example((*lead, 4, 5))
        matmul = amct.MatMulQAT()
        quantized = [ulq_fake_quantize(t, *ifmr_range(t), symmetric=True) for t in (a, b)]
        assert torch.equal(matmul(a, b), torch.matmul(*quantized))
        assert matmul.other_fake_quant.calculate_qparams()[1].item() == 0

    def test_it_learns_both_ranges(self) -> None:
        matmul = amct.MatMulQAT({"retrain_data_config": {"clip_max": 1.0, "clip_min": -1.0}})
        matmul(example((3, 4)), example((4, 5))).sum().backward()
        assert all(p.grad is not None for p in matmul.parameters())
        assert len(list(matmul.parameters())) == 4

    def test_disabled_it_is_matmul(self) -> None:
        a, b = example((3, 4)), example((4, 5))
        assert torch.equal(amct.MatMulQAT({"retrain_enable": False})(a, b), a @ b)

    def test_it_converts_and_exports(self, tmp_path: Path) -> None:
        class Scores(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.project = amct.LinearQAT(4, 4)
                self.matmul = amct.MatMulQAT()
                self.off = amct.MatMulQAT({"retrain_enable": False})

            def forward(self, q: Tensor, k: Tensor) -> Tensor:
                scores = self.matmul(self.project(q), k.transpose(-1, -2))
                return self.off(scores, k)

        model, q, k = Scores(), example((2, 3, 4)), 2 * example((2, 5, 4))
        model(q, k)
        expected = model.eval()(q, k).detach()
        converted = convert_amct(model)
        assert torch.allclose(converted(q, k), expected, atol=0.02 * float(expected.abs().max()))
        assert type(converted.matmul).__name__ == "QuantizedMatMul"
        path = str(tmp_path / "scores.onnx")
        export_onnx(converted, (q, k), path, input_names=["q", "k"])
        session = onnxruntime.InferenceSession(path)
        (output,) = session.run(None, {"q": q.numpy(), "k": k.numpy()})
        assert abs(output - converted(q, k).numpy()).max() < 0.02 * float(expected.abs().max())
        assert [n.op_type for n in onnx.load(path).graph.node].count("QuantizeLinear") == 3

    @pytest.mark.parametrize("shape", [(4,), (1, 1, 1, 1, 1, 3, 4)])
    def test_other_ranks_are_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(RuntimeError, match="2 to 6 axes"):
            amct.MatMulQAT()(example(shape), example((4, 5)))

    @pytest.mark.parametrize(
        "config",
        [{WEIGHT: {}}, {DATA: {"asymmetric": True}}, {DATA: {"dst_type": "INT16"}}],
    )
    def test_other_settings_are_refused(self, config: Any) -> None:
        with pytest.raises(ValueError, match="config"):
            amct.MatMulQAT(config)
