"""Networks and helpers of the distillation tests."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import amct_fx


class Chain(nn.Module):
    """conv-bn-relu twice, pooled, and a Linear."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(3, width, 3, padding=1)
        self.b1 = nn.BatchNorm2d(width)
        self.r1 = nn.ReLU(inplace=True)
        self.c2 = nn.Conv2d(width, width, 3, padding=1)
        self.b2 = nn.BatchNorm2d(width)
        self.r2 = nn.ReLU6(inplace=True)
        self.fc = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.r1(self.b1(self.c1(x)))
        x = self.r2(self.b2(self.c2(x)))
        return self.fc(x.mean((2, 3)))


class Residual(nn.Module):
    """Functions, a Dropout, a skip from outside of the obvious group, and a shared input."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.c1 = nn.Conv2d(4, 4, 3, padding=1)
        self.drop = nn.Dropout(0.5)
        self.c2 = nn.Conv2d(4, 4, 3, padding=1)
        self.b2 = nn.BatchNorm2d(4)
        self.side = nn.Conv2d(4, 4, 1)
        self.head = nn.Linear(4 * 64, 6)
        self.last = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        y = F.relu(self.c1(x))
        y = self.b2(self.c2(self.drop(y)))
        x = torch.relu_(y + self.side(x))
        return self.last(F.relu(self.head(torch.flatten(x, 1))))


class BasicBlock(nn.Module):
    """As in torchvision: one ReLU, called inside and behind the addition."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inputs, outputs, 1), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.conv2, self.bn2 = nn.Conv2d(outputs, outputs, 1), nn.BatchNorm2d(outputs)
        self.downsample = nn.Conv2d(inputs, outputs, 1) if inputs != outputs else None

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class Pairs(nn.Module):
    """A module that returns a tuple, one that takes two inputs, and a function of both."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 8)
        self.pool = nn.MaxPool1d(2, return_indices=True)
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)
        self.join = nn.Bilinear(4, 4, 4)
        self.b = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.pool(self.a(x))
        z, _ = self.attend(y, y, y)
        return self.b(self.join(y, z))


def trained_norms(model: nn.Module) -> nn.Module:
    """Give batch norms statistics and affine parameters that do something; return in eval mode."""
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            nn.init.uniform_(part.weight, 0.5, 1.5)
            nn.init.uniform_(part.bias, -0.5, 0.5)
            part.running_mean.uniform_(-0.5, 0.5)
            part.running_var.uniform_(0.5, 1.5)
    return model.eval()


def images(count: int = 4, batch: int = 4, size: int = 8) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(batch, 3, size, size, generator=generator) for _ in range(count)]


def calibrated(teacher: nn.Module, cfg: object, batches: list[Tensor]) -> nn.Module:
    """Return a student whose ranges were found on the first batches, and nothing trained."""
    student = amct_fx.prepare_distill_amct(teacher, cfg).eval()  # type: ignore[arg-type]
    with torch.no_grad():
        for batch in batches:
            student(batch)
    return student


def mse(student: nn.Module, teacher: nn.Module, batches: list[Tensor]) -> float:
    with torch.no_grad():
        return float(
            torch.stack([(student(x) - teacher(x)).square().mean() for x in batches]).mean()
        )


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {key: value.clone() for key, value in model.state_dict().items()}


def same_state(model: nn.Module, state: dict[str, Tensor]) -> bool:
    now = model.state_dict()
    return now.keys() == state.keys() and all(torch.equal(now[key], state[key]) for key in state)
