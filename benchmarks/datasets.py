"""What the accuracy benchmarks train on: bundled with packages or generated, never downloaded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True)
class Dataset:
    """Inputs and targets to train and to test with; targets are classes."""

    train_inputs: Tensor
    train_targets: Tensor
    test_inputs: Tensor
    test_targets: Tensor


def digits() -> Dataset:
    """Return the 1,797 images ``[N, 1, 8, 8]`` of scikit-learn; every third is for the test."""
    from sklearn.datasets import load_digits

    pixels, classes = load_digits(return_X_y=True)
    images = torch.from_numpy(pixels / 16).float().view(-1, 1, 8, 8)
    labels = torch.from_numpy(classes)
    test = torch.arange(len(labels)) % 3 == 0
    return Dataset(images[~test], labels[~test], images[test], labels[test])


def mnist1d() -> Dataset:
    """Return the 5,000 signals ``[N, 1, 40]`` that mnist1d generates; a fifth is for the test."""
    from mnist1d.data import get_dataset_args, make_dataset

    data = make_dataset(get_dataset_args())
    parts = [torch.from_numpy(np.asarray(data[key])) for key in ("x", "y", "x_test", "y_test")]
    x, y, x_test, y_test = parts
    return Dataset(x.float()[:, None], y.long(), x_test.float()[:, None], y_test.long())


#: A grammar of small stories; each word list is a choice.
SUBJECTS = ("the old miller", "a grey heron", "my sister", "the ferryman", "one of the boys")
VERBS = ("carried", "painted", "forgot", "found", "sold", "repaired")
OBJECTS = ("a wooden boat", "the bell", "three lanterns", "her letters", "the broken clock")
PLACES = ("by the river", "under the bridge", "at the market", "behind the mill", "in the snow")
ENDINGS = ("before dawn", "and laughed", "without a word", "twice that winter", "for the last time")


def story(sentences: int, seed: int) -> str:
    """Return generated prose; the same for the same seed."""
    draw = random.Random(seed)
    parts = (SUBJECTS, VERBS, OBJECTS, PLACES, ENDINGS)
    return " ".join(
        " ".join(draw.choice(words) for words in parts).capitalize() + "." for _ in range(sentences)
    )


def characters(length: int = 32) -> tuple[Dataset, int]:
    """Return windows of a generated story to predict the next character of, and the alphabet size.

    Args:
        length: Characters in a window; inputs and targets are ``[N, length]``.
    """
    text = story(2500, seed=1)
    alphabet = sorted(set(text))
    codes = torch.tensor([alphabet.index(character) for character in text])
    windows = codes.unfold(0, length + 1, length // 2)
    cut = len(windows) * 4 // 5
    train, test = windows[:cut], windows[cut:]
    parts = train[:, :-1], train[:, 1:], test[:, :-1], test[:, 1:]
    return Dataset(*(part.contiguous() for part in parts)), len(alphabet)


#: Files in the wheel of scikit-image, so nothing is downloaded.
PHOTOGRAPHS = (
    "astronaut.png",
    "chelsea.png",
    "coffee.png",
    "motorcycle_left.png",
    "retina.jpg",
    "rocket.jpg",
    "ihc.png",
)
#: More of them, most without colours.
MORE_PHOTOGRAPHS = (
    "hubble_deep_field.jpg",
    "brick.png",
    "camera.png",
    "grass.png",
    "gravel.png",
    "coins.png",
    "moon.png",
    "clock_motion.png",
)


def photographs(
    size: int, crops: int, test_crops: int, names: Sequence[str] = PHOTOGRAPHS
) -> tuple[Tensor, Tensor]:
    """Return crops ``[N, 3, size, size]`` of bundled photographs: to train with, and to test with.

    The test crops are of other photographs than those to train with. Values from -1 to 1.

    Args:
        size: Height and width of a crop.
        crops: Random crops of each photograph to train with.
        test_crops: Random crops of each photograph to test with.
        names: Files of scikit-image to take beside the two photographs of scikit-learn.
    """
    train, test = [], []
    generator = torch.Generator().manual_seed(0)
    for index, image in enumerate(_bundled_images(names)):
        part, count = (test, test_crops) if index % 3 == 2 else (train, crops)
        part += [_crop(image, size, generator) for _ in range(count)]
    return torch.stack(train), torch.stack(test)


def _bundled_images(names: Sequence[str]) -> list[Tensor]:
    import skimage
    from skimage.io import imread
    from sklearn.datasets import load_sample_images

    folder = Path(skimage.__file__).parent / "data"
    images = [np.asarray(image) for image in load_sample_images().images]
    images += [imread(folder / name) for name in names]
    coloured = (image if image.ndim == 3 else np.stack([image] * 3, -1) for image in images)
    return [
        torch.from_numpy(image[..., :3].copy()).permute(2, 0, 1) / 127.5 - 1 for image in coloured
    ]


def _crop(image: Tensor, size: int, generator: torch.Generator) -> Tensor:
    """Return a random square part of the image, between half and all of its height, resized."""
    height, width = image.shape[1:]
    side = int(min(height, width) * (0.5 + 0.5 * torch.rand((), generator=generator)))
    top, left = (
        int(torch.randint(extent - side + 1, (), generator=generator)) for extent in (height, width)
    )
    part = image[None, :, top : top + side, left : left + side]
    result = F.interpolate(part, (size, size), mode="bilinear", antialias=True)[0]
    return result.flip(-1) if torch.rand((), generator=generator) < 0.5 else result
