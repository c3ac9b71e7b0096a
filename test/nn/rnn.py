"""Models, inputs and a slow reference for the tests of LSTM and GRU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from amct_fx import prepare_qat_amct

CLASSES = [nn.LSTM, nn.GRU]
BATCH, TIME, INPUT, HIDDEN = 3, 5, 4, 6
both = pytest.mark.parametrize("cls", CLASSES, ids=["LSTM", "GRU"])


class Model(nn.Module):
    """A recurrent layer behind a ReLU, and a Linear on its last output."""

    def __init__(self, cls: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.stem = nn.Linear(INPUT, INPUT)
        self.rnn = cls(INPUT, HIDDEN, batch_first=True, **options)
        self.head = nn.Linear(HIDDEN, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.rnn(torch.relu(self.stem(x)))[0][:, -1])


class WithState(Model):
    """A model that computes the initial hidden state."""

    def forward(self, x: Tensor, h: Tensor) -> Tensor:
        h = torch.relu(h)
        state = (h, torch.zeros_like(h)) if isinstance(self.rnn, nn.LSTM) else h
        return self.head(self.rnn(self.stem(x), state)[0][:, -1])


def inputs(batch: int = BATCH) -> Tensor:
    return torch.randn(batch, TIME, INPUT, generator=torch.Generator().manual_seed(1))


def state_for(layer: nn.RNNBase) -> Any:
    generator = torch.Generator().manual_seed(2)
    h, c = (torch.rand(1, BATCH, HIDDEN, generator=generator) - 0.5 for _ in range(2))
    return (h, c) if isinstance(layer, nn.LSTM) else h


def tensors(result: Any) -> list[Tensor]:
    output, state = result
    return [output, *(state if isinstance(state, tuple) else (state,))]


def trained(model: nn.Module, *args: Tensor, cfg: str | None = None, steps: int = 3) -> nn.Module:
    prepared = prepare_qat_amct(model, cfg)
    optimizer = torch.optim.SGD(prepared.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        prepared(*args).square().mean().backward()
        optimizer.step()
    return prepared


def weight_cfg(algo: str, *, channel_wise: bool = True, dst_type: str = "INT8") -> str:
    return (
        "quant_skip_types: 'Linear' retrain_weight_quant_config "
        f"{{ {algo} {{ channel_wise: {channel_wise} dst_type: {dst_type} }} }}"
    )
