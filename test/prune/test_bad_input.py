"""The errors and warnings of a configuration that prunes, row by row: spec/pruning.md section 1."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx import AmctError, AmctWarning, prepare_qat_amct, prune_plan

ALGORITHM = "balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false }"
FILTER = f"prune_config {{ filter_pruner {{ {ALGORITHM} }} }}\n"
M4N2 = "prune_config { n_out_of_m_pruner { l1_selective_prune { update_freq: 0 } } }\n"
INT8 = "retrain_data_quant_config { ulq_quantize { } }\n"
IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    """Has layers of every kind that follows others, behind layers that can be pruned."""

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(3, 16, 3, padding=1)
        self.b1 = nn.BatchNorm2d(16)
        self.dw = nn.Conv2d(16, 16, 3, padding=1, groups=16)
        self.c2 = nn.Conv2d(16, 24, 1)
        self.act = nn.PReLU(24)
        self.gn = nn.GroupNorm(4, 24)
        self.up = nn.ConvTranspose2d(24, 16, 2, stride=2)
        self.fc = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Run on ``[N, 3, H, W]``."""
        x = F.relu(self.dw(F.relu(self.b1(self.c1(x)))))
        y: Tensor = self.fc(self.up(self.gn(self.act(self.c2(x)))).mean((2, 3)))
        return y


def fresh() -> Net:
    torch.manual_seed(0)
    return Net()


def ratio(text: str) -> str:
    return f"prune_config {{ filter_pruner {{ balanced_l2_norm_filter_prune {{ {text} }} }} }}"


def layer(name: str, block: str = FILTER) -> str:
    return f'override_layer_configs {{ layer_name: "{name}" {block} }}\n'


def kind(name: str, block: str = FILTER) -> str:
    return f'override_layer_types {{ layer_type: "{name}" {block} }}\n'


BOUNDS = r":1:\d+: prune_ratio must be between 0 and 1, both excluded, not "
FOLLOWS = "its channels are cut with those of 'c1', so name that layer"
ERRORS: list[tuple[str, str, str]] = [
    *(("native amct", ratio(f"prune_ratio: {r}"), BOUNDS) for r in ("0", "1", "-0.1", "2", "nan")),
    ("native", ratio('prune_ratio: "0.3"'), "prune_ratio must be a number"),
    ("native", ratio(""), "prune_ratio is missing in balanced_l2_norm_filter_prune"),
    ("native", ratio("prune_rate: 0.3"), "unknown field 'prune_rate'.*did you mean 'prune_ratio'"),
    ("native", "prune_config { }", "filter_pruner or n_out_of_m_pruner is missing"),
    ("native", "prune_config { filter_pruner { } }", "balanced_l2_norm_filter_prune is missing"),
    ("native", "prune_config { n_out_of_m_pruner { } }", "l1_selective_prune is missing"),
    ("native", M4N2.replace("update_freq: 0", "update_freq: -1"), "update_freq must be a whole"),
    ("native", M4N2.replace("update_freq: 0", "n_out_of_m_type: M4N3"), "one of M4N2, not M4N3"),
    ("native amct", FILTER + layer("c22"), ":2:1: the model has no layer 'c22'; did you mean 'c2'"),
    ("native amct", FILTER + layer("b1"), "2:1: layer 'b1' cannot be pruned: a BatchNorm2d has no"),
    ("native amct", FILTER + layer("b1"), FOLLOWS),
    ("native amct", layer("b1", INT8 + FILTER), FOLLOWS),
    ("native amct", layer("act"), "'act' cannot be pruned: .* those of 'c2'"),
    ("native amct", layer("gn"), "'gn' cannot be pruned: .* those of 'c2'"),
    ("native amct", layer("dw"), f"'dw' cannot be pruned: .*{FOLLOWS}"),
    ("native amct", layer("b1", M4N2), "2:4 pruning is for .*, not for BatchNorm2d$"),
    ("native amct", FILTER + layer("b1", INT8), "'b1' cannot be set: a BatchNorm2d is not quantiz"),
    ("amct", layer("up"), "'up' cannot be pruned: filter pruning is for Conv2d, Linear, not for"),
    ("native amct", layer("c2") + layer("c2"), "'c2' is overridden twice .* join the two"),
    ("native amct", kind("Conv2"), "unknown layer type 'Conv2'; did you mean 'Conv2d'"),
    ("native amct", kind("BatchNorm2d"), "type 'BatchNorm2d' cannot be pruned: filter pruning is"),
    ("native amct", kind("LSTM"), "type 'LSTM' cannot be pruned: filter pruning is for"),
    ("native", kind("DepthwiseConv2dNative"), "cannot be pruned: the channels of a depthwise"),
    ("amct", kind("ConvTranspose2d"), "type 'ConvTranspose2d' cannot be pruned: filter pruning"),
    ("native amct", kind("Conv2d") + kind("Conv2d"), "type 'Conv2d' is overridden twice"),
    ("native", FILTER + 'skip_layers: "c22"', "2:14: skip_layers has 'c22', .* did you mean 'c2'"),
    ("native", FILTER + 'regular_prune_skip_layers: "upp"', "'upp', .* mean 'up'"),
    ("native", FILTER + 'regular_prune_skip_types: "Conv2D2"', "type 'Conv2D2'; did you mean"),
    (
        "native amct",
        FILTER
        + "".join(f'skip_layer_types: "{t}" ' for t in ("Conv2d", "Linear", "Conv2DTranspose")),
        "no layer is left to be pruned: all are skipped",
    ),
]


@pytest.mark.filterwarnings("ignore::amct_fx.AmctWarning")
@pytest.mark.parametrize(("modes", "text", "message"), ERRORS)
def test_an_error_says_where_and_what_and_leaves_the_model(
    modes: str, text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "prune.cfg"
    path.write_text(text)
    for mode in modes.split():
        model: Any = fresh()
        before = {key: value.clone() for key, value in model.state_dict().items()}
        modules = {name: type(module) for name, module in model.named_modules()}
        for call in (prepare_qat_amct, prune_plan):
            options = {"inplace": True} if call is prepare_qat_amct else {}
            with pytest.raises(ValueError, match=message) as caught:
                call(model, path, IMAGE, mode=mode, **options)  # type: ignore[operator]
            assert isinstance(caught.value, AmctError)
            assert str(path) in str(caught.value)
        assert {name: type(module) for name, module in model.named_modules()} == modules
        assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


WARNINGS: list[tuple[str, str]] = [
    ('regular_prune_skip_layers: "b1"', "regular_prune_skip_layers has 'b1', .* those of 'c1'"),
    ('regular_prune_skip_layers: "dw"', "regular_prune_skip_layers has 'dw', .* those of 'c1'"),
    ('skip_layers: "dw"', "skip_layers has 'dw', which has no effect: .* those of 'c1'"),
    ('skip_layers: "act"', "skip_layers has 'act', which has no effect: .* those of 'c2'"),
    ('skip_layers: "c2" skip_layers: "c2"', "skip_layers has 'c2' more than once"),
    ('regular_prune_skip_types: "PReLU"', "no effect: layers of this type are not pruned"),
    (layer("c2") + 'skip_layers: "c2"', "skip lists beat an override, .* not pruned: 'c2'"),
]


@pytest.mark.parametrize(("text", "message"), WARNINGS)
def test_what_has_no_effect_is_a_warning(text: str, message: str) -> None:
    with pytest.warns(AmctWarning, match=message):
        prune_plan(fresh(), FILTER + text, IMAGE)


@pytest.mark.parametrize(
    "text",
    [
        FILTER + INT8 + 'skip_layers: "dw"',  # it is quantized
        FILTER + layer("dw", M4N2) + 'regular_prune_skip_layers: "up"',
        FILTER + M4N2.replace("prune_config", 'skip_layers: "c2" #'),
        layer("c1") + 'skip_layers: "c2"',
    ],
)
def test_an_entry_that_has_an_effect_is_no_warning(text: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmctWarning)
        prune_plan(fresh(), text, IMAGE)


def test_a_type_that_only_native_mode_prunes_may_be_set_and_skipped() -> None:
    model = nn.Sequential(nn.ConvTranspose3d(2, 8, 1), nn.ReLU(), nn.Conv3d(8, 2, 1))
    volume = torch.ones(1, 2, 2, 2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AmctWarning)
        plan = prune_plan(model, kind("ConvTranspose3d"), volume)
        assert len(plan["0"].kept) == 4
        skipped = FILTER + 'regular_prune_skip_types: "ConvTranspose3d"'
        assert prune_plan(model, skipped, volume).groups == ()
