"""Small networks built as the families of torchvision are."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def unit(
    inputs: int, outputs: int, kernel: int | tuple[int, int] = 3, **settings: int
) -> nn.Module:
    """Convolution, batch norm, ReLU."""
    sizes = (kernel, kernel) if isinstance(kernel, int) else kernel
    padding = tuple(size // 2 for size in sizes)
    layer = nn.Conv2d(inputs, outputs, sizes, padding=padding, bias=False, **settings)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv1, self.conv2 = (
            unit(inputs, width, 1),
            unit(width, width, stride=stride, groups=groups),
        )
        self.conv3, self.bn3 = nn.Conv2d(width, 32, 1, bias=False), nn.BatchNorm2d(32)
        self.downsample = None
        if stride != 1 or inputs != 32:
            layer = nn.Conv2d(inputs, 32, 1, stride=stride, bias=False)
            self.downsample = nn.Sequential(layer, nn.BatchNorm2d(32))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        y = self.bn3(self.conv3(self.conv2(self.conv1(x))))
        y += identity
        return F.relu(y)


def resnet(groups: int = 1) -> nn.Module:
    body = [unit(3, 16), nn.MaxPool2d(3, 2, 1), Bottleneck(16, 16, groups=groups)]
    body += [Bottleneck(32, 16, groups=groups), Bottleneck(32, 24, 2, groups)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 5))


class DenseLayer(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.norm1, self.conv1 = nn.BatchNorm2d(inputs), nn.Conv2d(inputs, 16, 1, bias=False)
        self.norm2, self.conv2 = nn.BatchNorm2d(16), nn.Conv2d(16, 8, 3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x = self.conv1(F.relu(self.norm1(torch.cat(features, 1))))
        return self.conv2(F.relu(self.norm2(x)))


class DenseNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3, padding=1)
        self.first = nn.ModuleList(DenseLayer(16 + 8 * i) for i in range(3))
        self.transition = nn.Sequential(nn.BatchNorm2d(40), nn.ReLU(), nn.Conv2d(40, 20, 1))
        self.second = nn.ModuleList(DenseLayer(20 + 8 * i) for i in range(2))
        self.norm, self.head = nn.BatchNorm2d(36), nn.Linear(36, 5)

    def forward(self, x: Tensor) -> Tensor:
        features = [self.stem(x)]
        for layer in self.first:
            features.append(layer(features))
        features = [F.avg_pool2d(self.transition(torch.cat(features, 1)), 2)]
        for layer in self.second:
            features.append(layer(features))
        x = F.relu(self.norm(torch.cat(features, 1)), inplace=True)
        return self.head(torch.flatten(F.adaptive_avg_pool2d(x, (1, 1)), 1))


class SqueezeExcite(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2 = nn.Conv2d(channels, 8, 1), nn.Conv2d(8, channels, 1)
        self.gate = nn.Hardsigmoid()

    def forward(self, x: Tensor) -> Tensor:
        return self.gate(self.fc2(F.relu(self.fc1(self.avgpool(x))))) * x


class InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        width = inputs * 3
        depthwise = nn.Conv2d(width, width, 3, stride, 1, groups=width, bias=False)
        self.residual = stride == 1 and inputs == outputs
        self.conv = nn.Sequential(
            *(nn.Conv2d(inputs, width, 1, bias=False), nn.BatchNorm2d(width), nn.Hardswish()),
            *(depthwise, nn.BatchNorm2d(width), nn.Hardswish(), SqueezeExcite(width)),
            *(nn.Conv2d(width, outputs, 1, bias=False), nn.BatchNorm2d(outputs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.conv(x) if self.residual else self.conv(x)


def mobilenet() -> nn.Module:
    body = [unit(3, 8), InvertedResidual(8, 12, 2), InvertedResidual(12, 12)]
    body += [InvertedResidual(12, 16, 2), InvertedResidual(16, 16), unit(16, 32, 1)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 20), nn.Hardswish()]
    return nn.Sequential(*body, *head, nn.Dropout(0.0), nn.Linear(20, 5))


class ShuffleUnit(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        half = outputs // 2
        self.stride = stride
        self.branch1 = nn.Sequential()
        if stride > 1:
            self.branch1 = nn.Sequential(self.depthwise(inputs, stride), unit(inputs, half, 1))
        start = inputs if stride > 1 else half
        self.branch2 = nn.Sequential(
            unit(start, half, 1), self.depthwise(half, stride), unit(half, half, 1)
        )

    @staticmethod
    def depthwise(channels: int, stride: int) -> nn.Module:
        layer = nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False)
        return nn.Sequential(layer, nn.BatchNorm2d(channels))

    def forward(self, x: Tensor) -> Tensor:
        if self.stride == 1:
            x1, x2 = x.chunk(2, dim=1)
            out = torch.cat((x1, self.branch2(x2)), dim=1)
        else:
            out = torch.cat((self.branch1(x), self.branch2(x)), dim=1)
        n, c, h, w = out.size()
        out = out.view(n, 2, c // 2, h, w)
        return torch.transpose(out, 1, 2).contiguous().view(n, c, h, w)


class ShuffleNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = unit(3, 12)
        self.stages = nn.Sequential(
            ShuffleUnit(12, 24, 2),
            ShuffleUnit(24, 24, 1),
            ShuffleUnit(24, 24, 1),
            ShuffleUnit(24, 32, 2),
        )
        self.last, self.fc = unit(32, 24, 1), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(self.last(self.stages(self.stem(x))).mean([2, 3]))


class Inception(nn.Module):
    def __init__(self, inputs: int) -> None:
        super().__init__()
        self.branch1 = unit(inputs, 8, 1)
        self.branch7 = nn.Sequential(unit(inputs, 12, 1), unit(12, 12, (1, 5)), unit(12, 8, (5, 1)))
        self.reduce = unit(inputs, 12, 1)
        self.wide, self.tall = unit(12, 8, (1, 3)), unit(12, 8, (3, 1))
        self.pooled = unit(inputs, 8, 1)

    def forward(self, x: Tensor) -> Tensor:
        middle = self.reduce(x)
        branches = [
            self.branch1(x),
            self.branch7(x),
            torch.cat([self.wide(middle), self.tall(middle)], 1),
        ]
        branches.append(self.pooled(F.avg_pool2d(x, 3, 1, 1)))
        return torch.cat(branches, 1)


def inception() -> nn.Module:
    body = [unit(3, 16), Inception(16), nn.MaxPool2d(2), Inception(40)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(40, 5))


class UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Sequential(unit(3, 8), unit(8, 8)), unit(8, 16)
        self.bottom = nn.Sequential(unit(16, 24), unit(24, 24))
        self.up2, self.up1 = nn.ConvTranspose2d(24, 16, 2, 2), nn.Conv2d(16, 8, 1)
        self.merge2, self.merge1 = unit(32, 16), unit(16, 8)
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        a = self.down1(x)
        b = self.down2(F.max_pool2d(a, 2))
        x = self.bottom(F.max_pool2d(b, 2))
        x = self.merge2(torch.cat([self.up2(x), b], 1))
        x = F.interpolate(self.up1(x), scale_factor=2, mode="bilinear", align_corners=False)
        return self.out(self.merge1(torch.cat([a, x], dim=1)))


class FireNet(nn.Module):
    """SqueezeNet's fire modules, with a convolution as the head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 16, 3)
        self.squeeze = nn.ModuleList([nn.Conv2d(16, 8, 1), nn.Conv2d(24, 8, 1)])
        self.expand1 = nn.ModuleList([nn.Conv2d(8, 12, 1) for _ in range(2)])
        self.expand3 = nn.ModuleList([nn.Conv2d(8, 12, 3, padding=1) for _ in range(2)])
        self.head = nn.Conv2d(24, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.stem(x))
        for squeeze, one, three in zip(self.squeeze, self.expand1, self.expand3, strict=True):
            x = F.relu(squeeze(x))
            x = torch.cat([F.relu(one(x)), F.relu(three(x))], 1)
        return F.adaptive_avg_pool2d(F.relu(self.head(x)), 1).flatten(1)


class FusedAttention(nn.Module):
    """Queries, keys and values out of one Linear, as vision transformers have it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        qkv = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        attention = (q * (c // self.heads) ** -0.5) @ k.transpose(-2, -1)
        return self.proj((attention.softmax(dim=-1) @ v).transpose(1, 2).reshape(b, n, c))


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 16, 4, 4)
        self.position = nn.Parameter(torch.zeros(1, 16, 16))
        self.norm1, self.attention = nn.LayerNorm(16), FusedAttention(16, 2)
        self.norm2, self.gamma = nn.LayerNorm(16), nn.Parameter(torch.full((16,), 0.5))
        self.mlp = nn.Sequential(nn.Linear(16, 40), nn.GELU(), nn.Dropout(0.0), nn.Linear(40, 16))
        self.head = nn.Linear(16, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        x = x + self.attention(self.norm1(x))
        x = x + self.gamma * self.mlp(self.norm2(x))
        return self.head(x.mean(1))


class ConvNextBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.dw = nn.Conv2d(width, width, 3, padding=1, groups=width)
        self.norm = nn.BatchNorm2d(width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width, 1, 1), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.dw(x)).permute(0, 2, 3, 1)
        y = self.narrow(F.gelu(self.wide(y))).permute(0, 3, 1, 2)
        return x + self.gamma * y


def convnext() -> nn.Module:
    body = [nn.Conv2d(3, 12, 2, 2), ConvNextBlock(12), ConvNextBlock(12), nn.Conv2d(12, 5, 1)]
    return nn.Sequential(*body)


FAMILIES = {
    "residual": resnet,
    "grouped residual": lambda: resnet(4),
    "dense": DenseNet,
    "inverted residual": mobilenet,
    "shuffle": ShuffleNet,
    "inception": inception,
    "U-shaped": UNet,
    "fire": FireNet,
    "vision transformer": VisionTransformer,
    "convnext": convnext,
}
