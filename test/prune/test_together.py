"""Filters, 2:4 and INT8 in one run on several networks: resumed, copied, converted, run."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from amct_fx import convert_amct, export_onnx, load_checkpoint, prepare_qat_amct, save_checkpoint
from amct_fx.pruning import current_plan

CFG = """batch_num: 2
prune_config { filter_pruner {
    balanced_l2_norm_filter_prune { prune_ratio: 0.4 ascend_optimized: false } } }
retrain_data_quant_config { ulq_quantize { } }
retrain_weight_quant_config { %s { channel_wise: true } }
override_layer_configs { layer_name: "%s"
    prune_config { n_out_of_m_pruner { l1_selective_prune { update_freq: 3 } } } }
"""


class Up(nn.Module):
    """U-shaped, with a grouped and two transposed convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.e1, self.e2 = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3, padding=1)
        self.e3 = nn.Conv2d(32, 48, 3, padding=1, groups=2)
        self.u2, self.u1 = nn.ConvTranspose2d(48, 32, 2, 2), nn.ConvTranspose2d(32, 16, 4, 2, 1)
        self.d2, self.d1 = nn.Conv2d(64, 32, 3, padding=1), nn.Conv2d(32, 16, 3, padding=1)
        self.n, self.o = nn.BatchNorm2d(16), nn.Conv2d(16, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Run on ``[N, 3, H, W]``."""
        a = F.relu(self.e1(x))
        b = F.relu(self.e2(F.max_pool2d(a, 2)))
        c = F.relu(self.e3(F.max_pool2d(b, 2)))
        d = F.relu(self.d2(torch.cat([self.u2(c), b], 1)))
        y: Tensor = self.o(F.relu(self.n(self.d1(torch.cat([a, self.u1(d)], 1)))))
        return y


class Shuffled(nn.Module):
    """A channel shuffle, a pixel shuffle, a PReLU, and a Linear on flattened maps."""

    def __init__(self) -> None:
        super().__init__()
        self.c = nn.Conv2d(3, 32, 3, padding=1)
        self.g = nn.Conv2d(32, 32, 3, padding=1, groups=4)
        self.p, self.ps = nn.Conv2d(32, 64, 1), nn.PixelShuffle(2)
        self.q, self.pr = nn.Conv2d(16, 16, 3, padding=1), nn.PReLU(16)
        self.f, self.k = nn.Linear(1024, 12), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Run on ``[N, 3, 8, 8]``."""
        x = F.relu(self.c(x))
        n, c, h, w = x.shape
        x = F.relu(self.g(x.view(n, 4, c // 4, h, w).transpose(1, 2).reshape(n, c, h, w)))
        x = self.pr(self.q(F.max_pool2d(self.ps(self.p(x)), 2)))
        y: Tensor = self.k(F.relu(self.f(x.flatten(1))))
        return y


class Gated(nn.Module):
    """Sequences: a gate of two halves, a residual, Linear layers over transposed channels."""

    def __init__(self) -> None:
        super().__init__()
        self.i, self.g = nn.Conv1d(6, 32, 3, padding=1), nn.Conv1d(32, 64, 1)
        self.n, self.o = nn.BatchNorm1d(32), nn.Conv1d(32, 32, 1)
        self.l1, self.l2 = nn.Linear(32, 48), nn.Linear(48, 7)

    def forward(self, x: Tensor) -> Tensor:
        """Run on ``[N, 6, T]``."""
        x = self.i(x)
        a, b = self.g(F.relu(x)).chunk(2, 1)
        x = (x + self.o(self.n(a * torch.sigmoid(b)))).transpose(1, 2)
        y: Tensor = self.l2(F.relu(self.l1(x))).mean(1)
        return y


CASES: list[tuple[Any, tuple[int, ...], str, str, Any]] = [
    (Up, (2, 3, 16, 16), "d2", "arq_retrain", torch.optim.SGD),
    (Shuffled, (2, 3, 8, 8), "q", "ulq_retrain", torch.optim.Adam),
    (Gated, (4, 6, 20), "l1", "arq_retrain", torch.optim.AdamW),
]


def optimizer_of(kind: Any, model: nn.Module) -> torch.optim.Optimizer:
    options = {"momentum": 0.9, "nesterov": True} if kind is torch.optim.SGD else {}
    made: torch.optim.Optimizer = kind(model.parameters(), lr=1e-3, weight_decay=0.01, **options)
    return made


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, steps: int) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        model.train()(x + 0.1 * step).square().mean().backward()
        optimizer.step()


@pytest.mark.filterwarnings("ignore:channel_wise:amct_fx.AmctWarning")
@pytest.mark.parametrize(("kind", "shape", "sparse", "weights", "optimizer"), CASES)
def test_all_three_go_through_checkpoint_copies_convert_and_onnxruntime(
    kind: Any, shape: tuple[int, ...], sparse: str, weights: str, optimizer: Any, tmp_path: Path
) -> None:
    ort = pytest.importorskip("onnxruntime")
    torch.manual_seed(0)
    model, x = kind(), torch.randn(shape)
    first = prepare_qat_amct(model, CFG % (weights, sparse), x)
    steps = optimizer_of(optimizer, first)
    train(first, steps, x, 4)
    save_checkpoint(first, tmp_path / "half.pt")
    second, _ = load_checkpoint(tmp_path / "half.pt", kind(), example_inputs=x)
    resumed = optimizer_of(optimizer, second)
    resumed.load_state_dict(copy.deepcopy(steps.state_dict()))
    train(first, steps, x, 3)
    train(second, resumed, x, 3)
    for key, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[key]), key

    plan = current_plan(second)
    assert plan is not None
    for key, mask in plan.column_masks().items():
        weight = second.get_submodule(key.rpartition(".")[0]).weight
        assert not weight.masked_select(~mask.expand_as(weight)).any()
    converted = convert_amct(second.eval()).eval()
    codes = converted.get_submodule(sparse).weight
    assert 0.4 <= float((codes != 0).float().mean()) <= 0.62  # the last group may have 1 to 3
    expected = converted(x).detach()
    scale = expected.abs().max()
    assert (second(x).detach() - expected).abs().max() <= 0.05 * scale
    for twin in (copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        assert torch.equal(convert_amct(twin).eval()(x), expected)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export_onnx(converted, x, tmp_path / "m.onnx")
    session = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    assert (torch.from_numpy(output) - expected).abs().max() <= 0.01 * scale
