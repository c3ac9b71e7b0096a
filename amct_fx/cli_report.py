"""The commands that show what became of a model: ``summary``, ``analyze``, ``report``."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn
from torch.ao.quantization import FakeQuantizeBase

from amct_fx.cli_tools import (
    AsJson,
    Cfg,
    Device,
    FloatFactory,
    Source,
    example,
    explained,
    find_object,
    load_source,
    make_model,
    make_object,
    print_json,
    user_code,
    writable_file,
)
from amct_fx.errors import InputDataError
from amct_fx.report import Analysis, History, Summary, analyze, save_html, save_png, summarize
from amct_fx.report.batches import Batches, device_of, moved, run_batch

__all__ = ["add_commands"]

Data = Annotated[
    str,
    typer.Option(
        "--data",
        metavar="PKG.MOD:NAME",
        help="Batches: an iterable, or a function without arguments that returns one.",
    ),
]
OptionalData = Annotated[
    str | None, typer.Option("--data", metavar="PKG.MOD:NAME", help="Batches to analyze with.")
]
MetricName = Annotated[
    str | None,
    typer.Option(
        "--metric",
        metavar="PKG.MOD:FUNCTION",
        help="function(output, batch) that returns a number; by default the output's MSE.",
    ),
]
SmallerIsBetter = Annotated[bool, typer.Option("--smaller-is-better", help="The metric is a loss.")]
FloatReference = Annotated[
    str | None,
    typer.Option(
        "--float-model",
        metavar="PKG.MOD:FACTORY",
        help="Compare with this float model; by default with all quantizers off.",
    ),
]
NumBatches = Annotated[
    int | None, typer.Option("--batches", min=1, help="Use only so many batches.")
]
Wanted = Annotated[
    float | None, typer.Option("--wanted", help="Leave layers float until the metric is this good.")
]
EachQuantizer = Annotated[
    bool, typer.Option("--each-quantizer", help="Switch on each quantizer alone, too.")
]
MaxSkips = Annotated[int, typer.Option("--max-skips", min=0, help="Number of suggestions.")]
PngFolder = Annotated[
    Path | None, typer.Option("--png", metavar="FOLDER", help="Write the pictures as PNG, too.")
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to ``amct-fx``."""
    app.command(
        epilog=example(
            "amct-fx summary my.models:make --cfg quant.cfg",
            "amct-fx summary qat.pt --model my.models:make --json",
        )
    )(summary)
    app.command(
        name="analyze",
        epilog=example(
            "amct-fx analyze qat.pt --model my.models:make --data my.data:validation "
            "--metric my.data:accuracy --batches 8"
        ),
    )(analyze_command)
    app.command(
        epilog=example(
            "amct-fx report qat.pt --model my.models:make --data my.data:validation "
            "--output report.html"
        )
    )(report)


def summary(
    source: Source,
    model: FloatFactory = None,
    cfg: Cfg = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print Markdown.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print what became of each layer, and why a layer stays float.

    A float model is prepared first, with --cfg or the defaults.
    """
    found = summarize(load_source(source, model, cfg))
    if as_json:
        print_json(found.to_dict())
    elif markdown:
        typer.echo(found.to_markdown())
    else:
        found.show()


def analyze_command(
    source: Source,
    data: Data,
    model: FloatFactory = None,
    cfg: Cfg = None,
    metric: MetricName = None,
    smaller_is_better: SmallerIsBetter = False,
    float_model: FloatReference = None,
    wanted: Wanted = None,
    max_skips: MaxSkips = 3,
    each_quantizer: EachQuantizer = False,
    batches: NumBatches = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Print which layers lose accuracy by quantization, and what to leave float.

    A model that was never calibrated is calibrated with the first batches of the data.
    """
    prepared = load_source(source, model, cfg, device)
    found = _analysis(
        prepared,
        data,
        metric=_metric(metric),
        greater_is_better=not smaller_is_better,
        float_model=_float_model(float_model, prepared),
        wanted=wanted,
        max_skips=max_skips,
        each_quantizer=each_quantizer,
        num_batches=batches,
    )
    if as_json:
        print_json(found.to_dict())
    else:
        found.show()


def report(
    source: Source,
    output: Annotated[
        Path,
        typer.Option(
            *("--output", "-o"),
            metavar="FILE",
            callback=writable_file,
            help="The HTML page to write.",
        ),
    ] = Path("report.html"),
    data: OptionalData = None,
    model: FloatFactory = None,
    cfg: Cfg = None,
    metric: MetricName = None,
    smaller_is_better: SmallerIsBetter = False,
    float_model: FloatReference = None,
    batches: NumBatches = None,
    history: Annotated[
        Path | None,
        typer.Option(
            "--history", metavar="FILE", help="JSON of TrainingRecorder.to_dict() to show."
        ),
    ] = None,
    title: Annotated[str, typer.Option("--title", help="Title of the page.")] = "amct_fx report",
    png: PngFolder = None,
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Write one HTML page to look at: layers, errors, histograms, network.

    With --data it shows what analyze measures; without, what summary prints.
    """
    past = None if history is None else _read_history(history)
    prepared = load_source(source, model, cfg, device)
    found: Analysis | Summary = summarize(prepared)
    if data is not None:
        found = _analysis(
            prepared,
            data,
            metric=_metric(metric),
            greater_is_better=not smaller_is_better,
            float_model=_float_model(float_model, prepared),
            num_batches=batches,
        )
    elif png is not None:
        message = "the pictures show what --data measures; say which data"
        raise typer.BadParameter(message, param_hint="--png")
    save_html(output, found, recorder=past, title=title)
    files = [str(output)]
    if png is not None and isinstance(found, Analysis):
        files += save_png(png, found, recorder=past)
    if as_json:
        print_json({"files": files, **found.to_dict()})
    else:
        typer.echo("\n".join(f"wrote {file}" for file in files))


def _analysis(prepared: nn.Module, data: str, **options: Any) -> Analysis:
    """Calibrate if need be, and analyze."""
    batches = Batches(make_object(data, "--data"), options.pop("num_batches"))
    with user_code(data), explained():
        _calibrate(prepared, batches)
        return analyze(prepared, options.pop("float_model"), batches, **options)


def _calibrate(model: nn.Module, batches: Batches) -> None:
    """Run batches through a model until its ranges are known; nothing if they are."""
    quantizers = [part for part in model.modules() if isinstance(part, FakeQuantizeBase)]
    inputs = [part for part in quantizers if hasattr(part, "clip_max")]
    if any(getattr(part, "is_calibrated", True) for part in inputs):
        return
    device = device_of(model)
    number = max((getattr(part, "batch_num", 1) for part in inputs), default=1)
    training = model.training
    model.eval()
    done = 0
    with torch.no_grad():
        while done < number:
            for batch in batches:
                run_batch(model, moved(batch, device), done, None)
                done += 1
                if done >= number:
                    break
    model.train(training)


def _metric(name: str | None) -> Any:
    if name is None:
        return None
    found = find_object(name, "--metric")
    if not callable(found):
        message = f"{name!r} is a {type(found).__name__}, not a function(output, batch)"
        raise typer.BadParameter(message, param_hint="--metric")

    @functools.wraps(found)
    def metric(output: Any, batch: Any) -> Any:
        with user_code(name):
            return found(output, batch)

    return metric


def _float_model(name: str | None, prepared: nn.Module) -> nn.Module | None:
    """Return the float model to compare with, on the device of the prepared one."""
    if name is None:
        return None
    return make_model(name, "--float-model").to(device_of(prepared))


def _read_history(path: Path) -> History:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        return History(**found.get("history", found))
    except (ValueError, TypeError, AttributeError) as error:
        message = f"{path} is not what TrainingRecorder.to_dict() returns: {error}"
        raise InputDataError(message) from error
