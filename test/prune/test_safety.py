"""Networks in which a careless tool cuts what something else still reads."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx import prune_plan
from amct_fx.config import FilterPruneConfig, M4N2PruneConfig
from amct_fx.errors import ConfigError, InputDataError, ModelError, ModelStateError
from amct_fx.prune import remove_channels
from amct_fx.prune.oracles import check_plan, column_mask_oracle, safe_oracle
from test.prune import networks as nets
from test.prune.helpers import assert_exact, kept, plan_for

CFG = """prune_config { filter_pruner {
    balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }"""
IMAGE = nets.golden_input(2, 3, 16, 16)


class DataDependent(nn.Module):
    """Calls its convolution again when the sum is positive, so it stays Python."""

    def __init__(self, conv: nn.Module) -> None:
        super().__init__()
        self.conv = conv

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x) if x.sum() > -1e9 else x


def codes(model: nn.Module, example: Tensor = IMAGE, **options: object) -> dict[str, str]:
    plan = plan_for(model, example, **options)  # type: ignore[arg-type]
    assert_exact(model, plan, example)
    return {layer.name: layer.code for layer in plan.pinned}


def test_a_part_that_stays_python_keeps_what_it_reads_and_makes() -> None:
    model = nets.Net(
        lambda m, x: m.b(F.relu(m.island(F.relu(m.a(x))))),
        a=nets.conv(3, 8),
        island=DataDependent(nets.conv(8, 8)),
        b=nets.conv(8, 4),
    )
    nets.golden_weights(model)
    assert codes(model) == {
        "a": "unknown_op",
        "island.conv": "unknown_op",
        "b": "graph_output",
    }


def test_a_layer_that_python_code_calls_too_is_left_alone() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nets.conv(3, 8), nn.ReLU(), nets.conv(8, 8))
            self.out = nets.conv(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            y = self.block(x)
            if y.sum() > -1e9:
                y = y + self.block[0](x)
            return self.out(y)

    model = nets.golden_weights(Both())
    assert codes(model)["block.0"] == "shared_module"


def test_a_convolution_shared_with_an_island_is_left_alone() -> None:
    shared = nets.conv(8, 8)
    model = nets.Net(
        lambda m, x: m.b(m.island(m.shared(F.relu(m.a(x))))),
        a=nets.conv(3, 8),
        shared=shared,
        island=DataDependent(shared),
        b=nets.conv(8, 4),
    )
    nets.golden_weights(model)
    assert set(codes(model)) == {"a", "shared", "b"}


def test_an_embedding_that_shares_the_weight_of_the_head_keeps_it() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(10, 8)
            self.wide, self.narrow = nn.Linear(8, 16), nn.Linear(16, 8)
            self.head = nn.Linear(8, 10, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.narrow(F.relu(self.wide(self.embedding(tokens)))))

    model = nets.golden_weights(Tied())
    tokens = torch.arange(6).reshape(2, 3)
    plan = plan_for(model, tokens)
    assert set(kept(plan)) == {"wide"}
    reasons = {layer.name: layer.code for layer in plan.pinned}
    assert reasons["narrow"] == "tied_parameter"
    assert column_mask_oracle(model, plan, tokens).outputs < 1e-5


def test_two_parts_of_python_keep_each_region_apart() -> None:
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Sequential(nets.conv(3, 8), nn.ReLU(), nets.conv(8, 8))
            self.second = nn.Sequential(nets.conv(8, 8), nn.ReLU(), nets.conv(8, 4))

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            return self.second(x if x.sum() > -1e9 else -x)

    model = nets.golden_weights(Root())
    plan = plan_for(model, IMAGE)
    assert set(kept(plan)) == {"first.0", "second.0"}
    assert_exact(model, plan, IMAGE)


def test_a_region_that_python_calls_twice_is_pruned_inside() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = nn.Sequential(nets.conv(8, 16), nn.ReLU(), nets.conv(16, 8))
            self.stem = nets.conv(3, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            return self.block(self.block(x) if x.sum() > -1e9 else x)

    model = nets.golden_weights(Twice())
    plan = plan_for(model, IMAGE)
    assert set(kept(plan)) == {"block.0"}
    assert_exact(model, plan, IMAGE)


def test_a_subclass_with_its_own_forward_is_followed_or_left_alone() -> None:
    class Scaled(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    class Standardized(nn.Conv2d):
        def forward(self, x: Tensor) -> Tensor:
            return F.conv2d(x, self.weight - self.weight.mean(0), self.bias, padding=1)

    for kind, cut in ((Scaled, {"a", "b"}), (Standardized, set())):
        model = nets.Net(
            lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))))),
            a=nets.conv(3, 8),
            b=kind(8, 8, 3, padding=1),
            c=nets.conv(8, 4),
        )
        nets.golden_weights(model)
        plan = plan_for(model, IMAGE)
        assert set(kept(plan)) == cut
        assert_exact(model, plan, IMAGE)


def test_functions_on_the_weight_of_a_layer_are_cut_like_the_layer() -> None:
    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.dw, self.b = nets.conv(3, 8), nets.conv(8, 8, groups=8), nets.conv(8, 4)

        def forward(self, x: Tensor) -> Tensor:
            x = F.relu(F.conv2d(x, self.a.weight, self.a.bias, padding=1))
            x = F.conv2d(x, self.dw.weight, self.dw.bias, padding=1, groups=8)
            return F.conv2d(x, self.b.weight, bias=self.b.bias)

    model = nets.golden_weights(Functional())
    plan = plan_for(model, IMAGE)
    assert set(kept(plan)) == {"a"}
    assert_exact(model, plan, IMAGE)


def test_parameters_of_an_add_follow_the_channels() -> None:
    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nets.conv(3, 8), nets.conv(8, 4)
            self.gamma = nn.Parameter(torch.rand(8, 1, 1))
            self.register_buffer("shift", torch.rand(1, 8, 1, 1))

        def forward(self, x: Tensor) -> Tensor:
            return self.b(torch.sigmoid(self.gamma * self.a(x) + self.shift))

    model = nets.golden_weights(Scale())
    plan = plan_for(model, IMAGE)
    assert set(kept(plan)) == {"a"}
    assert_exact(model, plan, IMAGE)
    remove_channels(model, plan)
    assert (tuple(model.gamma.shape), tuple(model.shift.shape)) == ((4, 1, 1), (1, 4, 1, 1))


@pytest.mark.parametrize("name", ["sqrt", "log", "rsqrt"])
def test_rows_are_not_masked_where_zero_has_no_finite_value(name: str) -> None:
    function = {"sqrt": torch.sqrt, "log": torch.log, "rsqrt": torch.rsqrt}[name]
    model = nets.Net(lambda m, x: m.b(function(m.a(x).abs())), a=nets.conv(3, 8), b=nets.conv(8, 4))
    nets.golden_weights(model)
    plan = plan_for(model, IMAGE)
    assert plan["a"].cut
    assert plan.row_masks() == {}
    assert_exact(model, plan, IMAGE)


def test_a_product_of_activations_needs_zeros() -> None:
    tokens = nets.golden_input(2, 5, 16)
    for between, prunes in ((F.relu, True), (torch.sigmoid, False), (torch.sigmoid_, False)):

        def forward(m: nets.Net, x: Tensor, between: object = between) -> Tensor:
            q, k = m.q(x), m.k(x)
            q = between(q)  # type: ignore[operator]
            return m.out(torch.softmax(q @ k.transpose(1, 2), -1))

        model = nets.Net(forward, q=nn.Linear(16, 8), k=nn.Linear(16, 8), out=nn.Linear(5, 2))
        nets.golden_weights(model)
        plan = plan_for(model, tokens)
        assert ("q" in kept(plan)) is prunes
        assert_exact(model, plan, tokens)


def test_an_operation_in_place_counts_for_later_products() -> None:
    def forward(m: nets.Net, x: Tensor) -> Tensor:
        q, k = m.q(x), m.k(x)
        q.sigmoid_()
        return m.out(torch.softmax(q @ k.transpose(1, 2), -1))

    model = nets.Net(forward, q=nn.Linear(16, 8), k=nn.Linear(16, 8), out=nn.Linear(5, 2))
    tokens = nets.golden_input(2, 5, 16)
    nets.golden_weights(model)
    assert kept(plan_for(model, tokens)) == {}


def test_writing_into_channels_keeps_them() -> None:
    def forward(m: nets.Net, x: Tensor) -> Tensor:
        y = m.a(x).clone()
        y[:, 0] = 1.0
        return m.b(y)

    model = nets.golden_weights(nets.Net(forward, a=nets.conv(3, 8), b=nets.conv(8, 4)))
    assert set(codes(model)) == {"a", "b"}


def test_a_two_of_four_layer_stops_channels() -> None:
    model = nets.golden_weights(nets.identity_blocks())
    settings = {
        name: M4N2PruneConfig() if name == "c2" else FilterPruneConfig(0.5, False)
        for name in ("stem", "c1", "c2", "c3", "c4", "out")
    }
    plan = plan_for(model, IMAGE, settings=settings)
    assert set(kept(plan)) == {"c1", "c3"}
    assert {layer.name: layer.code for layer in plan.pinned} == {
        "stem": "kind_m4n2",
        "c4": "kind_m4n2",
        "out": "graph_output",
    }
    assert [(cost.name, cost.density) for cost in plan.costs if cost.density < 1] == [("c2", 0.5)]
    assert_exact(model, plan, IMAGE)


def test_removal_keeps_format_gradients_hooks_and_modes() -> None:
    model = nets.golden_weights(nets.residual()).to(memory_format=torch.channels_last)
    model.train()
    model.c1.eval()
    model.stem.weight.requires_grad_(False)
    called: list[str] = []
    model.c2.register_forward_hook(lambda *_: called.append("c2"))
    plan = plan_for(nets.golden_weights(nets.residual()), IMAGE)
    remove_channels(model, plan)
    assert model.c2.weight.is_contiguous(memory_format=torch.channels_last)
    assert not model.stem.weight.requires_grad
    assert model.c1.weight.requires_grad
    assert (model.training, model.c1.training, model.c2.training) == (True, False, True)
    called.clear()
    model(IMAGE)
    assert called == ["c2"]


def test_half_precision_and_other_dtypes_stay() -> None:
    model = nets.golden_weights(nets.residual()).to(torch.bfloat16)
    plan = plan_for(model, IMAGE.to(torch.bfloat16))
    remove_channels(model, plan)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(IMAGE.to(torch.bfloat16)).shape == (2, 4, 16, 16)


def test_shapes_are_guessed_without_example_inputs(capfd: pytest.CaptureFixture[str]) -> None:
    for build in (nets.residual, nets.flattened, nets.feed_forward):
        model = nets.golden_weights(build())
        plan = plan_for(model, None)
        assert plan.groups, build
    model = nets.golden_weights(nets.residual())
    assert kept(plan_for(model, None)) == kept(plan_for(model, IMAGE))
    assert capfd.readouterr().err == ""  # torch would log each shape that does not fit


def test_shapes_that_cannot_be_guessed_are_asked_for() -> None:
    model = nets.Net(lambda m, x: m.a(x.view(2, 3, 5, 7)), a=nets.conv(3, 8))
    with pytest.raises(ModelError, match="pass example_inputs"):
        plan_for(model, None)
    with pytest.raises(InputDataError, match="cannot run on example_inputs"):
        plan_for(model, torch.ones(1))


def test_the_safe_oracle_agrees_where_it_is_valid() -> None:
    for build in (nets.residual, nets.dense, nets.inverted, nets.grouped, nets.unet):
        model = nets.golden_weights(build())
        assert safe_oracle(model, plan_for(model, IMAGE), IMAGE).outputs < 1e-5, build


def test_a_plan_that_changes_the_function_is_reported() -> None:
    model = nets.golden_weights(nets.residual())
    plan = plan_for(model, IMAGE)
    check_plan(model, plan, IMAGE)
    with pytest.raises(RuntimeError, match="differs from the masked one"):
        check_plan(model, plan, IMAGE, tolerance=0.0)


def test_another_form_of_call_is_refused_after_removal() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(16, 8), nn.Linear(8, 4)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            x = F.relu(self.a(x))
            if mask is not None:
                x = x * mask
            return self.b(x)

    model = nets.golden_weights(Masked())
    tokens = nets.golden_input(2, 5, 16)
    plan = prune_plan(model, CFG, (tokens,))
    assert set(kept(plan)) == {"a"}
    remove_channels(model, plan)
    assert model(tokens).shape == (2, 5, 4)
    with pytest.raises(ModelStateError):
        model(tokens, torch.ones(4))


def test_layers_that_the_setting_does_not_reach_are_reported() -> None:
    model = nets.golden_weights(nets.inverted())
    cfg = CFG + ' regular_prune_skip_layers: "e"'
    plan = prune_plan(model, cfg, IMAGE, mode="amct")
    reasons = {layer.name: layer.code for layer in plan.pinned}
    assert reasons == {"dw": "not_enabled", "out": "graph_output", "e": "not_enabled"}
    assert {layer.name for layer in prune_plan(model, CFG, IMAGE).pinned} == {"out"}


def test_a_configuration_that_does_not_prune_is_refused() -> None:
    with pytest.raises(ConfigError, match="does not prune"):
        prune_plan(nets.residual(), "batch_num: 1", IMAGE)


def test_dropping_whole_examples_passes() -> None:
    class DropPath(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not self.training:
                return x
            return x * torch.tensor([0.0, 2.0], dtype=x.dtype).reshape(2, 1, 1, 1)

    DropPath.__module__ = "timm.layers.drop"
    DropPath.__qualname__ = "DropPath"
    model = nets.Net(
        lambda m, x: m.c(m.a(x) + m.drop(m.b(x))),
        a=nets.conv(3, 8),
        b=nets.conv(3, 8),
        drop=DropPath(),
        c=nets.conv(8, 4),
    )
    nets.golden_weights(model)
    plan = plan_for(model, IMAGE)
    assert set(kept(plan)) == {"a", "b"}
    assert_exact(model, plan, IMAGE)


@pytest.mark.parametrize(("act", "follows"), [(nn.ReLU(), True), (nn.Softmax(1), False)])
def test_a_norm_of_timm_with_an_activation_is_followed_if_that_is_known(
    act: nn.Module, follows: bool
) -> None:
    class BatchNormAct2d(nn.BatchNorm2d):
        def __init__(self) -> None:
            super().__init__(8)
            self.drop, self.act = nn.Identity(), act

        def forward(self, x: Tensor) -> Tensor:
            return self.act(self.drop(super().forward(x)))

    BatchNormAct2d.__module__ = "timm.layers.norm_act"
    BatchNormAct2d.__qualname__ = "BatchNormAct2d"
    layers = {"a": nets.conv(3, 8), "n": BatchNormAct2d(), "b": nets.conv(8, 4)}
    model = nets.golden_weights(nets.Net(lambda m, x: m.b(m.n(m.a(x))), **layers))
    plan = plan_for(model, IMAGE)
    assert ("a" in kept(plan)) is follows
    assert_exact(model, plan, IMAGE)
