"""How the time of an action grows with the layers of a network, for prepare.py and convert.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from harness import Timing, fitted_growth, parser, report, start, stopwatch
from networks import Chain, SmallResNet

if TYPE_CHECKING:
    import torch
    from torch import nn


def benchmark(
    title: str,
    description: str,
    ready: Callable[[nn.Module, torch.device], nn.Module],
    action: Callable[[nn.Module], Any],
) -> None:
    """Measure an action on a ResNet and on chains of convolutions; print times and growth.

    Args:
        title: Heading of the table.
        description: For ``--help``.
        ready: Brings a network onto the device and into the state that the action wants.
        action: What is timed.
    """
    options = parser(description, repetitions=3)
    options.add_argument("--depths", type=int, nargs="*", default=[10, 100, 300, 1000])
    arguments = options.parse_args()
    device = start(arguments)
    chains = {f"chain of {d} convolutions": (d + 1, Chain(d)) for d in arguments.depths}
    networks = {"ResNet, 0.99 M parameters": (18, SmallResNet()), **chains}
    action(ready(SmallResNet(), device))  # the first time of all loads modules
    rows: list[dict[str, Any]] = []
    for name, (layers, network) in networks.items():
        timing = timed(action, ready(network, device), device, arguments.repetitions)
        rows.append(
            {
                "network": name,
                "layers": layers,
                "s": timing.wall_median,
                "CPU, s": timing.cpu_median,
                "CPU, ms per layer": 1e3 * timing.cpu_median / layers,
            }
        )
    growth = fitted_growth([r["layers"] for r in rows[1:]], [r["CPU, s"] for r in rows[1:]])
    report(title, rows, arguments, {"exponent": growth})
    print(f"CPU time grows as layers^{growth:.2f}.\n")


def timed(
    action: Callable[[nn.Module], Any], model: nn.Module, device: torch.device, repetitions: int
) -> Timing:
    """Return the seconds of each run of an action on a model."""
    timing = Timing()
    for _ in range(repetitions):
        wall, cpu = stopwatch(lambda: action(model), device)
        timing.wall.append(wall)
        timing.cpu.append(cpu)
    return timing
