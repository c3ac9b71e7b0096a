"""Quantization-aware training on several processes.

    torchrun --nproc-per-node 2 examples/train_ddp.py --epochs 2

The usual DistributedDataParallel code: prepare first, then wrap. The ranges that the ranks
calibrate on their own data are merged once, at the end of the calibration.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from amct_fx_demo.data import digits
from example_tools import print_table, share_right
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
from train_digits import make_model

import amct_fx


def train(model: nn.Module, data: TensorDataset, epochs: int) -> None:
    """Train ``model`` on this rank's share of ``data``; the learned ranges do not decay."""
    sampler: DistributedSampler[TensorDataset] = DistributedSampler(data, seed=0)
    groups = amct_fx.param_groups(model, weight_decay=0.01)
    optimizer = torch.optim.AdamW(groups, lr=3e-3)
    model.train()
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, batch_size=32, sampler=sampler):
            optimizer.zero_grad()
            F.cross_entropy(model(images), labels).backward()
            optimizer.step()


def clips(model: nn.Module) -> torch.Tensor:
    """Return the learned clips of all input quantizers, one after the other."""
    values = [p.detach() for name, p in model.named_parameters() if ".clip_" in name]
    return torch.cat(values)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, check that all ranks hold the same clips, convert on the first one."""
    parser = argparse.ArgumentParser(description="Quantize a small CNN on several processes.")
    parser.add_argument("--epochs", type=int, default=5)
    options = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    train_set, test_set = digits()
    prepared = amct_fx.prepare_qat_amct(make_model(), "batch_num: 2")
    # Nothing keeps the wrapper, which holds the process group, longer than the training.
    train(DistributedDataParallel(prepared), TensorDataset(*train_set), options.epochs)

    gathered = [torch.empty_like(clips(prepared)) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, clips(prepared))
    if dist.get_rank() == 0:
        equal = all(torch.equal(gathered[0], other) for other in gathered)
        print(f"clips equal on {len(gathered)} ranks: {equal}")
        converted = amct_fx.convert_amct(prepared)
        models = {"prepared": prepared, "converted": converted}
        rows = [{"model": n, "accuracy": share_right(m, *test_set)} for n, m in models.items()]
        print_table(f"Digits, trained on {len(gathered)} ranks", rows)
        if not equal:
            raise SystemExit(1)
    dist.barrier()  # no rank leaves while another one still works
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
