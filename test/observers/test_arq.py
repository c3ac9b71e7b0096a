"""ARQFakeQuantize: nothing learned, nothing calibrated, the scale follows the weight."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn
from torch.ao.quantization import FakeQuantizeBase, disable_fake_quant

from amct_fx.errors import ConfigError, ModelError, ModelStateError
from amct_fx.observers import ARQFakeQuantize, functional


def test_the_scale_follows_the_weight_in_every_forward() -> None:
    module = ARQFakeQuantize(ch_axis=0, num_channels=3)
    for factor in (1.0, 5.0):
        weight = torch.randn(3, 4) * factor
        assert torch.equal(module(weight), functional.arq_fake_quantize(weight, ch_axis=0))
        assert torch.equal(module.scale, functional.arq_qparams(weight, ch_axis=0))
        assert torch.equal(module.calculate_qparams()[0], module.scale)


def test_it_adds_no_parameter_and_keeps_only_its_switches() -> None:
    module = ARQFakeQuantize(ch_axis=0, num_channels=3)
    assert list(module.parameters()) == []
    assert list(module.state_dict()) == ["_extra_state"]
    assert isinstance(module, FakeQuantizeBase)


def test_switches_travel_with_the_state_dict() -> None:
    first, second = ARQFakeQuantize(), ARQFakeQuantize()
    first.apply(disable_fake_quant)
    second.load_state_dict(first.state_dict())
    weight = torch.randn(3, 4)
    assert second(weight) is weight


def test_the_gradient_is_the_identity() -> None:
    weight = torch.tensor([[0.1, -1.0, 3.0]], requires_grad=True)
    g = torch.randn(1, 3)
    ARQFakeQuantize(num_bits=2)(weight).backward(g)
    assert torch.equal(weight.grad, g)


def test_evaluation_writes_nothing() -> None:
    module = ARQFakeQuantize(ch_axis=0, num_channels=2)
    module(torch.ones(2, 2))
    before = module.scale.clone()
    module.eval()(torch.ones(2, 2) * 9)
    assert torch.equal(module.scale, before)


@pytest.mark.parametrize("kwargs", [{}, {"ch_axis": 0, "num_channels": 2}])
def test_shapes_are_final_from_construction(kwargs: dict[str, int]) -> None:
    module = ARQFakeQuantize(**kwargs)
    pointer, shape = module.scale.data_ptr(), module.scale.shape
    module(torch.randn(2, 3))
    assert (module.scale.data_ptr(), module.scale.shape) == (pointer, shape)
    scale, zero_point = module.calculate_qparams(torch.randn(2, 3))
    assert scale.shape == zero_point.shape == shape
    assert (scale.dtype, zero_point.dtype) == (torch.float32, torch.int32)
    assert zero_point.abs().sum() == 0


def test_qparams_without_weight_need_a_forward_or_say_so() -> None:
    with pytest.raises(ModelStateError, match=r"layer 'conv1'.*calculate_qparams\(weight\)"):
        ARQFakeQuantize(layer_name="conv1").calculate_qparams()
    module = ARQFakeQuantize(ch_axis=0)
    module(torch.randn(2, 3))
    with pytest.raises(ModelStateError, match="num_channels"):
        module.calculate_qparams()
    assert module.calculate_qparams(torch.randn(2, 3))[0].shape == (2,)


def test_a_weight_with_another_number_of_channels_is_refused() -> None:
    module = ARQFakeQuantize(ch_axis=1, groups=2, num_channels=6, layer_name="up")
    assert module(torch.randn(4, 3, 2, 2)).shape == (4, 3, 2, 2)
    with pytest.raises(ModelError, match=r"layer 'up': .*8 output channels.*num_channels=6"):
        module(torch.randn(4, 4, 2, 2))


def test_dead_and_tiny_channels_get_scale_one() -> None:
    weight = torch.tensor([[0.0, 0.0], [1e-30, -1e-30], [1.0, 0.5]])
    module = ARQFakeQuantize(ch_axis=0, num_channels=3)
    y = module(weight)
    assert module.scale.tolist()[:2] == [1.0, 1.0]
    assert y[:2].abs().sum() == 0


def test_copies_and_casts() -> None:
    module = ARQFakeQuantize(ch_axis=0, num_channels=2)
    weight = torch.randn(2, 3)
    expected = module(weight)
    for clone in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert torch.equal(clone(weight), expected)
    half = copy.deepcopy(module).half()
    assert half.scale.dtype == torch.float32
    assert half(weight.half()).dtype == torch.float16


def test_compiled_training_steps_write_the_scale() -> None:
    torch._dynamo.reset()
    module = ARQFakeQuantize(ch_axis=0, num_channels=2)
    weight = torch.randn(2, 3, requires_grad=True)
    y = torch.compile(module, fullgraph=True, backend="aot_eager")(weight)
    y.sum().backward()
    assert torch.equal(module.scale, functional.arq_qparams(weight, ch_axis=0))
    assert torch.equal(weight.grad, torch.ones(2, 3))


def test_export_of_a_layer_with_a_quantized_weight() -> None:
    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.fake_quant = ARQFakeQuantize(ch_axis=0, num_channels=2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(x, self.fake_quant(self.weight), self.bias)

    layer, x = Layer().eval(), torch.randn(4, 3)
    program = torch.export.export(layer, (x,))
    assert torch.equal(program.module()(x), layer(x))


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="'num_bit'; did you mean 'num_bits'"):
        ARQFakeQuantize(num_bit=8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="'axis'; did you mean 'ch_axis'"):
        ARQFakeQuantize.with_args(axis=0)
    for kwargs in ({"num_bits": 1}, {"groups": 0}, {"ch_axis": 0, "num_channels": 0}):
        with pytest.raises(ConfigError):
            ARQFakeQuantize(**kwargs)
    with pytest.raises(TypeError, match="floating point"):
        ARQFakeQuantize()(torch.ones(2, dtype=torch.int8))


def test_repr() -> None:
    off = ARQFakeQuantize(num_bits=4)
    off.disable_fake_quant()
    modules = [
        ARQFakeQuantize(ch_axis=1, groups=2, num_channels=6),
        ARQFakeQuantize(ch_axis=0),
        off,
    ]
    assert_expected_inline(
        "\n".join(map(repr, modules)),
        """\
ARQFakeQuantize(num_bits=8, ch_axis=1, groups=2, num_channels=6)
ARQFakeQuantize(num_bits=8, ch_axis=0)
ARQFakeQuantize(num_bits=4, fake_quant=off)""",
    )
