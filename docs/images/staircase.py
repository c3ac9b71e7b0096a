"""Draw docs/images/staircase.svg: what a learned range does to the values of one input.

python docs/images/staircase.py
"""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
import matplotlib.pyplot as plt
import torch

from amct_fx.observers.functional import ulq_fake_quantize

CLIP_MAX, CLIP_MIN, BITS = 2.0, -1.0, 3


def main() -> None:
    """Draw three bits, so that the steps can be seen."""
    mpl.rcParams["svg.hashsalt"] = "amct_fx"
    values = torch.linspace(-2, 3, 4001)
    clips = torch.tensor(CLIP_MAX), torch.tensor(CLIP_MIN)
    codes = ulq_fake_quantize(values, *clips, num_bits=BITS)
    figure, axis = plt.subplots(figsize=(7, 3.5))
    axis.plot(values, values, color="0.75", label="float")
    axis.plot(values, codes, color="#1565c0", label="fake-quantized")
    for clip, name in ((CLIP_MAX, "clip_max"), (CLIP_MIN, "clip_min")):
        axis.axvline(clip, color="#ef6c00", linestyle="--")
        axis.annotate(name, (clip, 2.6), ha="center", color="#ef6c00", backgroundcolor="white")
    axis.set(xlabel="input value", ylabel="value the layer sees", ylim=(-2, 3))
    axis.legend(loc="lower right", frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    path = Path(__file__).with_suffix(".svg")
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    main()
