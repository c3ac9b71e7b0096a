"""Scalars computed for all quantizers at once give what each quantizer computes for itself."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from amct_fx import convert_amct, prepare_qat_amct
from amct_fx.grouping import QuantizerGroups
from amct_fx.observers import ULQFakeQuantize
from amct_fx.root_hooks import remove_hooks

CONFIG = """
override_layer_configs { layer_name: "2" retrain_data_quant_config { ulq_quantize {
    dst_type: INT16 } } }
override_layer_configs { layer_name: "4" retrain_data_quant_config { ulq_quantize {
    clip_max_min { clip_max: 2.0 clip_min: -0.5 } } } }
"""


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.Hardswish(), nn.Conv2d(4, 2, 1)
    )


def quantizers(model: nn.Module) -> list[ULQFakeQuantize]:
    return [part for part in model.modules() if isinstance(part, ULQFakeQuantize)]


def pair(config: str | None = None) -> tuple[nn.Module, nn.Module]:
    """A prepared, calibrated model, and a copy whose quantizers compute for themselves."""
    together = prepare_qat_amct(network(), config)
    together(torch.randn(4, 3, 9, 9))
    apart = copy.deepcopy(together)
    remove_hooks(apart, QuantizerGroups)
    return together, apart


def train(model: nn.Module, steps: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    outputs = []
    for _ in range(steps):
        optimizer.zero_grad()
        y = model(3 * torch.randn(4, 3, 9, 9, generator=generator))
        y.square().mean().backward()
        optimizer.step()
        outputs.append(y.detach())
    return outputs


def assert_same_state(left: nn.Module, right: nn.Module) -> None:
    for tensors in (nn.Module.named_parameters, nn.Module.named_buffers):
        for (key, a), (_, b) in zip(tensors(left), tensors(right), strict=True):
            assert torch.equal(a, b), key


@pytest.mark.parametrize("config", [None, CONFIG], ids=["alike", "three kinds"])
def test_a_training_is_the_same_to_the_last_bit(config: str | None) -> None:
    together, apart = pair(config)
    for a, b in zip(train(together), train(apart), strict=True):
        assert torch.equal(a, b)
    assert_same_state(together, apart)
    x = torch.randn(2, 3, 9, 9)
    assert torch.equal(together.eval()(x), apart.eval()(x))


def test_the_number_of_operations_on_scalars_does_not_grow_with_the_layers() -> None:
    def scalar_operations(depth: int) -> int:
        layers = (nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(depth))
        model = prepare_qat_amct(nn.Sequential(*layers))
        x = torch.randn(4, 8)
        model(x)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            model(x)
        found = {event.key: event.count for event in profile.key_averages()}
        return found["aten::bitwise_or"] + found["aten::_foreach_copy_"]

    assert scalar_operations(12) == scalar_operations(3)


def test_a_weight_changed_within_the_forward_counts() -> None:
    together, apart = pair()
    x = torch.randn(2, 3, 9, 9)
    for model in (together, apart):
        weight = model.get_submodule("4").weight

        def double(*_: Any, weight: Tensor = weight) -> None:
            weight.detach().mul_(2)

        model.get_submodule("1").register_forward_hook(double)
    assert torch.equal(together(x), apart(x))


@pytest.mark.parametrize("name", ["", "1", "4"])
def test_a_hook_may_write_weights_and_clips_through_data(name: str) -> None:
    together, apart = pair()
    x = torch.randn(2, 3, 9, 9)
    for model in (together, apart):
        layer: Any = model.get_submodule("4")

        def constrain(*_: Any, layer: Any = layer) -> None:
            layer.weight.data.mul_(0.5)
            layer.input_fake_quant.clip_max.data.mul_(0.9)

        model.get_submodule(name).register_forward_pre_hook(constrain)
    for _ in range(2):
        assert torch.equal(together(x), apart(x))


class Decaying(nn.Module):
    """Writes its weight where no version counter shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.fc.weight.data.mul_(0.5)
        return self.out(self.fc(x))


def test_a_weight_written_through_data_within_the_forward_counts() -> None:
    together, x = prepare_qat_amct(Decaying()), torch.randn(8, 4)
    together(x)
    apart = copy.deepcopy(together)
    remove_hooks(apart, QuantizerGroups)
    for _ in range(3):
        assert torch.equal(together(x), apart(x))


def test_tied_layers_quantize_their_weight_once() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    model[2].weight = model[0].weight
    prepared = prepare_qat_amct(model, reused="quantize")
    apart = copy.deepcopy(prepared)
    remove_hooks(apart, QuantizerGroups)
    x = torch.randn(8, 4)
    for _ in range(3):
        assert torch.equal(prepared(x), apart(x))


@pytest.mark.parametrize("through_data", [True, False])
def test_clips_changed_between_forwards_count(through_data: bool) -> None:
    together, apart = pair()
    x = torch.randn(2, 3, 9, 9)
    for model in (together, apart):
        model.eval()(x)
        clip = quantizers(model)[0].clip_max
        (clip.data if through_data else clip.detach()).fill_(0.3)
    assert torch.equal(together(x), apart(x))


def test_a_forward_that_failed_leaves_nothing_behind() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    prepared = prepare_qat_amct(model)
    prepared(torch.randn(8, 4))
    handle = prepared[1].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        prepared(torch.randn(8, 4))
    handle.remove()
    first = quantizers(prepared)[0]
    first.set_clips(0.5, -0.5)
    assert first(torch.full((1,), 9.0)).item() == pytest.approx(0.5, abs=0.01)


def test_a_weight_changed_after_a_forward_that_failed_counts() -> None:
    together, apart = pair()
    for model in (together, apart):
        with pytest.raises(RuntimeError):
            model(torch.randn(2, 5, 9, 9))
        model.get_submodule("2").weight.data.mul_(2)
    x = torch.randn(2, 3, 9, 9)
    with torch.no_grad():
        assert torch.equal(together(x), apart(x))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.left(x) if x.sum() > 0 else self.right(x)


def test_a_branch_that_was_not_taken_is_not_written() -> None:
    prepared = prepare_qat_amct(Branches())
    positive, negative = torch.rand(8, 4), -torch.rand(8, 4)
    prepared(positive)
    prepared(negative)
    right = prepared.right.input_fake_quant
    with torch.no_grad():
        right.clip_max.mul_(0.5)
    before = right.scale.clone()
    prepared(positive)
    assert torch.equal(right.scale, before)
    prepared(negative)
    assert not torch.equal(right.scale, before)


def test_switched_off_frozen_and_foreign_quantizers_are_left_alone() -> None:
    together, apart = pair()
    for model in (together, apart):
        first, second, third = quantizers(model)
        first.enable_fake_quant(False)
        second.clip_max.requires_grad_(False)
        third.clip_max = nn.Parameter(third.clip_max.detach().reshape(1, 1)[0])
    for a, b in zip(train(together), train(apart), strict=True):
        assert torch.equal(a, b)
    assert_same_state(together, apart)


def test_a_recomputed_forward_gives_the_same() -> None:
    def step(model: nn.Module, checkpointed: bool) -> None:
        x = torch.ones(2, 3, 9, 9, requires_grad=True)
        run: Any = torch.utils.checkpoint.checkpoint
        y = run(model, x, use_reentrant=False) if checkpointed else model(x)
        y.sum().backward()

    together, _ = pair()
    plain = copy.deepcopy(together)
    step(together, checkpointed=True)
    step(plain, checkpointed=False)
    for a, b in zip(together.parameters(), plain.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad)  # type: ignore[arg-type]


def test_copies_and_pickles_serve_their_own_quantizers() -> None:
    together, _ = pair()
    file = io.BytesIO()
    torch.save(together, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    copied = copy.deepcopy(together)
    outputs = [train(model) for model in (together, loaded, copied)]
    for other in outputs[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outputs[0], other, strict=True))


def test_a_converted_model_has_no_hooks_left() -> None:
    together, _ = pair()
    converted = convert_amct(together)
    assert not converted._forward_pre_hooks
    assert not converted._forward_hooks


def test_a_compiler_sees_no_hooks() -> None:
    together, _ = pair()
    x = torch.randn(2, 3, 9, 9)
    compiled = torch.compile(together.eval(), fullgraph=True, backend="eager")
    assert torch.allclose(compiled(x), together(x), atol=1e-6)
