"""``analyze``: which layers lose accuracy by quantization, and what to leave float.

Each layer alone quantized, and each alone float, takes one run of the model for each batch. A run
computes only what lies behind the layer: the outputs of the layers before it are those of the run
with no layer, or with all layers, quantized. So the number of runs is linear in the layers, and
each costs half a forward pass on average.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import nn
from torch.ao.quantization import FakeQuantizeBase

from amct_fx.config.messages import listing
from amct_fx.copying import copy_model
from amct_fx.distributed import RangeMerger
from amct_fx.errors import ArgumentTypeError, InputDataError, ModelStateError, ModelTypeError
from amct_fx.nn.qat import QATLayer
from amct_fx.nn.quantized import QuantizedLayer
from amct_fx.report.analysis import Analysis, Suggestion
from amct_fx.report.batches import Batches, Forward
from amct_fx.report.graph_view import graph_view
from amct_fx.report.lookup import unwrapped
from amct_fx.report.preparation import preparation_of
from amct_fx.report.progress import Progress, ProgressReport, progress_bars
from amct_fx.report.study import Judge, Metric, Study
from amct_fx.report.summary import summarize
from amct_fx.report.switchboard import switchboard

__all__ = ["analyze"]


def analyze(
    model: nn.Module,
    float_model: nn.Module | None,
    data: Any,
    *,
    metric: Metric | None = None,
    greater_is_better: bool = True,
    wanted: float | None = None,
    max_skips: int = 3,
    sensitivity: bool = True,
    each_quantizer: bool = False,
    num_batches: int | None = None,
    forward: Forward | None = None,
    progress: Progress = None,
) -> Analysis:
    """Measure what quantization does to each layer, and to the outcome through each layer.

    Neither model changes: a copy of ``model`` runs, in eval mode. Inputs and outputs are compared
    with those of ``float_model`` layer by layer; what one layer does alone is compared with the
    prepared model with its quantizers off, so it shows quantization only, not what training did.

    Args:
        model: A prepared model, calibrated; on any device, also wrapped or compiled.
        float_model: The float model, whose layers have the same names; ``None`` compares with the
            prepared model with its quantizers off.
        data: An iterable of batches, such as a ``DataLoader``, or one tensor. A batch is a tensor,
            a tuple or list ``(input, targets …)``, or a mapping of keyword arguments; it is moved
            to the device of the model.
        metric: Called as ``metric(output, batch)`` for each batch, returns a number; the mean over
            the samples counts. ``None`` is the mean squared error of the output, which needs no
            targets.
        greater_is_better: ``False`` for a loss. Without a metric it does not matter.
        wanted: Suggest as many float layers as it takes until the metric is as good as this.
        max_skips: Without ``wanted``, leave up to so many layers float, as long as it helps; 0 for
            no suggestions.
        sensitivity: Whether to run each layer alone quantized and alone float.
        each_quantizer: Whether to run each quantizer alone, too: one of an input, one of a weight.
        num_batches: Use only the first batches.
        forward: Called as ``forward(model, batch)`` instead, for models and batches of any form.
        progress: ``None`` draws a bar in a terminal, ``False`` never; or a function that is called
            with a stage, the steps done and their number.

    Returns:
        The figures of each layer, a ranking, and suggestions as lines of a ``.cfg`` file.

    Raises:
        ArgumentTypeError: ``metric`` is no function, or ``num_batches`` no number.
        InputDataError: No batch, one that the model cannot take, a metric that is no number, or
            a float model that has none of the layers.
        ModelStateError: ``model`` is not prepared, not calibrated, or converted already.
        ModelTypeError: ``model`` or ``float_model`` is no ``nn.Module``.

    Example:
        >>> import torch
        >>> from amct_fx import prepare_qat_amct
        >>> _ = torch.manual_seed(0)
        >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)).eval()
        >>> prepared = prepare_qat_amct(net)
        >>> x = torch.randn(32, 8)
        >>> _ = prepared(x)
        >>> found = analyze(prepared, net, x, progress=False)
        >>> sorted(found.ranking), found.layer("0").weight.sqnr > 30
        (['0', '2'], True)
        >>> print(found.suggestions[0].cfg)
        quant_skip_layers: "..."
    """
    model, float_model = _module(model), _float_module(float_model)
    usable, notes = _calibrated_layers(model)
    batches = Batches(data, num_batches)
    summary = summarize(model)
    _check_metric(metric)
    judge = Judge(metric, greater_is_better)
    _check_names(float_model, model, usable)
    copy = copy_model(model).eval()
    RangeMerger.detach(copy)
    with (
        switchboard(copy, usable) as board,
        _in_eval_mode(float_model),
        progress_bars(progress) as report,
    ):
        study = Study(
            board,
            float_model,
            judge,
            forward,
            sensitivity=sensitivity,
            each_quantizer=each_quantizer,
        )
        study.measure(batches, report)
        found = study.result(summary, graph_view(model), notes)
        suggestions = _suggest(study, found, batches, wanted, max_skips, report)
        return replace(found, suggestions=_with_overrides(suggestions, model))


def _module(model: object) -> nn.Module:
    if not isinstance(model, nn.Module):
        message = f"the model must be a torch.nn.Module, not {type(model).__name__}"
        raise ModelTypeError(message)
    return unwrapped(model)


def _float_module(model: object) -> nn.Module | None:
    if model is not None and not isinstance(model, nn.Module):
        message = f"float_model must be a torch.nn.Module or None, not {type(model).__name__}"
        raise ModelTypeError(message)
    return None if model is None else unwrapped(model)


def _check_metric(metric: object) -> None:
    if metric is not None and not callable(metric):
        message = f"metric must be a function metric(output, batch), not {metric!r}"
        raise ArgumentTypeError(message)


def _check_names(float_model: nn.Module | None, model: nn.Module, names: list[str]) -> None:
    """Refuse a float model of other layers and parameters: nothing could be compared by layer."""
    if float_model is None:
        return
    layers = {name for name, _ in float_model.named_modules()}
    parameters = {name for name, _ in float_model.named_parameters()}
    if layers.isdisjoint(names) and parameters.isdisjoint(n for n, _ in model.named_parameters()):
        message = (
            "float_model has none of the layers of the prepared model "
            f"({listing(names, limit=5)}); give the model that was prepared, or None"
        )
        raise InputDataError(message)


def _calibrated_layers(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the layers to measure, in model order, and notes on the others."""
    layers = {name: part for name, part in model.named_modules() if isinstance(part, QATLayer)}
    if not layers:
        done = any(isinstance(part, QuantizedLayer) for part in model.modules())
        message = (
            "the model is already converted; analyze the prepared model, which computes the same"
            if done
            else "the model is not prepared; call prepare_qat_amct and calibrate it first"
        )
        raise ModelStateError(message)
    waiting = [name for name, layer in layers.items() if not _is_calibrated(layer)]
    if len(waiting) == len(layers):
        message = (
            "the input ranges were never calibrated; run at least batch_num forward passes on real "
            "data before analyze"
        )
        raise ModelStateError(message)
    notes = [f"not calibrated, so measured as float: {', '.join(waiting)}"] if waiting else []
    return [name for name in layers if name not in waiting], notes


def _is_calibrated(layer: QATLayer) -> bool:
    own = [module for module in layer.children() if isinstance(module, FakeQuantizeBase)]
    weights = {getattr(layer, key) for key in layer.weight_quantizers.values()}
    inputs = [layer.input_quantizer, *(module for module in own if module not in weights)]
    return all(getattr(quantizer, "is_calibrated", True) for quantizer in inputs)


@contextmanager
def _in_eval_mode(model: nn.Module | None) -> Iterator[None]:
    """Put a model into eval mode for a while, each part back into its own mode after."""
    modes = {} if model is None else {part: part.training for part in model.modules()}
    try:
        if model is not None:
            model.eval()
        yield
    finally:
        for part, mode in modes.items():
            part.training = mode


def _suggest(
    study: Study,
    found: Analysis,
    batches: Batches,
    wanted: float | None,
    max_skips: int,
    report: ProgressReport,
) -> tuple[Suggestion, ...]:
    """Leave one layer after the other float, the most useful first, and measure each choice.

    Without a wanted value it ends after ``max_skips`` choices, and keeps those that are better than
    all before.
    """
    order = _by_usefulness(found)
    number = len(order) if wanted is not None else min(max_skips, len(order))
    if wanted is not None and study.judge.better(found.quantized_value, wanted) >= 0:
        return ()
    suggestions: list[Suggestion] = []
    for count in range(1, number + 1):
        skipped = order[:count]
        value = study.value_without(skipped, batches)
        reached = None if wanted is None else study.judge.better(value, wanted) >= 0
        gain = study.judge.better(value, found.quantized_value)
        if wanted is not None or gain > max([0.0, *(item.gain for item in suggestions)]):
            suggestions.append(Suggestion(skipped, value, gain, reached))
        report("Trying to leave layers float", number if reached else count, number)
        if reached:
            break
    return tuple(suggestions)


def _with_overrides(suggestions: Iterable[Suggestion], model: nn.Module) -> tuple[Suggestion, ...]:
    """Add the overrides of the model's configuration that would beat the skips."""
    preparation = preparation_of(model)
    decisions = () if preparation is None else preparation.layers
    overrides = {decision.name: decision.override for decision in decisions}
    return tuple(
        replace(
            item,
            overrides=tuple(
                dict.fromkeys(found for name in item.layers if (found := overrides.get(name)))
            ),
        )
        for item in suggestions
    )


def _by_usefulness(found: Analysis) -> tuple[str, ...]:
    """Order the layers by what leaving each float brings, and harm where that is equal."""
    ranks = {name: rank for rank, name in enumerate(found.ranking)}

    def key(name: str) -> tuple[float, int]:
        sensitivity = found.layer(name).sensitivity
        return (0.0 if sensitivity is None else -sensitivity.gain), ranks[name]

    return tuple(sorted(found.ranking, key=key))
