"""What makes brevitas and amct_fx differ with INT4 weights: one change after the other.

    python benchmarks/accuracy_swaps.py --threads 1 --json swaps.json

EfficientNet-Lite0 with the budget of ``accuracy.py``, but on the twelve photographs alone that it
trains with: four times, trained on crops of nine and tested on the other three. So what is chosen
by this table has never seen the photographs that ``accuracy.py`` tests on. Needs brevitas, too.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import accuracy
import datasets
import efficientnet_lite
import harness
import torch
from accuracy_methods import amct_groups, weight_bits
from accuracy_tasks import Task, photograph_task
from torch import Tensor, nn
from torch.nn import functional as F

import amct_fx
from amct_fx.observers import ARQFakeQuantize, ULQFakeQuantize, ULQWeightFakeQuantize

TRAINED, TESTED, FOLDS, BITS = 16, 48, 4, 4
"""Crops of a photograph to train with, and to test with; times to train; width of the weights."""

Make = Callable[[nn.Module, int], nn.Module]


class RoundStraight(torch.autograd.Function):
    """Round; the gradient passes unchanged."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Return the nearest integers."""
        return x.round()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        """Pass the gradient on."""
        return grads[0]


class LargestWeight(nn.Module):
    """The weights of brevitas: the largest of an output channel has the largest code.

    Args:
        bits: Width of the codes, which are as far below zero as above.
        learns: Whether the gradient of the scale reaches the largest weight.
    """

    def __init__(self, bits: int, *, learns: bool) -> None:
        super().__init__()
        self.limit = 2 ** (bits - 1) - 1
        self.learns = learns

    def forward(self, weight: Tensor) -> Tensor:
        """Return the fake-quantized weight."""
        rows = weight.flatten(1)
        scale = (rows.abs().amax(1, keepdim=True) / self.limit).clamp_min(1e-10)
        scale = scale if self.learns else scale.detach()
        codes: Tensor = RoundStraight.apply(rows / scale)
        return (codes * scale).view_as(weight)


class QuantizedLayer(nn.Module):
    """A convolution or Linear that quantizes its input and its weight.

    Args:
        layer: The float layer.
        inputs: Quantizes the input.
        weights: Quantizes the weight.
    """

    def __init__(self, layer: nn.Module, inputs: nn.Module, weights: nn.Module) -> None:
        super().__init__()
        self.layer, self.inputs, self.weights = layer, inputs, weights

    def forward(self, x: Tensor) -> Tensor:
        """Return the output of the layer."""
        values = {"weight": self.weights(self.layer.weight)}
        return torch.func.functional_call(self.layer, values, self.inputs(x))


def percentile() -> nn.Module:
    """Return the input quantizer of brevitas: a percentile of each batch, later learned."""
    from brevitas import nn as qnn
    from brevitas.quant import Int8ActPerTensorFloat

    quantizer: nn.Module = qnn.QuantIdentity(act_quant=Int8ActPerTensorFloat)
    return quantizer


def arq(layer: nn.Module, bits: int, *, linear_rows: bool = True) -> nn.Module:
    """Return ARQ with a scale for each output, that of a Linear if wanted."""
    if isinstance(layer, nn.Linear) and not linear_rows:
        return ARQFakeQuantize(num_bits=bits)
    return ARQFakeQuantize(num_bits=bits, ch_axis=0, num_channels=len(layer.weight))


def learned(layer: nn.Module, bits: int) -> nn.Module:
    """Return a learned scale that starts at that of ARQ."""
    quantizer = ULQWeightFakeQuantize(num_bits=bits, ch_axis=0, num_channels=len(layer.weight))
    quantizer.initialize(layer.weight)
    return quantizer


def swap(model: nn.Module, inputs: Callable[[], nn.Module], weights: Make) -> nn.Module:
    """Return a copy of the model whose layers quantize."""
    model = copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, layer in list(parent.named_children()):
            if isinstance(layer, nn.Conv2d | nn.Linear):
                made = weights(layer, weight_bits(layer, BITS))
                setattr(parent, name, QuantizedLayer(layer, inputs(), made))
    return model


def by_share(share: float, model: nn.Module, lr: float) -> list[dict[str, Any]]:
    """Return groups in which learned scales have that share of the learning rate."""
    return amct_fx.param_groups(model, lr=lr, scale_lr=share * lr)


@dataclass(frozen=True)
class Row:
    """One row of the table: how inputs and weights are quantized, and the optimizer's groups."""

    name: str
    inputs: Callable[[], nn.Module]
    weights: Make
    groups: Callable[[nn.Module, float], Any] = amct_groups


ROWS = (
    Row("brevitas", percentile, lambda _, bits: LargestWeight(bits, learns=True)),
    Row(
        "its weights, our inputs", ULQFakeQuantize, lambda _, bits: LargestWeight(bits, learns=True)
    ),
    Row(
        "no gradient through the scale",
        ULQFakeQuantize,
        lambda _, bits: LargestWeight(bits, learns=False),
    ),
    Row("codes -8 to 7 (ARQ)", ULQFakeQuantize, arq),
    Row("one scale for a Linear", ULQFakeQuantize, functools.partial(arq, linear_rows=False)),
    Row(
        "ulq_retrain, scales at 1/100",
        ULQFakeQuantize,
        learned,
        functools.partial(by_share, 0.01),
    ),
    Row('ulq_retrain, scales at "auto"', ULQFakeQuantize, learned),
)


def fold_tasks() -> list[Task]:
    """Return the task of each fold; every fourth photograph is tested."""
    names = (*datasets.PHOTOGRAPHS, *datasets.MORE_PHOTOGRAPHS)
    crops, _ = datasets.photographs(size=96, crops=TESTED, test_crops=1, names=names)
    with torch.no_grad():
        logits = torch.cat([efficientnet_lite.pretrained()(part) for part in crops.split(TESTED)])
    images, targets = crops.unflatten(0, (-1, TESTED)), logits.unflatten(0, (-1, TESTED))
    tasks, budget = [], photograph_task()
    for fold in range(FOLDS):
        held = torch.arange(len(images)) % FOLDS == fold
        train = [part[~held, :TRAINED].flatten(0, 1) for part in (images, targets)]
        order = torch.randperm(len(train[0]), generator=torch.Generator().manual_seed(fold))
        test = [part[held].flatten(0, 1) for part in (images, targets)]
        data = datasets.Dataset(*(part[order] for part in train), *test)
        tasks.append(dataclasses.replace(budget, data=data))
    return tasks


def divergence(model: nn.Module, task: Task) -> float:
    """Return the mean Kullback-Leibler divergence from the float network on the test crops."""
    with torch.no_grad():
        logits = torch.cat([model(part) for part in task.data.test_inputs.split(task.batch)])
    values = logits.log_softmax(-1), task.data.test_targets.log_softmax(-1)
    return float(F.kl_div(*values, log_target=True, reduction="batchmean"))


def measure(row: Row, task: Task) -> tuple[float, float]:
    """Return agreement and divergence after the training of one fold."""
    torch.manual_seed(0)
    model = swap(task.make(), row.inputs, row.weights)
    if row.inputs is ULQFakeQuantize:  # the other finds its ranges while it trains
        with torch.no_grad():
            model.eval()(task.data.train_inputs[: task.calibration])
    accuracy.train(model, task, row.groups(model, task.lr), epochs=task.epochs, lr=task.lr)
    return task.score(model), divergence(model, task)


def main() -> None:
    """Run the benchmark."""
    arguments = harness.parser(__doc__.partition("\n")[0], repetitions=1).parse_args()
    harness.start(arguments)
    tasks, rows = fold_tasks(), []
    for row in ROWS:
        agreements, divergences = zip(*(measure(row, task) for task in tasks), strict=True)
        rows.append(
            {
                "layers": row.name,
                "agreement, %": f"{100 * sum(agreements) / FOLDS:.1f}",
                "divergence": f"{sum(divergences) / FOLDS:.2f}",
                "agreement of each fold": ", ".join(f"{100 * a:.0f}" for a in agreements),
            }
        )
        print(rows[-1], flush=True)
    harness.report("EfficientNet-Lite0, A8W4, held-out training photographs", rows, arguments)


if __name__ == "__main__":
    main()
