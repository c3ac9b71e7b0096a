"""Small networks that several test modules use."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from amct_fx.graph import fx_graph_of


def example(batch: int = 2, *, channels: int = 3, size: int = 8) -> Tensor:
    """Return a batch of images that is the same in every test."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(batch, channels, size, size, generator=generator)


class Net(nn.Module):
    """conv-bn-relu, two convolutions on the same tensor, add, pool, Linear."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(8)
        self.left = nn.Conv2d(8, 8, 1)
        self.right = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn(self.stem(x)))
        x = torch.relu(self.left(x) + self.right(x))
        return self.head(self.pool(x).flatten(1))

    def describe(self) -> str:
        return f"Net with {self.head.out_features} classes"


class Branching(nn.Module):
    """A part that decides by the batch size, so it cannot be traced."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1)
        self.tail = nn.Sequential(
            nn.Conv2d(channels, channels, 1), nn.BatchNorm2d(channels), nn.ReLU()
        )

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[0] > 2:
            return self.tail(self.conv(x))
        return self.conv(x)


class NetWithIsland(nn.Module):
    """A traceable network around a part that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3)
        self.middle = Branching(8)
        self.head = nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.middle(torch.relu(self.stem(x)))))


class Attend(nn.Module):
    """A torch.nn transformer encoder with a fused fast path in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(x).mean(1))


class Pyramid(nn.Module):
    """A head shared over two levels, and two layers that share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.down = nn.Conv2d(4, 4, 3, stride=2, padding=1)
        self.head = nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(4)
        self.first = nn.Conv2d(4, 4, 1)
        self.second = nn.Conv2d(4, 4, 1)
        self.second.weight = self.first.weight
        self.alias = self.stem

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        large = torch.relu(self.alias(x))
        small = torch.relu(self.down(large))
        a, b = self.norm(self.head(large)), self.norm(self.head(small))
        return self.first(a), self.second(b)


def quantizer_targets(model: nn.Module) -> list[str]:
    """Return the input quantizers in the order in which the graph calls them."""
    nodes = fx_graph_of(model).nodes
    return [str(n.target) for n in nodes if str(n.target).endswith("input_fake_quant")]
