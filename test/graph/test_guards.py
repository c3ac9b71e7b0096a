"""What tracing would change without a word becomes an island, and the model computes the same."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from amct_fx.graph import capture, install_graph


def is_layer(module: nn.Module) -> bool:
    return type(module) is nn.Linear


class Holder:
    """A plain object."""

    kept: object = None


class Inner(nn.Module):
    """Runs ``body(self, x)``."""

    def __init__(self, body: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.body = body
        self.fc = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.5)
        self.calls = 0
        self.history: list[Tensor] = []
        self.holder = Holder()
        self.chance = random.Random(0)
        self.numpy_chance = np.random.default_rng(0)
        self.noise = torch.Generator().manual_seed(0)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self, x)


class Outer(nn.Module):
    """Calls the inner module between two layers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = inner
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.first(x)))


def without_gradients(module: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = module.fc(x)
    return x + 1


def without_autocast(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return module.fc(x.float())


def with_autocast(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return module.fc(x).float()


def torch_noise(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x) + torch.randn(4)


def python_chance(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x) * 2 if random.random() < 0.5 else module.fc(x)


def numpy_chance(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x) * float(np.random.rand())


def keeps_a_feature(module: nn.Module, x: Tensor) -> Tensor:
    module.feature = module.fc(x)
    return module.feature


def counts(module: nn.Module, x: Tensor) -> Tensor:
    module.calls += 1
    return module.fc(x)


def remembers(module: nn.Module, x: Tensor) -> Tensor:
    module.history.append(x)
    return module.fc(x)


def asks_for_the_type(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x) if isinstance(x, Tensor) else module.fc(x[0])


def asks_torch_for_the_type(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x) if torch.is_tensor(x) else module.fc(x[0])


def asks_a_child_for_its_mode(module: nn.Module, x: Tensor) -> Tensor:
    return F.dropout(module.fc(x), 0.5, training=module.drop.training)


def changes_its_mode(module: nn.Module, x: Tensor) -> Tensor:
    module.training = False
    return module.fc(x)


class Reverse(torch.autograd.Function):
    """Identity whose gradient is turned around."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return -grad


def own_gradient(module: nn.Module, x: Tensor) -> Tensor:
    return Reverse.apply(module.fc(x))


def checkpointed(module: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(module.fc, x, use_reentrant=False)


@torch.no_grad()
def decorated(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x)


def catches_errors(module: nn.Module, x: Tensor) -> Tensor:
    try:
        return module.fc(x) if x.sum() > 1e9 else module.fc(x) * 2
    except Exception:
        return x * 1000


def compares_its_mode(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x) * 3 if module.training is True else module.fc(x)


def compares_the_dtype(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x) if x.dtype is torch.float32 else x


def keeps_a_feature_in_an_object(module: nn.Module, x: Tensor) -> Tensor:
    module.holder.kept = module.fc(x)
    return module.holder.kept


def compares_the_class(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x) if type(x) is Tensor else module.fc(x[0])


def compares_the_class_among_several(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x[0]) if type(x) in (list, tuple) else module.fc(x)


def asks_for_an_attribute(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x.scores) if hasattr(x, "scores") else module.fc(x)


def hopes_for_a_number(module: nn.Module, x: Tensor) -> Tensor:
    try:
        scale = float(x.mean())
    except Exception:
        scale = 100.0
    return module.fc(x) * scale


def hopes_for_an_integer(module: nn.Module, x: Tensor) -> Tensor:
    try:
        scale = int(x.shape[0])
    except Exception:
        scale = 100
    return module.fc(x) * scale


def hopes_for_a_length(module: nn.Module, x: Tensor) -> Tensor:
    try:
        scale = len(x)
    except Exception:
        scale = 100
    return module.fc(x) * scale


def hopes_for_rows(module: nn.Module, x: Tensor) -> Tensor:
    try:
        rows = list(x)
    except Exception:
        rows = [x]
    return module.fc(x) * len(rows)


def own_python_chance(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x) * module.chance.random()


def own_numpy_chance(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x) * float(module.numpy_chance.random())


def own_torch_noise(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x) + torch.randn(4, generator=module.noise)


CHANCE = random.Random(0)
NUMPY_CHANCE = np.random.RandomState(0)


def global_chance(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x) * CHANCE.random()


def global_numpy_chance(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x) * float(NUMPY_CHANCE.rand())


class Turn(torch.autograd.Function):
    """Turns the gradient around and returns what it got."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return -grad


def turned(x: Tensor) -> Tensor:
    return Turn.apply(x)


def own_gradient_of_the_argument(module: nn.Module, x: Tensor) -> Tensor:
    return turned(module.fc(x))


def depends_on_gradients(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x) * 2 if torch.is_grad_enabled() else module.fc(x)


def depends_on_autocast(module: nn.Module, x: Tensor) -> Tensor:
    return module.fc(x) * 2 if torch.is_autocast_enabled("cpu") else module.fc(x)


BODIES = [
    compares_the_class,
    compares_the_class_among_several,
    asks_for_an_attribute,
    hopes_for_a_number,
    hopes_for_an_integer,
    hopes_for_a_length,
    hopes_for_rows,
    own_python_chance,
    own_numpy_chance,
    own_torch_noise,
    global_chance,
    global_numpy_chance,
    own_gradient_of_the_argument,
    depends_on_gradients,
    depends_on_autocast,
    catches_errors,
    compares_its_mode,
    compares_the_dtype,
    keeps_a_feature_in_an_object,
    own_gradient,
    checkpointed,
    decorated,
    without_gradients,
    without_autocast,
    with_autocast,
    torch_noise,
    python_chance,
    numpy_chance,
    keeps_a_feature,
    counts,
    remembers,
    asks_for_the_type,
    asks_torch_for_the_type,
    asks_a_child_for_its_mode,
    changes_its_mode,
]


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@pytest.mark.parametrize("at_root", [False, True])
def test_the_part_becomes_an_island_and_nothing_is_left_behind(body, at_root):
    inner = Inner(body)
    model = inner if at_root else Outer(inner)
    before = dict(vars(inner))
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()
    captured = capture(model, is_layer)
    assert [island.name for island in captured.islands] == ["" if at_root else "inner"]
    assert vars(inner) == before
    assert inner.history == []
    assert torch.equal(states[0], torch.get_rng_state())
    assert random.getstate() == states[1]
    assert (np.random.get_state()[1] == states[2]).all()


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_the_traced_model_computes_what_the_original_does(body):
    torch.manual_seed(0)
    original = Outer(Inner(body))
    torch.manual_seed(0)
    traced = Outer(Inner(body))
    for region in capture(traced, is_layer).regions:
        install_graph(region.module, region.graph)
    x = torch.randn(3, 4)
    for _ in range(2):
        results = []
        for model in (original, traced):
            torch.manual_seed(1)
            random.seed(1)
            np.random.seed(1)
            CHANCE.seed(1)
            NUMPY_CHANCE.seed(1)
            y = model(x)
            y.sum().backward()
            results.append((y, model.first.weight.grad))
        for a, b in zip(*results, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)


class Branch(nn.Module):
    """Reads a parameter that its parent owns, then fails to be traced."""

    def __init__(self, gain: nn.Parameter) -> None:
        super().__init__()
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.gain
        return y if x.sum() > 0 else -y


class SharedGain(nn.Module):
    """Reads the parameter again after the failed attempt."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(4))
        self.fc = nn.Linear(4, 4)
        self.branch = Branch(self.gain)

    def forward(self, x: Tensor) -> Tensor:
        return self.branch(self.fc(x)) * self.gain


def test_a_parameter_read_by_a_failed_attempt_can_be_read_again():
    model = SharedGain()
    x = torch.randn(3, 4)
    expected = model(x)
    for region in capture(model, is_layer).regions:
        install_graph(region.module, region.graph)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("body", [depends_on_gradients, depends_on_autocast])
def test_branches_on_modes_stay_alive(body, grad, autocast):
    model = Outer(Inner(body))
    for region in capture(model, is_layer).regions:
        install_graph(region.module, region.graph)
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    plain = model.last(model.first(x) @ model.inner.fc.weight.T + model.inner.fc.bias)
    with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        doubled = not torch.allclose(model(x).float(), plain, atol=0.1)
    assert doubled == (grad if body is depends_on_gradients else autocast)


def test_the_reason_names_the_line_of_the_question():
    (island,) = capture(Inner(own_gradient_of_the_argument), is_layer).islands
    line = own_gradient_of_the_argument.__code__.co_firstlineno
    assert "autograd.Function" in island.reason
    path, _, number = island.source.rpartition(":")
    assert path == __file__
    assert int(number) == turned.__code__.co_firstlineno + 1 < line


def test_a_loop_over_modules_may_ask_for_their_class():
    class Loops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.Linear(4, 4), nn.ReLU()])

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = layer(x) if type(layer) is nn.Linear or hasattr(layer, "inplace") else x
            return x if type(self) is Loops else -x

    assert not capture(Loops(), is_layer).islands


def test_tracing_under_no_grad_is_no_reason_for_an_island():
    with torch.no_grad():
        captured = capture(Outer(nn.Sequential(nn.Linear(4, 4))), is_layer)
    assert not captured.islands


class Keeper(nn.Module):
    """Writes to its child and to a plain tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.child = nn.Sequential(nn.Linear(4, 4))
        self.child.calls = 0
        self.table = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.child.calls += 1
        self.child.feature = x
        self.table.add_(1.0)
        return self.child(x) * self.child.calls + self.table


def test_writes_to_children_and_plain_tensors_stay_alive():
    torch.manual_seed(0)
    original = Keeper()
    torch.manual_seed(0)
    traced = Keeper()
    for region in capture(traced, is_layer).regions:
        install_graph(region.module, region.graph)
    assert traced.child.calls == 0
    assert not hasattr(traced.child, "feature")
    x = torch.randn(3, 4)
    for _ in range(3):
        assert torch.equal(original(x), traced(x))
    assert traced.child.calls == 3


class Position(nn.Module):
    """Computes a constant in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.table = torch.randn(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) + (self.table @ self.table)[0]


def test_constants_keep_their_precision():
    model = Position()
    x = torch.randn(3, 4)
    expected = model(x)
    captured = capture(model, is_layer, example_inputs=x)
    for region in captured.regions:
        install_graph(region.module, region.graph)
    assert not captured.islands
    assert torch.equal(model(x), expected)
