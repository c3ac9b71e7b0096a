"""The search for prune ratios: exact costs, the greedy order, files, bad input."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from amct_fx import (
    AmctError,
    AmctWarning,
    convert_amct,
    load_config,
    prepare_qat_amct,
    prune_plan,
    search_channel_pruning,
)
from amct_fx import amct_pytorch as amct
from amct_fx.config.auto_prune import AutoPruneConfig
from amct_fx.prune import PrunePlan
from amct_fx.prune.cost import CostModel
from amct_fx.prune.sensitivity import TaylorLossSensitivity, samples_of
from test.prune import networks as nets

BETWEEN = "ignore:the ratio that can be reached is:amct_fx.AmctWarning"
FREE = "ascend_optimized: false "


class Plain(nn.Module):
    """Three convolutions of which two can be cut, with very different prices."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Conv2d(3, 32, 3, padding=1)
        self.b = nn.Conv2d(32, 32, 3, padding=1, stride=2)
        self.c = nn.Conv2d(32, 16, 3, padding=1)
        self.out = nn.Conv2d(16, 4, 1)

    def forward(self, x):
        return self.out(F.relu(self.c(F.relu(self.b(F.relu(self.a(x)))))))


def model(kind=Plain) -> nn.Module:
    torch.manual_seed(0)
    return kind()


def data(count: int = 4, channels: int = 3) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, channels, 16, 16, generator=generator)
    return [x, torch.randn(count, 4, 8, 8, generator=generator)]


def macs(network: nn.Module, x: torch.Tensor) -> int:
    """Count by running: an independent count."""
    found = []

    def count(layer, _args, output):
        weight = layer.weight
        if isinstance(layer, nn.Linear):
            found.append(weight.numel() * math.prod(output.shape[1:-1]))
        elif isinstance(layer, nn.ConvTranspose2d):
            found.append(weight.numel() * math.prod(_args[0].shape[2:]))
        else:
            found.append(weight.numel() * math.prod(output.shape[2:]))

    layers = [
        m for m in network.modules() if isinstance(m, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear))
    ]
    hooks = [layer.register_forward_hook(count) for layer in layers]
    network.eval()(x[:1])
    for hook in hooks:
        hook.remove()
    return sum(found)


@pytest.mark.parametrize("target", [1.2, 1.5, 2.0])
def test_the_converted_model_has_the_ratio_that_was_asked_for(target):
    network, samples = model(), data()
    found = search_channel_pruning(network, f"compress_ratio: {target} {FREE}", samples)
    assert target <= found.ratio <= target * 1.02
    assert found.ratio == pytest.approx(found.plan.macs / found.plan.macs_after)
    cfg = found.config
    converted = convert_amct(prepare_qat_amct(network, cfg, samples[0][:1], plan=found.plan))
    x = samples[0]
    assert macs(network, x) / macs(converted, x) == pytest.approx(found.ratio)


def test_different_targets_remove_different_channels():
    removed = [
        tuple(
            len(g.cut)
            for g in search_channel_pruning(
                model(), f"compress_ratio: {t} {FREE}", data()
            ).plan.groups
        )
        for t in (1.2, 1.5, 2.0)
    ]
    assert len(set(removed)) == 3
    assert [sum(counts) for counts in removed] == sorted(sum(counts) for counts in removed)


@pytest.mark.parametrize(
    "kind", [nets.residual, nets.dense, nets.inverted, nets.grouped, nets.unet, nets.flattened]
)
@pytest.mark.parametrize("metric", ["macs", "params"])
def test_the_closed_form_equals_the_cost_of_a_plan(kind, metric):
    cfg = """prune_config { filter_pruner {
        balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }"""
    plan = prune_plan(model(kind), cfg, torch.randn(1, 3, 16, 16))
    cost = CostModel(plan, metric)
    before, after = (
        (plan.macs, plan.macs_after)
        if metric == "macs"
        else (plan.parameters, plan.parameters_after)
    )
    assert cost.total == before
    for group in plan.groups:
        saved = cost.saving({group.id: group.cut})
        total = cost.total
        cost.remove({group.id: group.cut})
        assert total - cost.total == pytest.approx(saved)
    assert cost.total == after


@pytest.mark.filterwarnings(BETWEEN)
def test_each_step_takes_the_cheapest_loss_for_what_it_saves():
    found = search_channel_pruning(model(), f"compress_ratio: 1.7 {FREE}", data())
    groups = {group.id: group for group in found.plan.groups}
    left = {i: sorted(range(g.channels), key=lambda u: g.scores[u]) for i, g in groups.items()}

    def total() -> int:
        plan = found.plan
        for i, units in left.items():
            plan = plan.with_kept(i, units)
        return plan.macs_after

    for step in found.steps:
        now, prices = total(), {}
        for i, units in left.items():
            if len(units) > 1:
                first = left[i].pop(0)
                prices[i] = groups[i].scores[first] / (now - total())
                left[i].insert(0, first)
        assert step.group == min(prices, key=prices.get)
        left[step.group].pop(0)
    assert {i: tuple(sorted(units)) for i, units in left.items()} == {
        i: g.kept for i, g in groups.items()
    }


def test_channels_stay_a_multiple_of_16_on_request():
    with pytest.warns(AmctWarning, match="ratio that can be reached is"):
        found = search_channel_pruning(model(), "compress_ratio: 1.5", data())
    assert all(len(group.kept) % 16 == 0 for group in found.plan.groups)


def test_what_is_reachable_is_said():
    with pytest.warns(AmctWarning, match=r"largest ratio that can be reached is \d"):
        found = search_channel_pruning(
            model(), f"compress_ratio: 50 max_prune_ratio: 0.5 {FREE}", data()
        )
    assert all(len(group.kept) == group.channels / 2 for group in found.plan.groups)


def test_the_gradient_is_averaged_over_the_samples():
    network, (x, y) = model(), data(3)
    sensitivity = TaylorLossSensitivity()
    sensitivity.setup_initialization((None, network), samples_of([x, y]), 3, None)
    expected = torch.autograd.grad(
        sum(F.l1_loss(network(x[i : i + 1]), y[i : i + 1]) for i in range(3)) / 3, network.a.weight
    )
    assert torch.allclose(network.a.weight.grad, expected[0], atol=1e-7)


@pytest.mark.filterwarnings(BETWEEN)
def test_the_scores_add_up_the_rows_of_all_producers():
    network, (x, y) = model(nets.residual).eval(), data(1)
    y = network(x).detach() + 1
    found = search_channel_pruning(
        network, f"compress_ratio: 1.1 {FREE}", [(x, y)], loss=lambda a, b: (a - b).square().sum()
    )
    twin = model(nets.residual).eval()
    (twin(x) - y).square().sum().backward()
    for group in found.plan.groups:
        layers = [twin.get_submodule(name) for name in group.producers]
        expected = sum((m.weight * m.weight.grad).abs().flatten(1).sum(1) for m in layers)
        assert group.scores == pytest.approx(expected.tolist(), rel=1e-3)


@pytest.mark.filterwarnings(BETWEEN)
def test_the_file_reproduces_the_counts_and_the_plan_the_channels(tmp_path):
    network, samples = model(), data()
    found = search_channel_pruning(
        network,
        f"compress_ratio: 1.6 {FREE}",
        samples,
        output_cfg=tmp_path / "out.cfg",
        output_plan=tmp_path / "out.json",
    )
    config = load_config(tmp_path / "out.cfg")
    assert config == found.config
    again = prune_plan(network, config, samples[0][:1])
    assert {g.producers: len(g.kept) for g in again.groups} == {
        g.producers: len(g.kept) for g in found.plan.groups if g.cut
    }
    plan = PrunePlan.from_json((tmp_path / "out.json").read_text())
    assert [group.kept for group in plan.groups] == [group.kept for group in found.plan.groups]
    assert config.prune is not None
    without = search_channel_pruning(
        network, f"compress_ratio: 1.6 {FREE}", samples, global_block=False
    )
    assert without.config.prune is None


def test_layers_of_the_override_file_keep_their_setting(tmp_path):
    override = tmp_path / "override.cfg"
    override.write_text(
        """regular_prune_skip_layers: "c"
        override_layer_configs { layer_name: "a" prune_config { filter_pruner {
            balanced_l2_norm_filter_prune { prune_ratio: 0.25 ascend_optimized: false } } } }"""
    )
    search = tmp_path / "search.cfg"
    search.write_text(f'compress_ratio: 1.2 {FREE} override_prune_cfg: "override.cfg"')
    found = search_channel_pruning(model(), search, data())
    assert [group.producers for group in found.plan.groups] == [("b",)]
    named = {override.name: override.prune.prune_ratio for override in found.config.layer_overrides}
    assert named["a"] == 0.25
    assert set(named) == {"a", "b"}
    assert "c" in found.config.prune_skip_layers


@pytest.mark.parametrize("metric", ["params", "bitops"])
def test_other_costs_can_be_asked_for(metric):
    bits = {"a": (8, 16)} if metric == "bitops" else None
    found = search_channel_pruning(
        model(), f"compress_ratio: 1.5 {FREE}", data(), metric=metric, bits=bits
    )
    assert 1.5 <= found.ratio <= 1.6
    if metric == "params":
        assert found.ratio == pytest.approx(found.plan.parameters / found.plan.parameters_after)


@pytest.mark.filterwarnings(BETWEEN)
def test_batches_may_come_from_a_loader():
    x, y = data(4)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=2)
    found = search_channel_pruning(model(), f"compress_ratio: 1.3 test_iteration: 2 {FREE}", loader)
    assert found.ratio >= 1.3


@pytest.mark.filterwarnings(BETWEEN)
def test_own_objects_score_and_search():
    class Equal:
        def setup_initialization(self, graph_and_info, samples, iterations, outputs):
            assert isinstance(graph_and_info[0], PrunePlan)
            assert len(samples) >= iterations

        def get_sensitivity(self, groups):
            return [[float(unit) for unit in range(group.channels)] for group in groups]

    class First:
        def channel_prune_search(self, info, groups, settings):
            assert info is not None
            assert settings == (1.2, False, 1.0)
            return {groups[0].id: range(8)}

    found = search_channel_pruning(
        model(), f"compress_ratio: 1.2 {FREE}", data(), sensitivity=Equal(), search_alg=First()
    )
    assert found.plan.groups[0].kept == tuple(range(8))


@pytest.mark.filterwarnings(BETWEEN)
def test_the_model_is_untouched_and_progress_is_told():
    network = model()
    before = {key: value.clone() for key, value in network.state_dict().items()}
    seen = []
    search_channel_pruning(
        network, f"compress_ratio: 1.5 {FREE}", data(), progress=lambda *step: seen.append(step)
    )
    assert seen[-1] == ("search", 100, 100)
    assert all(torch.equal(before[key], value) for key, value in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())
    assert network.training


BAD = [
    ("", ValueError, "empty|missing|config"),
    ("compress_ratio: 1.0", ValueError, "1:1: compress_ratio must be above 1"),
    ("compress_ratio: 0.5", ValueError, "above 1, not 0.5"),
    ("compress_ratio: 2 max_prune_ratio: 0", ValueError, "max_prune_ratio must be above 0"),
    ("compress_ratio: 2 max_prune_ratio: 1.5", ValueError, "at most 1"),
    ("compress_ratio: 2 test_iteration: 0", ValueError, "test_iteration must be at least 1"),
    ("compress_ratio: 2 tset_iteration: 1", ValueError, "did you mean 'test_iteration'"),
    ("compress_ratio: 2 test_iteration: 9", RuntimeError, "only 4 samples"),
    ('compress_ratio: 2 override_prune_cfg: "nowhere.cfg"', FileNotFoundError, "nowhere"),
    ("/nowhere/search.cfg", FileNotFoundError, "search.cfg"),
]


@pytest.mark.parametrize(("config", "error", "text"), BAD)
def test_a_wrong_configuration_is_explained(config, error, text):
    with pytest.raises(error, match=text):
        search_channel_pruning(model(), config, data())


@pytest.mark.parametrize(
    "text",
    [
        "batch_num: 2",
        "retrain_data_quant_config { ulq_quantize { } }",
        'override_layer_configs { layer_name: "a" prune_config { n_out_of_m_pruner {'
        " l1_selective_prune { } } } }",
    ],
)
def test_an_override_file_with_other_fields_is_refused(text, tmp_path):
    (tmp_path / "o.cfg").write_text(text)
    config = {"compress_ratio": 2.0, "override_prune_cfg": str(tmp_path / "o.cfg")}
    with pytest.raises(ValueError, match="may hold skip lists"):
        search_channel_pruning(model(), config, data())


def test_no_layer_to_search_is_an_error():
    overrides = load_config('skip_layer_types: "Conv2d"')
    with pytest.raises(ValueError, match=r"no layer is left|skipped"):
        search_channel_pruning(model(), AutoPruneConfig(2.0, overrides=overrides), data())
    with pytest.raises(ValueError, match="no channels that can be cut"):
        search_channel_pruning(
            nn.Sequential(nn.Conv2d(3, 4, 1)),
            "compress_ratio: 2",
            [(torch.ones(1, 3, 8, 8), torch.ones(1, 4, 8, 8))],
        )


@pytest.mark.parametrize("given", [torch.ones(2), 3, [1, 2, 3], [(1,)]])
def test_data_of_another_form_is_refused(given):
    with pytest.raises(RuntimeError, match=r"data must be \[inputs, targets\]"):
        search_channel_pruning(model(), "compress_ratio: 2", given)


def test_names_that_do_not_exist_are_refused():
    for keyword in ("sensitivity", "search_alg"):
        with pytest.raises(ValueError, match=f"{keyword} must be"):
            search_channel_pruning(model(), "compress_ratio: 2", data(), **{keyword: "Best"})


@pytest.mark.filterwarnings(BETWEEN)
def test_the_function_of_amct_writes_a_file_for_create(tmp_path):
    config, out = tmp_path / "search.cfg", str(tmp_path / "out.cfg")
    config.write_text(f"compress_ratio: 1.5 {FREE} test_iteration: 2")
    assert amct.auto_channel_prune_search(model(), str(config), data(), out) is None
    pruned = amct.create_prune_retrain_model(model(), data()[0][:1], out, None)
    assert macs(model(), data()[0]) / macs(pruned, data()[0]) >= 1.5
    plan = PrunePlan.from_json((tmp_path / "out.plan.json").read_text())
    assert plan.macs / plan.macs_after >= 1.5
    with pytest.raises(TypeError, match="input_data"):
        amct.auto_channel_prune_search(model(), str(config), tuple(data()), out)


@pytest.mark.filterwarnings("ignore::amct_fx.AmctWarning")
def test_a_model_with_several_outputs_takes_a_target_for_each():
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.c = nn.Linear(4, 16), nn.Linear(16, 2), nn.Linear(16, 3)

        def forward(self, x):
            x = self.a(x).relu()
            return [self.b(x), self.c(x)]

    torch.manual_seed(0)
    model, x = Heads(), torch.randn(4, 4)
    targets = [torch.randn(4, 2), torch.randn(4, 3)]
    text = "compress_ratio: 1.5 ascend_optimized: false test_iteration: 4"
    found = search_channel_pruning(model, text, [x, targets])
    pairs = [(x[i : i + 1], tuple(t[i : i + 1] for t in targets)) for i in range(4)]
    assert found.plan.groups == search_channel_pruning(model, text, pairs).plan.groups
    with pytest.raises(AmctError, match="4 inputs, but 3 targets"):
        search_channel_pruning(model, text, [x, tuple(t[:3] for t in targets)])
