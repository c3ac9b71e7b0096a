"""Networks of the usual shapes, for the benchmark of inference."""

from __future__ import annotations

import torch
from networks import Block
from torch import Tensor, nn


def resnet18(num_classes: int = 1000) -> nn.Sequential:
    """Build a network of the shape of ResNet-18, for images ``[N, 3, H, W]``."""
    stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU()]
    layers: list[nn.Module] = [*stem, nn.MaxPool2d(3, 2, 1)]
    channels = 64
    for stage in range(4):
        width = 64 * 2**stage
        for index in range(2):
            layers.append(Block(channels, width, 2 if stage > 0 and index == 0 else 1))
            channels = width
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, num_classes)]
    return nn.Sequential(*layers, *head)


class InvertedResidual(nn.Module):
    """A block of MobileNetV2: widen, depthwise, narrow; added to its input where shapes allow."""

    def __init__(self, channels: int, out_channels: int, stride: int, expand: int) -> None:
        super().__init__()
        hidden = channels * expand
        layers: list[nn.Module] = []
        if expand != 1:
            layers += _conv_bn_relu6(channels, hidden, 1)
        layers += _conv_bn_relu6(hidden, hidden, 3, stride, groups=hidden)
        layers += [nn.Conv2d(hidden, out_channels, 1, bias=False), nn.BatchNorm2d(out_channels)]
        self.layers = nn.Sequential(*layers)
        self.adds = stride == 1 and channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor ``[N, out_channels, H/stride, W/stride]``."""
        return x + self.layers(x) if self.adds else self.layers(x)


def mobilenet_v2(num_classes: int = 1000) -> nn.Sequential:
    """Build a network of the shape of MobileNetV2."""
    layers: list[nn.Module] = _conv_bn_relu6(3, 32, 3, 2)
    channels = 32
    stages = [
        (1, 16, 1, 1),
        (6, 24, 2, 2),
        (6, 32, 3, 2),
        (6, 64, 4, 2),
        (6, 96, 3, 1),
        (6, 160, 3, 2),
        (6, 320, 1, 1),
    ]
    for expand, width, count, stride in stages:
        for index in range(count):
            layers.append(InvertedResidual(channels, width, stride if index == 0 else 1, expand))
            channels = width
    layers += _conv_bn_relu6(channels, 1280, 1)
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, num_classes)]
    return nn.Sequential(*layers, *head)


def _conv_bn_relu6(
    channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    padding = kernel // 2
    conv = nn.Conv2d(channels, out_channels, kernel, stride, padding, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out_channels), nn.ReLU6()]


class EncoderLayer(nn.Module):
    """Self-attention and a feed-forward part, each behind a layer norm and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor like ``x``, ``[N, T, width]``."""
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = torch.softmax(q @ k.transpose(-2, -1) * q.shape[-1] ** -0.5, -1)
        x = x + self.out((scores @ v).transpose(1, 2).flatten(2))
        return x + self.down(torch.relu(self.up(self.norm2(x))))


def encoder(width: int = 384, heads: int = 6, depth: int = 6) -> nn.Sequential:
    """Build a transformer encoder for tokens ``[N, T, width]``."""
    return nn.Sequential(*(EncoderLayer(width, heads) for _ in range(depth)))
