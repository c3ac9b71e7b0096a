"""A detector whose code cannot be traced as a whole: it stays Python where it has to.

    python examples/detection_islands.py --epochs 6

The detector returns losses or lists of boxes, as those of torchvision do. Its ``forward`` branches
on the values of tensors, so it becomes an island; the backbone inside is traced, and every layer is
trained with INT8.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
from example_tools import print_table
from torch import Tensor, nn
from torch.nn import functional as F

import amct_fx

SIZE, GRID = 32, 8
CELL = SIZE // GRID


def block(channels: int, out_channels: int) -> nn.Sequential:
    """Return a convolution that halves the image, with batch norm and ReLU."""
    return nn.Sequential(
        nn.Conv2d(channels, out_channels, 3, stride=2, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    )


class Detector(nn.Module):
    """Finds the one bright rectangle in images ``[N, 1, 32, 32]``.

    In training it returns a dict of losses; in eval a list of boxes, one ``[K, 4]`` tensor of
    ``x0, y0, x1, y1`` for each image, empty where nothing is found.
    """

    anchors: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(block(1, 16), block(16, 32), nn.Conv2d(32, 32, 3, padding=1))
        self.relu = nn.ReLU()
        self.objectness = nn.Conv2d(32, 1, 1)
        self.sides = nn.Conv2d(32, 4, 1)
        centres = torch.cartesian_prod(*[(torch.arange(GRID) + 0.5) * CELL] * 2).flip(1)
        self.register_buffer("anchors", centres.repeat(1, 2), persistent=False)

    def forward(
        self, images: Tensor, boxes: Tensor | None = None
    ) -> dict[str, Tensor] | list[Tensor]:
        """Return losses if ``boxes`` ``[N, 4]`` are given, else the boxes found."""
        features = self.relu(self.backbone(images))
        scores = self.objectness(features).flatten(1)
        sides = self.anchors + CELL * self.sides(features).flatten(2).transpose(1, 2)
        if boxes is not None:
            return self.losses(scores, sides, boxes)
        found = []
        for score, side in zip(scores, sides, strict=True):
            if float(score.max()) > 0:  # a branch on values: no tracer follows it
                found.append(side[score.argmax()][None])
            else:
                found.append(side.new_zeros(0, 4))
        return found

    def losses(self, scores: Tensor, sides: Tensor, boxes: Tensor) -> dict[str, Tensor]:
        """Return the losses of the cell at the centre of each box."""
        centre = (boxes[:, :2] + boxes[:, 2:]) / 2
        column, row = (centre * GRID / SIZE).long().clamp(0, GRID - 1).unbind(1)
        cell = row * GRID + column
        wanted = F.one_hot(cell, GRID * GRID).to(scores.dtype)
        picked = sides[torch.arange(len(boxes)), cell]
        return {
            "objectness": F.binary_cross_entropy_with_logits(scores, wanted),
            "box": F.smooth_l1_loss(picked / CELL, boxes / CELL),
        }


def scenes(count: int) -> tuple[Tensor, Tensor]:
    """Return noisy images with one rectangle each, and its box."""
    corner = torch.randint(2, SIZE - 14, (count, 2))
    extent = torch.randint(6, 12, (count, 2))
    boxes = torch.cat([corner, corner + extent], dim=1)
    axis = torch.arange(SIZE)
    inside = [(axis >= boxes[:, side, None]) & (axis < boxes[:, side + 2, None]) for side in (0, 1)]
    images = (inside[1][:, :, None] & inside[0][:, None, :]).float()[:, None]
    return images + 0.2 * torch.randn(count, 1, SIZE, SIZE), boxes.float()


def train(model: nn.Module, images: Tensor, boxes: Tensor, *, epochs: int, lr: float) -> None:
    """Train in place on the sum of the losses."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    model.train()
    for _ in range(epochs):
        for part in torch.randperm(len(images)).split(32):
            optimizer.zero_grad()
            losses: dict[str, Tensor] = model(images[part], boxes[part])
            torch.stack(list(losses.values())).sum().backward()
            optimizer.step()


@torch.no_grad()
def mean_overlap(model: nn.Module, images: Tensor, boxes: Tensor) -> float:
    """Return the mean of intersection over union; an image without a box counts as 0."""
    overlaps = []
    for found, box in zip(model.eval()(images), boxes, strict=True):
        if len(found) == 0:
            overlaps.append(0.0)
            continue
        low, high = torch.maximum(found[0, :2], box[:2]), torch.minimum(found[0, 2:], box[2:])
        common = (high - low).clamp(min=0).prod()
        areas = [(b[2:] - b[:2]).clamp(min=0).prod() for b in (found[0], box)]
        overlaps.append(float(common / (areas[0] + areas[1] - common)))
    return sum(overlaps) / len(overlaps)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train in float, train on with quantization, convert."""
    parser = argparse.ArgumentParser(description="Quantize a detector that cannot be traced.")
    parser.add_argument("--epochs", type=int, default=12)
    options = parser.parse_args(arguments)

    torch.manual_seed(0)
    train_set, test_set = scenes(1200), scenes(300)
    model = Detector()
    train(model, *train_set, epochs=options.epochs, lr=4e-3)
    prepared = amct_fx.prepare_qat_amct(model)
    train(prepared, *train_set, epochs=max(1, options.epochs // 3), lr=4e-4)
    converted = amct_fx.convert_amct(prepared)

    print(amct_fx.summarize(prepared))
    stages = {"float": model, "prepared": prepared, "converted": converted}
    rows = [{"model": name, "overlap": mean_overlap(m, *test_set)} for name, m in stages.items()]
    print_table("Mean overlap of the box found with the true one", rows)


if __name__ == "__main__":
    main()
