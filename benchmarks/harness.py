"""What the benchmarks share: fair timing, memory, tables, files.

The things to compare run in turn, one repetition of each after the other, so a busy moment of the
machine hits all of them; medians are compared. Beside the time on the clock stands the time of the
processor, which other programs hardly change.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

MIB = 2**20


@dataclass
class Timing:
    """Seconds of each repetition, on the clock and of the processor."""

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def wall_median(self) -> float:
        """Median time on the clock."""
        return statistics.median(self.wall)

    @property
    def cpu_median(self) -> float:
        """Median time of the processor, all threads together."""
        return statistics.median(self.cpu)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles of the time on the clock, over the median."""
        if len(self.wall) < 2:
            return 0.0
        low, _, high = statistics.quantiles(self.wall, n=4)
        return (high - low) / 2 / self.wall_median

    def as_json(self) -> dict[str, Any]:
        """Return what a file should hold."""
        return {
            "wall_median_s": self.wall_median,
            "wall_spread": self.spread,
            "cpu_median_s": self.cpu_median,
            "repetitions": len(self.wall),
        }


def synchronize(device: torch.device) -> None:
    """Wait for an accelerator; nothing on a CPU."""
    module = getattr(torch, device.type, None)
    if device.type != "cpu" and module is not None:
        module.synchronize(device)


def stopwatch(run: Callable[[], Any], device: torch.device, count: int = 1) -> tuple[float, float]:
    """Return the seconds of one of ``count`` runs: on the clock, of the processor."""
    synchronize(device)
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        run()
    synchronize(device)
    return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count


def interleaved(
    runs: Mapping[str, Callable[[], Any]],
    device: torch.device,
    *,
    repetitions: int,
    count: int = 1,
    warmup: int = 2,
) -> dict[str, Timing]:
    """Time several things in turn.

    Args:
        runs: What to time, by name. One with a method ``stopwatch(count)`` times itself, such as
            one that runs in another process.
        device: Where they run.
        repetitions: How often each is timed.
        count: Runs in one repetition.
        warmup: Runs of each before the first repetition.
    """
    timings = {name: Timing() for name in runs}
    for run in runs.values():
        for _ in range(warmup):
            run()
    gc.collect()
    with collector_off():
        for _ in range(repetitions):
            for name, run in runs.items():
                own = getattr(run, "stopwatch", None)
                wall, cpu = own(count) if own else stopwatch(run, device, count)
                timings[name].wall.append(wall)
                timings[name].cpu.append(cpu)
    return timings


@contextlib.contextmanager
def collector_off() -> Iterator[None]:
    """Keep Python's garbage collector from running in the middle of a measurement."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def saved_bytes(loss: Callable[[], torch.Tensor], model: nn.Module) -> int:
    """Return how much a forward keeps for the backward, parameters not counted.

    Args:
        loss: Runs the forward.
        model: The model; its parameters and buffers exist anyway.
    """
    own = [*model.parameters(), *model.buffers()]
    known = {tensor.untyped_storage().data_ptr() for tensor in own}
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = loss()
    total = sum(kept.values())
    result.backward()
    return total


def peak_bytes(run: Callable[[], Any], device: torch.device) -> int:
    """Return the most memory that tensors took during a run, beyond what they took before.

    Runs before it are not counted: they leave what a training has between two steps. On a CPU the
    last of them is recorded as well, since the profiler does not know how large older tensors are.
    Several, since :func:`saved_bytes` ran a forward whose weights the next step found unchanged, as
    when gradients are accumulated, and quantized weights are kept for a while then.
    """
    for _ in range(3):
        run()
    if device.type != "cpu":
        module = getattr(torch, device.type)
        synchronize(device)
        module.reset_peak_memory_stats(device)
        before = module.memory_allocated(device)
        run()
        synchronize(device)
        return int(module.max_memory_allocated(device) - before)
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
        with torch.profiler.record_function("counted"):
            run()
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    level = before = peak = 0
    for event in events:
        if event.name() == "counted":
            before = peak = level
        elif event.name() == "[memory]":
            level += event.nbytes()
            peak = max(peak, level)
    return peak - before


def fitted_growth(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Return the exponent p of the best fit ``value ~ size^p``; 1 is linear growth."""
    x, y = [math.log(size) for size in sizes], [math.log(value) for value in values]
    return statistics.linear_regression(x, y).slope


def parser(description: str, *, repetitions: int) -> argparse.ArgumentParser:
    """Return a parser with the options that all benchmarks have."""
    result = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    result.add_argument("--device", default="cpu", help="cpu, cuda, npu …")
    result.add_argument("--threads", type=int, default=2, help="threads of PyTorch on a CPU")
    result.add_argument("--repetitions", type=int, default=repetitions)
    result.add_argument("--json", type=Path, help="also write the figures into this file")
    return result


def start(arguments: argparse.Namespace) -> torch.device:
    """Set threads and seed; return the device.

    glibc gives memory back to the system above a threshold that grows with the largest block ever
    freed. In a young process a step then spends up to a tenth of its time on getting the same pages
    again, or none, by chance. One block of the largest size that counts ends that for all alike.
    """
    torch.set_num_threads(arguments.threads)
    torch.empty(32 * MIB - 4096, dtype=torch.uint8).fill_(0)
    torch.manual_seed(0)
    if arguments.device.startswith("npu"):
        import torch_npu  # noqa: F401  registers the device
    return torch.device(arguments.device)


def environment(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return machine, versions and command."""
    device = arguments.device
    facts = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": arguments.threads,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "command": " ".join(["python", *_command()]),
    }
    if device != "cpu":
        facts["accelerator"] = getattr(torch, torch.device(device).type).get_device_name()
    return facts


def _command() -> list[str]:
    script = Path(sys.argv[0])
    return [f"benchmarks/{script.name}", *sys.argv[1:]]


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a Markdown table; the keys of the first row are the head."""
    head = list(rows[0])
    lines = [head, ["-"] * len(head), *([_cell(row.get(key)) for key in head] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def report(
    title: str,
    rows: Sequence[Mapping[str, Any]],
    arguments: argparse.Namespace,
    details: Mapping[str, Any] | None = None,
) -> None:
    """Print a Markdown table with machine, versions and command; write JSON if asked.

    Args:
        title: Heading.
        rows: Rows of the table.
        arguments: Of the command line.
        details: More for the file.
    """
    facts = environment(arguments)
    print(f"### {title}\n\n{markdown(rows)}\n")
    print(", ".join(f"{key}: {value}" for key, value in facts.items() if key != "command"))
    print(f"\n    {facts['command']}\n")
    if arguments.json is not None:
        content = {"title": title, "environment": facts, "rows": rows, "details": details or {}}
        arguments.json.write_text(json.dumps(content, indent=1, default=str) + "\n")
