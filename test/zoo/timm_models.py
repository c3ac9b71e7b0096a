"""More than sixty families of timm, one small model of each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from .entry import Entry, image

if TYPE_CHECKING:
    from torch import nn

__all__ = ["timm_entries"]

# Convolutional networks, which take any image.
_ANY_SIZE = """
cs3darknet_s cspnext_tiny convmixer_768_32 davit_tiny densenet121 dla46x_c dpn48b
edgenext_xx_small efficientvit_b0 ese_vovnet19b_slim_dw fasternet_t0 fastvit_t8 focalnet_tiny_srf
ghostnet_050 hgnetv2_b0 hrnet_w18_small iformer_t inception_next_atto lcnetv2_small
legacy_seresnet18 mobilenetv3_small_050 nextvit_small poolformer_s12 pvt_v2_b0 rdnet_tiny
regnetx_002 repghostnet_050 res2next50 resnest14d resnet10t resnetv2_18 rexnet_100 selecsls42
shvit_s1 skresnet18 starnet_s050 test_convnext test_mambaout test_nfnet tiny_vit_5m_224 tinynet_e
tresnet_m xception41 crossvit_tiny_240 cpubone_nano lowformer_b0 efficientvim_m1
"""
# Networks that are built for one size.
_OF_ONE_SIZE = """
beit_base_patch16_224 botnet26t_256 cait_xxs24_224 coat_tiny convit_tiny deit_tiny_patch16_224
efficientformerv2_s0 efficientvit_m0 gcvit_xxtiny gernet_s gmlp_ti16_224 hiera_tiny_224 levit_128s
mobilevit_xxs mvitv2_tiny nest_tiny pit_ti_224 repvit_m1 sequencer2d_s swiftformer_xs
swin_tiny_patch4_window7_224 swinv2_tiny_window8_256 test_coatnet test_vit test_vit_relpos
tnt_s_patch16_224 twins_pcpvt_small visformer_tiny vit_tiny_patch16_dinov3_qkvb volo_d1_224
xcit_nano_12_p16_224
"""
_DEFAULT_SIZE = 32
_SIZES = {"inception_v4": 96}
_ARGUMENTS: dict[str, dict[str, Any]] = {"beit_base_patch16_224": {"depth": 2}}


def timm_entries() -> list[Entry]:
    """Return the entries by name."""
    return [_entry(name) for name in sorted([*_ANY_SIZE.split(), *_OF_ONE_SIZE.split(), *_SIZES])]


def _entry(name: str) -> Entry:
    size = _SIZES.get(name, _DEFAULT_SIZE)
    build = partial(_build, name, size)
    return Entry("timm", "timm", name, build, image(size), f"2x3x{size}x{size}")


def _build(name: str, size: int) -> nn.Module:
    import timm

    arguments = dict(_ARGUMENTS.get(name, {}))
    if name in _OF_ONE_SIZE.split():
        arguments["img_size"] = size
    return timm.create_model(name, pretrained=False, num_classes=10, **arguments)
