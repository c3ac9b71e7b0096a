"""Modules that run a graph: identity, copies, pickles."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx import ModelStateError, convert_amct, prepare_qat_amct, summarize
from amct_fx.graph import capture, fx_graph_of, install_graph, regions


class Net(nn.Module):
    """Uses modules, functions, methods, slices, constants, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.body = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())
        self.register_buffer("shift", torch.ones(1))
        self.note = {"kept": True}

    def forward(self, x: Tensor, gain: float = 2.0) -> dict[str, Tensor]:
        x = F.max_pool2d(F.relu(self.conv(x), inplace=True), 2)
        y = self.body(x)[:, 1:3].flatten(1) * gain + self.shift
        return {"y": torch.cat([y, y.sigmoid()], dim=1), "none": None}

    def custom(self) -> bool:
        return self.note["kept"]


def traced() -> Net:
    torch.manual_seed(0)
    model = Net()
    for region in capture(model, lambda m: type(m) is nn.Conv2d).regions:
        install_graph(region.module, region.graph)
    return model


@pytest.fixture
def x() -> Tensor:
    return torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


def test_the_traced_module_computes_what_the_original_does(x):
    model = traced()
    torch.manual_seed(0)
    assert torch.equal(model(x)["y"], Net()(x)["y"])
    assert model(x)["none"] is None


def test_it_is_still_an_instance_of_the_users_class():
    model = traced()
    assert isinstance(model, Net)
    assert type(model).__name__ == "Net"
    assert model.custom()
    assert isinstance(model.body, nn.Sequential)
    assert list(model.state_dict()) == list(Net().state_dict())


def test_default_arguments_stay_arguments(x):
    model = traced()
    assert not torch.equal(model(x)["y"], model(x, gain=3.0)["y"])


def test_it_has_no_graph_attribute_that_exporters_take_for_torchscript():
    assert not hasattr(traced(), "graph")


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_copies_compute_the_same_and_own_their_parameters(how, x):
    model = traced()
    if how == "deepcopy":
        clone = copy.deepcopy(model)
    elif how == "pickle":
        clone = pickle.loads(pickle.dumps(model))
    else:
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        clone = torch.load(buffer, weights_only=False)
    assert torch.equal(clone(x)["y"], model(x)["y"])
    assert str(fx_graph_of(clone)) == str(fx_graph_of(model))
    assert isinstance(clone, Net)
    with torch.no_grad():
        clone.conv.weight.zero_()
    assert not torch.equal(clone(x)["y"], model(x)["y"])


def test_a_copy_of_a_copy_works(x):
    model = traced()
    assert torch.equal(copy.deepcopy(copy.deepcopy(model))(x)["y"], model(x)["y"])


def test_installing_again_after_a_change_of_the_graph(x):
    model = traced()
    graph = fx_graph_of(model)
    relu = next(node for node in graph.nodes if node.target is F.relu)
    relu.replace_all_uses_with(relu.args[0])
    graph.erase_node(relu)
    install_graph(model, graph)
    assert not torch.equal(model(x)["y"], traced()(x)["y"])


def test_fx_graph_of_an_ordinary_module_is_refused():
    with pytest.raises(TypeError, match="Net runs its own forward"):
        fx_graph_of(Net())


def test_regions_are_found_by_name():
    model = nn.ModuleDict({"a": traced(), "b": nn.ReLU()})
    assert [name for name, _ in regions(model)] == ["a"]


def test_torch_compile_takes_it_whole(x):
    model = traced()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    assert torch.allclose(compiled(x)["y"], model(x)["y"])


class Registered(nn.Module):
    """Keeps a registry of its subclasses and decides what a pickle holds."""

    registry: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls) -> None:
        Registered.registry[cls.__name__] = cls

    def __getstate__(self) -> dict[str, object]:
        state = dict(self.__dict__)
        state["lock"] = None
        return state


class InRegistry(Registered):
    """One of them, with an attribute that cannot be pickled."""

    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()
        self.conv = nn.Conv2d(3, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x)


def test_generated_classes_do_not_enter_the_users_registry(x):
    model = InRegistry()
    for region in capture(model, lambda m: type(m) is nn.Conv2d).regions:
        install_graph(region.module, region.graph)
    assert Registered.registry == {"InRegistry": InRegistry}
    clone = copy.deepcopy(model)
    assert clone.lock is None
    assert torch.equal(clone(x), model(x))


def test_a_part_of_a_traced_container_runs_its_own_layers(x):
    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(3, 3, 1), nn.ReLU(), nn.Conv2d(3, 3, 1))

        def forward(self, x):
            return self.layers[1:](self.layers[:1](x)) if x.mean() < 100 else x

    prepared = prepare_qat_amct(Sliced())
    prepared(x)
    expected = prepared.layers(x)
    assert torch.equal(prepared(x), expected)
    assert type(prepared.layers[1:]) is nn.Sequential


@pytest.mark.parametrize(
    ("replacement", "message"),
    [
        (nn.Linear(4, 4), "layer '1.0' is a Linear without 'input_fake_quant' now"),
        (None, "layer '1' is a Sequential without '0' now"),
    ],
)
@pytest.mark.parametrize("use", [convert_amct, summarize, lambda model: model(torch.ones(2, 4))])
def test_a_layer_that_was_replaced_after_prepare_is_named(
    use: Callable[[nn.Module], Any], replacement: nn.Module | None, message: str
):
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.ReLU())).eval()
    prepared = prepare_qat_amct(model)
    prepared(torch.ones(2, 4))
    if replacement is None:
        del prepared[1]._modules["0"]
    else:
        prepared[1][0] = replacement
    with pytest.raises(ModelStateError, match=message):
        use(prepared)


def test_a_copy_shares_the_code_and_not_the_graph(x):
    model = traced()
    copied = copy.deepcopy(model)
    assert type(copied).forward is type(model).forward
    assert fx_graph_of(copied) is not fx_graph_of(model)
    assert {node.graph for node in fx_graph_of(copied).nodes} == {fx_graph_of(copied)}
    torch.nn.init.zeros_(copied.conv.weight)
    assert not torch.equal(copied(x)["y"], model(x)["y"])


class OwnCopy(nn.Module):
    """Says itself how it is copied."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 2)
        self.copies = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnCopy:
        made = type(self)()
        made.copies = self.copies + 1
        return made

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).relu()


def test_a_class_that_copies_itself_still_does():
    model = OwnCopy()
    (region,) = capture(model, lambda m: type(m) is nn.Linear).regions
    install_graph(model, region.graph)
    assert copy.deepcopy(model).copies == 1
