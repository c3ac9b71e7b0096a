"""Every classifier, segmentation network and detection backbone of torchvision."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from .entry import Entry, image

if TYPE_CHECKING:
    from torch import nn

__all__ = ["torchvision_entries"]

_DEFAULT_SIZE = 64
_SIZES = {
    "inception_v3": 96,
    "maxvit_t": 224,
    "vit_h_14": 28,
    "densenet": 32,
    "efficientnet": 32,
    "regnet": 32,
    "resnet1": 32,
    "resnext1": 32,
    "swin_s": 32,
    "swin_b": 32,
    "swin_v2_s": 32,
    "swin_v2_b": 32,
    "convnext_": 32,
    "vgg": 32,
    "vit": 32,
    "wide_resnet101": 32,
}
_ARGUMENTS: dict[str, dict[str, Any]] = {
    # The second classifier of Inception needs images of 299 pixels.
    "inception_v3": {"aux_logits": False, "init_weights": False},
    "googlenet": {"init_weights": False, "aux_logits": True},
    "vit": {"image_size": 32},
    "vit_h_14": {"image_size": 28},
}


def torchvision_entries() -> list[Entry]:
    """Return the entries in the order of ``torchvision.models.list_models``."""
    from torchvision import models

    entries = [_classifier(name) for name in models.list_models(module=models)]
    entries += [
        _entry("torchvision segmentation", name, 64, _segmentation)
        for name in models.list_models(module=models.segmentation)
    ]
    for name in models.list_models(module=models.detection):
        size = 300 if name == "ssd300_vgg16" else 64
        entries.append(_entry("torchvision detection backbones", name, size, _backbone))
    return entries


def _entry(group: str, name: str, size: int, build: Any) -> Entry:
    shape = f"2x3x{size}x{size}"
    return Entry(group, "torchvision", name, partial(build, name), image(size), shape)


def _classifier(name: str) -> Entry:
    size = _of_longest_prefix(_SIZES, name, _DEFAULT_SIZE)
    return _entry("torchvision classification", name, size, _build_classifier)


def _build_classifier(name: str) -> nn.Module:
    from torchvision import models

    if name in _SHORTENED:
        return _SHORTENED[name]()
    arguments = _of_longest_prefix(_ARGUMENTS, name, {})
    return models.get_model(name, weights=None, num_classes=10, **arguments)


def _short_vit(patch: int, width: int) -> nn.Module:
    """Four of the 24 or 32 equal layers of a large vision transformer."""
    from torchvision.models import VisionTransformer

    size = 2 * patch if patch < 32 else patch
    return VisionTransformer(size, patch, 4, 16, width, 4 * width, num_classes=10)


def _short_regnet() -> nn.Module:
    """RegNetY-128GF with 9 of its 27 blocks."""
    from torchvision.models import RegNet
    from torchvision.models.regnet import BlockParams

    parameters = BlockParams.from_init_params(
        depth=9, w_0=456, w_a=160.83, w_m=2.52, group_width=264, se_ratio=0.25
    )
    return RegNet(parameters, num_classes=10)


_SHORTENED: dict[str, Callable[[], nn.Module]] = {
    # The only ones with more than 300 million weights; the layers left out are like those kept.
    "vit_l_16": partial(_short_vit, 16, 1024),
    "vit_l_32": partial(_short_vit, 32, 1024),
    "vit_h_14": partial(_short_vit, 14, 1280),
    "regnet_y_128gf": _short_regnet,
}


def _segmentation(name: str) -> nn.Module:
    from torchvision import models

    # The FCN and DeepLab builders take the second classifier, as in their training recipe.
    auxiliary = {} if name.startswith("lraspp") else {"aux_loss": True}
    return models.get_model(name, weights=None, weights_backbone=None, num_classes=5, **auxiliary)


def _backbone(name: str) -> nn.Module:
    from torchvision import models

    detector = models.get_model(name, weights=None, weights_backbone=None, num_classes=5)
    backbone: nn.Module = detector.backbone
    return backbone


def _of_longest_prefix(table: dict[str, Any], name: str, default: Any) -> Any:
    found = [prefix for prefix in table if name.startswith(prefix)]
    return table[max(found, key=len)] if found else default
