"""Facts of the networks behind the golden configurations."""

from __future__ import annotations

from amct_fx.config import LayerFacts
from test.config.helpers import conv, linear, model


def other(layer_type: str, name: str, channels: int, reason: str | None = None) -> LayerFacts:
    return LayerFacts(
        name, layer_type, in_channels=channels, packing_sizes=(channels,), reason=reason
    )


NETWORKS = {
    "PlainChain": model(
        conv("c1", 3), conv("c2", 32), conv("c3", 48), linear("fc", 20), r1="ReLU", mp="MaxPool2d"
    ),
    "ResidualAdd": model(
        conv("stem", 3), conv("c1", 32), conv("c2", 32), conv("c3", 32), linear("fc", 24)
    ),
    "DeconvNet": model(conv("c1", 3), other("ConvTranspose2d", "up", 32), conv("c2", 24)),
    "DepthwiseNet": model(
        conv("f.0.0", 3),
        conv("f.1.0", 32, groups=32),
        conv("f.2.0", 32),
        conv("f.3.0", 48, groups=48),
        conv("f.4.0", 48),
        linear("fc", 16),
    ),
    "MLP": model(linear("l1", 20), linear("l2", 64), linear("l3", 40)),
    "ReusedModule": model(
        conv("c1", 3), conv("twice", 8, reason="it is called twice"), conv("c2", 8)
    ),
    "Dims": model(
        other("Conv1d", "c1", 2),
        other("ConvTranspose1d", "t1", 4),
        conv("c2", 4),
        other("ConvTranspose2d", "t2", 4),
        other("Conv3d", "c3", 4),
        other("Conv3d", "c3d", 4, reason="dilation along depth"),
        t3="ConvTranspose3d",
    ),
    "FunctionalAndUnused": model(
        conv("used", 4),
        conv("func", 8, reason="it is never called"),
        conv("never", 8, reason="it is never called"),
        linear("lin", 8),
    ),
    "SharedInput": model(
        conv("stem", 3), conv("q", 8), conv("k", 8), conv("v", 8), conv("o", 8), r="ReLU"
    ),
    "NoLayers": model(bn="BatchNorm2d", p="MaxPool2d"),
}
