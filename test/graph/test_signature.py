"""The form of a call: what is compared, and what a call of another form runs."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import Tensor, nn

from amct_fx.errors import ModelError
from amct_fx.graph import capture, fx_graph_of, guard_of, install_graph
from amct_fx.graph.signature import call_form


def is_layer(module: nn.Module) -> bool:
    return type(module) is nn.Linear


def traced(model: nn.Module, example_inputs: object) -> nn.Module:
    for region in capture(model, is_layer, example_inputs=example_inputs).regions:
        install_graph(region.module, region.graph, region.guard)
    return model


class Masked(nn.Module):
    """Takes an optional tensor, a flag, and whatever else."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4)
        self.k = nn.Linear(4, 4)

    def forward(
        self, x: Tensor, mask: Tensor | None = None, flag: bool = True, **more: Tensor | None
    ) -> Tensor:
        y = self.q(x) if mask is None else self.q(x * mask)
        y = y + self.k(x) if flag else y
        return y if more.get("bias") is None else y + more["bias"]


MASK = torch.tensor([1.0, 0.0, 1.0, 0.0])
CALLS = [
    {},
    {"mask": None},
    {"mask": MASK},
    {"flag": False},
    {"mask": MASK, "flag": False},
    {"bias": MASK},
    {"bias": None},
]


@pytest.mark.parametrize("shown", CALLS, ids=str)
@pytest.mark.parametrize("called", CALLS, ids=str)
def test_every_form_of_call_computes_what_the_model_computes(shown, called):
    torch.manual_seed(0)
    model = Masked()
    x = torch.randn(3, 4)
    expected = model(x, **called)
    region = traced(model, {"x": x, **shown})
    assert fx_graph_of(region) is not None
    assert torch.equal(region(x, **called), expected)


def test_arguments_by_position_and_by_name_are_one_form():
    form = call_form(Masked(), (torch.ones(2), None), {})
    assert form.leaves((), {"x": torch.ones(2), "flag": True}) is not None
    assert form.leaves((), {"x": torch.ones(2), "flag": 1}) is None


def test_what_does_not_fit_the_signature_raises_as_it_did():
    model = traced(Masked(), torch.ones(2, 4))
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'x'"):
        model()
    with pytest.raises(TypeError, match="multiple values"):
        model(torch.ones(2, 4), x=torch.ones(2, 4))


def test_tensors_in_lists_and_dicts_are_inputs_of_the_graph():
    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, pair: tuple[Tensor, Tensor], named: dict[str, Tensor]) -> Tensor:
            y = self.fc(pair[0] + pair[1])
            return y * sum(named[key] for key in ("gain", "more") if key in named)

    model = Nested()
    pair, named = (torch.ones(2, 4), torch.ones(4)), {"gain": MASK}
    copied = traced(copy.deepcopy(model), (pair, named))
    assert "input_2" in str(fx_graph_of(copied))
    for call in ((pair, named), (pair, {}), ((torch.zeros(1, 4), MASK), {"gain": -MASK})):
        assert torch.equal(copied(*call), model(*call))


def test_an_object_that_is_no_tensor_keeps_the_module_as_it_is():
    class Cache:
        gain = 2.0

    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, cache: Cache | None = None) -> Tensor:
            return self.fc(x) if cache is None else self.fc(x) * cache.gain

    assert call_form(Cached(), (torch.ones(2, 4), Cache()), {}) is None
    captured = capture(Cached(), is_layer, example_inputs=(torch.ones(2, 4), Cache()))
    (island,) = captured.islands
    assert "'cache'" in island.reason


def test_none_for_a_required_argument_is_not_taken_for_a_tensor():
    class Required(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
            return self.fc(x) if mask is None else self.fc(x) * mask

    model = Required()
    x = torch.ones(2, 4)
    expected = [model(x, None), model(x, MASK)]
    copied = traced(model, (x, None))
    assert guard_of(copied).form is not None
    assert torch.equal(copied(x, None), expected[0])
    assert torch.equal(copied(x, MASK), expected[1])


def test_a_module_that_is_called_in_two_forms_stays_python():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Masked()

        def forward(self, x: Tensor, *more: Tensor) -> Tensor:
            return self.inner(x) + self.inner(x, *more) if x.sum() > 0 else self.inner(x)

    captured = capture(Twice(), is_layer, example_inputs=(torch.ones(2, 4), MASK))
    assert [island.name for island in captured.islands] == ["", "inner"]


def test_a_layer_of_another_form_looks_after_itself():
    captured = capture(Masked(), is_layer, example_inputs={"x": torch.ones(2, 4), "flag": False})
    assert [region.name for region in captured.regions] == [""]
    assert captured.island_leaves == ["k"]


@pytest.mark.parametrize("way", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles_keep_the_form(way):
    model = traced(Masked(), torch.ones(2, 4))
    again = way(model)
    x = torch.randn(3, 4)
    assert str(guard_of(again).form) == "(tensor, None, True)"
    for arguments in ({}, {"mask": MASK}):
        assert torch.equal(again(x, **arguments), model(x, **arguments))


class Heads(nn.Module):
    """Unpacks a shape, as attention layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y = self.fc(x).view(*x.shape[:-1], 2, -1)
        return y.reshape(*x.size()) if mask is None else y


def test_a_shape_is_unpacked_where_example_inputs_show_its_rank():
    model = Heads()
    x = torch.randn(2, 3, 4)
    copied = traced(copy.deepcopy(model), x)
    assert guard_of(copied).form is not None
    for other in (x, torch.randn(5, 7, 4), torch.randn(5, 4)):
        assert torch.equal(copied(other), model(other))


def test_a_rank_that_was_relied_on_is_checked_when_the_graph_runs():
    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Heads()

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            return self.inner(x.squeeze(0))

    model = Around()
    copied = traced(copy.deepcopy(model), torch.randn(2, 3, 4))
    assert torch.equal(copied(torch.ones(2, 3, 4)), model(torch.ones(2, 3, 4)))
    with pytest.raises(ModelError, match="had 2 sizes, and now it has 1"):
        copied(torch.ones(1, 3, 4))


def test_without_example_inputs_nothing_is_assumed():
    assert [island.name for island in capture(Heads(), is_layer).islands] == [""]


def test_recording_leaves_hooks_modes_and_random_state_alone():
    model = nn.Sequential(Masked(), nn.Dropout())
    model[0].eval()
    state = torch.get_rng_state()
    capture(model, is_layer, example_inputs=torch.ones(2, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert [module.training for module in model] == [False, True]


def test_layers_of_an_island_that_read_one_tensor_are_found():
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v = (nn.Linear(4, 4) for _ in range(3))
            self.out = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.q(x) + self.k(x)
            x.mul_(2.0)
            return self.out(y + self.v(x)) if x.shape[0] > 1 else y

    captured = capture(Attention(), is_layer, example_inputs=torch.ones(2, 4))
    assert captured.shared_inputs == [["q", "k"]]
    assert not capture(Attention(), is_layer).shared_inputs


def test_no_layer_is_found_twice_below_a_part_that_is_traced_for_a_form():
    class Island(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.fc(self.block(x)) if x.sum() > 0 else self.fc(x)

    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Island()
            self.head = nn.Linear(4, 4)
            self.other = nn.Linear(4, 4)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            y = self.head(self.inner(x))
            return y if mask is None else self.other(y)

    captured = capture(Root(), is_layer, example_inputs=torch.ones(2, 4))
    assert [region.name for region in captured.regions] == ["", "inner.block"]
    assert captured.island_leaves == ["inner.fc", "other"]
