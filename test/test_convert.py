"""Convert: the integer model computes what the prepared model computes in eval mode."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx import AmctWarning, convert_amct, prepare_qat_amct, summarize
from amct_fx.graph import fx_graph_of
from amct_fx.nn import quantized
from amct_fx.nn.quantized import collect_codes

from .golden import networks as models
from .networks import Attend, Net, NetWithIsland, Pyramid, example

GOLDEN_NETWORKS = [*models.PRUNE, "TinyCNN", "SharedInput", "Dims", "UnusedAnd3d"]


def trained(model: nn.Module, *inputs: Tensor, cfg: str | None = None, steps: int = 3) -> nn.Module:
    prepared = prepare_qat_amct(model.train(), cfg)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        loss(prepared(*inputs)).backward()
        optimizer.step()
    return prepared


def loss(output: Tensor | tuple[Tensor, ...]) -> Tensor:
    outputs = output if isinstance(output, tuple) else (output,)
    return torch.stack([item.square().mean() for item in outputs]).sum()


def assert_close(converted: nn.Module, prepared: nn.Module, *inputs: Tensor) -> None:
    """Compare within what bias rounding and single flipped codes explain."""
    expected, actual = prepared.eval()(*inputs), converted(*inputs)
    if isinstance(expected, Tensor):
        expected, actual = (expected,), (actual,)
    for left, right in zip(expected, actual, strict=True):
        assert (left - right).abs().max() <= 0.01 * left.abs().max() + 1e-6


@pytest.mark.parametrize("name", GOLDEN_NETWORKS)
def test_the_converted_golden_networks_equal_the_prepared_ones(name):
    x = models.example_input(name)
    prepared = trained(models.build(name), x)
    assert_close(convert_amct(prepared), prepared, x)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv1d(4, 6, 3, stride=2),
        nn.Conv2d(4, 6, 3, padding="same", groups=2),
        nn.Conv2d(4, 4, 3, groups=4, bias=False),
        nn.Conv3d(4, 6, 2, dilation=(1, 2, 1)),
        nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1),
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1),
        nn.ConvTranspose2d(4, 6, 3, groups=2),
        nn.Linear(4, 6),
    ],
    ids=lambda layer: repr(layer),
)
@pytest.mark.parametrize("channel_wise", [True, False])
@pytest.mark.parametrize("algo", ["arq_retrain", "ulq_retrain"])
@pytest.mark.filterwarnings("ignore::amct_fx.AmctWarning")
def test_every_layer_type_converts(layer, channel_wise, algo):
    rank = {"1": 1, "2": 2, "3": 3}.get(type(layer).__name__[-2], 0)
    x = torch.randn(2, 4, *[7] * rank, generator=torch.Generator().manual_seed(0))
    cfg = f"retrain_weight_quant_config {{ {algo} {{ channel_wise: {channel_wise} }} }}"
    prepared = trained(nn.Sequential(layer), x, cfg=cfg)
    converted = convert_amct(prepared)
    assert converted[0].weight_codes.dtype == torch.int8
    assert_close(converted, prepared, x)
    assert converted[0].weight.shape == layer.weight.shape


def test_one_learned_scale_of_a_transposed_convolution_counts_output_channels():
    """K of the gradient is C_in/groups times the kernel; spec/quantization.md 2.1 and 2.3."""
    layer = nn.ConvTranspose2d(6, 8, 3, groups=2)
    cfg = "retrain_weight_quant_config { ulq_retrain { channel_wise: false } }"
    prepared = prepare_qat_amct(nn.Sequential(layer), cfg)
    fake_quant = prepared[0].weight_fake_quant
    assert (fake_quant.ch_axis, fake_quant.groups, fake_quant.scale.shape) == (1, 2, (1,))
    weight = prepared[0].weight.detach()
    fake_quant.initialize(weight)
    with torch.no_grad():
        fake_quant.scale.mul_(1.1)  # nothing is clipped
    gradient = torch.randn_like(weight)
    fake_quant(weight).backward(gradient)
    v = weight / fake_quant.scale
    expected = ((v.round() - v) * gradient).sum() / (3 * 9 * 127) ** 0.5
    assert torch.allclose(fake_quant.scale.grad, expected, rtol=1e-4, atol=1e-6)


def test_weight_codes_are_the_trained_ones_up_to_the_sign_of_gamma():
    model = Net()
    with torch.no_grad():
        model.bn.weight[::2] *= -1
    prepared = trained(model, example())
    stem = prepared.stem
    scale, _ = stem.weight_fake_quant.calculate_qparams(stem.weight)
    with torch.no_grad():
        codes = stem.weight_fake_quant(stem.weight) / scale[:, None, None, None]
    assert (codes - codes.round()).abs().max() < 1e-3
    expected = (codes.round() * prepared.bn.weight.sign()[:, None, None, None]).clamp(-128, 127)
    assert torch.equal(convert_amct(prepared).stem.weight_codes.float(), expected)


def test_a_folded_batch_norm_leaves_graph_modules_and_state():
    converted = convert_amct(trained(Net(), example()))
    assert type(converted.bn) is nn.Identity
    assert not any(str(node.target) == "bn" for node in fx_graph_of(converted).nodes)
    assert not any(key.startswith("bn.") for key in converted.state_dict())


@pytest.mark.parametrize("gamma", [0.0, 1e-30, -1.0])
def test_any_gamma_trains_and_converts(gamma):
    model = Net()
    with torch.no_grad():
        model.bn.weight[0] = gamma
    prepared = trained(model, example())
    assert all(torch.isfinite(p).all() for p in prepared.parameters())
    assert_close(convert_amct(prepared), prepared, example())


class Norms(nn.Module):
    """A convolution and a batch norm of every kind."""

    def __init__(self, layer: nn.Module, norm: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x))


@pytest.mark.parametrize(
    ("layer", "norm", "folds"),
    [
        (nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), True),
        (nn.Conv2d(3, 6, 3, bias=False), nn.BatchNorm2d(6, affine=False), True),
        (nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, track_running_stats=False), False),
        (nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6, momentum=None, eps=1e-2), True),
        (nn.ConvTranspose2d(3, 6, 3), nn.BatchNorm2d(6), False),
    ],
    ids=["plain", "affine=False", "no statistics", "momentum=None", "transposed"],
)
def test_batch_norms_fold_where_they_can_and_survive_elsewhere(layer, norm, folds):
    prepared = trained(Norms(layer, norm), example(4))
    converted = convert_amct(prepared)
    assert (type(converted.norm) is nn.Identity) == folds
    if folds:
        assert_close(converted, prepared, example(4))


def test_sync_batch_norm_folds_like_the_batch_norm_it_stands_for():
    model = nn.SyncBatchNorm.convert_sync_batchnorm(Net())
    prepared = prepare_qat_amct(model).eval()
    prepared(example())
    converted = convert_amct(prepared)
    assert type(converted.bn) is nn.Identity
    assert_close(converted, prepared, example())


def test_a_batch_norm_behind_linear_survives():
    prepared = trained(Norms(nn.Linear(8, 6), nn.BatchNorm1d(6)), torch.randn(4, 8))
    converted = convert_amct(prepared)
    assert type(converted.norm) is nn.BatchNorm1d
    assert_close(converted, prepared, torch.randn(4, 8))


def test_a_batch_norm_whose_convolution_has_a_second_reader_survives():
    class Both(Norms):
        def forward(self, x: Tensor) -> Tensor:
            y = self.layer(x)
            return self.norm(y) + y

    prepared = trained(Both(nn.Conv2d(3, 6, 1), nn.BatchNorm2d(6)), example())
    converted = convert_amct(prepared)
    assert type(converted.norm) is nn.BatchNorm2d
    assert_close(converted, prepared, example())


def test_one_batch_norm_behind_two_convolutions_folds_into_both():
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv2d(3, 6, 1)
            self.b = nn.Conv2d(3, 6, 3, padding=1)
            self.norm = nn.BatchNorm2d(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(self.a(x)) + self.norm(self.b(x))

    prepared = trained(Shared(), example())
    converted = convert_amct(prepared)
    assert type(converted.norm) is nn.Identity
    assert_close(converted, prepared, example())


def test_a_functional_batch_norm_folds():
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 6, 1)
            self.bn = nn.BatchNorm2d(6)
            nn.init.uniform_(self.bn.running_mean)

        def forward(self, x: Tensor) -> Tensor:
            bn = self.bn
            y = self.conv(x)
            return F.batch_norm(y, bn.running_mean, bn.running_var, bn.weight, bn.bias, eps=1e-3)

    prepared = trained(Functional(), example())
    converted = convert_amct(prepared)
    assert not any(node.target is F.batch_norm for node in fx_graph_of(converted).nodes)
    assert_close(converted, prepared, example())


def test_a_batch_norm_that_is_not_finite_is_not_folded_and_warned_about():
    prepared = trained(Net(), example())
    prepared.bn.running_var[0] = float("inf")
    prepared.bn.running_mean[1] = float("inf")
    with pytest.warns(AmctWarning, match="stem"):
        converted = convert_amct(prepared)
    assert type(converted.bn) is nn.BatchNorm2d


def test_train_mode_gives_the_same_model_as_eval_mode_and_is_not_changed():
    prepared = trained(Net(), example()).train()
    state = copy.deepcopy(prepared.state_dict())
    from_train = convert_amct(prepared).state_dict()
    assert prepared.training
    assert all(torch.equal(state[key], value) for key, value in prepared.state_dict().items())
    from_eval = convert_amct(prepared.eval()).state_dict()
    assert all(torch.equal(from_train[key], from_eval[key]) for key in from_train)


def test_conversion_uses_the_latest_clips_without_an_eval_forward():
    prepared = trained(Net(), example())
    prepared.eval()(example())
    prepared.train()
    with torch.no_grad():
        prepared.stem.input_fake_quant.clip_max.fill_(6.0)
        prepared.stem.input_fake_quant.clip_min.fill_(-2.0)
    scale = convert_amct(prepared).stem.input_quantize.scale
    assert torch.allclose(scale, torch.tensor(8.0 / 255))


def test_codes_agree_with_the_prepared_model_at_every_quantizer():
    prepared = trained(Net(), example(16)).eval()
    converted = convert_amct(prepared)
    trained_codes: dict[str, Tensor] = {}

    def remember(name: str):
        def hook(quantizer: nn.Module, _inputs: object, output: Tensor) -> None:
            scale, zero_point = quantizer.calculate_qparams()
            trained_codes[name] = torch.round(output / scale) + zero_point

        return hook

    for name, module in prepared.named_modules():
        if name.endswith("input_fake_quant"):
            module.register_forward_hook(remember(name.replace("fake_quant", "quantize")))
    prepared(example(16))
    with collect_codes(converted) as codes:
        converted(example(16))
    assert codes.keys() == trained_codes.keys()
    for name, (code,) in codes.items():
        difference = (code.float() - trained_codes[name]).abs()
        assert (difference == 0).float().mean() >= 0.995
        assert difference.max() <= 2


def test_islands_convert_too():
    model = NetWithIsland()
    prepared = trained(model, example(4))
    converted = convert_amct(prepared)
    assert isinstance(converted.middle.conv, quantized.Conv2d)
    assert type(converted.middle.tail[1]) is nn.Identity
    for batch in (1, 4):
        assert_close(converted, prepared, example(batch))


def test_transformer_layers_convert():
    x = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(0))
    prepared = trained(Attend(), x)
    converted = convert_amct(prepared)
    assert isinstance(converted.encoder.layers[0].linear1, quantized.Linear)
    with torch.no_grad():
        assert_close(converted, prepared, x)


def test_the_converted_model_is_an_ordinary_module():
    prepared = trained(Net(), example())
    converted = convert_amct(prepared)
    x = example()
    expected = converted(x)
    assert isinstance(converted, Net)
    assert not converted.training
    assert not converted._forward_hooks
    assert not converted._forward_pre_hooks
    for clone in (copy.deepcopy(converted), pickle.loads(pickle.dumps(converted))):
        assert torch.equal(clone(x), expected)
    other = convert_amct(trained(Net(), 2 * x))
    other.load_state_dict(converted.state_dict())
    assert torch.equal(other(x), expected)
    compiled = torch.compile(converted, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x), expected)
    exported = torch.export.export(converted, (x,)).module()
    assert torch.allclose(exported(x), expected, atol=0.02)


def test_attributes_that_code_reads_survive_conversion():
    converted = convert_amct(trained(Net(), example()))
    assert converted.stem.out_channels == 8
    assert converted.left.weight.shape == (8, 8, 1, 1)
    assert converted.left.bias.dtype == torch.float32
    assert converted.describe() == "Net with 4 classes"


def test_a16w8_converts_to_int16_codes():
    cfg = "retrain_data_quant_config { ulq_quantize { dst_type: INT16 } }"
    prepared = trained(Net(), example(), cfg=cfg)
    converted = convert_amct(prepared)
    assert converted.stem.input_quantize.zero_point.dtype == torch.int16
    assert_close(converted, prepared, example())


def test_force_fp16_rounds_the_scales_as_the_device_does():
    cfg = "fakequant_precision_mode: FORCE_FP16_QUANT"
    plain, forced = trained(Net(), example()), prepare_qat_amct(Net(), cfg)
    forced.load_state_dict(plain.state_dict())
    assert torch.equal(forced.eval()(example()), plain.eval()(example()))  # training is the same
    plain, forced = convert_amct(plain), convert_amct(forced)
    scale = forced.stem.input_quantize.scale
    assert scale == plain.stem.input_quantize.scale.half().float()
    assert torch.equal(forced.stem.weight_codes, plain.stem.weight_codes)
    deq = (forced.left.weight_scale * forced.left.input_quantize.scale).view(torch.int32)
    assert ((deq + 1) & 0x1FFF <= 2).all()  # 19 bits, up to the rounding of the product
    assert (forced.left.bias_scale.view(torch.int32) & 0x1FFF == 0).all()
    expected = plain(example())
    assert (forced(example()) - expected).abs().max() <= 0.05 * expected.abs().max()


def test_a8w4_stays_within_int4_codes():
    cfg = "retrain_weight_quant_config { arq_retrain { dst_type: INT4 } }"
    prepared = trained(nn.Sequential(nn.Conv2d(4, 6, 3)), example(channels=4), cfg=cfg)
    converted = convert_amct(prepared)
    assert converted[0].weight_codes.abs().max() <= 8
    assert_close(converted, prepared, example(channels=4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_prepare_train_and_convert(dtype):
    x = example().to(dtype)
    prepared = trained(Net().to(dtype), x)
    converted = convert_amct(prepared)
    assert converted(x).dtype == dtype
    expected = prepared.eval()(x)
    assert (converted(x) - expected).abs().max() <= 0.05 * expected.abs().max()


def test_summaries_of_converted_models_name_scales_and_reasons():
    prepared = trained(Net(), example(), cfg='skip_layers: "head"')
    text = str(summarize(convert_amct(prepared)))
    assert "3 of 4 layers quantized" in text
    assert "skip_layers has 'head' (line 1)" in text
    assert "of left" in text


def test_reused_and_tied_layers_convert():
    model = Pyramid()
    prepared = prepare_qat_amct(model, reused="quantize")
    prepared(example())
    converted = convert_amct(prepared)
    assert type(converted.norm) is nn.Identity
    assert isinstance(converted.head, quantized.Conv2d)
    assert_close(converted, prepared, example())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_a_cast_converted_model_keeps_its_scales_in_float32(dtype):
    converted = convert_amct(trained(Net(), example()))
    scale = converted.stem.input_quantize.scale.clone()
    expected = converted(example())
    cast = copy.deepcopy(converted).to(dtype)
    assert torch.equal(cast.stem.input_quantize.scale, scale)
    assert cast.left.weight_scale.dtype == torch.float32
    assert cast.left.weight.dtype == dtype
    output = cast(example().to(dtype))
    assert output.dtype == dtype
    assert (output.float() - expected).abs().max() <= 0.05 * expected.abs().max()


class Gate(nn.Module):
    """Python code that calls a batch norm of its parent."""

    def __init__(self, bn: nn.Module) -> None:
        super().__init__()
        self.bn = bn

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(x) if x.sum() > -1e9 else x


class SharedNorm(nn.Module):
    """Uses a batch norm behind a convolution, in an island, and by its weight."""

    def __init__(self, *, gate: bool) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1)
        self.bn = nn.BatchNorm2d(4)
        self.gate = Gate(self.bn) if gate else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn(self.conv(x))
        return y + self.bn.weight.sum() if self.gate is None else self.gate(torch.relu(y))


@pytest.mark.parametrize("gate", [True, False])
def test_a_batch_norm_that_something_else_needs_is_not_folded(gate):
    prepared = trained(SharedNorm(gate=gate), example(), steps=9)
    converted = convert_amct(prepared)
    assert type(converted.bn) is nn.BatchNorm2d
    assert_close(converted, prepared, example())
