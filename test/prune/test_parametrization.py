"""Masks on the parameters of single layers: gradients, steps, copies, checkpoints, compilers."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from amct_fx.errors import ConfigError
from amct_fx.prune.functional import m4n2_mask
from amct_fx.prune.parametrization import M4N2, FilterNorm, filter_norm, m4n2


def network() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    filter_norm(net[0], "weight", torch.tensor([1, 0, 1, 1, 0, 1, 1, 1]).view(-1, 1, 1, 1))
    filter_norm(net[0], "bias", torch.tensor([1, 0, 1, 1, 0, 1, 1, 1]))
    m4n2(net[2], update_freq=2)
    return net


def images() -> torch.Tensor:
    return torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(1))


def train(net: nn.Module, steps: int, **options: float) -> None:
    optimizer = torch.optim.SGD(net.parameters(), **{"lr": 0.1, **options})
    for _ in range(steps):
        optimizer.zero_grad()
        net(images()).square().mean().backward()
        optimizer.step()


def masks(layer: nn.Module) -> torch.Tensor:
    return layer.parametrizations.weight[0].mask


def test_masked_entries_are_zero_and_get_exactly_no_gradient():
    net = network()
    train(net, 2, weight_decay=0.1, momentum=0.9)
    net.zero_grad()
    net(images()).sum().backward()
    for layer in (net[0], net[2]):
        cut = (masks(layer) == 0).expand_as(layer.weight)
        assert cut.any()
        assert (layer.weight[cut] == 0).all()
        assert (layer.parametrizations.weight.original.grad[cut] == 0).all()
    assert (net[0].bias[[1, 4]] == 0).all()
    assert (net[0].parametrizations.bias.original.grad[[1, 4]] == 0).all()


def test_the_stored_weight_stays_the_same_parameter():
    layer = nn.Conv2d(4, 4, 1)
    weight, bias = layer.weight, layer.bias
    m4n2(layer)
    filter_norm(layer, "bias", torch.ones(4))
    assert layer.parametrizations.weight.original is weight
    assert layer.parametrizations.bias.original is bias


@pytest.mark.parametrize(
    ("freq", "due"), [(0, []), (1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3])]
)
@pytest.mark.parametrize("eval_between", [False, True])
def test_the_mask_is_chosen_anew_at_training_forwards_0_f_2f(freq, due, eval_between):
    layer = nn.Linear(8, 3)
    m4n2(layer, update_freq=freq)
    found = []
    for step in range(5):
        with torch.no_grad():
            layer.parametrizations.weight.original.normal_()
        before = masks(layer).clone()
        if eval_between:
            layer.eval()(torch.ones(1, 8))
        _ = layer.train().weight, layer.weight  # looking is no step
        layer(torch.ones(1, 8))
        if torch.equal(masks(layer), m4n2_mask(layer.parametrizations.weight.original).byte()):
            found.append(step)
        else:
            assert torch.equal(masks(layer), before)
    assert found == due
    assert layer.parametrizations.weight[0].counter.item() == (5 if freq else 0)


def test_evaluation_counts_on_request_as_in_amct():
    layer = nn.Linear(8, 3).eval()
    m4n2(layer, update_freq=2, count_eval=True)
    layer(torch.ones(1, 8))
    assert layer.parametrizations.weight[0].counter.item() == 1


def test_a_cut_weight_returns_when_kept_ones_shrink_below_it():
    layer = nn.Linear(4, 1, bias=False)
    layer.weight.data = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    m4n2(layer, update_freq=1)
    assert masks(layer).tolist() == [[0, 0, 1, 1]]
    layer.parametrizations.weight.original.data[0, 3] = 0.5
    layer(torch.ones(1, 4))
    assert masks(layer).tolist() == [[0, 1, 1, 0]]


def test_groups_of_four_run_over_the_kept_channels():
    weight = torch.randn(5, 10, 3)
    columns = torch.tensor([1, 0, 1, 1, 0, 1, 1, 0, 1, 1])
    mask = M4N2(weight, columns=columns.view(1, -1, 1)).mask
    kept = columns.nonzero().flatten()
    assert torch.equal(mask[:, kept].bool(), m4n2_mask(weight[:, kept]))
    assert (mask[:, columns == 0] == 0).all()


def test_groups_of_four_run_over_the_channels_each_conv_group_keeps():
    weight = torch.randn(4, 6)
    columns = torch.tensor([[1, 0, 1, 1, 0, 1]] * 2 + [[0, 1, 1, 0, 1, 1]] * 2)
    mask = M4N2(weight, columns=columns).mask
    for row, column in enumerate(columns):
        kept = column.nonzero().flatten()
        assert torch.equal(mask[row, kept].bool(), m4n2_mask(weight[row : row + 1, kept])[0])
    with pytest.raises(ConfigError, match="equally many"):
        M4N2(weight, columns=torch.tril(torch.ones(4, 6)))


def test_transposed_convolutions_are_masked_along_their_input_channels():
    layer = nn.ConvTranspose2d(8, 4, 2, groups=2)
    m4n2(layer)
    assert torch.equal(
        masks(layer).bool(), m4n2_mask(layer.parametrizations.weight.original, axis=0)
    )


def test_padding_modes_are_honoured():
    layer = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
    m4n2(layer)
    plain = nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")
    plain.weight.data, plain.bias.data = layer.weight.data, layer.bias.data
    assert torch.equal(layer(images()), plain(images()))


@pytest.mark.parametrize(
    "duplicate",
    [
        copy.deepcopy,
        lambda net: pickle.loads(pickle.dumps(net)),
        lambda net: torch.load(io.BytesIO(saved(net)), weights_only=False),
    ],
    ids=["deepcopy", "pickle", "torch.save"],
)
def test_copies_and_pickles_go_on_by_themselves(duplicate):
    net = network()
    train(net, 1)
    twin = duplicate(net)
    assert isinstance(twin[2], nn.Conv2d)
    assert type(twin[2]).__name__ == "Conv2d"
    before = {key: value.clone() for key, value in net.state_dict().items()}
    train(twin, 3)
    assert all(torch.equal(before[key], value) for key, value in net.state_dict().items())
    train(net, 3)
    assert torch.equal(net(images()), twin(images()))
    parametrize.remove_parametrizations(twin[2], "weight")
    assert parametrize.is_parametrized(net[2])
    assert net[2].weight.shape == twin[2].weight.shape


def saved(net: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.save(net, file)
    return file.getvalue()


def test_the_state_dict_restores_masks_and_counters():
    net = network()
    train(net, 3)
    fresh = nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    filter_norm(fresh[0], "weight", torch.ones(8, 1, 1, 1))
    filter_norm(fresh[0], "bias", torch.ones(8))
    m4n2(fresh[2], update_freq=2)
    fresh.load_state_dict(net.state_dict())
    train(net, 3)
    train(fresh, 3)
    assert all(torch.equal(net.state_dict()[k], v) for k, v in fresh.state_dict().items())


def test_a_float_checkpoint_loads_by_name_and_chooses_its_masks():
    plain = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)).state_dict()
    net = network()
    missing, unexpected = net.load_state_dict(plain, strict=False)
    assert unexpected == []
    assert all("mask" in key or "counter" in key for key in missing)
    assert torch.equal(net[2].parametrizations.weight.original, plain["2.weight"])
    assert torch.equal(masks(net[2]).bool(), m4n2_mask(plain["2.weight"]))


def test_loading_other_layers_leaves_the_mask_as_it_is():
    layer = nn.Linear(8, 3)
    m4n2(layer)
    before = masks(layer).clone()
    layer.parametrizations.weight.original.data.normal_()
    nn.Sequential(layer, nn.Linear(3, 2)).load_state_dict({"1.bias": torch.ones(2)}, strict=False)
    assert torch.equal(masks(layer), before)


def test_setting_the_weight_sets_what_is_stored():
    net = network()
    net[2].weight = torch.ones(4, 8, 3, 3)
    assert (net[2].parametrizations.weight.original == 1).all()


def test_the_whole_graph_compiles_and_counts():
    net = network()
    twin = copy.deepcopy(net)
    compiled = torch.compile(net, fullgraph=True, backend="aot_eager")
    for _ in range(3):
        assert torch.allclose(compiled(images()), twin(images()), atol=1e-6)
    counters = [part[2].parametrizations.weight[0].counter.item() for part in (net, twin)]
    assert counters == [3, 3]


def test_the_graph_exports():
    net = network().eval()
    program = torch.export.export(net, (images(),))
    assert torch.equal(program.module()(images()), net(images()))


def test_activation_checkpointing_does_not_count_twice():
    net = network()
    checkpoint(net, images().requires_grad_(), use_reentrant=False).sum().backward()
    assert net[2].parametrizations.weight[0].counter.item() == 1


def test_averaged_models_take_the_masks():
    net = network()
    average = AveragedModel(net, use_buffers=True)
    average.update_parameters(net)
    assert torch.equal(average(images()), average.module(images()))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_the_weight_keeps_its_dtype(dtype):
    net = network().to(dtype)
    assert net[0].weight.dtype == net[2].weight.dtype == dtype
    assert masks(net[0]).dtype == torch.uint8


def test_autocast_reaches_masked_weights():
    net = network()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net(images())
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    assert net[2].parametrizations.weight.original.grad.dtype == torch.float32


def test_masks_registered_by_hand_work_on_any_module():
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.matrix = nn.Parameter(torch.randn(8, 8))

    own = Own()
    mask = FilterNorm.choose(own.matrix, 0.5, ascend_optimized=False)
    parametrize.register_parametrization(own, "matrix", mask)
    parametrize.register_parametrization(own, "matrix", M4N2(own.matrix))
    assert (own.matrix != 0).sum() == 4 * 4


def test_by_hand_the_loop_makes_the_steps():
    layer = nn.Linear(8, 3)
    mask = M4N2(layer.weight, update_freq=1)
    parametrize.register_parametrization(layer, "weight", mask)
    layer.parametrizations.weight.original.data.normal_()
    mask.step(layer.parametrizations.weight.original)
    assert torch.equal(mask.mask.bool(), m4n2_mask(layer.parametrizations.weight.original))


@pytest.mark.parametrize("freq", [-1, 1.5, True])
def test_a_frequency_that_is_no_whole_number_is_refused(freq):
    with pytest.raises(ConfigError, match="update_freq"):
        m4n2(nn.Linear(4, 4), update_freq=freq)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_gradients_go_straight_through_on_request(decay):
    layer = nn.Linear(8, 3)
    m4n2(layer, straight_through=decay)
    stored, mask = layer.parametrizations.weight.original, masks(layer)
    (layer.weight * torch.arange(24.0).view(3, 8)).sum().backward()
    expected = torch.arange(24.0).view(3, 8) + decay * stored.detach() * (1 - mask.float())
    assert torch.allclose(stored.grad, expected)
    assert (layer.weight[mask == 0] == 0).all()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(torch.ones(1, 8)), layer(torch.ones(1, 8)))
