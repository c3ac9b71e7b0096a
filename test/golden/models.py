"""The networks of the recorded training runs. Attribute names are the keys of their state dicts."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TinyCNN(nn.Module):
    """Conv-bn-relu, strided conv-relu, 1x1 conv-bn-relu, mean over H and W, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.b1 = nn.BatchNorm2d(8)
        self.r1 = nn.ReLU()
        self.c2 = nn.Conv2d(8, 16, 3, stride=2, padding=1)
        self.r2 = nn.ReLU()
        self.c3 = nn.Conv2d(16, 16, 1)
        self.b3 = nn.BatchNorm2d(16)
        self.r3 = nn.ReLU()
        self.fc = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores of images ``[N, 3, H, W]``."""
        x = self.r1(self.b1(self.c1(x)))
        x = self.r2(self.c2(x))
        x = self.r3(self.b3(self.c3(x)))
        return self.fc(x.mean((2, 3)))


class ResidualAdd(nn.Module):
    """Stem, one residual block, 1x1 conv, pooling, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, padding=1, bias=False)
        self.bs = nn.BatchNorm2d(32)
        self.c1 = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.b1 = nn.BatchNorm2d(32)
        self.c2 = nn.Conv2d(32, 32, 3, padding=1, bias=False)
        self.b2 = nn.BatchNorm2d(32)
        self.c3 = nn.Conv2d(32, 24, 1)
        self.relu = nn.ReLU()
        self.r1 = nn.ReLU()
        self.r2 = nn.ReLU()
        self.r3 = nn.ReLU()
        self.gap = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores of images ``[N, 3, H, W]``."""
        s = self.relu(self.bs(self.stem(x)))
        y = self.b2(self.c2(self.r1(self.b1(self.c1(s)))))
        y = self.r2(y + s)
        return self.fc(torch.flatten(self.gap(self.r3(self.c3(y))), 1))


def _conv_bn(inputs: int, outputs: int, kernel: int, stride: int, groups: int) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(outputs)]


class DepthwiseNet(nn.Module):
    """Depthwise-separable convolutions with ReLU6, pooling, linear."""

    def __init__(self) -> None:
        super().__init__()
        self.f = nn.Sequential(
            nn.Sequential(*_conv_bn(3, 32, 3, 1, 1), nn.ReLU6()),
            nn.Sequential(*_conv_bn(32, 32, 3, 1, 32), nn.ReLU6()),
            nn.Sequential(*_conv_bn(32, 48, 1, 1, 1), nn.ReLU6()),
            nn.Sequential(*_conv_bn(48, 48, 3, 2, 48), nn.ReLU6()),
            nn.Sequential(*_conv_bn(48, 16, 1, 1, 1)),
        )
        self.gap = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(16, 6)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores of images ``[N, 3, H, W]``."""
        return self.fc(torch.flatten(self.gap(self.f(x)), 1))


class MLP(nn.Module):
    """Three linear layers with ReLU, the last without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.l1 = nn.Linear(20, 64)
        self.r1 = nn.ReLU()
        self.l2 = nn.Linear(64, 40)
        self.r2 = nn.ReLU()
        self.l3 = nn.Linear(40, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Return class scores of vectors ``[N, 20]``."""
        return self.l3(self.r2(self.l2(self.r1(self.l1(x)))))


NETWORKS: dict[str, type[nn.Module]] = {
    cls.__name__: cls for cls in (TinyCNN, ResidualAdd, DepthwiseNet, MLP)
}
