"""Which operators a training step spends its time in: torch.profiler, quantized against float.

python benchmarks/profile_step.py
"""

from __future__ import annotations

from typing import Any

import torch
from harness import parser, report, start
from tools import build, ours, plain


def profiled(step: Any, device: torch.device, steps: int) -> dict[str, tuple[float, int]]:
    """Return milliseconds and calls of each operator in one step."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    for _ in range(3):
        step()
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(steps):
            step()
    field = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    return {
        event.key: (getattr(event, field) / 1e3 / steps, event.count // steps)
        for event in profile.key_averages()
    }


def main() -> None:
    """Measure and print the operators that cost most beyond the float step."""
    options = parser(__doc__ or "", repetitions=10)
    options.add_argument("--rows", type=int, default=16)
    arguments = options.parse_args()
    device = start(arguments)
    tables = {
        name: profiled(build(make, 16, 32, device), device, arguments.repetitions)
        for name, make in (("float", plain), ("amct_fx", ours))
    }
    base, table = tables["float"], tables["amct_fx"]
    extra = {key: time - base.get(key, (0.0, 0))[0] for key, (time, _) in table.items()}
    rows: list[dict[str, Any]] = [
        {
            "operator": f"`{key}`",
            "float, ms": base.get(key, (0.0, 0))[0],
            "calls": base.get(key, (0.0, 0))[1],
            "amct_fx, ms": table[key][0],
            "calls ": table[key][1],
            "extra, ms": extra[key],
        }
        for key in sorted(extra, key=lambda key: -extra[key])[: arguments.rows]
    ]
    sums = [sum(time for time, _ in t.values()) for t in (base, table)]
    counts = [sum(count for _, count in t.values()) for t in (base, table)]
    rows.append(
        {
            "operator": "all",
            "float, ms": sums[0],
            "calls": counts[0],
            "amct_fx, ms": sums[1],
            "calls ": counts[1],
            "extra, ms": sums[1] - sums[0],
        }
    )
    report("Operators of a step", rows, arguments)


if __name__ == "__main__":
    main()
