"""How the overhead of a quantized training step grows with the network.

    python benchmarks/scaling.py --plot benchmarks/scaling.svg      # needs matplotlib

Width, depth and image size are changed one at a time. Overhead is the processor time of a quantized
step less that of a float step; memory is what a forward keeps for backward.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from harness import MIB, fitted_growth, interleaved, parser, report, saved_bytes, start
from networks import Chain, SmallResNet, TrainingStep
from torch import nn

import amct_fx


def cases(full: bool) -> Iterator[tuple[str, int, nn.Module, tuple[int, ...]]]:
    """Yield axis, value, network and shape of the batch."""
    for width in (1, 2, 4):
        yield "width", width, SmallResNet(32 * width), (4, 3, 32, 32)
    for depth in (10, 100, 1000) if full else (10, 100):
        yield "depth", depth, Chain(depth, residual=True), (4, 3, 16, 16)
    for size in (32, 64, 128, 224) if full else (32, 64):
        yield "image", size, SmallResNet(), (2, 3, size, size)


def measure(
    network: nn.Module, shape: tuple[int, ...], device: torch.device, repetitions: int
) -> dict[str, float]:
    """Return processor time and kept memory of a float and a quantized step."""
    images = torch.randn(shape, device=device)
    quantized = amct_fx.prepare_qat_amct(network.to(device))
    steps = {
        "float": TrainingStep(network, images),
        "quantized": TrainingStep(quantized, images),
    }
    timings = interleaved(steps, device, repetitions=repetitions)
    times = {name: timing.cpu_median for name, timing in timings.items()}
    if device.type != "cpu":
        times = {name: timing.wall_median for name, timing in timings.items()}
    if not all(step.loss().isfinite() for step in steps.values()):
        message = "the training overflowed: its time says nothing"
        raise FloatingPointError(message)
    kept = {name: saved_bytes(step.loss, step.model) / MIB for name, step in steps.items()}
    return {
        "float, ms": times["float"] * 1e3,
        "quantized, ms": times["quantized"] * 1e3,
        "ratio": times["quantized"] / times["float"],
        "overhead, ms": max(times["quantized"] - times["float"], 1e-6) * 1e3,
        "kept, MiB": kept["quantized"],
        "kept ratio": kept["quantized"] / kept["float"],
    }


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw ratios over each axis."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(1, 3, figsize=(10, 3.2), sharey=True)
    for panel, axis in zip(panels, ("width", "depth", "image"), strict=True):
        chosen = [row for row in rows if row["axis"] == axis]
        values = [row["value"] for row in chosen]
        panel.plot(values, [row["ratio"] for row in chosen], "o-", label="time")
        panel.plot(values, [row["kept ratio"] for row in chosen], "s--", label="memory kept")
        panel.axhline(1, color="gray", linewidth=0.8)
        panel.set(xlabel=axis, xscale="log", ylim=(0.9, None))
        panel.set_xticks(values, [str(value) for value in values], minor=False)
        panel.minorticks_off()
    panels[0].set_ylabel("quantized / float")
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    """Measure, print, fit and draw."""
    options = parser(__doc__ or "", repetitions=5)
    options.add_argument("--small", action="store_true", help="leave out the largest networks")
    options.add_argument("--plot", type=Path, help="draw into this file")
    arguments = options.parse_args()
    device = start(arguments)
    rows: list[dict[str, Any]] = []
    for axis, value, network, shape in cases(not arguments.small):
        measured = measure(network, shape, device, arguments.repetitions)
        rows.append({"axis": axis, "value": value, **measured})
    growth: dict[str, float] = {}
    for axis in ("width", "depth", "image"):
        chosen = [row for row in rows if row["axis"] == axis]
        values = [row["value"] for row in chosen]
        for what in ("float, ms", "overhead, ms", "kept, MiB"):
            growth[f"{what} ~ {axis}"] = fitted_growth(values, [row[what] for row in chosen])
    report("Scaling", rows, arguments, {"exponents": growth})
    fits = (f"{what}^{exponent:.2f}" for what, exponent in growth.items())
    print("Fitted growth: " + "; ".join(fits) + ".\n")
    if arguments.plot is not None:
        plot(rows, arguments.plot)


if __name__ == "__main__":
    main()
