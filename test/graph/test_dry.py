"""Following a model on shapes alone, and what must still be run on real tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from amct_fx.graph import Region, capture
from amct_fx.graph.dry import DryRun
from amct_fx.graph.dry_rules import Unknown, result_of
from amct_fx.graph.recording import record_calls
from amct_fx.graph.shapes import propagate_shapes, tried_on
from test.graph.test_recording import Branches, Convolutions, is_layer

IMAGES = torch.randn(2, 6, 9, 8)


def test_a_usual_model_is_prepared_without_computing_anything():
    model, images = Branches(), torch.randn(2, 3, 8, 8)
    with Convolutions() as run:
        captured = capture(model, is_layer, example_inputs=images)
    assert run.count == 0
    assert not captured.islands
    assert captured.facts == propagate_shapes(model, captured.regions, images)


CALLS: dict[str, Callable[[Tensor], Any]] = {
    "conv": lambda x: F.conv2d(x, torch.ones(4, 6, 3, 2), None, (2, 1), (1, 0), (1, 2)),
    "grouped": lambda x: F.conv2d(x, torch.ones(4, 3, 3, 3), torch.ones(4), groups=2),
    "same": lambda x: F.conv2d(x, torch.ones(4, 6, 3, 4), padding="same", dilation=2),
    "valid": lambda x: F.conv2d(x, torch.ones(4, 6, 3, 4), padding="valid"),
    "conv1d": lambda x: F.conv1d(x.flatten(2), torch.ones(4, 6, 3), stride=2),
    "conv3d": lambda x: F.conv3d(x.unsqueeze(2), torch.ones(4, 6, 1, 3, 3)),
    "transposed": lambda x: F.conv_transpose2d(x, torch.ones(6, 4, 3, 2), None, 2, 1, (1, 0), 1, 2),
    "transposed groups": lambda x: F.conv_transpose2d(x, torch.ones(6, 4, 2, 2), groups=3),
    "linear": lambda x: F.linear(x, torch.ones(5, 8), torch.ones(5)),
    "norm": lambda x: F.batch_norm(x, torch.ones(6), torch.ones(6), eps=0.1),
    "relu6": lambda x: F.relu6(x, inplace=True),
    "hardtanh": lambda x: F.hardtanh(x, 0.0, 1.0, True),
    "leaky": lambda x: F.leaky_relu(x, 0.1),
    "clamp": lambda x: x.clamp(0, 1).sigmoid_(),
    "broadcast": lambda x: x * x.mean((2, 3), keepdim=True) + 1,
    "reversed": lambda x: 1 - x,
    "in place": lambda x: x.add_(x.mean(1, True)).div_(2.0),
    "cat": lambda x: torch.cat([x, x, x], dim=-1),
    "mean": lambda x: x.mean(),
    "pools": lambda x: F.avg_pool2d(F.max_pool2d(x, 3, 2, 1, ceil_mode=True), 2),
    "adaptive": lambda x: F.adaptive_avg_pool2d(x, (None, 3)),
    "views": lambda x: x.chunk(3, 1)[2].permute(0, 2, 3, 1).reshape(2, -1).t(),
    "resize": lambda x: F.interpolate(F.pad(x, (1, 2)), scale_factor=2),
    "dropout": lambda x: F.dropout2d(x, training=False),
}


class _Checked(TorchFunctionMode):
    """Computes each function, and compares with what is said of its result."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ones:
            return func(*args)
        followed = result_of(func, *_on_meta((args, kwargs or {})))
        result = func(*args, **(kwargs or {}))
        for made, known in zip(tree_leaves(result), tree_leaves(followed), strict=True):
            assert known.is_meta
            assert (made.shape, made.stride(), made.dtype) == (
                (known.shape, known.stride(), known.dtype)
            )
        return result


class _Followed(TorchFunctionMode):
    """Computes nothing."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ones:
            return func(*args, **(kwargs or {}))
        return result_of(func, *_on_meta((args, kwargs or {})))


def _on_meta(value: Any) -> Any:
    def twin(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")

    return tree_map(twin, value)


@pytest.mark.parametrize("name", CALLS)
def test_what_is_known_of_a_function_is_what_it_makes(name: str):
    images = IMAGES.clone()
    with torch.no_grad(), _Checked():
        CALLS[name](images)


WRONG: dict[str, Callable[[Tensor], Any]] = {
    "channels": lambda x: F.conv2d(x, torch.ones(4, 5, 3, 3)),
    "groups": lambda x: F.conv2d(x, torch.ones(4, 2, 3, 3), groups=3),
    "too small": lambda x: F.conv2d(x, torch.ones(4, 6, 10, 3)),
    "dtype": lambda x: F.conv2d(x, torch.ones(4, 6, 3, 3, dtype=torch.float64)),
    "bias": lambda x: F.conv2d(x, torch.ones(4, 6, 3, 3), torch.ones(5)),
    "stride": lambda x: F.conv2d(x, torch.ones(4, 6, 3, 3), stride=(1, 1, 1)),
    "same with a stride": lambda x: F.conv2d(x, torch.ones(4, 6, 3, 3), padding="same", stride=2),
    "output padding": lambda x: F.conv_transpose2d(x, torch.ones(6, 4, 3, 3), None, 2, 0, 2),
    "features": lambda x: F.linear(x, torch.ones(5, 9)),
    "statistics": lambda x: F.batch_norm(x, torch.ones(7), torch.ones(7)),
    "shapes": lambda x: x + x[:, :5],
    "in place": lambda x: x[:, :1].contiguous().add_(x),
    "concatenation": lambda x: torch.cat([x, x[:, :, :5].contiguous()], 1),
    "axis": lambda x: x.mean((1, -3)),
    "view": lambda x: x.transpose(1, 2).view(2, -1),
    "pool": lambda x: F.max_pool2d(x, 20),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_fails_for_real_is_not_followed(name: str):
    with torch.no_grad(), pytest.raises(RuntimeError):
        WRONG[name](IMAGES.clone())
    with torch.no_grad(), _Followed(), pytest.raises((Unknown, RuntimeError)):
        WRONG[name](IMAGES.to("meta"))


class _Model(nn.Module):
    """A convolution, then a function."""

    def __init__(self, function: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(6, 4, 1)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.conv(x))


def _branch(_: nn.Module, x: Tensor) -> Tensor:
    return x + 1 if bool((x > -1e9).all()) else x - 1


def _caught(model: nn.Module, x: Tensor) -> Tensor:
    try:
        return _branch(model, x)
    except Exception:
        return x


def _lazy(model: Any, x: Tensor) -> Tensor:
    if not hasattr(model, "scale"):
        model.scale = nn.Parameter(x.mean((0, 2, 3)).view(-1, 1, 1))
    y: Tensor = x * model.scale
    return y


def _foreign(_: nn.Module, x: Tensor) -> Tensor:
    return x + float(x.detach().numpy().mean())


@pytest.mark.parametrize("function", [_branch, _caught, _lazy, _foreign, lambda m, x: x.cumsum(1)])
def test_values_and_unknown_functions_need_a_real_run(function: Any):
    model = _Model(function).eval()
    calls = record_calls(model, IMAGES)
    assert calls.dry is None
    assert torch.equal(calls.outputs, model(IMAGES))
    assert not any(p.is_meta for p in model.parameters())


@pytest.mark.parametrize(
    "inputs",
    [
        IMAGES.double(),
        IMAGES[:, :5],
        (IMAGES, 1),
    ],
)
def test_inputs_that_do_not_fit_are_not_followed(inputs: Any):
    with pytest.raises((RuntimeError, TypeError)):
        record_calls(_Model(lambda _, x: x), inputs)


def test_autocast_and_meta_tensors_are_not_followed():
    assert DryRun.of(nn.Linear(2, 2), ((torch.ones(1, 2, device="meta"),), {})) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert DryRun.of(nn.Linear(2, 2), ((torch.ones(1, 2),), {})) is None


def _added(_: nn.Module, x: Tensor) -> Tensor:
    y = x.relu()
    y += x
    return F.relu(y, inplace=True).flatten(1) * 2


def test_an_addition_in_place_is_the_addition_that_the_trace_makes_of_it():
    with Convolutions() as run:
        captured = capture(_Model(_added), is_layer, example_inputs=IMAGES)
    assert (run.count, captured.islands) == (0, [])


def _seen_by_another_name(_: nn.Module, x: Tensor) -> Tensor:
    y = x
    y += 1
    return x * y


def _seen_through_a_view(_: nn.Module, x: Tensor) -> Tensor:
    y = x.view(2, -1)
    x += 1
    return y * 2


@pytest.mark.parametrize("function", [_seen_by_another_name, _seen_through_a_view])
def test_an_addition_in_place_that_others_see_is_another_computation(function: Any):
    model = _Model(function)
    calls = record_calls(model, IMAGES)
    region = Region("", model, fx.Tracer().trace(model))
    assert calls.dry is not None
    with pytest.raises(Unknown):
        tried_on(region, IMAGES, calls)


class _Turns(nn.Module):
    """Computes something else at every call, and hides what fails."""

    turn = 0

    def forward(self, x: Tensor) -> Tensor:
        _Turns.turn += 1
        try:
            return x.relu() if _Turns.turn % 2 else x.sigmoid()
        except Exception:
            return x


def test_a_difference_that_the_model_hides_is_one():
    model = nn.Sequential(_Turns(), nn.Conv2d(6, 4, 1))
    calls = record_calls(model, IMAGES)
    tracer = fx.Tracer()
    tracer.is_leaf_module = lambda *_: True  # type: ignore[method-assign]
    with pytest.raises(Unknown):
        tried_on(Region("", model, tracer.trace(model)), IMAGES, calls)
