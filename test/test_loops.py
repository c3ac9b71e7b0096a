"""The loops people write: AMP, compile, checkpointing, averaging, several forwards, threads.

Numbers in brackets are those of spec/situations.md.
"""

from __future__ import annotations

import copy
import io
import pickle
import threading
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from amct_fx import convert_amct, prepare_qat_amct
from amct_fx.observers import ULQFakeQuantize

from .networks import Attend, Net, NetWithIsland, Pyramid, example

WEIGHT_ULQ = "batch_num: 2 retrain_weight_quant_config { ulq_retrain { } }"


def prepared_net(cfg: str | None = None, model: nn.Module | None = None) -> nn.Module:
    torch.manual_seed(0)
    return prepare_qat_amct(model if model is not None else Net(), cfg)


def started(cfg: str | None = None) -> nn.Module:
    model = prepared_net(cfg)
    for _ in range(2):
        model(example())
    return model


def train(model: nn.Module, steps: int, call: Any = None) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        x = example() + 0.01 * step
        loss = (call or (lambda m, inputs: m(inputs)))(model, x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def assert_same_state(a: nn.Module, b: nn.Module, *, skip: str = "never") -> None:
    for (key, left), right in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert skip in key or torch.equal(left, right), key


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_trains_with_float32_clips(dtype):
    model = started()
    with torch.autocast("cpu", dtype):
        output = model(example())
    assert output.dtype == dtype
    output.float().square().sum().backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert torch.isfinite(parameter.grad).all(), name
        assert parameter.grad.dtype == torch.float32


def test_the_gradient_scaler_steps():
    model = started()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cpu")
    before = model.left.input_fake_quant.clip_max.item()
    for _ in range(12):  # the first scales overflow float16, so their steps are skipped
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = model(example()).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert model.left.input_fake_quant.clip_max.item() != before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("when", ["before", "after"])
def test_cast_models_keep_float32_clips(dtype, when):
    model = Net().to(dtype) if when == "before" else Net()
    prepared = prepare_qat_amct(model, WEIGHT_ULQ).to(dtype)
    x = example().to(dtype)
    for _ in range(3):
        prepared(x).square().sum().backward()
    for module in prepared.modules():
        if isinstance(module, ULQFakeQuantize):
            assert module.clip_max.dtype == module.scale.dtype == torch.float32
    assert prepared.left.weight_fake_quant.scale.dtype == torch.float32
    assert prepared(x).dtype == dtype
    assert convert_amct(prepared)(x).dtype == dtype


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("cfg", ["batch_num: 2", WEIGHT_ULQ])
def test_activation_checkpointing_counts_and_collects_nothing_twice(reentrant, cfg):
    """(20) Batch norm statistics are torch's own affair and move twice in any model."""

    def call(model: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(model, x.requires_grad_(), use_reentrant=reentrant)

    plain, checkpointed = prepared_net(cfg), prepared_net(cfg)
    assert train(plain, 4) == train(checkpointed, 4, call)
    assert_same_state(plain, checkpointed, skip="bn.")


@pytest.mark.parametrize("average", ["equal", "ema"])
@pytest.mark.parametrize("cfg", ["batch_num: 3", WEIGHT_ULQ])
def test_averaged_copies_made_before_any_forward_work(average, cfg):
    """(18) A copy must not restart its calibration."""
    model = prepared_net(cfg)
    options = {"multi_avg_fn": get_ema_multi_avg_fn(0.9)} if average == "ema" else {}
    averaged = AveragedModel(model, use_buffers=True, **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(5):
        model(example()).square().mean().backward()
        optimizer.step()
        averaged.update_parameters(model)
    averaged.eval()
    state = copy.deepcopy(averaged.state_dict())
    averaged(example())
    assert all(torch.equal(state[key], value) for key, value in averaged.state_dict().items())
    convert_amct(averaged.module)


def test_an_average_by_deepcopy_over_float_entries_evaluates_and_restores():
    """(18, 26)"""
    model = prepared_net("batch_num: 2")
    average = copy.deepcopy(model)
    for step in range(4):
        train(model, 1)
        decay = step / (step + 1)
        source = model.state_dict()
        for key, value in average.state_dict().items():
            if value.dtype.is_floating_point:
                value *= decay
                value += (1 - decay) * source[key]
    expected = average.eval()(example())
    restored = prepared_net("batch_num: 2")
    restored.load_state_dict(average.state_dict())
    assert torch.equal(restored.eval()(example()), expected)


@pytest.mark.parametrize("cfg", [None, WEIGHT_ULQ])
def test_compile_takes_the_started_model_whole(cfg):
    """(38) 3 eager + 3 compiled + 3 eager steps equal 9 eager steps."""
    eager, mixed = started(cfg), started(cfg)
    compiled = torch.compile(mixed, fullgraph=True, backend="aot_eager")
    expected = [loss for _ in range(3) for loss in train(eager, 3)]
    actual = train(mixed, 3) + train(mixed, 3, lambda _, x: compiled(x)) + train(mixed, 3)
    assert actual == pytest.approx(expected, rel=1e-5)
    evaluated = mixed.eval()(example())
    assert torch.allclose(compiled.eval()(example()), evaluated, rtol=1e-5, atol=1e-6)


def test_inductor_compiles_the_started_and_the_converted_model_whole():
    torch._dynamo.reset()  # other tests have compiled the same forwards
    model = prepare_qat_amct(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)))
    x = torch.randn(16, 4)
    expected = model(x)
    compiled = torch.compile(model, fullgraph=True)
    assert torch.allclose(compiled(x), expected, rtol=1e-5, atol=1e-6)
    compiled(x).sum().backward()
    assert model[0].input_fake_quant.clip_max.grad is not None
    converted = convert_amct(model)
    assert torch.allclose(torch.compile(converted, fullgraph=True)(x), converted(x), atol=1e-5)


def test_torch_export_of_the_prepared_model():
    model = started().eval()
    batch = torch.export.Dim("batch")
    program = torch.export.export(model, (example(3),), dynamic_shapes=({0: batch},), strict=False)
    assert torch.allclose(program.module()(example(5)), model(example(5)), atol=1e-6)


@pytest.mark.parametrize(
    "model", [Net(), NetWithIsland(), Attend()], ids=lambda m: type(m).__name__
)
def test_pickle_and_torch_save_in_the_middle_of_a_calibration(model):
    x = torch.randn(2, 5, 16) if isinstance(model, Attend) else example()
    prepared = prepare_qat_amct(model, "batch_num: 2")
    prepared(x)
    buffer = io.BytesIO()
    torch.save(prepared, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    clones = [pickle.loads(pickle.dumps(prepared)), copy.deepcopy(prepared), loaded]
    prepared(x)
    for clone in clones:
        clone(x)
        assert_same_state(prepared, clone)


@pytest.mark.parametrize("cfg", [None, "batch_num: 3", WEIGHT_ULQ])
def test_nothing_is_resized_or_replaced(cfg):
    """(19, 23, 27)"""
    model = prepared_net(cfg)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    places = {name: (tensor.data_ptr(), tensor.shape) for name, tensor in tensors.items()}
    shapes = {key: value.shape for key, value in model.state_dict().items()}
    train(model, 5)
    model.eval()(example())
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert places == {name: (tensor.data_ptr(), tensor.shape) for name, tensor in tensors.items()}
    assert shapes == {key: value.shape for key, value in model.state_dict().items()}


@pytest.mark.parametrize("cfg", [None, "batch_num: 3", WEIGHT_ULQ])
@pytest.mark.parametrize("steps", [0, 1, 3, 5])
def test_a_state_dict_restores_before_during_and_after_the_calibration(cfg, steps):
    """(25, 28) A calibration that was interrupted collects again, with a warning."""
    model = prepared_net(cfg)
    train(model, steps)
    buffer = io.BytesIO()
    torch.save(model.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    restored = prepare_qat_amct(Net(), cfg)
    interrupted = cfg is not None and 0 < steps < int(cfg.split()[1])
    if interrupted:
        with pytest.warns(UserWarning, match="collect their batches again"):
            restored.load_state_dict(state)
        model = prepare_qat_amct(Net(), cfg)
        model.load_state_dict(
            {k: v for k, v in state.items() if "fake_quant" not in k}, strict=False
        )
        return
    restored.load_state_dict(state)
    assert_same_state(model, restored)
    assert train(model, 3) == train(restored, 3)
    assert_same_state(model, restored)


def test_two_forwards_before_one_backward():
    """(41) Written-back clips must not be what backward saved."""
    model = started()
    (model(example()).sum() + model(2 * example(3)).sum()).backward()
    together = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    model(example()).sum().backward()
    model(2 * example(3)).sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.allclose(parameter.grad, together[name], rtol=1e-4, atol=1e-5), name


def test_a_start_under_inference_mode_leaves_a_trainable_model():
    """(39)"""
    model = prepared_net()
    with torch.inference_mode():
        model(example())
    model(example()).sum().backward()
    assert model.stem.input_fake_quant.clip_max.grad is not None


def test_no_grad_outputs_do_not_require_grad():
    model = started()
    with torch.no_grad():
        assert not model(example()).requires_grad


def test_channels_last_is_kept_forward_and_backward():
    """(40)"""
    model = started().to(memory_format=torch.channels_last)
    reference = started()
    x = example().contiguous(memory_format=torch.channels_last).requires_grad_()
    quantized = model.stem.input_fake_quant(x)
    assert quantized.is_contiguous(memory_format=torch.channels_last)
    output = model(x)
    output.sum().backward()
    assert x.grad.is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(output, reference(example()), rtol=1e-4, atol=1e-5)
    converted = convert_amct(model)
    codes = converted.stem.input_quantize(x.detach())
    assert codes.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("batch", [0, 1, 3, 16])
@pytest.mark.parametrize("size", [8, 11])
def test_batch_and_image_size_stay_free(batch, size):
    """(5)"""
    model = started().eval()
    assert model(example(batch, size=size)).shape == (batch, 4)
    assert convert_amct(model)(example(batch, size=size)).shape == (batch, 4)


def test_a_smaller_last_batch_of_the_start_counts_by_elements():
    """(37)"""
    x = example(19)
    parts, whole = prepared_net("batch_num: 3"), prepared_net("batch_num: 1")
    for part in x.split(8):
        parts(part)
    whole(x)
    one, other = parts.stem.input_fake_quant, whole.stem.input_fake_quant
    assert torch.allclose(one.clip_max, other.clip_max)
    assert torch.allclose(one.clip_min, other.clip_min)


def test_gradient_accumulation_equals_the_whole_batch():
    cfg = """retrain_data_quant_config { ulq_quantize {
        clip_max_min { clip_max: 3.0 clip_min: -3.0 } } }"""
    whole, parts = prepared_net(cfg).eval(), prepared_net(cfg).eval()
    x, y = example(8), torch.arange(8) % 4
    F.cross_entropy(whole(x), y).backward()
    for part, target in zip(x.split(4), y.split(4), strict=True):
        (F.cross_entropy(parts(part), target) / 2).backward()
    for (name, one), other in zip(whole.named_parameters(), parts.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-6), name


def test_two_models_in_two_threads_do_not_disturb_each_other():
    alone = [prepared_net(), prepared_net("batch_num: 2")]
    threaded = [prepared_net(), prepared_net("batch_num: 2")]
    for model in alone:
        train(model, 3)
    threads = [threading.Thread(target=train, args=(model, 3)) for model in threaded]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one, other in zip(alone, threaded, strict=True):
        assert_same_state(one, other)


def test_train_and_eval_work_on_parts():
    """(4)"""

    class WithDropout(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
            self.drop = nn.Dropout(0.5)
            self.head = nn.Conv2d(4, 2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.drop(self.backbone(x)))

    model = prepare_qat_amct(WithDropout())
    model(example())
    assert not torch.equal(model(example()), model(example()))
    model.backbone.eval()
    before = model.backbone[1].running_mean.clone()
    model(5 * example())
    assert torch.equal(model.backbone[1].running_mean, before)
    model.eval()
    assert torch.equal(model(example()), model(example()))


def test_a_model_with_reused_layers_resumes():
    first = prepare_qat_amct(Pyramid(), "batch_num: 2", reused="quantize")
    for _ in range(3):
        first(example())
    second = prepare_qat_amct(Pyramid(), "batch_num: 2", reused="quantize")
    second.load_state_dict(first.state_dict())
    for one, other in zip(first.eval()(example()), second.eval()(example()), strict=True):
        assert torch.equal(one, other)


def test_a_steady_forward_assigns_no_tensor(monkeypatch):
    """(23)"""
    model = started()
    assigned = []
    original = nn.Module.__setattr__

    def spy(module: nn.Module, name: str, value: object) -> None:
        if isinstance(value, Tensor):
            assigned.append(name)
        original(module, name, value)

    monkeypatch.setattr(nn.Module, "__setattr__", spy)
    model(example()).sum().backward()
    assert not assigned
