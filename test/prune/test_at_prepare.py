"""``apply="prepare"``: channels gone before the quantizers are inserted, in AMCT's order."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from amct_fx import convert_amct, export_onnx, prepare_qat_amct, prune_plan
from amct_fx.errors import ModelError
from amct_fx.nn.qat import QATLayer
from amct_fx.prune.oracles import masked_copy
from test.prune import networks as nets
from test.prune.families import FAMILIES
from test.prune.test_families import randomized

INT8 = "batch_num: 1 retrain_data_quant_config { ulq_quantize { } }"
IMAGE, TOKENS = (2, 3, 16, 16), (2, 5, 16)
SPEC: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1": (nets.residual, IMAGE),
    "2": (nets.identity_blocks, IMAGE),
    "3": (nets.dense, IMAGE),
    "4": (nets.concat, IMAGE),
    "5": (nets.shufflenet, IMAGE),
    "6": (nets.inverted, IMAGE),
    "7": (nets.depthwise2, IMAGE),
    "8": (nets.squeeze_excite, IMAGE),
    "9": (nets.grouped, IMAGE),
    "9b": (nets.grouped_add, (2, 6, 16, 16)),
    "9c": (nets.grouped_series, (2, 6, 16, 16)),
    "10": (nets.unet, IMAGE),
    "11": (nets.flattened, IMAGE),
    "12": (nets.TwoHeads, IMAGE),
    "13": (nets.shared, IMAGE),
    "13 tied": (nets.tied, IMAGE),
    "14": (nets.transformer, TOKENS),
    "14b": (nets.feed_forward, TOKENS),
    "15": (nets.WithOutput, IMAGE),
}


def config(ratio: float) -> str:
    block = f"balanced_l2_norm_filter_prune {{ prune_ratio: {ratio} ascend_optimized: false }}"
    return f"prune_config {{ filter_pruner {{ {block} }} }}\n"


def tensors(value: Any) -> Iterator[Tensor]:
    yield from value if isinstance(value, tuple) else (value,)


def assert_same(found: Any, expected: Any, share: float = 1e-5) -> None:
    for ours, theirs in zip(tensors(found), tensors(expected), strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).abs().max() <= share * theirs.abs().max()


def assert_removed_at_once(model: nn.Module, x: Tensor, ratio: float, mode: Any) -> None:
    """Compare the model without the channels, the masked one, and the one cut at convert."""
    cfg = config(ratio)
    plan = prune_plan(model, cfg, x, mode=mode)
    small = prepare_qat_amct(model, cfg, x, mode=mode, apply="prepare").eval()
    late = convert_amct(prepare_qat_amct(model, cfg, x, mode=mode)).eval()
    with torch.no_grad():
        assert_same(small(x), masked_copy(model, plan).eval()(x))
        assert_same(small(x), late(x))
    assert sum(p.numel() for p in small.parameters()) == plan.parameters_after
    sizes = {key: value.shape for key, value in late.state_dict().items()}
    assert {key: value.shape for key, value in small.state_dict().items()} == sizes


@pytest.mark.parametrize("ratio", [0.3, 0.5])
@pytest.mark.parametrize("mode", ["native", "amct"])
@pytest.mark.parametrize("name", SPEC)
def test_the_networks_of_the_spec_are_cut_before_training(
    name: str, mode: str, ratio: float
) -> None:
    build, shape = SPEC[name]
    assert_removed_at_once(nets.golden_weights(build()), nets.golden_input(*shape), ratio, mode)


@pytest.mark.parametrize("mode", ["native", "amct"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_are_cut_before_training(family: str, mode: str) -> None:
    assert_removed_at_once(randomized(FAMILIES[family]()), torch.randn(2, 3, 16, 16), 0.3, mode)


@pytest.mark.parametrize("name", ["1", "5", "6", "9", "10"])
def test_it_trains_converts_and_runs_in_onnxruntime(name: str, tmp_path: Path) -> None:
    ort = pytest.importorskip("onnxruntime")
    build, shape = SPEC[name]
    model, x = nets.golden_weights(build()), nets.golden_input(*shape)
    options: dict[str, Any] = {"mode": "amct", "importance": "first", "apply": "prepare"}
    cfg = config(0.5) + INT8
    prepared = prepare_qat_amct(model, cfg, x, **options)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=1e-4, momentum=0.9, weight_decay=1e-4)
    for _ in range(2):
        optimizer.zero_grad()
        sum(t.square().mean() for t in tensors(prepared.train()(x))).backward()
        optimizer.step()
    resumed = prepare_qat_amct(copy.deepcopy(model), cfg, x, **options)
    resumed.load_state_dict(prepared.state_dict())
    with torch.no_grad():
        assert torch.equal(resumed.eval()(x), prepared.eval()(x))
    assert any(isinstance(module, QATLayer) for module in resumed.modules())
    converted = convert_amct(resumed).eval()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        export_onnx(converted, x, tmp_path / "m.onnx")
    session = ort.InferenceSession(tmp_path / "m.onnx", providers=["CPUExecutionProvider"])
    (output,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    expected = converted(x).detach().numpy()
    # a code that lies between two may fall to either side in the sums of onnxruntime
    assert np.abs(output - expected).max() <= 0.01 * np.abs(expected).max()


def test_nothing_to_prune_is_the_same_error_and_leaves_the_model() -> None:
    model = nn.Sequential(nn.Conv1d(4, 8, 1), nn.Conv1d(8, 2, 1))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ModelError, match="no layer that can be pruned"):
        prepare_qat_amct(
            model, config(0.5), torch.ones(1, 4, 6), mode="amct", apply="prepare", inplace=True
        )
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
