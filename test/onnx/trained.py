"""Models at the end of the recorded training runs."""

from __future__ import annotations

import copy
import functools

import torch
import torch.nn.functional as F
from torch import nn

from amct_fx import prepare_qat_amct

from ..golden.reader import Run, load_run


def trained(name: str) -> tuple[nn.Module, Run]:
    """Return the prepared model after the recorded training, and the recording."""
    model, run = _trained(name)
    return copy.deepcopy(model), run


@functools.cache
def _trained(name: str) -> tuple[nn.Module, Run]:
    run = load_run(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model = prepare_qat_amct(run.build(), run.cfg)
        optimizer = torch.optim.SGD(model.parameters(), lr=run.lr)
        for x, y in zip(run.inputs, run.targets, strict=True):
            optimizer.zero_grad()
            output = model(x)
            loss = F.cross_entropy(output, y) if y.numel() else output.square().mean()
            loss.backward()
            optimizer.step()
    finally:
        torch.set_num_threads(threads)
    return model, run
