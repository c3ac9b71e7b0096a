"""How much the search of the start ranges (IFMR) costs.

    python benchmarks/calibration.py

Against a sort of the same values, and in a training: the first step, which searches, against a
later one.
"""

from __future__ import annotations

from typing import Any

import torch
from harness import Timing, interleaved, parser, report, start, stopwatch
from networks import SmallResNet, TrainingStep

import amct_fx
from amct_fx.observers.functional import ifmr_range, ifmr_search

SHAPES = [(16, 32, 32, 32), (16, 64, 112, 112)]


def search_rows(device: torch.device, repetitions: int) -> list[dict[str, Any]]:
    """Time the search and a sort on activations behind a ReLU."""
    rows = []
    for shape in SHAPES:
        x = torch.relu(torch.randn(shape, device=device))
        runs = {
            "sort": lambda x=x: torch.sort(x.flatten()),
            "ifmr_range": lambda x=x: ifmr_range(x),
            "ifmr_search": lambda x=x: ifmr_search(x),
        }
        timings = interleaved(runs, device, repetitions=repetitions, warmup=1)
        base = timings["sort"]
        for name, timing in timings.items():
            values = "x".join(map(str, shape))
            rows.append(_row(f"{name} of {values} values", timing, base, "one sort"))
    return rows


def step_rows(device: torch.device, repetitions: int) -> list[dict[str, Any]]:
    """Time the first and a later training step of freshly prepared networks, batch_num 1."""
    first, steady = Timing(), Timing()
    images = torch.randn(16, 3, 32, 32, device=device)
    for repetition in range(repetitions + 1):
        torch.manual_seed(0)
        step = TrainingStep(amct_fx.prepare_qat_amct(SmallResNet().to(device)), images)
        runs = [stopwatch(step, device), stopwatch(step, device), stopwatch(step, device, 2)]
        if repetition == 0:
            continue  # warms the process up
        for timing, (wall, cpu) in ((first, runs[0]), (steady, runs[2])):
            timing.wall.append(wall)
            timing.cpu.append(cpu)
    return [
        _row("first step, which calibrates", first, steady, "a later step"),
        _row("a later step", steady, steady, "a later step"),
    ]


def _row(name: str, timing: Timing, base: Timing, of: str) -> dict[str, Any]:
    return {
        "what": name,
        "ms": timing.wall_median * 1e3,
        "± %": 100 * timing.spread,
        "CPU, ms": timing.cpu_median * 1e3,
        "relative to": of,
        "ratio": timing.wall_median / base.wall_median,
        "CPU ratio": timing.cpu_median / base.cpu_median,
    }


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__ or "", repetitions=7).parse_args()
    device = start(arguments)
    rows = search_rows(device, arguments.repetitions) + step_rows(device, arguments.repetitions)
    report("Calibration", rows, arguments)


if __name__ == "__main__":
    main()
