"""Channel pruning from a configuration: masked while training, gone after convert, with INT8."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amct_fx import (
    AmctWarning,
    convert_amct,
    load_checkpoint,
    prepare_qat_amct,
    prune_plan,
    save_checkpoint,
    summarize,
)
from amct_fx.nn import qat
from amct_fx.prune import PrunePlan, kept_indices
from amct_fx.pruning import current_plan
from test.prune import networks as nets

FILTER = """prune_config { filter_pruner {
    balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }
"""
INT8 = "retrain_data_quant_config { ulq_quantize { } }\n"
LEARNED = INT8 + "retrain_weight_quant_config { ulq_retrain { channel_wise: true } }\n"
M4N2 = """override_layer_configs { layer_name: "c3"
    prune_config { n_out_of_m_pruner { l1_selective_prune { update_freq: 2 } } } }
"""
SAMPLES = Path(__file__).parents[1] / "config" / "samples"
IMAGE, TOKENS = (2, 3, 16, 16), (2, 5, 16)
NETWORKS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (nets.residual, IMAGE),
    (nets.dense, IMAGE),
    (nets.concat, IMAGE),
    (nets.shufflenet, IMAGE),
    (nets.inverted, IMAGE),
    (nets.depthwise2, IMAGE),
    (nets.squeeze_excite, IMAGE),
    (nets.grouped, IMAGE),
    (nets.unet, IMAGE),
    (nets.flattened, IMAGE),
    (nets.shared, IMAGE),
    (nets.tied, IMAGE),
    (nets.transformer, TOKENS),
]


class Chain(nn.Module):
    """Has ops that are not zero at zero, a batch norm, a residual and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(3, 16, 3)
        self.norm = nn.BatchNorm2d(16)
        self.c2 = nn.Conv2d(16, 32, 3, padding=1)
        self.c3 = nn.Conv2d(32, 24, 3, padding=1)
        self.c4 = nn.Conv2d(24, 32, 1)
        self.fc = nn.Linear(32, 10)

    def forward(self, x):
        x = self.c2(torch.sigmoid(self.norm(self.c1(x))))
        x = x + self.c4(F.silu(self.c3(x)))
        return self.fc(torch.relu(x).mean((2, 3)))


class SampleNet(nn.Module):
    """Has the layer names of the sample files."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 32, 3)
        self.bn = nn.BatchNorm2d(32)
        self.conv2 = nn.Conv2d(32, 48, 3)
        self.conv3 = nn.Conv2d(48, 64, 3)
        self.conv4 = nn.Conv2d(64, 32, 1)
        self.up = nn.ConvTranspose2d(32, 16, 2)
        self.fc = nn.Linear(16, 4)

    def forward(self, x):
        x = torch.relu(self.bn(self.conv1(x)))
        x = self.conv4(torch.relu(self.conv3(torch.relu(self.conv2(x)))))
        return self.fc(self.up(x).mean((2, 3)))


def images(shape: tuple[int, ...] = (4, 3, 8, 8)) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def fresh(kind: Callable[[], nn.Module] = Chain, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return kind()


def prepare(kind: Callable[[], nn.Module], cfg: str, x: torch.Tensor, **options) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", AmctWarning)
        return prepare_qat_amct(fresh(kind), cfg, x, **options)


def train(model: nn.Module, steps: int, x: torch.Tensor, **options: float) -> list[float]:
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), **{"lr": 0.01, **options})
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def size(model: nn.Module) -> int:
    return sum(tensor.numel() for tensor in [*model.parameters(), *model.buffers()])


def assert_close(found: torch.Tensor, expected: torch.Tensor, share: float = 1e-5) -> None:
    assert (found - expected).abs().max() <= share * expected.abs().max() + 1e-7


@pytest.mark.parametrize(
    ("kind", "shape"), NETWORKS, ids=lambda value: getattr(value, "__name__", "")
)
@pytest.mark.parametrize("mode", ["native", "amct"])
def test_a_trained_masked_model_equals_the_converted_one(kind, shape, mode):
    x = images(shape)
    try:
        model = prepare(kind, FILTER, x, mode=mode)
    except ValueError as error:
        pytest.skip(f"nothing to prune: {error}")
    train(model, 3, x, momentum=0.9, weight_decay=0.1)
    twin = copy.deepcopy(model).train()
    converted = convert_amct(model)
    plan = current_plan(model)
    assert plan is not None
    assert_close(converted(x), model.eval()(x))
    assert_close(converted.train()(x), twin(x))  # batch statistics of the channels that stay
    if any(group.cut for group in plan.groups):
        assert plan.parameters_after == sum(p.numel() for p in set(converted.parameters()))


@pytest.mark.parametrize(
    ("kind", "shape"), NETWORKS, ids=lambda value: getattr(value, "__name__", "")
)
def test_masked_and_removed_channels_train_alike(kind, shape):
    x = images(shape)
    masked = prepare(kind, FILTER, x)
    removed = prepare(kind, FILTER, x, apply="prepare")
    assert train(masked, 4, x, momentum=0.9) == pytest.approx(
        train(removed, 4, x, momentum=0.9), rel=1e-5
    )
    assert_close(convert_amct(masked)(x), convert_amct(removed)(x))


@pytest.mark.parametrize("batches", [1, 2])
@pytest.mark.parametrize("cfg", [INT8, LEARNED, INT8 + M4N2], ids=["arq", "ulq", "2:4"])
def test_quantizers_are_not_disturbed_by_removed_channels(cfg, batches):
    x = images()
    cfg = f"{FILTER}{cfg}batch_num: {batches}"
    masked = prepare(Chain, cfg, x)
    removed = prepare(Chain, cfg, x, apply="prepare")
    assert train(masked, 4, x) == pytest.approx(train(removed, 4, x), rel=1e-4)
    found = dict(removed.named_parameters())
    for name, parameter in masked.named_parameters():
        if "clip" in name:
            assert parameter.item() == pytest.approx(found[name].item(), rel=1e-4, abs=1e-6)


def test_masked_rows_and_columns_are_zero_and_no_optimizer_revives_them():
    x = images()
    model = prepare(Chain, FILTER, x)
    for optimizer in (
        torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1),
        torch.optim.AdamW(model.parameters(), lr=0.01),
    ):
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
    cut = model.c1.kept_channels == 0
    assert cut.sum() == 8
    assert (model.c1.weight[cut] == 0).all()
    assert (model.c1.bias[cut] == 0).all()
    assert (model.c2.weight[:, cut] == 0).all()
    assert (model.c1.parametrizations.weight.original.grad[cut] == 0).all()


def test_rows_are_left_alone_on_request():
    model = prepare(Chain, FILTER, images(), row_masks=False)
    assert (model.c1.weight != 0).all()
    assert_close(convert_amct(model)(images()), model.eval()(images()))


@pytest.mark.parametrize("cfg", [FILTER, FILTER + INT8 + M4N2], ids=["prune only", "all three"])
def test_training_resumes_bit_for_bit_whatever_the_fresh_weights(cfg, tmp_path):
    x = images()
    model = prepare(Chain, cfg, x)
    train(model, 3, x)
    save_checkpoint(model, tmp_path / "half.pt")
    resumed = prepare_qat_amct(fresh(seed=1), cfg, x)
    assert not torch.equal(resumed.c1.kept_channels, model.c1.kept_channels)
    resumed.load_state_dict(model.state_dict())
    restored, _ = load_checkpoint(tmp_path / "half.pt", fresh(seed=2), example_inputs=x)
    assert train(model, 3, x) == train(resumed, 3, x) == train(restored, 3, x)
    for other in (resumed, restored):
        assert all(torch.equal(model.state_dict()[k], v) for k, v in other.state_dict().items())
    expected = convert_amct(model)(x)
    assert torch.equal(convert_amct(resumed)(x), expected)
    assert torch.equal(convert_amct(restored)(x), expected)
    save_checkpoint(convert_amct(model), tmp_path / "done.pt")
    done, _ = load_checkpoint(tmp_path / "done.pt", fresh(seed=3), example_inputs=x)
    assert torch.equal(done(x), expected)


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_convert_too(duplicate):
    model = prepare(Chain, FILTER + INT8 + M4N2, images())
    train(model, 2, images())
    twin = duplicate(model)
    assert torch.equal(convert_amct(twin)(images()), convert_amct(model)(images()))
    assert train(twin, 2, images()) == train(model, 2, images())


def test_the_input_model_is_untouched():
    model = fresh()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    for apply in ("convert", "prepare"):
        prepare_qat_amct(model, FILTER + INT8, images(), apply=apply)
    assert type(model) is Chain
    assert model.c1.out_channels == 16
    assert list(before) == list(model.state_dict())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_all_three_together_train_convert_and_run_in_onnxruntime(tmp_path):
    ort = pytest.importorskip("onnxruntime")
    x = images()
    model = prepare(Chain, FILTER + INT8 + M4N2, x)
    losses = train(model, 5, x)
    assert losses[-1] < losses[0]
    expected = model.eval()(x)
    converted = convert_amct(model)
    assert size(converted) < size(model) / 2
    assert converted.c1.out_channels == converted.c2.in_channels == 8
    mask = model.c3.parametrizations.weight[-1].mask
    kept = model.c2.kept_channels.bool()
    assert (converted.c3.weight_codes[mask[:, kept] == 0] == 0).all()
    assert (mask[:, kept].float().mean()) == 0.5
    assert_close(converted(x), expected, 0.02)
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(converted, (x,), path, dynamo=False, opset_version=17)
    session = ort.InferenceSession(path, providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert (
        np.abs(output - converted(x).detach().numpy()).max() <= 0.01 * expected.abs().max().item()
    )


def test_a_masked_quantized_model_compiles_and_exports():
    model = prepare(Chain, FILTER + INT8, images())
    model(images())
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    assert_close(compiled(images()), model(images()), 1e-3)
    program = torch.export.export(model.eval(), (images(),), strict=False)
    assert_close(program.module()(images()), model(images()), 1e-4)


@pytest.mark.filterwarnings("ignore::amct_fx.AmctWarning")
def test_the_sample_file_for_pruning_prunes_what_it_says():
    model = prepare_qat_amct(fresh(SampleNet), SAMPLES / "prune.cfg", images())
    assert not any(isinstance(module, qat.QATLayer) for module in model.modules())
    kept = {
        name: int(m.kept_channels.sum())
        for name, m in model.named_children()
        if hasattr(m, "kept_channels")
    }
    # conv1 and fc are skipped; what stays is rounded up to a multiple of 16
    assert kept == {"conv2": 32, "conv3": 48}
    converted = convert_amct(model)
    assert converted.conv3.weight.shape == (48, 32, 3, 3)
    assert_close(converted(images()), model.eval()(images()))


@pytest.mark.filterwarnings("ignore::amct_fx.AmctWarning")
def test_the_sample_file_for_both_quantizes_and_prunes():
    model = prepare_qat_amct(fresh(SampleNet), SAMPLES / "compressed1.cfg", images())
    names = [name for name, m in model.named_modules() if isinstance(m, qat.QATLayer)]
    assert names == ["conv1", "conv2", "conv3", "conv4"]
    assert model.conv3.kept_channels.sum() == 32
    train(model, 2, images())
    assert_close(convert_amct(model)(images()), model.eval()(images()), 0.02)


def test_the_report_counts_the_channels():
    model = prepare(Chain, FILTER + INT8 + M4N2, images())
    rows = {row.name: str(row.pruning) for row in summarize(model).rows}
    assert rows["c1"] == "8/16 filter"
    assert rows["c3"] == "2/4 2:4"


def test_a_plan_may_be_edited_and_given_instead_of_the_choice():
    model, x = fresh(), images()
    plan = prune_plan(model, FILTER, x).with_kept("c1", [0, 1, 2])
    prepared = prepare_qat_amct(model, FILTER, x, plan=PrunePlan.from_json(plan.to_json()))
    assert prepared.c1.kept_channels.nonzero().flatten().tolist() == [0, 1, 2]
    converted = convert_amct(prepared)
    assert converted.c2.in_channels == 3
    assert_close(converted(x), prepared.eval()(x))


def test_a_checkpoint_knows_the_plan_that_was_given(tmp_path):
    model, x = fresh(), images()
    plan = prune_plan(model, FILTER, x).with_kept("c1", [0, 1, 2])
    for apply in ("convert", "prepare"):
        prepared = prepare_qat_amct(model, FILTER + INT8, x, plan=plan, apply=apply)
        train(prepared, 1, x)
        save_checkpoint(prepared, tmp_path / "plan.pt")
        restored, _ = load_checkpoint(tmp_path / "plan.pt", fresh(seed=4), example_inputs=x)
        assert torch.equal(restored.eval()(x), prepared.eval()(x))
        assert torch.equal(convert_amct(restored)(x), convert_amct(prepared)(x))


def test_a_plan_of_another_model_is_refused_by_name():
    plan = prune_plan(fresh(), FILTER, images())
    with pytest.raises(ValueError, match=r"made for another model: c1\.weight of shape"):
        prepare_qat_amct(fresh(SampleNet), FILTER, images(), plan=plan)


def test_float_checkpoints_load_by_name():
    other = fresh(seed=7)
    model = prepare(Chain, FILTER + INT8 + M4N2, images())
    assert model.load_state_dict(other.state_dict(), strict=False).unexpected_keys == []
    assert torch.equal(model.c1.parametrizations.weight.original, other.c1.weight)


def test_a_filter_that_is_nan_is_no_error_when_nothing_is_quantized():
    model = fresh()
    with torch.no_grad():
        model.c1.weight[3, 0, 0, 0] = torch.nan
    with pytest.warns(AmctWarning, match="holds NaN"):
        prepared = prepare_qat_amct(model, FILTER, images())
    assert prepared.c1.kept_channels.tolist() == [0] * 8 + [1] * 8
    with pytest.raises(ValueError, match=r"c1\.weight holds NaN"):
        prepare_qat_amct(model, FILTER + INT8, images())


def test_the_state_of_an_optimizer_can_be_cut_alike():
    model = prepare(Chain, FILTER, images())
    train(model, 1, images())
    converted = convert_amct(model)
    for name, axes in kept_indices(converted).items():
        cut = model.get_submodule(name.rpartition(".")[0])
        tensor = getattr(cut, name.rpartition(".")[2])
        for axis, indices in axes.items():
            tensor = tensor.index_select(axis, indices)
        owner = converted.get_submodule(name.rpartition(".")[0])
        assert torch.equal(tensor, getattr(owner, name.rpartition(".")[2]))
    with pytest.raises(RuntimeError, match="takes a model of convert_amct"):
        kept_indices(model)
