"""The networks that the benchmarks measure."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """A residual block: two 3x3 convolutions, and a 1x1 one where the shape changes."""

    def __init__(self, channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.relu_out = nn.ReLU()
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out_channels:
            convolution = nn.Conv2d(channels, out_channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor ``[N, out_channels, H/stride, W/stride]``."""
        y = self.relu(self.bn1(self.conv1(x)))
        return self.relu_out(self.bn2(self.conv2(y)) + self.shortcut(x))


class SmallResNet(nn.Module):
    """A ResNet for small images: 0.99 M parameters, 17 convolutions, one Linear.

    Args:
        width: Channels of the first stage; the others have twice and four times as many.
        blocks: Residual blocks of each stage.
        num_classes: Size of the output.
    """

    def __init__(
        self, width: int = 32, blocks: tuple[int, ...] = (2, 2, 3), num_classes: int = 10
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, 1, 1, bias=False)
        self.bn = nn.BatchNorm2d(width)
        self.relu = nn.ReLU()
        layers: list[nn.Module] = []
        channels = width
        for stage, count in enumerate(blocks):
            out_channels = width * 2**stage
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                layers.append(Block(channels, out_channels, stride))
                channels = out_channels
        self.layers = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[N, num_classes]`` of images ``[N, 3, H, W]``."""
        x = self.layers(self.relu(self.bn(self.conv(x))))
        return self.fc(self.flatten(self.pool(x)))


class Bottleneck(nn.Module):
    """The residual block of ResNet-50."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        out_channels = 4 * width
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, out_channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out_channels:
            convolution = nn.Conv2d(channels, out_channels, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(out_channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor ``[N, 4 * width, H/stride, W/stride]``."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        return self.relu(self.bn3(self.conv3(y)) + self.shortcut(x))


def resnet50(num_classes: int = 1000) -> nn.Sequential:
    """Build a network of the shape of ResNet-50, for images ``[N, 3, 224, 224]``."""
    layers: list[nn.Module] = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    for stage, count in enumerate((3, 4, 6, 3)):
        width = 64 * 2**stage
        for index in range(count):
            layers.append(Bottleneck(channels, width, 2 if stage > 0 and index == 0 else 1))
            channels = 4 * width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]
    return nn.Sequential(*layers, *head)


class Chain(nn.Module):
    """Many convolutions in a row, each with batch norm and ReLU.

    Args:
        depth: Number of convolutions.
        channels: Their channels.
        residual: Add the input of each to its output; else the gradients of hundreds overflow.
    """

    def __init__(self, depth: int, channels: int = 8, *, residual: bool = False) -> None:
        super().__init__()
        self.residual = residual
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(channels, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU()
            )
            for _ in range(depth - 1)
        )
        self.head = nn.Linear(channels, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[N, 10]`` of images ``[N, 3, H, W]``."""
        x = self.stem(x)
        for block in self.blocks:
            x = x + block(x) if self.residual else block(x)
        return self.head(x.mean((2, 3)))


class TrainingStep:
    """One step of SGD with momentum on one batch; call it to run the step.

    Args:
        model: A model for images.
        images: Batch ``[N, 3, H, W]``.
        autocast: Half precision to run the forward in, or ``None``.
    """

    def __init__(
        self, model: nn.Module, images: Tensor, autocast: torch.dtype | None = None
    ) -> None:
        self.model = model.train()
        self.images = images
        self.labels = torch.arange(len(images), device=images.device) % 10
        self.optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        self.autocast = autocast

    def loss(self) -> Tensor:
        """Run the forward and return the loss."""
        kind = self.images.device.type
        with torch.autocast(kind, self.autocast, enabled=self.autocast is not None):
            return F.cross_entropy(self.model(self.images), self.labels)

    def __call__(self) -> None:
        """Run forward, backward and optimizer."""
        self.optimizer.zero_grad(set_to_none=True)
        self.loss().backward()
        self.optimizer.step()
