"""One self-contained page: table, bars, histograms, history, prune plan, network.

The page needs no network. Its data stands in it as JSON, in which ``<`` is escaped, so no name of a
layer can end the script; the script sets text as text only.
"""

from __future__ import annotations

import html
import json
from dataclasses import asdict
from importlib import resources
from typing import TYPE_CHECKING, Any

from amct_fx.config.files import write_text
from amct_fx.report.prune_picture import prune_picture
from amct_fx.report.recorder import history_of
from amct_fx.report.summary import Summary
from amct_fx.report.table import plain_data

if TYPE_CHECKING:
    import os

    from amct_fx.report.analysis import Analysis, LayerAnalysis
    from amct_fx.report.measures import CodeUse
    from amct_fx.report.recorder import History, TrainingRecorder

__all__ = ["page_data", "save_html"]

_MOST_BARS = 256


def save_html(
    path: str | os.PathLike[str],
    report: Analysis | Summary,
    *,
    recorder: TrainingRecorder | History | None = None,
    prune_plan: Any = None,
    title: str = "amct_fx report",
) -> None:
    """Write one page to look at, with everything in it; written atomically.

    Args:
        path: The file.
        report: What :func:`amct_fx.analyze` returned, or :func:`amct_fx.summarize` for a page
            without measurements.
        recorder: Recorder or history of the training to show.
        prune_plan: What ``amct_fx.prune_plan`` returned; by default the plan of the model.
        title: Title of the page.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from torch import nn
        >>> from amct_fx import prepare_qat_amct, summarize
        >>> summary = summarize(prepare_qat_amct(nn.Sequential(nn.Linear(4, 2))))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     save_html(f"{folder}/report.html", summary, title="My model")
        ...     Path(f"{folder}/report.html").read_text().count("<title>My model</title>")
        1
    """
    write_text(path, render(report, recorder=recorder, prune_plan=prune_plan, title=title))


def render(
    report: Analysis | Summary,
    *,
    recorder: TrainingRecorder | History | None = None,
    prune_plan: Any = None,
    title: str = "amct_fx report",
) -> str:
    """Return the text of the page; arguments as for :func:`save_html`."""
    from amct_fx import __version__

    data = page_data(report, recorder=recorder, prune_plan=prune_plan)
    parts = {
        "@VERSION@": html.escape(__version__),
        "@TITLE@": html.escape(title),
        "@STYLE@": _part("style.css"),
        "@SCRIPT@": _part("script.js"),
        "@DATA@": _json(data),
    }
    page = _part("page.html")
    pieces = []
    while page:
        first = min((p for p in parts if p in page), key=page.index, default=None)
        if first is None:
            break
        before, _, page = page.partition(first)
        pieces += [before, parts[first]]
    return "".join([*pieces, page])


def page_data(
    report: Analysis | Summary,
    *,
    recorder: TrainingRecorder | History | None = None,
    prune_plan: Any = None,
) -> dict[str, Any]:
    """Return what the page draws, as plain data; arguments as for :func:`save_html`."""
    summary = report if isinstance(report, Summary) else report.summary
    analyzed = {} if isinstance(report, Summary) else {item.name: item for item in report.layers}
    plan = summary.plan if prune_plan is None else prune_plan
    layers = []
    for row in (*summary.rows, *summary.others):
        record = {**row.to_dict(), "input_text": row.input, "weight_text": row.weight}
        record["pruning_text"] = row.pruned
        if row.name in analyzed:
            record.update(_figures(analyzed[row.name]))
        layers.append(record)
    data = {
        "layers": layers,
        "islands": [str(island) for island in summary.islands],
        "quantized": summary.quantized,
        "totals": summary.totals,
        "history": None if recorder is None else asdict(history_of(recorder)),
        "prune_plan": None if plan is None else prune_picture(plan),
        **_findings(report),
    }
    plain: dict[str, Any] = plain_data(data)
    return plain


def _findings(report: Analysis | Summary) -> dict[str, Any]:
    """Return what belongs to the whole model."""
    if isinstance(report, Summary):
        return {"metric": None, "notes": [], "suggestions": [], "graph": None}
    output = None if report.output is None else asdict(report.output)
    return {
        "metric": {
            "name": report.metric,
            "float": report.float_value,
            "quantized": report.quantized_value,
            "unquantized": report.unquantized_value,
            "output": output if output is None else {**output, "sqnr": _decibels(output["sqnr"])},
            "batches": report.batches,
            "samples": report.samples,
        },
        "notes": report.notes,
        "suggestions": [{"text": item.text(report.metric)} for item in report.suggestions],
        "graph": asdict(report.graph),
    }


def _figures(layer: LayerAnalysis) -> dict[str, Any]:
    """Return the figures and histograms of one layer."""
    record = layer.record()
    record = {k: _decibels(v) if k.endswith("sqnr") else v for k, v in record.items()}
    dead = [(layer.dead_channels, "out"), (layer.dead_inputs, "in")]
    record["dead"] = "; ".join(f"{word} {_ranges(found)}" for found, word in dead if found)
    for kind in ("input", "weight"):
        histogram, use = getattr(layer, f"{kind}_histogram"), getattr(layer, f"{kind}_codes")
        record[f"{kind}_histogram"] = None if histogram is None else asdict(histogram)
        record[f"{kind}_codes"] = None if use is None else _few(use)
    return record


def _decibels(value: float | None) -> float | str | None:
    """Return an SQNR; of equal tensors it is infinite, which JSON cannot hold."""
    return "exact" if value == float("inf") else value


def _few(use: CodeUse) -> list[int]:
    """Return the counts of the codes, neighbours together where there are very many."""
    step = max(1, len(use.counts) // _MOST_BARS)
    return [sum(use.counts[i : i + step]) for i in range(0, len(use.counts), step)]


def _ranges(numbers: tuple[int, ...], most: int = 12) -> str:
    """Return numbers in words, neighbours together: ``0-3, 7 (5)``."""
    groups: list[list[int]] = []
    for number in numbers:
        if groups and number == groups[-1][-1] + 1:
            groups[-1].append(number)
        else:
            groups.append([number])
    texts = [f"{g[0]}-{g[-1]}" if len(g) > 1 else str(g[0]) for g in groups]
    shown = ", ".join(texts[:most]) + (", …" if len(texts) > most else "")
    return f"{shown} ({len(numbers)})"


def _part(name: str) -> str:
    return (resources.files("amct_fx.report") / "page" / name).read_text(encoding="utf-8")


def _json(data: dict[str, Any]) -> str:
    """Return JSON that can stand in a script element, whatever the names are."""
    text = json.dumps(data, allow_nan=False, ensure_ascii=True, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
