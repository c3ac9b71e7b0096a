"""Pruned models under everything a training may do: ranks, averages, precisions, layouts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from amct_fx import convert_amct, prepare_qat_amct
from test.prune.test_channel_training import FILTER, INT8, M4N2, Chain, fresh, images, train

CFG = FILTER + INT8 + M4N2


def prepared(seed: int = 0) -> nn.Module:
    return prepare_qat_amct(fresh(seed=seed), CFG, images())


def rank_trains(rank: int, store: str, results: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    try:
        model = prepared(seed=rank)  # other weights, other masks: rank 0 counts
        wrapped = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.01)
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            optimizer.zero_grad()
            wrapped(torch.randn(4, 3, 8, 8, generator=generator)).square().mean().backward()
            optimizer.step()
        torch.save(model.state_dict(), f"{results}/{rank}.pt")
        torch.save(convert_amct(model)(images()), f"{results}/out{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_ranks_keep_the_same_masks_and_weights(tmp_path: Path):
    mp.spawn(rank_trains, (f"file://{tmp_path}/store", str(tmp_path)), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt") for rank in (0, 1))
    for key, value in first.items():
        if "_extra_state" not in key and "norm.running" not in key:
            assert torch.equal(value, second[key]), key
    expected = prepared(seed=0)
    assert torch.equal(first["c1.kept_channels"], expected.c1.kept_channels)
    outputs = [torch.load(tmp_path / f"out{rank}.pt") for rank in (0, 1)]
    assert outputs[0].shape == outputs[1].shape


def test_an_average_of_the_training_converts():
    model = prepared()
    train(model, 1, images())
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for _ in range(3):
        train(model, 1, images())
        average.update_parameters(model)
    expected = average.module.eval()(images())
    converted = convert_amct(average.module)
    assert converted.c1.out_channels == 8
    assert (converted(images()) - expected).abs().max() <= 0.02 * expected.abs().max()


def test_autocast_reaches_masked_weights():
    model = prepared()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [model(images()).float().square().mean() for _ in range(2)]
    losses[-1].backward()
    cut = model.c1.kept_channels == 0
    gradient = model.c1.parametrizations.weight.original.grad
    assert gradient.dtype == torch.float32
    assert (gradient[cut] == 0).all()
    assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_train_and_convert(dtype):
    x = images().to(dtype)
    model = prepare_qat_amct(fresh().to(dtype), CFG, x)
    train(model, 2, x)
    expected = model.eval()(x)
    assert expected.dtype == dtype
    assert (convert_amct(model)(x) - expected).abs().max() <= 0.06 * expected.abs().max()


def test_channels_last_stays_and_changes_nothing():
    x = images().to(memory_format=torch.channels_last)
    model = prepare_qat_amct(fresh().to(memory_format=torch.channels_last), CFG, x)
    plain = prepared()
    assert train(model, 3, x) == pytest.approx(train(plain, 3, images()), rel=1e-4)
    converted = convert_amct(
        prepare_qat_amct(fresh().to(memory_format=torch.channels_last), FILTER, x)
    )
    assert converted.c3.weight.is_contiguous(memory_format=torch.channels_last)


def test_inference_mode_and_no_grad_change_no_mask():
    model = prepared()
    train(model, 1, images())
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.inference_mode():
        model.eval()(images())
    with torch.no_grad():
        model.eval()(images())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


def test_the_mode_of_the_model_is_kept_and_frozen_parameters_stay_frozen():
    model = fresh().eval()
    model.c1.weight.requires_grad_(False)
    for apply in ("convert", "prepare"):
        found = prepare_qat_amct(model, CFG, images(), apply=apply)
        assert not found.training
        frozen = [n for n, p in found.named_parameters() if not p.requires_grad]
        assert len(frozen) == 1
        assert frozen[0].startswith("c1.")


def test_the_optimizer_made_before_an_inplace_prepare_still_trains():
    model = fresh(Chain)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = prepare_qat_amct(model, FILTER, images(), inplace=True)
    before = found.c2.weight.detach().clone()
    found(images()).square().mean().backward()
    optimizer.step()
    assert not torch.equal(found.c2.weight, before)
