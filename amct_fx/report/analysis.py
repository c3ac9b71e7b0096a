"""What ``analyze`` found: one entry for each layer, a ranking, and what to leave float."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any, TextIO

from amct_fx.config.writer import fields_to_text
from amct_fx.errors import LayerNameError, did_you_mean
from amct_fx.report import table

if TYPE_CHECKING:
    import os

    from amct_fx.report.graph_view import GraphView
    from amct_fx.report.measures import CodeUse, Histogram, TensorError
    from amct_fx.report.recorder import History, TrainingRecorder
    from amct_fx.report.summary import Summary

__all__ = ["Analysis", "LayerAnalysis", "Sensitivity", "Suggestion"]


@dataclass(frozen=True)
class Sensitivity:
    """What quantizing one layer does to the outcome of the whole model.

    Attributes:
        alone_quantized: The metric when only this layer is quantized.
        alone_float: The metric when all layers but this one are quantized.
        harm: By how much ``alone_quantized`` is worse than no layer quantized.
        gain: By how much ``alone_float`` is better than all layers quantized.
        output_mse: Mean squared error of the model's output when only this layer is quantized.
        harm_input: The harm of the quantizer of its input alone, ``None`` if not measured.
        harm_weight: The harm of the quantizer of its weight alone, likewise.
    """

    alone_quantized: float
    alone_float: float
    harm: float
    gain: float
    output_mse: float
    harm_input: float | None = None
    harm_weight: float | None = None


@dataclass(frozen=True)
class LayerAnalysis:
    """One quantized layer.

    Attributes:
        name: Name of the layer in the model.
        type: Class of the float layer.
        calls: How often it ran.
        input: Error of its quantized input in the quantized model, against the float model.
        weight: Error of its quantized weight, against its own float weight.
        output: Error of its output in the quantized model, against the float model.
        output_alone: Error of its output when it is the only quantized layer.
        by_input: The same, with only its input quantized.
        by_weight: The same, with only its weight quantized.
        input_codes: Use of the codes of the input.
        weight_codes: Use of the codes of the weight.
        input_histogram: Values of the input in the quantized model, before its quantizer.
        weight_histogram: Values of the weight.
        dead_channels: Output channels whose weight codes are all 0.
        dead_inputs: Input channels whose codes are the zero point in all batches.
        sensitivity: What it does to the outcome; ``None`` if that was not measured.
    """

    name: str
    type: str
    calls: int
    input: TensorError | None
    weight: TensorError | None
    output: TensorError | None
    output_alone: TensorError | None
    by_input: TensorError | None
    by_weight: TensorError | None
    input_codes: CodeUse | None
    weight_codes: CodeUse | None
    input_histogram: Histogram | None
    weight_histogram: Histogram | None
    dead_channels: tuple[int, ...]
    dead_inputs: tuple[int, ...]
    sensitivity: Sensitivity | None

    def record(self) -> dict[str, Any]:
        """Return the figures as one flat record, without the histograms."""
        found: dict[str, Any] = {"layer": self.name, "type": self.type, "calls": self.calls}
        for name in ("input", "weight", "output", "output_alone", "by_input", "by_weight"):
            error: TensorError | None = getattr(self, name)
            found[f"{name}_sqnr"] = None if error is None else error.sqnr
            found[f"{name}_cosine"] = None if error is None else error.cosine
        for name, use in (("input", self.input_codes), ("weight", self.weight_codes)):
            found[f"{name}_saturated"] = None if use is None else use.saturated
            found[f"{name}_unused_codes"] = None if use is None else use.unused
        found["dead_channels"] = list(self.dead_channels)
        found["dead_inputs"] = list(self.dead_inputs)
        names = [item.name for item in fields(Sensitivity)]
        found.update((name, getattr(self.sensitivity, name, None)) for name in names)
        return found


@dataclass(frozen=True)
class Suggestion:
    """Layers to leave float, and what that brings.

    Attributes:
        layers: Names of the layers, the most useful one first.
        value: The metric with these layers float and all others quantized.
        gain: By how much that is better than all layers quantized.
        reached: Whether it is as good as wanted; ``None`` if nothing was asked for.
        overrides: Overrides of the configuration that quantize some of them: these beat a skip.
    """

    layers: tuple[str, ...]
    value: float
    gain: float
    reached: bool | None = None
    overrides: tuple[str, ...] = ()

    @property
    def cfg(self) -> str:
        """Lines for the ``.cfg`` file; a comment names each override that has to go from it.

        Example:
            >>> print(Suggestion(("stem", "head"), 0.98, 0.004).cfg)
            quant_skip_layers: "stem"
            quant_skip_layers: "head"
        """
        comments = [
            f"# the override for {override} beats a skip: take these layers out of it"
            for override in self.overrides
        ]
        skips = fields_to_text({"quant_skip_layers": self.layers}).rstrip("\n")
        return "\n".join([*comments, skips])

    def text(self, metric: str) -> str:
        """Return the suggestion as a comment and lines of a ``.cfg`` file."""
        what = "this layer" if len(self.layers) == 1 else f"these {len(self.layers)} layers"
        better = f"{metric} {self.value:.6g}, better by {self.gain:.3g}"
        reached = {True: ", as wanted", False: ", not yet as wanted", None: ""}[self.reached]
        return f"# leave {what} float: {better}{reached}\n{self.cfg}"


@dataclass(frozen=True)
class Analysis:
    """What :func:`amct_fx.analyze` found; ``print`` it, or :meth:`save_html` it.

    Attributes:
        layers: All quantized layers that ran, in model order.
        metric: Name of the metric.
        greater_is_better: Whether a greater value of the metric is better.
        float_value: The metric of the float model.
        unquantized_value: The metric of the prepared model with all quantizers off; it differs
            from ``float_value`` when the weights were trained on.
        quantized_value: The metric of the prepared model.
        output: Error of the output of the prepared model, against the float model.
        batches: Number of batches.
        samples: Number of samples in them.
        suggestions: What to leave float, fewest layers first.
        notes: What could not be measured, and why.
        summary: What became of each layer, also of those that stay float.
        graph: The network as a picture.
    """

    layers: tuple[LayerAnalysis, ...]
    metric: str
    greater_is_better: bool
    float_value: float
    unquantized_value: float
    quantized_value: float
    output: TensorError | None
    batches: int
    samples: int
    suggestions: tuple[Suggestion, ...]
    notes: tuple[str, ...]
    summary: Summary = field(repr=False)
    graph: GraphView = field(repr=False)

    @property
    def ranking(self) -> tuple[str, ...]:
        """Names of the layers, the one whose quantization does most harm first."""
        return tuple(layer.name for layer in sorted(self.layers, key=_harm, reverse=True))

    def layer(self, name: str) -> LayerAnalysis:
        """Return the entry of one layer.

        Raises:
            LayerNameError: No quantized layer that ran has that name.
        """
        layers = {layer.name: layer for layer in self.layers}
        if name not in layers:
            message = f"no layer {name!r} was measured{did_you_mean(name, layers)}"
            raise LayerNameError(message)
        return layers[name]

    @property
    def headline(self) -> str:
        """One line: the metric in float and quantized."""
        values = f"{self.float_value:.6g} float, {self.quantized_value:.6g} quantized"
        if self.unquantized_value != self.float_value:
            values += f", {self.unquantized_value:.6g} with all quantizers off"
        error = f"; output {self.output}" if self.output is not None else ""
        return f"{self.metric}: {values}{error}; {self.samples} samples"

    def records(self) -> list[dict[str, Any]]:
        """Return one flat record for each layer, the most harmful first."""
        return [self.layer(name).record() for name in self.ranking]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, histograms included; numbers that are not finite are ``None``."""
        layers = [
            {**asdict(layer), **layer.record(), "rank": self.ranking.index(layer.name) + 1}
            for layer in self.layers
        ]
        found: dict[str, Any] = {name: getattr(self, name) for name in _PLAIN}
        found["output"] = None if self.output is None else asdict(self.output)
        found["ranking"] = self.ranking
        found["layers"] = layers
        found["suggestions"] = [{**asdict(item), "cfg": item.cfg} for item in self.suggestions]
        data: dict[str, Any] = table.plain_data(found)
        return data

    def to_markdown(self) -> str:
        """Return the table in Markdown, the headline above, suggestions below."""
        parts = [table.escaped(self.headline)]
        if self.layers:
            parts.append(table.markdown(self.records()))
        if self.suggestions:
            parts.append(f"```protobuf\n{self._suggested()}\n```")
        parts += [f"- {table.escaped(note)}" for note in self.notes]
        return "\n\n".join(parts)

    def to_dataframe(self) -> Any:
        """Return a ``pandas.DataFrame``, one row for each layer.

        Raises:
            MissingExtraError: pandas is not installed.
        """
        return table.dataframe(self.records())

    def show(self, file: TextIO | None = None) -> None:
        """Print a rich table in a terminal, plain text otherwise.

        Args:
            file: Where to; standard output by default.
        """
        table.show(self, self.__rich__, file)

    def save_html(
        self,
        path: str | os.PathLike[str],
        *,
        recorder: TrainingRecorder | History | None = None,
        prune_plan: Any = None,
        title: str = "amct_fx report",
    ) -> None:
        """Write one self-contained page; arguments as for :func:`amct_fx.report.save_html`."""
        from amct_fx.report.html import save_html

        save_html(path, self, recorder=recorder, prune_plan=prune_plan, title=title)

    def save_png(
        self,
        folder: str | os.PathLike[str],
        *,
        recorder: TrainingRecorder | History | None = None,
        prune_plan: Any = None,
    ) -> list[str]:
        """Write the pictures of the page as PNG files, see :func:`amct_fx.report.save_png`."""
        from amct_fx.report.plots import save_png

        return save_png(folder, self, recorder=recorder, prune_plan=prune_plan)

    def _rows(self) -> list[list[str]]:
        return [[table.cell(row[key]) for key, _ in _COLUMNS] for row in _short(self.records())]

    def _notes_below(self) -> str:
        parts = [self.headline, *([self._suggested()] if self.suggestions else []), *self.notes]
        return "\n".join(parts)

    def _suggested(self) -> str:
        """Return all suggestions; they can be told apart by their comments."""
        return "\n".join(item.text(self.metric) for item in self.suggestions)

    def __rich__(self) -> Any:
        """Return the table for rich."""
        return table.FiguresTable(_HEADER, self._rows(), note=self._notes_below())

    def __str__(self) -> str:
        """Return an aligned table, the most harmful layer first, and what to leave float."""
        lines = table.plain(*table.filled(_HEADER, self._rows()))
        return "\n".join([*lines, self._notes_below()])


def _harm(layer: LayerAnalysis) -> tuple[float, float]:
    """Order layers by the harm they do; where the metric cannot tell, by the error they make."""
    if layer.sensitivity is None:
        return 0.0, -layer.output_alone.sqnr if layer.output_alone is not None else 0.0
    harm = layer.sensitivity.harm
    return (math.inf if math.isnan(harm) else harm), layer.sensitivity.output_mse


_PLAIN = (
    "metric",
    "greater_is_better",
    "float_value",
    "unquantized_value",
    "quantized_value",
    "batches",
    "samples",
    "notes",
)

_COLUMNS = (
    ("layer", "layer"),
    ("type", "type"),
    ("harm", "harm alone"),
    ("harm_input", "… by input"),
    ("harm_weight", "… by weight"),
    ("gain", "gain if float"),
    ("input_sqnr", "input dB"),
    ("weight_sqnr", "weight dB"),
    ("output_sqnr", "output dB"),
    ("output_alone_sqnr", "alone dB"),
    ("output_cosine", "cosine"),
    ("input_saturated", "saturated"),
    ("input_unused_codes", "unused codes"),
    ("dead", "dead channels"),
)
_HEADER = tuple(title for _, title in _COLUMNS)


def _short(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return records whose figures are rounded as people read them."""
    for record in records:
        for key in record:
            if key.endswith("sqnr") and record[key] is not None:
                record[key] = f"{record[key]:.1f}"
            elif isinstance(record[key], float):
                record[key] = f"{record[key]:.4g}"
        dead = [
            f"{len(record[key])} {word}"
            for key, word in (("dead_channels", "out"), ("dead_inputs", "in"))
            if record[key]
        ]
        record["dead"] = ", ".join(dead)
    return records
