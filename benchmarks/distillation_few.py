"""Distillation with very few samples: is it ever worse than calibration alone?

    python benchmarks/distillation_few.py --threads 1

One epoch with all defaults; four networks, three seeds, 32 to 128 samples in batches of 16. Each
number is the mean squared error of the outputs, student against teacher, on data that nothing was
trained on, over that of the student which is only calibrated. Needs ``scikit-learn``.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import accuracy_tasks
import datasets
import harness
import torch
from distillation import WIDTHS, compared, fit
from torch import Tensor, nn

import amct_fx

BATCH = 16
SAMPLES = (32, 64, 128)


def cnn() -> nn.Module:
    """Return a network without branches for images ``[N, 1, 8, 8]``."""
    return nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()),
        *(nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.BatchNorm2d(16), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )


def mlp() -> nn.Module:
    """Return a network of three layers for the same images."""
    return nn.Sequential(
        *(nn.Flatten(), nn.Linear(64, 64), nn.ReLU()),
        *(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10)),
    )


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "CNN": cnn,
    "depthwise net": accuracy_tasks.depthwise_net,
    "MLP": mlp,
    "residual net": accuracy_tasks.digits_cnn,
}


def teacher(name: str, seed: int, data: datasets.Dataset) -> nn.Module:
    """Return a trained network in eval mode."""
    torch.manual_seed(seed)
    model = NETWORKS[name]()
    epochs, size = 15, len(data.train_inputs)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(epochs):
            for part in torch.randperm(size).split(64):
                yield data.train_inputs[part], data.train_targets[part]

    fit(model, batches, model.parameters(), epochs * -(-size // 64), 3e-3)
    return model.eval()


def ratio(model: nn.Module, samples: list[Tensor], test: Tensor, cfg: str, **options: Any) -> float:
    """Return the error of the distilled student over that of the calibrated one."""
    calibrated = amct_fx.prepare_distill_amct(model, cfg).eval()
    with torch.no_grad():
        for batch in samples[:2]:
            calibrated(batch)
    student = amct_fx.prepare_distill_amct(model, cfg)
    student = amct_fx.distill(model, student, samples, **options)
    return compared(student, model, test)[0] / compared(calibrated, model, test)[0]


def rows(arguments: Any) -> Iterator[tuple[dict[str, Any], dict[str, list[float]]]]:
    """Yield a row for each network and width, and its single results by the number of samples."""
    data = datasets.digits()
    options = {"epochs": arguments.epochs, "weight_step": arguments.weight_step}
    for name in arguments.networks:
        teachers = [teacher(name, seed, data) for seed in range(arguments.seeds)]
        for width, cfg in WIDTHS.items():
            found: dict[str, list[float]] = {}
            for count in SAMPLES:
                for seed, model in enumerate(teachers):
                    torch.manual_seed(seed + 100)
                    chosen = torch.randperm(len(data.train_inputs))[:count]
                    samples = list(data.train_inputs[chosen].split(BATCH))
                    result = ratio(model, samples, data.test_inputs, cfg, **options)
                    found.setdefault(str(count), []).append(result)
            every = [value for values in found.values() for value in values]
            row = {"network": name, "": width}
            row |= {f"{n} samples": ", ".join(f"{v:.2f}" for v in vs) for n, vs in found.items()}
            row |= {"mean": f"{statistics.geometric_mean(every):.2f}", "worst": f"{max(every):.2f}"}
            yield row, found


def main() -> None:
    """Run the benchmark."""
    parser = harness.parser(__doc__.partition("\n")[0], repetitions=1)
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--weight-step", type=float, default=0.02, help="inf: no limit")
    arguments = parser.parse_args()
    harness.start(arguments)
    warnings.simplefilter("ignore", amct_fx.AmctWarning)  # layers too odd for INT4
    if arguments.weight_step == float("inf"):
        arguments.weight_step = None
    table, details = [], {}
    for row, found in rows(arguments):
        print(*row.values(), flush=True)
        table.append(row)
        details[f"{row['network']}, {row['']}"] = found
    harness.report("Error of few samples, distilled : calibrated", table, arguments, details)


if __name__ == "__main__":
    main()
