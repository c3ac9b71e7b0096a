"""Networks with every kind of layer, converted, for the tests of the files."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amct_fx import convert_amct, prepare_qat_amct

INT4 = "retrain_weight_quant_config { arq_retrain { dst_type: INT4 } }"
INT16 = "retrain_data_quant_config { ulq_quantize { dst_type: INT16 } }"


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Sequence1d(nn.Module):
    """Conv1d, ConvTranspose1d with groups and output padding, dilation and stride."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Conv1d(4, 8, 3, stride=2, padding=1)
        self.wide = nn.Conv1d(8, 8, 3, padding=2, dilation=2, groups=2, bias=False)
        self.up = nn.ConvTranspose1d(8, 6, 3, stride=2, padding=1, output_padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.relu(self.wide(torch.relu(self.down(x)))))


class Images(nn.Module):
    """Conv2d with batch norm, a transposed convolution with groups, and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 8, (3, 2), padding=(1, 0), bias=False)
        self.norm = nn.BatchNorm2d(8)
        self.up = nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.grouped = nn.ConvTranspose2d(8, 4, 3, groups=2, bias=False)
        self.after = nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.grouped(torch.relu(self.up(torch.relu(self.norm(self.stem(x)))))))


class Volume(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv3d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm3d(4)
        self.last = nn.Conv3d(4, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.norm(self.conv(x))))


class Tokens(nn.Module):
    """Linear on two and on three dimensions, with and without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(8, 16)
        self.bare = nn.Linear(16, 8, bias=False)
        self.head = nn.Linear(8, 4)
        self.last = nn.Linear(4, 6, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.bare(torch.relu(self.wide(x)))
        return self.last(torch.relu(self.head(x.mean(1))))


class Recurrent(nn.Module):
    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 6, batch_first=True, bias=bias)
        self.gru = nn.GRU(6, 4, bias=bias)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, (h, c) = self.lstm(x)
        z, last = self.gru(y.transpose(0, 1))
        return z, last, h, c


CASES: dict[str, tuple[type[nn.Module], Tensor]] = {
    "conv1d": (Sequence1d, rand(3, 4, 12)),
    "conv2d": (Images, rand(2, 4, 6, 6)),
    "conv3d": (Volume, rand(2, 2, 4, 4, 4)),
    "linear": (Tokens, rand(3, 5, 8)),
}


def converted(model: nn.Module, x: Tensor, cfg: str | None = None) -> nn.Module:
    """Return the converted form of a model whose batch norms are not trivial."""
    torch.manual_seed(1)
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.BatchNorm3d)):
            nn.init.uniform_(module.weight, -1.5, 1.5)
            nn.init.uniform_(module.running_mean, -0.2, 0.2)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    prepared = prepare_qat_amct(model.eval(), cfg)
    prepared(x)
    return convert_amct(prepared)


def spread(x: Tensor) -> float:
    return float(x.detach().max() - x.detach().min())
