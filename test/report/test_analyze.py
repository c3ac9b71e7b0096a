"""``analyze``: figures against brute force, ranking, suggestions."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from amct_fx import (
    analyze,
    control,
    load_config,
    prepare_qat_amct,
)
from amct_fx.report import Suggestion
from test.networks import Net, example
from test.report.chain import (
    NAMES,
    Chain,
    accuracy,
    loss,
    mse,
    prepared_and_float,
    quiet,
    with_only,
)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_alone_quantized_does_what_its_switches_do(name: str) -> None:
    prepared, model = prepared_and_float()
    x = example(4)
    found = quiet(prepared, model, x).layer(name).sensitivity
    assert found is not None
    expected = mse(with_only(prepared, [name], x), model(x))
    assert found.alone_quantized == pytest.approx(expected, rel=1e-4)
    assert found.harm == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_alone_float_does_what_its_switches_do(name: str) -> None:
    prepared, model = prepared_and_float()
    x = example(4)
    found = quiet(prepared, model, x)
    others = [other for other in NAMES if other != name]
    expected = mse(with_only(prepared, others, x), model(x))
    sensitivity = found.layer(name).sensitivity
    assert sensitivity is not None
    assert sensitivity.alone_float == pytest.approx(expected, rel=1e-4)
    assert sensitivity.gain == pytest.approx(found.quantized_value - expected, rel=1e-3, abs=1e-12)
    assert found.quantized_value == pytest.approx(mse(prepared(x), model(x)), rel=1e-4)


@pytest.mark.parametrize("part", ["input", "weight"])
def test_each_quantizer_can_be_switched_on_alone(part: str) -> None:
    prepared, model = prepared_and_float()
    x = example(4)
    found = quiet(prepared, model, x, each_quantizer=True)
    only = copy.deepcopy(prepared).eval()
    control.disable_fake_quant(only)
    only.get_submodule(f"c.{part}_fake_quant").enable_fake_quant(True)  # type: ignore[operator]
    sensitivity = found.layer("c").sensitivity
    assert sensitivity is not None
    assert getattr(sensitivity, f"harm_{part}") == pytest.approx(mse(only(x), model(x)), rel=1e-4)
    assert found.records()[0][f"harm_{part}"] is not None
    assert quiet(prepared, model, x).layer("c").record()[f"harm_{part}"] is None


def test_of_two_layers_that_share_a_quantizer_one_can_be_quantized_alone() -> None:
    prepared, model = prepared_and_float(Net)
    x = example(4)
    found = quiet(prepared, model, x).layer("right").sensitivity
    own = prepare_qat_amct(model, 'skip_layers: "stem" skip_layers: "left" skip_layers: "head"')
    own.load_state_dict(prepared.state_dict(), strict=False)
    quantizer = prepared.get_submodule("left.input_fake_quant")
    own.get_submodule("right.input_fake_quant").load_state_dict(quantizer.state_dict())
    assert found is not None
    assert found.alone_quantized == pytest.approx(mse(own.eval()(x), model(x)), rel=1e-4)


def test_the_error_of_a_weight_is_that_of_its_quantizer() -> None:
    prepared, model = prepared_and_float()
    found = quiet(prepared, model, example()).layer("b").weight
    weight = prepared.get_submodule("b").weight.detach().double()  # type: ignore[operator, union-attr]
    quantized = prepared.get_submodule("b").quantized_weight().detach().double()  # type: ignore[operator]
    sqnr = 10 * torch.log10((weight**2).sum() / ((quantized - weight) ** 2).sum())
    assert found is not None
    assert found.sqnr == pytest.approx(float(sqnr), abs=1e-3)
    assert found.cosine == pytest.approx(
        float(F.cosine_similarity(weight.flatten(), quantized.flatten(), 0)), abs=1e-6
    )


def test_inputs_and_outputs_are_compared_with_the_float_model() -> None:
    prepared, model = prepared_and_float()
    x = example(4)
    seen: dict[str, list[Tensor]] = {}
    for which in (model, prepared.eval()):
        layer = which.get_submodule("c")
        handle = layer.register_forward_hook(
            lambda _m, args, output: seen.setdefault("c", []).extend(
                [args[0].detach().clone(), output.detach().clone()]
            )
        )
        which(x)
        handle.remove()
    found = quiet(prepared, model, x).layer("c")
    inputs, outputs = seen["c"][0::2], seen["c"][1::2]
    for error, (f, q) in ((found.input, inputs), (found.output, outputs)):
        assert error is not None
        expected = 10 * torch.log10((f.double() ** 2).sum() / ((q - f).double() ** 2).sum())
        assert error.sqnr == pytest.approx(float(expected), abs=1e-2)


def test_a_float_model_with_other_weights_is_another_reference() -> None:
    prepared, model = prepared_and_float()
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.d.bias += 1.0  # type: ignore[operator, union-attr]
    found = quiet(prepared, other, example())
    assert found.unquantized_value == pytest.approx(1.0, rel=1e-4)
    assert found.float_value == 0
    assert found.layer("d").sensitivity.harm < 0.01  # type: ignore[union-attr]


def test_without_a_float_model_the_quantizers_off_are_the_reference() -> None:
    prepared, model = prepared_and_float()
    x = example(4)
    without, given = quiet(prepared, None, x), quiet(prepared, model, x)
    assert without.quantized_value == pytest.approx(given.quantized_value, rel=1e-5)
    assert without.ranking == given.ranking


class Gained(Chain):
    """One channel in front of layer ``c`` may be far larger than the others."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        self.register_buffer("gain", torch.ones(8, 1, 1))
        self.gain[3] = gain

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.a(x))
        x = self.act(self.b(x)) + x
        x = self.act(self.c(x * self.gain))
        return self.d(x.mean((2, 3)))


def trained(gain: float, x: Tensor, target: Tensor) -> nn.Module:
    """Return a trained toy; layer ``c`` undoes the gain, so in float it does not matter."""
    torch.manual_seed(0)
    model = Gained(1.0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), target).backward()
        optimizer.step()
    with torch.no_grad():
        model.gain[3] = gain
        model.c.weight[:, 3] /= gain
    return model.eval()


@pytest.mark.parametrize("metric", [loss, None])
def test_the_layer_with_an_outlier_channel_ranks_first_and_skipping_it_restores_the_loss(
    metric: Any,
) -> None:
    x, target = example(32), torch.arange(32) % 4
    model = trained(1000.0, x, target)
    float_loss = float(loss(model(x), (x, target)).detach())
    prepared = prepare_qat_amct(model)
    prepared(x)
    found = quiet(prepared, model, [(x, target)], metric=metric, greater_is_better=False)
    assert found.ranking[0] == "c"
    assert found.suggestions[0].layers == ("c",)
    again = prepare_qat_amct(model, found.suggestions[0].cfg)
    again(x)
    assert float(loss(again(x), (x, target)).detach()) == pytest.approx(float_loss, rel=0.05)


def test_without_an_outlier_the_start_keeps_the_loss_near_float() -> None:
    x, target = example(32), torch.arange(32) % 4
    model = trained(1.0, x, target)
    prepared = prepare_qat_amct(model)
    prepared(x)
    data = [(x, target)]
    found = quiet(prepared, model, data, metric=loss, greater_is_better=False)
    assert found.quantized_value < 1.5 * found.float_value


def test_the_metric_counts_samples_not_batches() -> None:
    prepared, model = prepared_and_float()
    x = example(5)
    right = model(x).argmax(1)
    wrong = (right + 1) % 4
    data = [(x[:4], right[:4]), (x[4:], wrong[4:])]
    found = quiet(prepared, model, data, metric=accuracy)
    assert found.float_value == pytest.approx(4 / 5)
    assert (found.batches, found.samples, found.metric) == (2, 5, "accuracy")


def test_suggestions_go_on_until_the_wanted_value_is_reached() -> None:
    prepared, model = prepared_and_float()
    x = example(4)
    everything = quiet(prepared, model, x, max_skips=4)
    values = [item.value for item in everything.suggestions]
    assert values[-1] == pytest.approx(0, abs=1e-12)
    wanted = values[1]
    found = quiet(prepared, model, x, wanted=wanted)
    assert [len(item.layers) for item in found.suggestions] == [1, 2]
    assert [item.reached for item in found.suggestions] == [False, True]
    assert quiet(prepared, model, x, wanted=1e9).suggestions == ()


def test_suggested_lines_are_a_configuration_whatever_the_names() -> None:
    lines = Suggestion(('a"b', "c.d"), 1.0, 0.1).cfg
    assert load_config(lines).quant_skip_layers == ('a"b', "c.d")


def test_where_the_metric_cannot_tell_layers_rank_by_the_error_they_make() -> None:
    prepared, model = prepared_and_float()
    x = example(4)
    data = [(x, model(x).argmax(1))]
    found = quiet(prepared, model, data, metric=lambda output, batch: 1.0)
    errors = [found.layer(name).sensitivity.output_mse for name in found.ranking]  # type: ignore[union-attr]
    assert errors == sorted(errors, reverse=True)
    assert found.metric == "metric"


def test_nothing_changes_in_the_models() -> None:
    prepared, model = prepared_and_float()
    prepared.train()
    model.train()
    hooks = [len(part._forward_hooks) for part in (*prepared.modules(), *model.modules())]
    before = {k: v.clone() for k, v in (prepared.state_dict() | model.state_dict()).items()}
    random = torch.get_rng_state()
    quiet(prepared, model, example(4))
    after = prepared.state_dict() | model.state_dict()
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert torch.equal(torch.get_rng_state(), random)
    assert hooks == [len(part._forward_hooks) for part in (*prepared.modules(), *model.modules())]
    for which in (prepared, model):
        assert all(part.training for part in which.modules())
        assert not any("forward" in vars(part) for part in which.modules())


def test_the_batch_is_not_changed_by_a_model_that_works_in_place() -> None:
    class Greedy(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.mul_(2.0))

    prepared, model = prepared_and_float(Greedy)
    x = example(4)
    expected = x.clone()
    quiet(prepared, model, [x])
    assert torch.equal(x, expected)


def test_layers_before_the_one_looked_at_are_not_computed_again() -> None:
    class Deep(nn.Module):
        def __init__(self, depth: int) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(nn.Linear(4, 4) for _ in range(depth)))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    def evaluations(depth: int) -> int:
        prepared = prepare_qat_amct(Deep(depth))
        x = torch.randn(8, 4)
        prepared(x)
        count = 0
        original = F.linear

        def counted(*args: Any) -> Tensor:
            nonlocal count
            count += 1
            return original(*args)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(F, "linear", counted)
            quiet(prepared, None, x, max_skips=0)
        return count

    for depth in (4, 8):
        runs = depth * (depth + 1) // 2  # of each layer and all behind it
        again = 3 * depth  # the local error of each layer, once for each choice of quantizers
        assert evaluations(depth) == 2 * depth + 2 * runs + again


def test_progress_goes_up_to_the_end() -> None:
    prepared, model = prepared_and_float()
    steps: list[tuple[str, int, int]] = []
    analyze(prepared, model, [example(), example()], progress=lambda *step: steps.append(step))
    first = [step for step in steps if step[0] == "Analyzing layers"]
    assert [done for _, done, _ in first] == list(range(1, 2 * (3 + 8) + 1))
    assert {total for _, _, total in first} == {22}
    assert steps[-1][1] == steps[-1][2]


def test_dead_channels_of_weights_and_inputs_are_listed() -> None:
    torch.manual_seed(0)
    model = Chain().eval()
    with torch.no_grad():
        model.b.weight[2] = 0
        model.b.weight[5] = 1e-30
        model.b.bias[3] = -1e4  # its channel dies in the activation; the sum has the one of `a`
        model.a.weight[3] = 0
        model.a.bias[3] = -1
    cfg = "retrain_weight_quant_config { arq_retrain { channel_wise: true } } skip_layers: 'd'"
    prepared = prepare_qat_amct(model, cfg)
    prepared(example(4))
    found = quiet(prepared, model, example(4))
    assert found.layer("b").dead_channels == (2, 5)
    histogram = found.layer("b").weight_histogram
    assert histogram is not None
    assert histogram.clip_max == pytest.approx(prepared.b.weight.abs().max().item(), rel=0.02)
    assert found.layer("c").dead_inputs == (3,)
    assert found.layer("a").dead_inputs == ()


def test_codes_and_saturation_are_those_of_the_quantizer() -> None:
    prepared, model = prepared_and_float()
    x = 3 * example(4)
    found = quiet(prepared, model, x).layer("a")
    quantizer = prepared.get_submodule("a.input_fake_quant")
    scale, zero = quantizer.calculate_qparams()  # type: ignore[operator]
    codes = torch.round(x / scale) + zero
    use = found.input_codes
    assert use is not None
    assert use.saturated == pytest.approx(((codes < -128) | (codes > 127)).double().mean().item())
    assert use.unused == 256 - len(codes.clamp(-128, 127).unique())
    assert sum(use.counts) == x.numel()
    assert found.input_histogram is not None
    assert sum(found.input_histogram.counts) == x.numel()
    assert found.input_histogram.low <= x.min()
    assert found.input_histogram.high >= x.max()
    assert found.input_histogram.clip_max == pytest.approx(quantizer.clip_max.item())  # type: ignore[union-attr, operator]
