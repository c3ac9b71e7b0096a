"""Copies of models: what ``copy.deepcopy`` makes, only faster."""

from __future__ import annotations

import copy
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from amct_fx import convert_amct, prepare_qat_amct
from amct_fx.copying import copy_model
from amct_fx.graph.region import regions


class Odd(nn.Module):
    """Shares a storage, a list and a layer, and holds tensors in odd places."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.arange(6.0))
        self.register_buffer("part", self.whole[2:4])
        self.first = nn.Conv2d(3, 4, 1).to(memory_format=torch.channels_last)
        self.again = self.first
        self.tied = nn.Conv2d(3, 4, 1)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm2d(4)
        self.notes = [{"layer": self.first}, self.whole]
        self.same_notes = self.notes
        self.table = OrderedDict(a=(1, [2]), b=self.tied.weight)
        self.pair = (self.norm, 3)
        self.first.register_forward_hook(self.hook)
        self.lazy = nn.LazyLinear(2)

    def hook(self, *_: Any) -> None:
        """Know its owner."""

    def forward(self, x: Tensor) -> Tensor:
        return x


class Guarded(nn.Linear):
    """Has a protocol of its own."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "restored": True}


def test_a_copy_is_what_deepcopy_makes():
    model = Odd().eval()
    model.first.weight.requires_grad_(False)
    ours, theirs = copy_model(model), copy.deepcopy(model)
    for made in (ours, theirs):
        assert [name for name, _ in made.named_modules()] == [n for n, _ in model.named_modules()]
        assert list(vars(made)) == list(vars(model))
        assert made.again is made.first is made.notes[0]["layer"] is not model.first
        assert made.tied.weight is made.first.weight is made.table["b"]
        assert made.notes is made.same_notes is not model.notes
        assert made.notes[1] is made.whole
        assert made.pair[0] is made.norm
        assert type(made.table) is OrderedDict
        assert not made.first.weight.requires_grad
        assert not made.training
        (hook,) = made.first._forward_hooks.values()
        assert hook.__self__ is made
        made.whole.fill_(7)
        assert made.part.tolist() == [7, 7]
        assert isinstance(made.lazy.weight, nn.UninitializedParameter)
        assert made.first.weight.stride() == model.first.weight.stride()
    assert model.whole.tolist() == [0, 1, 2, 3, 4, 5]
    for name, value in ours.named_parameters():
        if not isinstance(value, nn.UninitializedParameter):
            assert torch.equal(value, model.get_parameter(name))
            assert value.data_ptr() != model.get_parameter(name).data_ptr()


def test_a_class_that_copies_in_its_own_way_does():
    assert copy_model(nn.Sequential(Guarded(2, 2)))[0].restored


class Scaled(nn.Module):
    """Reads a plain attribute, which a graph of it watches."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.factor = nn.Linear(2, 2), 2.0

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x) * self.factor


class Stage(nn.Module):
    """Holds the parts that it runs in a list."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x: Tensor) -> Tensor:
        for part in self.parts:
            x = part(x)
        return x


class Chooses(nn.Module):
    """Stays Python, and has a stage that is traced; its first part is that of another list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.ModuleList([Scaled()])
        self.stages = nn.ModuleList([Stage(self.shared[0], Scaled())])

    def forward(self, x: Tensor) -> Tensor:
        return self.stages[0](x) if x.sum() > 0 else x


def test_a_traced_part_within_python_finds_its_parts_in_a_copy():
    x = torch.ones(3, 2)
    prepared = prepare_qat_amct(Chooses(), reused="quantize")
    assert "stages.0" in [name for name, _ in regions(prepared)]
    expected = prepared(x)
    copied = copy_model(prepared)
    assert torch.equal(copied(x), expected)
    assert copied.shared[0] is copied.stages[0].parts[0] is not prepared.shared[0]
    converted = convert_amct(prepared)
    assert torch.allclose(converted(x), prepared.eval()(x), atol=0.01)
