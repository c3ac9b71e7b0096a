"""The commands ``prune-plan``, ``export`` and ``verify``."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amct_fx.cli_tools import (
    AsJson,
    Cfg,
    FloatFactory,
    Source,
    example,
    explained,
    load_source,
    make_inputs,
    make_model,
    make_object,
    print_json,
    user_code,
)
from amct_fx.errors import ModelStateError
from amct_fx.onnx import export_onnx, verify_onnx
from amct_fx.onnx.arguments import FORMATS
from amct_fx.prune import prune_plan
from amct_fx.report.batches import Batches, device_of
from amct_fx.report.table import plain_data

if TYPE_CHECKING:
    from torch import nn

__all__ = ["add_commands", "quiet_exporter"]

_DIFFERS = 3
"""Exit code of ``verify`` when the file computes something else than the model."""

Format = Enum("Format", {name: name for name in FORMATS}, type=str)  # type: ignore[misc]


class Exporter(str, Enum):
    """PyTorch's exporters; see :func:`amct_fx.export_onnx`."""

    AUTO = "auto"
    DYNAMO = "dynamo"
    TORCHSCRIPT = "torchscript"


class Mode(str, Enum):
    """How far channels are followed; see :func:`amct_fx.prune_plan`."""

    NATIVE = "native"
    AMCT = "amct"


Inputs = Annotated[
    list[str] | None,
    typer.Option(
        "--input",
        metavar="SHAPE",
        help="Random input of this shape, such as 1x3x224x224; may be repeated.",
    ),
]
InputData = Annotated[
    str | None,
    typer.Option("--data", metavar="PKG.MOD:NAME", help="Take the inputs of the first batch."),
]
Opset = Annotated[int | None, typer.Option("--opset", help="Version of ONNX's operators.")]
DynamicBatch = Annotated[
    bool, typer.Option("--dynamic-batch", help="Let the batch size of the file vary.")
]


def add_commands(app: typer.Typer) -> None:
    """Add the commands to ``amct-fx``."""
    app.command(
        name="prune-plan",
        epilog=example("amct-fx prune-plan my.models:make prune.cfg --input 1x3x224x224"),
    )(prune_plan_command)
    app.command(
        epilog=example(
            "amct-fx export qat.pt model.onnx --model my.models:make --input 1x3x224x224",
        )
    )(export)
    app.command(
        epilog=example(
            "amct-fx verify model.onnx qat.pt --model my.models:make --data my.data:validation",
        )
    )(verify)


def prune_plan_command(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="PKG.MOD:FACTORY that makes the float model."),
    ],
    cfg: Annotated[Path, typer.Argument(metavar="CFG", help="A .cfg file with pruning.")],
    inputs: Inputs = None,
    data: InputData = None,
    mode: Annotated[
        Mode, typer.Option("--mode", help="Follow channels as far as possible, or as AMCT does.")
    ] = Mode.NATIVE,
    as_json: AsJson = False,
) -> None:
    """Print which channels a configuration would cut, and why the others stay.

    Without --input or --data usual shapes of the input are tried.
    """
    network = make_model(model, "MODEL")
    arguments = None if inputs is None and data is None else _arguments(network, inputs, data)
    with explained(), user_code(model):
        plan = prune_plan(network, str(cfg), arguments, mode=mode.value)
    typer.echo(plan.to_json(indent=2) if as_json else str(plan))


def export(
    source: Source,
    output: Annotated[Path, typer.Argument(metavar="FILE", help="The ONNX file to write.")],
    model: FloatFactory = None,
    cfg: Cfg = None,
    inputs: Inputs = None,
    data: InputData = None,
    format: Annotated[
        Format, typer.Option("--format", help="What the file is for; see the documentation.")
    ] = Format.qdq,  # type: ignore[attr-defined]
    opset: Opset = None,
    dynamic_batch: DynamicBatch = False,
    exporter: Annotated[
        Exporter, typer.Option("--exporter", help="PyTorch's exporter.")
    ] = Exporter.AUTO,
    as_json: AsJson = False,
) -> None:
    """Write a trained model as an ONNX file: for onnxruntime, for Ascend's ATC, or simulated."""
    network = _trained(source, model, cfg)
    arguments = _arguments(network, inputs, data)
    with quiet_exporter(), explained(), user_code(source):
        export_onnx(
            network,
            arguments,
            output,
            format=format.value,
            opset=opset,
            dynamic_batch=dynamic_batch,
            exporter=exporter.value,
        )
    size = output.stat().st_size
    if as_json:
        print_json({"file": str(output), "format": format.value, "bytes": size})
    else:
        typer.echo(f"wrote {output}: {format.value}, {size:,} bytes")


def verify(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The ONNX file.")],
    source: Source,
    model: FloatFactory = None,
    cfg: Cfg = None,
    inputs: Inputs = None,
    data: InputData = None,
    as_json: AsJson = False,
) -> None:
    """Compare a file with the model that it was made of, layer by layer.

    Ends with exit code 3 if some layer of the file computes something else.
    """
    network = _trained(source, model, cfg)
    arguments = _arguments(network, inputs, data)
    with quiet_exporter(), explained(), user_code(source):
        found = verify_onnx(file, network, arguments)
    if as_json:
        rows = [asdict(row) for row in found.rows]
        figures = {"passed": found.passed, "first_diverging": found.first_diverging}
        output = found.output_sqnr if math.isfinite(found.output_sqnr) else None
        print_json(plain_data({"file": str(file), **figures, "output_sqnr": output, "rows": rows}))
    else:
        typer.echo(str(found))
    if not found.passed:
        raise typer.Exit(_DIFFERS)


def _trained(source: str, factory: str | None, cfg: Path | None) -> nn.Module:
    """Return the model that the arguments describe, if it can be exported."""
    network = load_source(source, factory, cfg)
    if not all(getattr(part, "is_calibrated", True) for part in network.modules()):
        message = (
            f"{source} was never calibrated; give the checkpoint of a trained model, which "
            "amct_fx.save_checkpoint writes, or a factory that returns a trained model"
        )
        raise ModelStateError(message)
    return network


def _arguments(network: nn.Module, inputs: list[str] | None, data: str | None) -> tuple[Any, ...]:
    """Return the example inputs that the options describe."""
    if (inputs is None) == (data is None):
        message = "say what the model takes, by --input SHAPE or by --data PKG.MOD:NAME"
        message += "" if inputs is None else "; not by both"
        raise typer.BadParameter(message, param_hint="--input")
    if data is None:
        return make_inputs(inputs, device_of(network))
    batch = next(iter(Batches(make_object(data, "--data"), 1)))
    first = batch[0] if isinstance(batch, (tuple, list)) else batch
    return tuple(first) if isinstance(first, (tuple, list)) else (first,)


@contextmanager
def quiet_exporter() -> Iterator[None]:
    """Keep the exporter's notes to its own developers off the terminal; errors still show."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            for category in (FutureWarning, DeprecationWarning):
                warnings.simplefilter("ignore", category)
            yield
    finally:
        logger.setLevel(level)
