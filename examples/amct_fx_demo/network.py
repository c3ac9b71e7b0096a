"""The network of the demo: a small residual CNN for 8x8 images."""

from __future__ import annotations

from collections import OrderedDict

from torch import Tensor, nn

__all__ = ["DigitsNet", "ResidualBlock"]


def _conv_bn_relu(
    in_channels: int, out_channels: int, kernel_size: int, *, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    conv = nn.Conv2d(
        in_channels,
        out_channels,
        kernel_size,
        stride=stride,
        padding=kernel_size // 2,
        groups=groups,
        bias=False,
    )
    layers = OrderedDict(conv=conv, bn=nn.BatchNorm2d(out_channels), relu=nn.ReLU())
    return nn.Sequential(layers)


class ResidualBlock(nn.Module):
    """Two 3x3 convolutions, with the input added before the last ReLU.

    Shape:
        ``[N, channels, H, W]`` in and out.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return ``relu(x + body(x))``."""
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        result: Tensor = self.relu(x + y)
        return result


class DigitsNet(nn.Module):
    """Plain and depthwise convolutions, a residual block and two linear layers.

    Some 373 000 parameters, nearly all of them in layers that the demo quantizes. Nothing here
    knows of quantization.

    Shape:
        ``[N, 1, 8, 8]`` images in, ``[N, num_classes]`` logits out.
    """

    def __init__(self, num_classes: int = 10, width: int = 96) -> None:
        super().__init__()
        self.stem = _conv_bn_relu(1, 32, 3)
        self.depthwise = _conv_bn_relu(32, 32, 3, groups=32)
        self.down1 = _conv_bn_relu(32, width, 3, stride=2)
        self.residual = ResidualBlock(width)
        self.down2 = _conv_bn_relu(width, 128, 3, stride=2)
        self.flatten = nn.Flatten()
        self.hidden = nn.Linear(128 * 2 * 2, 128)
        self.relu = nn.ReLU()
        self.dropout = nn.Dropout(0.2)
        self.classifier = nn.Linear(128, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits of the images ``x``."""
        x = self.down1(self.depthwise(self.stem(x)))
        x = self.flatten(self.down2(self.residual(x)))
        x = self.dropout(self.relu(self.hidden(x)))
        logits: Tensor = self.classifier(x)
        return logits
