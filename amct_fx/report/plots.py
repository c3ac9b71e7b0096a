"""The pictures of the page as PNG files, through matplotlib (the extra ``report``)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amct_fx.config.files import make_folder, replacing
from amct_fx.report.prune_picture import prune_picture
from amct_fx.report.recorder import history_of
from amct_fx.report.table import one_line, optional, shortened

if TYPE_CHECKING:
    import os

    from amct_fx.report.analysis import Analysis, LayerAnalysis
    from amct_fx.report.measures import Histogram
    from amct_fx.report.recorder import History, TrainingRecorder

__all__ = ["save_png"]

_INPUT, _WEIGHT, _CLIP, _FAINT = "#0b62b8", "#b4540a", "#c2185b", "#5b6675"
_PER_PICTURE = 12
_MOST_PIXELS = 32_000
"""Of one side of a picture; matplotlib draws none of 65,536, and few programs show that many."""


def save_png(
    folder: str | os.PathLike[str],
    analysis: Analysis,
    *,
    recorder: TrainingRecorder | History | None = None,
    prune_plan: Any = None,
) -> list[str]:
    """Write the pictures of the page as PNG files: ``sqnr``, ``sensitivity``, ``histograms_1`` ….

    Args:
        folder: Where to; made if need be.
        analysis: What :func:`amct_fx.analyze` returned.
        recorder: History of the training: ``loss`` and ``clips_1`` ….
        prune_plan: What ``amct_fx.prune_plan`` returned: ``prune_plan``; by default the plan of the
            model.

    Returns:
        The paths of the files.

    Raises:
        AmctNotADirectoryError: ``folder`` is a file.
        MissingExtraError: matplotlib is not installed.
    """
    optional("matplotlib", needed_for="drawing PNG files", install="amct-fx[report]")
    place = Path(folder)
    make_folder(place)
    pictures: dict[str, Callable[[], Any]] = {"sqnr": lambda: _sqnr(analysis)}
    if any(layer.sensitivity is not None for layer in analysis.layers):
        pictures["sensitivity"] = lambda: _sensitivity(analysis)
    pictures["network"] = lambda: _network(analysis)
    for start in range(0, len(analysis.layers), _PER_PICTURE):
        part = analysis.layers[start : start + _PER_PICTURE]
        pictures[f"histograms_{start // _PER_PICTURE + 1}"] = functools.partial(_histograms, part)
    if recorder is not None:
        history = history_of(recorder)
        names = list(history.clip_max)
        for start in range(0, len(names), _PER_PICTURE):
            some = names[start : start + _PER_PICTURE]
            pictures[f"clips_{start // _PER_PICTURE + 1}"] = functools.partial(
                _clips, history, some
            )
        if history.scalars:
            pictures["loss"] = lambda: _scalars(history)
    plan = analysis.summary.plan if prune_plan is None else prune_plan
    if plan is not None:
        pictures["prune_plan"] = lambda: _prune_plan(prune_picture(plan))
    return [_write(place / f"{name}.png", draw()) for name, draw in pictures.items()]


def _write(path: Path, figure: Any) -> str:
    longest = max(figure.get_size_inches())
    with replacing(path) as file:
        figure.savefig(file, format="png", dpi=min(120.0, _MOST_PIXELS / longest))
    return str(path)


def _figure(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Any, list[Any]]:
    """Return a figure without matplotlib's global state, and its axes."""
    module = optional("matplotlib.figure", needed_for="a plot", install="amct-fx[report]")
    figure = module.Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def _plain_text(text: str) -> str:
    """Return text that matplotlib does not read as a formula."""
    return one_line(text).replace("$", r"\$")


def _label(name: str) -> str:
    """Return the name of a layer for the margin, which must leave room for the picture."""
    return _plain_text(shortened(name, 40))


def _bar_charts(names: list[str], charts: list[tuple[str, list[float]]], width: float) -> Any:
    """Draw bars for each layer side by side; the names stand once, at the left."""
    figure, axes = _figure(width, 1 + 0.22 * len(names), 1, len(charts))
    positions = range(len(names))
    for index, (axis, (title, values)) in enumerate(zip(axes, charts, strict=True)):
        axis.barh(positions, values, color=[_INPUT if v >= 0 else _WEIGHT for v in values])
        axis.set_yticks(positions, [_label(name) for name in names] if index == 0 else [])
        axis.tick_params(labelsize=8)
        axis.set_ylim(len(names) - 0.4, -0.6)
        axis.set_title(_plain_text(title), fontsize=9)
        axis.grid(axis="x", alpha=0.3)
        axis.set_axisbelow(True)
    return figure


def _sqnr(analysis: Analysis) -> Any:
    kinds = (("output", "output"), ("output_alone", "output, alone"), ("weight", "weight"))
    charts = []
    for key, title in kinds:
        errors = [getattr(layer, key) for layer in analysis.layers]
        values = [e.sqnr if e is not None and math.isfinite(e.sqnr) else math.nan for e in errors]
        charts.append((f"SQNR of the {title} (dB)", values))
    return _bar_charts([layer.name for layer in analysis.layers], charts, 12)


def _sensitivity(analysis: Analysis) -> Any:
    order = [analysis.layer(name) for name in analysis.ranking]
    charts = [
        (
            f"{title}: {analysis.metric}",
            [getattr(layer.sensitivity, key, math.nan) for layer in order],
        )
        for key, title in (("harm", "harm alone"), ("gain", "gain if float"))
    ]
    return _bar_charts([layer.name for layer in order], charts, 10)


def _histograms(layers: tuple[LayerAnalysis, ...]) -> Any:
    figure, axes = _figure(9, 1.5 * len(layers), len(layers), 2)
    for index, layer in enumerate(layers):
        both = (layer.input_histogram, _INPUT), (layer.weight_histogram, _WEIGHT)
        for axis, (found, colour) in zip(axes[2 * index : 2 * index + 2], both, strict=True):
            _draw_histogram(axis, found, colour)
        axes[2 * index].set_ylabel(_label(layer.name), rotation=0, ha="right", fontsize=8)
    for axis, title in zip(axes[:2], ("input", "weight"), strict=True):
        axis.set_title(title, fontsize=9)
    return figure


def _draw_histogram(axis: Any, found: Histogram | None, colour: str) -> None:
    axis.tick_params(labelsize=7)
    axis.set_yticks([])
    if found is None:
        return
    step = (found.high - found.low) / len(found.counts)
    edges = [found.low + index * step for index in range(len(found.counts) + 1)]
    axis.stairs([math.log1p(count) for count in found.counts], edges, fill=True, color=colour)
    for clip in (found.clip_min, found.clip_max):
        if clip is not None:
            axis.axvline(clip, color=_CLIP, linestyle="--", linewidth=1)


def _scalars(history: History) -> Any:
    figure, axes = _figure(8, 2.2 * len(history.scalars), len(history.scalars), 1)
    for axis, (name, (steps, values)) in zip(axes, history.scalars.items(), strict=True):
        axis.plot(steps, values, color=_INPUT)
        axis.set_ylabel(_plain_text(name))
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    return figure


def _clips(history: History, names: list[str]) -> Any:
    figure, axes = _figure(8, 1.4 * len(names), len(names), 1)
    for axis, name in zip(axes, names, strict=True):
        axis.plot(history.steps, history.clip_max[name], color=_INPUT)
        axis.plot(history.steps, history.clip_min[name], color=_WEIGHT)
        axis.set_ylabel(_label(name), rotation=0, ha="right", fontsize=8)
        axis.tick_params(labelsize=7)
        axis.grid(alpha=0.3)
    axes[-1].set_xlabel("step")
    return figure


def _network(analysis: Analysis) -> Any:
    view = analysis.graph
    figure, axes = _figure(1 + 1.7 * view.width, 0.8 + 0.55 * view.height)
    axis = axes[0]
    colours = _heat(analysis)
    for line in view.edges:
        axis.plot([x for x, _ in line], [y for _, y in line], color=_FAINT, lw=0.8, zorder=1)
    for node in view.nodes:
        face, ink = colours.get(node.layer, ("white", "black"))
        style = "dashed" if node.kind == "float" else "solid"
        box = {"boxstyle": "round", "facecolor": face, "edgecolor": _FAINT, "linestyle": style}
        place = {"ha": "center", "va": "center", "fontsize": 7, "color": ink, "bbox": box}
        axis.text(node.x, node.y, _plain_text(node.label), **place)
    for title, row in view.titles:
        axis.text(-0.4, row, _plain_text(title), fontsize=7, color=_FAINT)
    axis.set_xlim(-0.6, view.width - 0.4)
    axis.set_ylim(view.height - 0.4, -0.6)
    axis.axis("off")
    return figure


def _heat(analysis: Analysis) -> dict[str, tuple[Any, str]]:
    """Return the colours of each layer: the more it costs the darker."""
    module = optional("matplotlib", needed_for="a plot", install="amct-fx[report]")
    scale = module.colormaps["Blues"]
    harms = {item.name: item.sensitivity.harm for item in analysis.layers if item.sensitivity}
    worst = max(harms.values(), default=0.0)
    found: dict[str, tuple[Any, str]] = {}
    for name, harm in harms.items():
        share = 0.0
        if harm > 0 and worst > 0:
            share = min(max(1 + 0.4 * math.log10(harm / worst), 0.0), 1.0)
        found[name] = (scale(0.05 + 0.9 * share), "white" if share > 0.55 else "black")
    return found


def _prune_plan(plan: dict[str, Any]) -> Any:
    groups = plan["groups"]
    figure, axes = _figure(10, 1 + 0.4 * len(groups))
    axis = axes[0]
    for row, group in enumerate(groups):
        kept = set(group["kept"])
        cut = [index for index in range(group["channels"]) if index not in kept]
        axis.broken_barh([(index, 0.9) for index in sorted(kept)], (row - 0.35, 0.7), color=_INPUT)
        edges = {"facecolor": "none", "edgecolor": "#b3261e", "linewidth": 0.6}
        axis.broken_barh([(index, 0.9) for index in cut], (row - 0.35, 0.7), **edges)
    labels = [_label(", ".join(group["producers"])) for group in groups]
    axis.set_yticks(range(len(groups)), labels, fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("channel; filled ones stay")
    if plan["totals"]:
        axis.set_title(_plain_text(plan["totals"]), fontsize=9)
    return figure
