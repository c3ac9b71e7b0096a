"""Layers that keep the float input only: same results and gradients, less memory."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import QConfig
from torch.utils.checkpoint import checkpoint

from amct_fx import prepare_qat_amct
from amct_fx.nn.qat import qat_class_of
from amct_fx.observers import ARQFakeQuantize, ULQFakeQuantize, _recompute

LAYERS: list[tuple[Callable[[], nn.Module], tuple[int, ...]]] = [
    (lambda: nn.Conv1d(4, 6, 3, padding=1), (2, 4, 9)),
    (lambda: nn.Conv2d(4, 6, 3, stride=2, padding=1, bias=False), (2, 4, 9, 9)),
    (lambda: nn.Conv2d(4, 8, 3, dilation=2, groups=4), (2, 4, 9, 9)),
    (lambda: nn.Conv3d(2, 3, 2), (2, 2, 4, 4, 4)),
    (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (2, 4, 9)),
    (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, groups=2), (2, 4, 5, 5)),
    (lambda: nn.Linear(5, 7), (3, 5)),
    (lambda: nn.Linear(5, 7, bias=False), (2, 3, 4, 5)),
    (lambda: nn.Linear(5, 7), (5,)),
    # these take the ordinary way
    (lambda: nn.Conv2d(4, 6, 3, padding="same"), (2, 4, 9, 9)),
    (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), (2, 4, 9, 9)),
    (lambda: nn.Conv2d(4, 6, 3), (4, 9, 9)),
]


def quantized(layer: nn.Module) -> nn.Module:
    qconfig = QConfig(ULQFakeQuantize.with_args(), ARQFakeQuantize.with_args(ch_axis=0))
    return qat_class_of(type(layer)).from_float(layer, qconfig)


def ordinary(layer: nn.Module, x: Tensor) -> Tensor:
    """Run the layer where it keeps its quantized input."""
    y = layer.input_fake_quant(x)
    return layer(y.view_as(y), quantized=True)  # another tensor: its source is not known


def gradients(layer: nn.Module, run: Callable[[Tensor], Tensor], x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    inputs = [x, *layer.parameters()]
    y = run(torch.relu(x))
    weights = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
    return [y, *torch.autograd.grad((y * weights).sum(), inputs)]


@pytest.mark.parametrize(("make", "shape"), LAYERS)
def test_results_and_gradients_are_the_same_to_the_last_bit(make: Any, shape: Any) -> None:
    layer = quantized(make())
    x = torch.randn(shape)
    layer(torch.relu(x))
    left = gradients(layer, layer, x * 1.1)
    right = gradients(layer, lambda x: ordinary(layer, x), x * 1.1)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("make", [lambda: nn.Conv2d(4, 6, 3), lambda: nn.Linear(9, 7)])
def test_other_dtypes(make: Any, dtype: torch.dtype) -> None:
    layer, x = quantized(make().to(dtype)), torch.randn(2, 4, 9, 9, dtype=dtype)
    layer(torch.relu(x))
    left = gradients(layer, layer, x * 1.1)
    right = gradients(layer, lambda x: ordinary(layer, x), x * 1.1)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("make", [lambda: nn.Conv2d(4, 6, 3), lambda: nn.Linear(9, 7)])
def test_autocast(make: Any) -> None:
    layer, x = quantized(make()), torch.randn(2, 4, 9, 9)
    layer(torch.relu(x))
    with torch.autocast("cpu", torch.bfloat16):
        left = gradients(layer, layer, x * 1.1)
        right = gradients(layer, lambda x: ordinary(layer, x), x * 1.1)
    assert left[0].dtype == torch.bfloat16
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)
        assert a.dtype == b.dtype


def test_channels_last() -> None:
    layer = quantized(nn.Conv2d(4, 6, 3)).to(memory_format=torch.channels_last)
    x = torch.randn(2, 4, 9, 9).to(memory_format=torch.channels_last)
    layer(torch.relu(x))
    left = gradients(layer, layer, x * 1.1)
    right = gradients(layer, lambda x: ordinary(layer, x), x * 1.1)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)
        assert a.stride() == b.stride()


def kept(model: nn.Module, x: Tensor) -> int:
    known = {p.untyped_storage().data_ptr() for p in [*model.parameters(), *model.buffers()]}
    storages: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(x).sum().backward()
    return sum(storages.values())


def test_a_quantized_network_keeps_hardly_more_than_a_float_one() -> None:
    blocks = [nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*blocks)
    x = torch.randn(8, 8, 32, 32)
    prepared = prepare_qat_amct(model)
    prepared(x)
    weights = sum(p.numel() * 4 for p in model.parameters())
    assert kept(prepared, x) <= kept(model, x) + weights + x.nbytes + 10_000


def test_two_readers_of_one_input_get_it_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class TwoReaders(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Conv2d(3, 4, 3), nn.Conv2d(3, 4, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.left(x) * self.right(x)

    prepared = prepare_qat_amct(TwoReaders())
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    prepared(x)
    loss = prepared(x).sum()
    made = []
    original = _recompute.fake_quantize_values
    monkeypatch.setattr(
        _recompute, "fake_quantize_values", lambda *a: made.append(1) or original(*a)
    )
    loss.backward()
    assert len(made) == 1


def test_nothing_stays_alive_after_backward() -> None:
    layer = quantized(nn.Linear(4, 4))
    x = torch.randn(3, 4)
    layer(x)
    loss = layer(x).sum()
    assert layer.input_fake_quant._sources._last is None  # the quantized input is gone already
    loss.backward()
    loss = layer(x).sum()
    loss.backward(retain_graph=True)
    first = layer.weight.grad.clone()
    loss.backward()
    torch.testing.assert_close(layer.weight.grad - first, first / 2)


def test_an_input_changed_in_place_is_not_taken_for_its_source() -> None:
    layer = quantized(nn.Linear(4, 4))
    x = torch.randn(3, 4)
    layer(x)
    y = layer.input_fake_quant(x)
    assert layer.input_fake_quant.source_of(y) is not None
    y.mul_(2)
    assert layer.input_fake_quant.source_of(y) is None
    with torch.no_grad():
        assert layer.input_fake_quant.source_of(layer.input_fake_quant(x)) is None


def test_copies_and_pickles_leave_the_source_behind() -> None:
    layer = quantized(nn.Linear(4, 4))
    x = torch.randn(3, 4)
    layer(x)
    y = layer.input_fake_quant(x)
    for clone in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert clone.input_fake_quant.source_of(y) is None
        assert torch.equal(clone(x), layer(x))
    buffer = io.BytesIO()
    torch.save(y, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=True), y)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_activation_checkpointing_gives_the_same_gradients(use_reentrant: bool) -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 4, 3))
    prepared = prepare_qat_amct(model)
    x = torch.randn(2, 3, 8, 8, requires_grad=True)
    prepared(x)

    def grads(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        prepared.zero_grad(set_to_none=True)
        run(x).square().sum().backward()
        return [p.grad.clone() for p in prepared.parameters()]

    plain = grads(prepared)
    recomputed = grads(lambda x: checkpoint(prepared, x, use_reentrant=use_reentrant))
    for a, b in zip(plain, recomputed, strict=True):
        assert torch.equal(a, b)


def test_the_float_input_changed_in_place_is_an_error_as_in_a_float_layer() -> None:
    layer = quantized(nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    layer(x)
    h = torch.relu(x)
    loss = layer(h).sum()
    h.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_frozen_weights_need_no_input() -> None:
    layer = quantized(nn.Linear(4, 4))
    x = torch.randn(3, 4, requires_grad=True)
    layer(x)
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert x.grad is not None
    assert layer.input_fake_quant.clip_max.grad is not None
    y = layer.input_fake_quant(x)
    assert layer.source_of(y) is None
    layer.weight.requires_grad_(True)
    assert layer.source_of(y) is not None


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(2, 4), (2, 3, 4), (2, 3, 3, 4)])
def test_the_output_may_be_changed_in_place(shape: tuple[int, ...], bias: bool) -> None:
    class Doubles(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=bias)
            self.last = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x).mul_(2.0))

    prepared = prepare_qat_amct(Doubles())
    for _ in range(2):
        prepared(torch.randn(shape)).sum().backward()
    assert prepared.first.weight.grad is not None


@pytest.mark.parametrize("make", [lambda: nn.Conv2d(4, 6, 3), lambda: nn.Linear(9, 7)])
def test_a_gradient_penalty_sees_the_same_second_derivatives(make: Any) -> None:
    layer = quantized(make())
    x = torch.randn(2, 4, 9, 9)
    layer(torch.relu(x))

    def penalty(run: Callable[[Tensor], Tensor]) -> list[Tensor]:
        layer.zero_grad(set_to_none=True)
        leaf = (x * 1.1).requires_grad_()
        loss = run(torch.relu(leaf)).square().sum()
        wanted = [leaf, layer.weight, layer.input_fake_quant.clip_max]
        first = torch.autograd.grad(loss, wanted, create_graph=True)
        sum(g.square().sum() for g in first).backward()
        return [leaf.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]

    left, right = penalty(layer), penalty(lambda x: ordinary(layer, x))
    assert len(left) == len(right) >= 5
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())
