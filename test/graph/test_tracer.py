"""Tracing with islands: what is traced, what stays Python, and why."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from amct_fx.errors import ModelError
from amct_fx.graph import capture, fx_graph_of, install_graph


def is_layer(module: nn.Module) -> bool:
    return type(module) in (nn.Linear, nn.Conv2d)


class Flagged(nn.Module):
    """Depends on its mode."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * 2 if self.training else self.fc(x)


class Branching(nn.Module):
    """Decides by the shape of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 2:
            x = x + 1
        return self.fc(x)


class Optional(nn.Module):
    """Takes an optional argument."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return self.fc(x if mask is None else x * mask)


class Around(nn.Module):
    """Calls an inner module between two layers."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = inner
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.inner(self.first(x))))


def test_a_plain_model_is_one_region():
    captured = capture(Around(nn.Linear(4, 4)), is_layer)
    assert [region.name for region in captured.regions] == [""]
    assert not captured.islands
    assert not captured.island_leaves


def test_a_shape_branch_becomes_an_island_with_its_source_line():
    captured = capture(Around(Branching()), is_layer)
    (island,) = captured.islands
    assert island.name == "inner"
    assert "control flow" in island.reason
    assert island.source is not None
    assert __file__ in island.source
    assert captured.island_leaves == ["inner.fc"]


def test_the_region_around_an_island_keeps_no_trace_of_the_failed_attempt():
    (region, *_) = capture(Around(Branching()), is_layer).regions
    targets = [node.target for node in region.graph.nodes if node.op == "call_module"]
    assert targets == ["first", "inner", "last"]
    region.graph.lint()


def test_handing_self_training_on_is_traced_and_stays_alive():
    class HandsOn(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return F.dropout(self.fc(x), 0.5, training=self.training)

    model = Around(HandsOn())
    captured = capture(model, is_layer)
    assert not captured.islands
    (region,) = captured.regions
    assert type(model.inner) is HandsOn
    install_graph(region.module, region.graph)
    x = torch.randn(8, 4)
    assert not torch.equal(model(x), model(x))
    model.inner.eval()
    assert torch.equal(model(x), model(x))
    assert "self.inner.training" in fx_graph_of(model).python_code("self").src


def test_branching_on_self_training_becomes_an_island():
    model = Around(Flagged())
    captured = capture(model, is_layer)
    (island,) = captured.islands
    assert "self.training" in island.reason
    assert all(module.training for module in model.modules())


def test_an_optional_argument_at_the_root_keeps_the_root_as_it_is():
    captured = capture(Optional(), is_layer)
    (island,) = captured.islands
    assert island.name == ""
    assert "'mask'" in island.reason
    assert captured.island_leaves == ["fc"]


def test_an_optional_argument_inside_is_traced_with_the_value_that_is_passed():
    captured = capture(Around(Optional()), is_layer)
    assert not captured.islands


def test_varargs_at_the_root_keep_the_root_as_it_is():
    class Variadic(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(4, 4)

        def forward(self, *inputs: Tensor) -> Tensor:
            return self.fc(sum(inputs))

    (island,) = capture(Variadic(), is_layer).islands
    assert "*inputs" in island.reason


def test_a_module_with_forward_hooks_keeps_them():
    model = Around(nn.Sequential(nn.Linear(4, 4)))
    model.inner.register_forward_hook(lambda *_: None)
    (island,) = capture(model, is_layer).islands
    assert (island.name, "hooks" in island.reason) == ("inner", True)


def test_a_forward_replaced_on_the_instance_is_not_traced():
    model = Around(nn.Sequential(nn.Linear(4, 4)))
    model.inner.forward = lambda x: x
    (island,) = capture(model, is_layer).islands
    assert "replaced" in island.reason


def test_torch_containers_with_layers_are_islands_not_opaque_leaves():
    encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    captured = capture(encoder, is_layer)
    assert captured.island_leaves == ["linear1", "linear2"]


def test_an_island_without_layers_needs_no_second_look():
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if self.training else x

    captured = capture(Around(Noise()), is_layer)
    assert [island.name for island in captured.islands] == ["inner"]
    assert not captured.island_leaves


def test_module_lists_are_walked_through():
    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(2)])

        def forward(self, x: Tensor, flag: Tensor | None = None) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    captured = capture(Loop(), is_layer)
    assert [region.name for region in captured.regions] == ["blocks.0", "blocks.1"]


def test_strict_raises_and_lists_the_reasons():
    with pytest.raises(ModelError, match=r"inner \(Branching\).*control flow"):
        capture(Around(Branching()), is_layer, strict=True)


def test_strict_accepts_islands_without_layers():
    class Noise(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if self.training else x

    assert capture(Around(Noise()), is_layer, strict=True).regions


class Prints(nn.Module):
    """A question that a proxy answers differently from a tensor, and that nothing can notice."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) if str(x).startswith("tensor") else self.fc(x) + 1


def test_example_inputs_reveal_what_tracing_would_have_frozen():
    assert not capture(Prints(), is_layer).islands
    captured = capture(Prints(), is_layer, example_inputs=torch.randn(2, 4))
    (island,) = captured.islands
    assert "example_inputs" in island.reason
    assert captured.island_leaves == ["fc"]


def test_a_result_of_another_shape_on_example_inputs_makes_an_island():
    class Shapes(Prints):
        def forward(self, x: Tensor) -> Tensor:
            return self.fc(x) if str(x).startswith("tensor") else self.fc(x)[:, :2].T

    (island,) = capture(Shapes(), is_layer, example_inputs=torch.randn(2, 4)).islands
    assert "example_inputs" in island.reason


def test_comparing_on_example_inputs_leaves_modes_and_random_state_alone():
    model = Around(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    model.inner.eval()
    state = torch.random.get_rng_state()
    capture(model, is_layer, example_inputs=(torch.randn(2, 4, generator=torch.Generator()),))
    assert torch.equal(state, torch.random.get_rng_state())
    assert model.training
    assert not model.inner[1].training


class Halves(nn.Module):
    """Uses the shape that its parent read, then branches."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor, shape: torch.Size) -> Tensor:
        x = x.reshape(shape[0], -1)
        return self.fc(x) if x.sum() > 0 else self.fc(-x)


class ReadsOnce(nn.Module):
    """Reads a shape once and uses it before and behind a part that cannot be traced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inner = Halves()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        shape = x.shape
        return self.inner(x, shape).reshape(shape[0], 2, shape[1] // 2)


def test_an_attribute_first_used_in_a_failed_attempt_is_made_anew():
    model = ReadsOnce()
    x = torch.randn(3, 4)
    expected = model(x)
    captured = capture(model, is_layer, example_inputs=x)
    assert [island.name for island in captured.islands] == ["inner"]
    for region in captured.regions:
        install_graph(region.module, region.graph, region.guard)
    assert torch.equal(model(x), expected)


class Listed(nn.Module):
    """Grows a list of parts, as the blocks of YOLO do."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(8, 12)
        self.inner = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        parts = list(self.fc(x).chunk(2, -1))
        parts.append(self.inner(parts[-1]))
        first, second = map(torch.relu, torch.split(torch.cat(parts, -1), [6, 12], -1))
        return torch.cat([first, second], -1)


def test_the_parts_of_a_chunk_or_split_can_be_listed():
    model = Listed()
    x = torch.randn(3, 8)
    expected = model(x)
    captured = capture(model, is_layer)
    assert not captured.islands
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("width", [1, 2, 4])
def test_a_chunk_of_a_short_axis_makes_fewer_parts(width: int):
    class Chunked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.fc = nn.Linear(8, width)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([part.sum() for part in self.fc(x).chunk(3, -1)])

    model, x = Chunked(), torch.randn(3, 8)
    captured = capture(model, is_layer, example_inputs=x)
    (island,) = captured.islands
    assert "computes something else on example_inputs" in island.reason
    assert captured.island_leaves == ["fc"]
    (region,) = capture(model, is_layer).regions  # nothing shows how many parts there are
    with pytest.raises(ModelError, match="chunk makes 3 parts, and now it makes"):
        fx.GraphModule(model, region.graph)(x)


class Projected(nn.Module):
    """Keeps its weight within a norm, as EEGNet does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.fc.weight.data = torch.renorm(self.fc.weight.data, 2, 0, 0.1)
        return self.fc(x)


class Halved(Projected):
    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        y.data *= 0.5
        return y


@pytest.mark.parametrize("part", [Projected, Halved])
def test_what_a_forward_sets_of_a_tensor_is_not_lost(part: type[nn.Module]) -> None:
    model = nn.Sequential(nn.Linear(4, 4), part())
    x = torch.randn(2, 4)
    expected = copy.deepcopy(model)(x)
    captured = capture(model, is_layer)
    (island,) = captured.islands
    assert (island.name, "sets data of a tensor" in island.reason) == ("1", True)
    for region in captured.regions:
        install_graph(region.module, region.graph, region.guard)
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize("name", ['a"b', "line\nbreak", "back\\nslash", "for"])
def test_names_that_generated_code_cannot_hold_make_an_island(name: str):
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.add_module(name, nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return getattr(self, name)(x)

    captured = capture(Around(Named()), is_layer)
    (island,) = captured.islands
    assert island.name == "inner"
    assert repr(f"inner.{name}") in island.reason
    assert captured.island_leaves == [f"inner.{name}"]
