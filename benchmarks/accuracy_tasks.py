"""What benchmarks/accuracy.py trains: networks, data, budgets."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import datasets
import efficientnet_lite
import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Task:
    """One network on one data set.

    Args:
        name: Row of the table.
        make: Makes the float network, trained if ``float_epochs`` is 0.
        data: Inputs and targets: classes, or the logits of the float network.
        epochs: Of the training with quantization; every method has the same.
        lr: Of AdamW at the start, going down to 0 by a cosine.
        float_epochs: Of the float training, with ten times the learning rate.
        batch: Samples in a batch.
        calibration: Samples that find the first ranges.
        freeze_bn: Keep the statistics of batch norms, for small sets.
    """

    name: str
    make: Callable[[], nn.Module]
    data: datasets.Dataset
    epochs: int = 5
    lr: float = 3e-4
    float_epochs: int = 20
    batch: int = 64
    calibration: int = 64
    freeze_bn: bool = False

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the cross entropy; for logits as targets, that of their softmax."""
        if target.is_floating_point():
            return F.cross_entropy(output, target.softmax(-1))
        return F.cross_entropy(output.flatten(0, -2), target.flatten())

    def score(self, model: nn.Module) -> float:
        """Return the share of test samples with the right class, or with that of the float net."""
        model.eval()
        hits = []
        with torch.no_grad():
            for start in range(0, len(self.data.test_inputs), self.batch):
                part = slice(start, start + self.batch)
                target = self.data.test_targets[part]
                if target.is_floating_point():
                    target = target.argmax(-1)
                hits.append((model(self.data.test_inputs[part]).argmax(-1) == target).flatten())
        return float(torch.cat(hits).double().mean())


class Residual(nn.Module):
    """Two convolutions around which the input passes."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x``."""
        return self.relu(x + self.body(x))


def digits_cnn() -> nn.Module:
    """Return a residual network for images ``[N, 1, 8, 8]``."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        Residual(16),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        Residual(32),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


def depthwise(channels: int, out: int, stride: int) -> list[nn.Module]:
    """Return a depthwise and a pointwise convolution, each with batch norm and ReLU6."""
    return [
        nn.Conv2d(channels, channels, 3, stride, 1, groups=channels, bias=False),
        nn.BatchNorm2d(channels),
        nn.ReLU6(),
        nn.Conv2d(channels, out, 1, bias=False),
        nn.BatchNorm2d(out),
        nn.ReLU6(),
    ]


def depthwise_net() -> nn.Module:
    """Return a network of depthwise convolutions for images ``[N, 1, 8, 8]``."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU6(),
        *depthwise(16, 32, 1),
        *depthwise(32, 48, 2),
        *depthwise(48, 64, 1),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(64, 10),
    )


def signal_cnn() -> nn.Module:
    """Return a network for signals ``[N, 1, 40]``."""
    return nn.Sequential(
        nn.Conv1d(1, 24, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv1d(24, 24, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv1d(24, 24, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(120, 10),
    )


class EncoderBlock(nn.Module):
    """Causal self-attention and a feed-forward part, norms in front."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)
        self.value, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.gelu = nn.GELU()

    def split(self, x: Tensor) -> Tensor:
        """Return the heads: from ``[N, T, width]`` to ``[N, heads, T, width / heads]``."""
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Return a tensor of the shape of ``x``, ``[N, T, width]``."""
        y = self.norm1(x)
        q, k, v = self.split(self.query(y)), self.split(self.key(y)), self.split(self.value(y))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(self.gelu(self.up(self.norm2(x))))


class CharacterModel(nn.Module):
    """Predicts the next character; inputs ``[N, T]`` of codes, T up to 32."""

    def __init__(self, alphabet: int, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(alphabet, width)
        self.position = nn.Parameter(torch.randn(32, width) * 0.02)
        self.blocks = nn.Sequential(EncoderBlock(width, 4), EncoderBlock(width, 4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, alphabet)

    def forward(self, codes: Tensor) -> Tensor:
        """Return logits ``[N, T, alphabet]``."""
        return self.head(self.norm(self.blocks(self.embedding(codes) + self.position)))


def photograph_task() -> Task:
    """Return EfficientNet-Lite0, to agree with itself in float on crops of photographs."""
    names = (*datasets.PHOTOGRAPHS, *datasets.MORE_PHOTOGRAPHS)
    train, test = datasets.photographs(size=96, crops=12, test_crops=48, names=names)
    # Crops of one photograph stand together, and a batch should hold several.
    train = train[torch.randperm(len(train), generator=torch.Generator().manual_seed(0))]
    model = efficientnet_lite.pretrained()
    with torch.no_grad():
        train_logits, test_logits = model(train), model(test)
    data = datasets.Dataset(train, train_logits, test, test_logits)
    return Task(
        "EfficientNet-Lite0, photographs",
        efficientnet_lite.pretrained,
        data,
        epochs=1,
        lr=3e-5,
        float_epochs=0,
        batch=8,
        calibration=32,
        freeze_bn=True,
    )


def characters_task() -> Task:
    """Return the transformer on generated prose."""
    data, alphabet = datasets.characters()
    make = functools.partial(CharacterModel, alphabet)
    return Task("transformer, characters", make, data, epochs=2, float_epochs=6)


#: Short name: makes the task.
TASKS: dict[str, Callable[[], Task]] = {
    "digits": lambda: Task("residual CNN, digits", digits_cnn, datasets.digits()),
    "depthwise": lambda: Task("depthwise CNN, digits", depthwise_net, datasets.digits()),
    "mnist1d": lambda: Task("Conv1d CNN, mnist1d", signal_cnn, datasets.mnist1d()),
    "characters": characters_task,
    "photographs": photograph_task,
}
