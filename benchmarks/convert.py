"""How long convert takes, and that it grows linearly with the number of layers.

python benchmarks/convert.py
"""

from __future__ import annotations

from typing import Any

import torch
from harness import Timing, fitted_growth, parser, report, start, stopwatch
from networks import Chain, SmallResNet
from torch import nn

import amct_fx


def prepared(model: nn.Module, device: torch.device) -> nn.Module:
    """Return a calibrated model."""
    model = amct_fx.prepare_qat_amct(model.to(device).eval())
    with torch.no_grad():
        model(torch.randn(2, 3, 8, 8, device=device))
    return model


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "", repetitions=3)
    options.add_argument("--depths", type=int, nargs="*", default=[10, 100, 300, 1000])
    arguments = options.parse_args()
    device = start(arguments)
    networks: dict[str, tuple[int, nn.Module]] = {
        "ResNet, 0.99 M parameters": (18, SmallResNet()),
        **{
            f"chain of {depth} convolutions": (depth + 1, Chain(depth))
            for depth in arguments.depths
        },
    }
    amct_fx.convert_amct(prepared(SmallResNet(), device))
    rows: list[dict[str, Any]] = []
    for name, (layers, network) in networks.items():
        model, timing = prepared(network, device), Timing()
        for _ in range(arguments.repetitions):
            wall, cpu = stopwatch(lambda model=model: amct_fx.convert_amct(model), device)
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
    report("Convert", rows, arguments, {"exponent": growth})
    print(f"CPU time grows as layers^{growth:.2f}.\n")


if __name__ == "__main__":
    main()
