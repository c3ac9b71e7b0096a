"""How long prepare takes, and that it grows linearly with the number of layers.

python benchmarks/prepare.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness import Timing, fitted_growth, parser, report, start, stopwatch
from networks import Chain, SmallResNet

import amct_fx

if TYPE_CHECKING:
    from torch import nn


def networks(depths: list[int]) -> dict[str, tuple[int, nn.Module]]:
    """Return the networks with their number of layers."""
    chains = {f"chain of {depth} convolutions": (depth + 1, Chain(depth)) for depth in depths}
    return {"ResNet, 0.99 M parameters": (18, SmallResNet()), **chains}


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", repetitions=3)
    options.add_argument("--depths", type=int, nargs="*", default=[10, 100, 300, 1000])
    arguments = options.parse_args()
    device = start(arguments)
    amct_fx.prepare_qat_amct(SmallResNet().to(device))
    rows: list[dict[str, Any]] = []
    for name, (layers, model) in networks(arguments.depths).items():
        timing = Timing()
        model = model.to(device)
        for _ in range(arguments.repetitions):
            wall, cpu = stopwatch(lambda model=model: amct_fx.prepare_qat_amct(model), device)
            timing.wall.append(wall)
            timing.cpu.append(cpu)
        rows.append(
            {
                "network": name,
                "layers": layers,
                "s": timing.wall_median,
                "CPU, s": timing.cpu_median,
                "CPU, ms per layer": 1e3 * timing.cpu_median / layers,
            }
        )
    chains = rows[1:]
    growth = fitted_growth([r["layers"] for r in chains], [r["CPU, s"] for r in chains])
    report("Prepare", rows, arguments, {"exponent": growth})
    print(f"CPU time grows as layers^{growth:.2f}; copying, tracing and swapping included.\n")


if __name__ == "__main__":
    main()
