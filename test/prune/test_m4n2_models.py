"""2:4 sparsity from a configuration: which layers, with which quantizers, until the ONNX file."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from amct_fx import (
    AmctWarning,
    convert_amct,
    load_checkpoint,
    prepare_qat_amct,
    save_checkpoint,
    summarize,
)
from amct_fx.nn import qat, quantized
from amct_fx.prune.functional import m4n2_mask

M4N2 = "prune_config {{ n_out_of_m_pruner {{ l1_selective_prune {{ update_freq: {} }} }} }}\n"
ONCE = M4N2.format(0)
OFTEN = M4N2.format(2)
INT8 = "retrain_data_quant_config { ulq_quantize { dst_type: INT8 } }\n"
SAMPLES = Path(__file__).parents[1] / "config" / "samples"


class Net(nn.Module):
    """One layer of every kind that 2:4 treats in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.norm = nn.BatchNorm2d(16)
        self.dw = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.grouped = nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.up = nn.ConvTranspose2d(16, 16, 2)
        self.up_grouped = nn.ConvTranspose2d(16, 16, 2, groups=4)
        self.two = nn.Conv2d(16, 2, 1)
        self.six = nn.Conv2d(2, 6, 1)
        self.wide = nn.Conv2d(6, 6, 1, padding=1, padding_mode="circular")
        self.fc = nn.Linear(96, 10)

    def forward(self, x):
        x = torch.relu(self.norm(self.stem(x)))
        x = self.up_grouped(self.up(self.grouped(self.dw(x))))
        x = self.wide(self.six(self.two(x)))
        return self.fc(torch.nn.functional.adaptive_avg_pool2d(x, 4).flatten(1))


DENSITIES = {
    "stem": 2 / 3,
    "dw": 1,
    "grouped": 0.5,
    "up": 0.5,
    "up_grouped": 0.5,
    "two": 0.5,
    "six": 1,
    "wide": 2 / 3,
    "fc": 0.5,
}


class SampleNet(nn.Module):
    """Has the layer names of the sample files."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 8, 3)
        self.bn = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3)
        self.fc = nn.Linear(8, 4)

    def forward(self, x):
        x = torch.relu(self.bn(self.conv1(x)))
        return self.fc(torch.relu(self.conv2(x)).mean((2, 3)))


def images() -> torch.Tensor:
    return torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def fresh(kind: type[nn.Module] = Net, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def train(model: nn.Module, steps: int) -> list[float]:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(images()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mask_of(layer: nn.Module) -> torch.Tensor:
    return layer.parametrizations.weight[0].mask


@pytest.mark.parametrize("cfg", [ONCE, OFTEN + INT8], ids=["prune only", "with INT8"])
def test_every_layer_has_the_density_of_its_kind(cfg):
    model = prepare_qat_amct(fresh(), cfg)
    densities = {name: mask_of(getattr(model, name)).float().mean().item() for name in DENSITIES}
    assert densities == pytest.approx(DENSITIES)
    train(model, 2)
    assert all(
        (getattr(model, name).parametrizations.weight.original.grad[mask_of(layer) == 0] == 0).all()
        for name in DENSITIES
        for layer in [getattr(model, name)]
    )


def test_a_file_that_only_prunes_quantizes_nothing():
    model = prepare_qat_amct(fresh(), ONCE)
    assert not any(isinstance(module, qat.QATLayer) for module in model.modules())
    reasons = {row.name: row.reason for row in summarize(model).rows}
    assert reasons["fc"] == "quantization is off: the configuration only prunes"


def test_a_prune_only_model_converts_to_plain_layers_with_zeros():
    model = prepare_qat_amct(fresh(), OFTEN)
    train(model, 3)
    expected = model.eval()(images())
    converted = convert_amct(model)
    assert type(converted.fc) is nn.Linear
    assert not any(parametrize.is_parametrized(module) for module in converted.modules())
    assert torch.equal(converted(images()), expected)
    assert (converted.fc.weight == 0).float().mean() == 0.5
    assert converted.fc.weight.is_leaf
    assert not converted.fc._forward_pre_hooks
    assert torch.equal(model(images()), expected)
    copied = pickle.loads(pickle.dumps(converted))
    assert torch.equal(copied(images()), expected)


def test_arq_quantizes_the_masked_weight_and_the_codes_keep_its_zeros():
    model = prepare_qat_amct(fresh(), OFTEN + INT8)
    train(model, 3)
    weight, mask = model.fc.parametrizations.weight.original, mask_of(model.fc)
    assert model.fc.weight_scale().item() == pytest.approx(
        (weight * mask).abs().max().item() / 127, rel=0.01
    )
    expected = model.eval()(images())
    converted = convert_amct(model)
    assert isinstance(converted.fc, quantized.Linear)
    assert (converted.fc.weight_codes[mask == 0] == 0).all()
    assert (converted(images()) - expected).abs().max() <= 0.02 * expected.abs().max()


def test_a_mask_may_stand_on_a_layer_that_stays_float():
    model = prepare_qat_amct(fresh(), ONCE + INT8)
    assert not isinstance(model.wide, qat.QATLayer)  # circular padding
    assert mask_of(model.wide).float().mean().item() == pytest.approx(2 / 3)


@pytest.mark.parametrize("cfg", [OFTEN, OFTEN + INT8], ids=["prune only", "with INT8"])
def test_training_resumes_bit_for_bit_from_a_state_dict(cfg, tmp_path):
    model = prepare_qat_amct(fresh(), cfg)
    train(model, 3)
    save_checkpoint(model, tmp_path / "half.pt")
    resumed = prepare_qat_amct(fresh(seed=1), cfg)
    resumed.load_state_dict(model.state_dict())
    restored, _ = load_checkpoint(tmp_path / "half.pt", fresh(seed=2))
    assert train(model, 3) == train(resumed, 3) == train(restored, 3)
    for other in (resumed, restored):
        assert all(torch.equal(model.state_dict()[k], v) for k, v in other.state_dict().items())
    converted = convert_amct(model)
    save_checkpoint(converted, tmp_path / "done.pt")
    again, _ = load_checkpoint(tmp_path / "done.pt", fresh(seed=3))
    assert torch.equal(again(images()), converted(images()))


@pytest.mark.parametrize("cfg", [OFTEN, OFTEN + INT8], ids=["prune only", "with INT8"])
@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_of_a_prepared_model_go_on(cfg, duplicate):
    model = prepare_qat_amct(fresh(), cfg)
    train(model, 1)
    twin = duplicate(model)
    assert isinstance(twin, Net)
    assert train(twin, 2) == train(model, 2)


def test_a_float_checkpoint_loads_by_name():
    other = fresh(seed=5)
    model = prepare_qat_amct(fresh(), ONCE + INT8)
    assert model.load_state_dict(other.state_dict(), strict=False).unexpected_keys == []
    assert torch.equal(mask_of(model.up).bool(), m4n2_mask(other.up.weight, axis=0))


def test_a_calibrated_model_compiles_as_one_graph_and_exports():
    model = prepare_qat_amct(fresh(SampleNet), OFTEN + INT8)
    model(images())
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        assert torch.allclose(compiled(images()), twin(images()), atol=1e-5)
    assert model.conv1.parametrizations.weight[0].counter.item() == 3
    program = torch.export.export(model.eval(), (images(),), strict=False)
    assert torch.allclose(program.module()(images()), model(images()), atol=1e-5)


def test_two_models_with_equal_layer_names_do_not_share_masks():
    first, second = (prepare_qat_amct(fresh(seed=seed), OFTEN) for seed in (0, 1))
    before = {key: value.clone() for key, value in second.state_dict().items()}
    train(first, 2)
    assert all(torch.equal(before[key], value) for key, value in second.state_dict().items())


@pytest.mark.parametrize(
    ("sample", "quantized_layers", "frequencies"),
    [
        ("selective_prune", [], {"conv2": 1, "fc": 0}),
        ("compressed2", ["conv1", "conv2", "fc"], {"conv1": 1, "conv2": 1, "fc": 0}),
    ],
)
@pytest.mark.filterwarnings("ignore::amct_fx.AmctWarning")
def test_the_sample_files_prune_what_they_say(sample, quantized_layers, frequencies):
    model = prepare_qat_amct(fresh(SampleNet), SAMPLES / f"{sample}.cfg")
    named = dict(model.named_modules())
    assert [name for name, m in named.items() if isinstance(m, qat.QATLayer)] == quantized_layers
    found = {
        name: module.parametrizations.weight[0].update_freq
        for name, module in named.items()
        if parametrize.is_parametrized(module)
    }
    assert found == frequencies
    train(model, 2)
    expected = model.eval()(images())
    converted = convert_amct(model)(images())
    assert (converted - expected).abs().max() <= 0.02 * expected.abs().max()


@pytest.mark.filterwarnings("ignore")
def test_the_integer_model_with_zeros_runs_in_onnxruntime(tmp_path):
    ort = pytest.importorskip("onnxruntime")
    model = prepare_qat_amct(fresh(SampleNet), OFTEN + INT8)
    train(model, 2)
    converted = convert_amct(model)
    path = tmp_path / "model.onnx"
    torch.onnx.export(converted, (images(),), path, dynamo=False, opset_version=17)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: images().numpy()})
    expected = converted(images()).detach().numpy()
    assert np.abs(output - expected).max() <= 0.01 * np.abs(expected).max()


def test_a_prepared_or_converted_model_is_refused_by_name():
    prepared = prepare_qat_amct(fresh(), ONCE)
    with pytest.raises(RuntimeError, match="already prepared"):
        prepare_qat_amct(prepared, ONCE)
    converted = convert_amct(prepared)
    with pytest.raises(RuntimeError, match="already converted"):
        convert_amct(converted)
    with pytest.raises(RuntimeError, match="not prepared"):
        convert_amct(fresh())


def test_a_converted_prune_only_model_may_be_prepared_for_quantization():
    converted = convert_amct(prepare_qat_amct(fresh(), ONCE))
    model = prepare_qat_amct(converted, INT8)
    assert isinstance(model.fc, qat.Linear)


def test_an_override_asks_for_layers_that_amct_does_not_prune():
    class One(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Conv1d(4, 4, 1)
            self.b = nn.Linear(4, 2)

        def forward(self, x):
            return self.b(self.a(x).mean(-1))

    override = f'override_layer_configs {{ layer_name: "a" {ONCE} }}'
    assert not parametrize.is_parametrized(prepare_qat_amct(One(), ONCE).a)
    assert parametrize.is_parametrized(prepare_qat_amct(One(), ONCE + override).a)
    with pytest.raises(ValueError, match="'a' cannot be pruned: 2:4 pruning is for Conv2d"):
        prepare_qat_amct(One(), ONCE + override, mode="amct")


BAD = [
    ('override_layer_configs { layer_name: "stm" %s }', "no layer 'stm'; did you mean 'stem'"),
    (
        'override_layer_configs { layer_name: "norm" %s }',
        "'norm' cannot be pruned: 2:4 pruning is for .* not for BatchNorm2d$",
    ),
    ('regular_prune_skip_layers: "stm" %s', "'stm', which is not in the model; did you mean"),
    (
        "regular_prune_skip_types: 'Conv2d' regular_prune_skip_types: 'Linear' "
        "regular_prune_skip_types: 'ConvTranspose2d' %s",
        "no layer is left to be pruned",
    ),
    ("prune_config { } ", "algorithm|pruner"),
    ('override_layer_types { layer_type: "LSTM" %s }', "LSTM"),
]


@pytest.mark.parametrize(("cfg", "text"), BAD)
def test_a_configuration_that_cannot_be_is_refused_and_the_model_stays_as_it_was(cfg, text):
    model = fresh()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with pytest.raises(ValueError, match=text):
        prepare_qat_amct(model, cfg.replace("%s", ONCE), inplace=True)
    assert type(model) is Net
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_a_skip_entry_for_a_layer_that_is_never_pruned_is_only_a_warning():
    with pytest.warns(AmctWarning, match="'norm', which has no effect"):
        prepare_qat_amct(fresh(), f'regular_prune_skip_layers: "norm" {ONCE}')


def test_an_option_that_does_not_exist_is_named():
    with pytest.raises(TypeError, match="did you mean 'importance'"):
        prepare_qat_amct(fresh(), ONCE, importanc="mean")
    with pytest.raises(ValueError, match="mode must be 'native' or 'amct'"):
        prepare_qat_amct(fresh(), ONCE, mode="torch")


def test_saving_with_torch_keeps_the_model_whole():
    model = prepare_qat_amct(fresh(), OFTEN + INT8)
    train(model, 1)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded.eval()(images()), model.eval()(images()))
