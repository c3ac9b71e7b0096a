"""Two gloo ranks: ranges merge once, clips stay equal, a rank that skips a layer hangs no one."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from amct_fx import ModelStateError, convert_amct, prepare_qat_amct
from amct_fx.distributed import ignore_quantizer_buffers, merge_ranges_across_ranks
from amct_fx.observers import ULQFakeQuantize

from .networks import Net, example
from .versions import BEFORE_2_7

pytestmark = [
    pytest.mark.skipif(not dist.is_gloo_available(), reason="torch without gloo"),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork.*:DeprecationWarning"),
]

CLIPS = """retrain_data_quant_config { ulq_quantize {
    clip_max_min { clip_max: 3.0 clip_min: -3.0 } } }"""


WEIGHTS = "retrain_weight_quant_config { ulq_retrain { } }"


class Plain(nn.Module):
    """No batch norm, so that two ranks can equal one process."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3)
        self.second = nn.Conv2d(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(x))).mean((2, 3))


class Skips(nn.Module):
    """Runs a layer only when the input is large."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Conv2d(3, 4, 1)
        self.sometimes = nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.always(x)
        return self.sometimes(y) if x.abs().max() > 50 else y


def clips(model: nn.Module) -> Tensor:
    values = [m for m in model.modules() if isinstance(m, ULQFakeQuantize)]
    return torch.stack([torch.cat([m.clip_max.detach(), m.clip_min.detach()]) for m in values])


def on_every_rank(value: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, value)
    return gathered


def run(rank: int, job: Callable[[int], None], store: str) -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    try:
        job(rank)
        # In PyTorch 2.7 destroying the group while gloo's thread drops its last tensor can hang.
        time.sleep(0.1)
    finally:
        dist.destroy_process_group()


def two_ranks(tmp_path: Path, job: Callable[[int], None]) -> None:
    # forked: two fresh interpreters would spend ten seconds on importing torch
    mp.start_processes(run, (job, str(tmp_path / "store")), nprocs=2, start_method="fork")


def merged_ranges(rank: int) -> None:
    torch.manual_seed(0)
    model = Plain()
    local = prepare_qat_amct(copy.deepcopy(model))
    local.requires_grad_(False).eval()  # eval never communicates
    local((rank + 1) * example())
    expected = torch.stack(on_every_rank(clips(local)[0])).mean(0)
    prepared = DistributedDataParallel(prepare_qat_amct(model))
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    for step in range(4):
        optimizer.zero_grad()
        prepared((rank + 1) * example()).square().mean().backward()
        if step == 0:
            assert torch.allclose(clips(prepared)[0], expected)
        optimizer.step()
        first, second = on_every_rank(clips(prepared))
        assert torch.equal(first, second)
    convert_amct(prepared.module)


def test_calibrated_ranges_are_the_mean_over_ranks_and_stay_equal(tmp_path):
    two_ranks(tmp_path, merged_ranges)


def widest_range(rank: int) -> None:
    torch.manual_seed(0)
    prepared = prepare_qat_amct(Plain(), range_merge="max")
    prepared((rank + 1) * example())
    first, second = on_every_rank(clips(prepared))
    assert torch.equal(first, second)
    alone = prepare_qat_amct(Plain())
    alone.eval()(2 * example())
    assert torch.allclose(first[0], clips(alone)[0])


def test_the_widest_rank_wins_on_request(tmp_path):
    two_ranks(tmp_path, widest_range)


def joined_batch(rank: int) -> None:
    torch.manual_seed(0)
    model = Plain()
    x, y = example(8), torch.arange(8) % 4
    joined = prepare_qat_amct(copy.deepcopy(model), CLIPS)
    parallel = DistributedDataParallel(prepare_qat_amct(model, CLIPS))
    part = slice(4 * rank, 4 * rank + 4)
    for module, inputs, targets in ((joined, x, y), (parallel, x[part], y[part])):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            F.cross_entropy(module(inputs), targets).backward()
            optimizer.step()
    state = joined.state_dict()
    for key, value in parallel.module.state_dict().items():
        assert torch.allclose(value, state[key], rtol=1e-5, atol=1e-6), key


def test_two_ranks_equal_one_process_on_the_joined_batch(tmp_path):
    two_ranks(tmp_path, joined_batch)


def skipped_layer(rank: int) -> None:
    torch.manual_seed(0)
    prepared = prepare_qat_amct(Skips())
    prepared((100 if rank == 0 else 1) * example())
    assert prepared.sometimes.input_fake_quant.is_calibrated
    first, second = on_every_rank(clips(prepared))
    assert torch.equal(first, second)


def test_a_rank_that_skips_a_layer_takes_the_range_of_the_other(tmp_path):
    two_ranks(tmp_path, skipped_layer)


class CountingGroup:
    """Counts the collectives that anything calls."""

    def __init__(self) -> None:
        self.count = 0
        self._real = dist.all_reduce

    def __call__(self, *args: object, **kwargs: object) -> object:
        self.count += 1
        return self._real(*args, **kwargs)


def counted_collectives(rank: int) -> None:
    counting = CountingGroup()
    dist.all_reduce = counting
    prepared = prepare_qat_amct(Net(), "batch_num: 2")
    prepared.eval()
    prepared(example())
    assert counting.count == 0
    prepared.train()
    counts = []
    for _ in range(4):
        prepared(example())
        counts.append(counting.count)
    assert counts == [0, 1, 1, 1]
    prepared.eval()(example())
    explicit = prepare_qat_amct(Net(), CLIPS)
    explicit(example())
    assert counting.count == 1


def test_one_reduction_in_the_whole_training_and_none_in_eval(tmp_path):
    two_ranks(tmp_path, counted_collectives)


def equal_everywhere(model: nn.Module) -> bool:
    first, second = on_every_rank(clips(model))
    return torch.equal(first, second)


def evaluated_by_one_rank_first(rank: int) -> None:
    torch.manual_seed(0)
    prepared = prepare_qat_amct(Net(), WEIGHTS)
    if rank == 0:
        with torch.no_grad():
            prepared.eval()(3 * example())
        prepared.train()
    parallel = DistributedDataParallel(prepared)
    for _ in range(2):
        parallel((rank + 1) * example()).sum().backward()
        assert equal_everywhere(prepared)
    convert_amct(prepared)


def test_one_rank_may_evaluate_before_the_training(tmp_path):
    two_ranks(tmp_path, evaluated_by_one_rank_first)


def validated_by_one_rank(rank: int) -> None:
    torch.manual_seed(0)
    model = Net()
    local = prepare_qat_amct(copy.deepcopy(model), "batch_num: 2").eval()
    larger = nn.Sequential(prepare_qat_amct(model, "batch_num: 2"))
    ignore_quantizer_buffers(larger)
    parallel = DistributedDataParallel(larger)
    for step in range(2):
        x = (rank + 1) * example()
        parallel(x)
        local(x)
        if rank == 0 and step == 0:
            with torch.no_grad():
                larger.eval()(x)
            larger.train()
    expected = torch.stack(on_every_rank(clips(local)[0])).mean(0)
    assert torch.allclose(clips(larger)[0], expected)
    assert equal_everywhere(larger)


def test_one_rank_may_validate_in_the_middle_of_the_calibration(tmp_path):
    two_ranks(tmp_path, validated_by_one_rank)


class Late(nn.Module):
    """Runs its second layer from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.step = 0

    def forward(self, x: Tensor, **_: object) -> Tensor:
        self.step += 1
        y = self.first(x)
        return self.second(y) if self.step > 3 else y


def late_layer(rank: int) -> None:
    torch.manual_seed(0)
    counting = CountingGroup()
    prepared = prepare_qat_amct(Late(), WEIGHTS)
    dist.all_reduce = counting
    for step in range(6):
        # without DDP, whose logger counts as well
        prepared((rank + 1) * example().flatten(1)[:, :8]).sum().backward()
        assert counting.count == min(step + 1, 4)
        assert prepared.second.input_fake_quant.is_calibrated == (step >= 3)
        assert equal_everywhere(prepared)
    scales = on_every_rank(prepared.second.weight_fake_quant.scale.detach())
    assert torch.equal(*scales)


def test_a_layer_that_starts_late_is_merged_when_it_starts(tmp_path):
    two_ranks(tmp_path, late_layer)


def compiled(rank: int) -> None:
    torch.manual_seed(0)
    prepared = prepare_qat_amct(Plain())
    parallel = torch.compile(DistributedDataParallel(prepared), backend="eager")
    for _ in range(3):
        parallel((rank + 1) * example()).sum().backward()
        assert equal_everywhere(prepared)


def test_a_compiled_model_is_merged_too(tmp_path):
    two_ranks(tmp_path, compiled)


def never_run(rank: int) -> None:
    torch.manual_seed(0)
    counting = CountingGroup()
    dist.all_reduce = counting
    prepared = prepare_qat_amct(Skips())
    for _ in range(110):
        prepared(example())
    assert counting.count == 101
    assert merge_ranges_across_ranks(prepared) == ["sometimes.input_fake_quant"]


def test_the_ranks_stop_waiting_for_a_layer_that_never_runs(tmp_path):
    two_ranks(tmp_path, never_run)


def sharded(rank: int) -> None:
    torch.manual_seed(0)
    x = (rank + 1) * example()
    parallel = prepare_qat_amct(Plain())
    fully = copy.deepcopy(parallel)
    for module in (parallel, fully):
        module(x)
    fully_shard(fully, mesh=init_device_mesh("cpu", (2,)))
    wrapped = DistributedDataParallel(parallel)
    losses: list[list[float]] = [[], []]
    for module, seen in zip((wrapped, fully), losses, strict=True):
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(4):
            optimizer.zero_grad()
            loss = module(x).square().mean()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for key, value in fully.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        assert torch.allclose(whole, parallel.state_dict()[key], rtol=1e-5, atol=1e-6), key


def sharded_float(rank: int) -> None:
    parallel = nn.Linear(4, 2)
    nn.init.ones_(parallel.weight)
    fully = copy.deepcopy(parallel)
    fully_shard(fully, mesh=init_device_mesh("cpu", (2,)))
    wrapped = DistributedDataParallel(parallel)
    for module in (wrapped, fully):
        module((rank + 1) * torch.ones(2, 4)).sum().backward()
    assert torch.equal(fully.weight.grad.full_tensor(), parallel.weight.grad)


def skip_unless_fsdp2_runs_on_cpus(tmp_path: Path) -> None:
    """PyTorch 2.6 has no stream for FSDP2 on a CPU; 2.7 adds gradients up instead of averaging."""
    folder = tmp_path / "float"
    folder.mkdir()
    try:
        two_ranks(folder, sharded_float)
    except mp.ProcessRaisedException as error:
        reason = f"FSDP2 of PyTorch {torch.__version__} on CPUs is wrong for a float nn.Linear"
        pytest.skip(f"{reason}: {str(error).strip().splitlines()[-1]}")


def test_a_calibrated_model_trains_the_same_under_fsdp2_and_ddp(tmp_path):
    skip_unless_fsdp2_runs_on_cpus(tmp_path)
    two_ranks(tmp_path, sharded)


def sharded_too_early(rank: int) -> None:
    prepared = prepare_qat_amct(Plain())
    fully_shard(prepared, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ModelStateError, match="before fully_shard"):
        prepared(example())


def test_sharding_before_the_calibration_is_refused(tmp_path):
    if BEFORE_2_7:
        pytest.skip("FSDP2 of PyTorch 2.6 does not run on CPUs")
    two_ranks(tmp_path, sharded_too_early)


def resumed(rank: int) -> None:
    torch.manual_seed(0)
    first = prepare_qat_amct(Net())
    first((rank + 1) * example())
    second = prepare_qat_amct(Net())
    second.load_state_dict(first.state_dict())
    before = {key: value.clone() for key, value in second.named_parameters()}
    before |= {key: value for key, value in second.named_buffers() if "clip" in key}
    second((rank + 3) * example())
    for key, value in before.items():
        assert torch.equal(second.state_dict()[key], value), key


def test_a_resumed_training_keeps_its_clips_bit_for_bit(tmp_path):
    two_ranks(tmp_path, resumed)


@pytest.mark.parametrize("copied", [False, True])
def test_ddp_is_told_to_leave_the_buffers_of_quantizers_alone(copied):
    model = Net()
    model._ddp_params_and_buffers_to_ignore = ["bn.running_mean"]
    prepared = prepare_qat_amct(model)
    prepared = copy.deepcopy(prepared) if copied else prepared
    prepared(example())
    names = prepared._ddp_params_and_buffers_to_ignore
    assert "stem.input_fake_quant.calibrated" in names
    assert not {name for name, _ in prepared.named_parameters()} & set(names)
    assert {name for name, _ in prepared.named_buffers()} - set(names) == {
        "bn.running_var",
        "bn.num_batches_tracked",
    }
    assert convert_amct(prepared)._ddp_params_and_buffers_to_ignore == ["bn.running_mean"]


def test_without_a_process_group_nothing_happens():
    prepared = prepare_qat_amct(Net())
    prepared(example())
    alone = clips(prepared)
    prepared(example())
    assert torch.equal(clips(prepared), alone)
