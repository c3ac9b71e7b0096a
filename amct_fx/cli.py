"""The command ``amct-fx``.

Errors that amct_fx raises on purpose, and those of the user's own code, end a command with their
message and exit code 1; with ``amct-fx --traceback ...`` the traceback is shown too. Wrong usage
ends with exit code 2, and a file that ``verify`` finds to differ with 3.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from traceback import format_exception
from typing import TYPE_CHECKING, Annotated, Any

import amct_fx
from amct_fx.config.files import write_text
from amct_fx.errors import AmctError
from amct_fx.report.progress import progress_bars

try:
    import typer
    from rich.console import Console
    from rich.table import Table
    from typer.core import TyperGroup

    from amct_fx import cli_config, cli_deploy, cli_report
    from amct_fx.cli_deploy import quiet_exporter
    from amct_fx.cli_tools import example, writable_file
except ModuleNotFoundError as missing:
    # Only the script imports this module, so ending it here is its whole error message.
    _hint = f"amct-fx needs {missing.name}: python -m pip install 'amct-fx[cli]'"
    raise SystemExit(_hint) from missing

if TYPE_CHECKING:
    from amct_fx_demo import DemoResult

__all__ = ["app", "main"]


class _Commands(TyperGroup):
    """The commands, with errors turned into messages."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that ``ctx`` names."""
        try:
            return super().invoke(ctx)
        except (AmctError, OSError) as error:
            if ctx.params["traceback"]:
                raise
            notes: list[str] = getattr(error, "__notes__", [])
            typer.echo("\n".join([f"error: {_sentence(error)}", *notes]), err=True)
            raise typer.Exit(1) from error
        except typer.BadParameter as error:
            if ctx.params["traceback"] and error.__cause__ is not None:
                typer.echo("".join(format_exception(error.__cause__)), err=True)
            raise


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Compression of PyTorch models for Ascend NPUs, driven by AMCT .cfg files.",
    epilog=example("amct-fx summary my.models:make --cfg quant.cfg"),
)
app.add_typer(cli_config.app, name="config")
cli_report.add_commands(app)
cli_deploy.add_commands(app)


def _sentence(error: Exception) -> str:
    """Return the message of an error; one of the system without its number."""
    if not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    return error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"


def main() -> None:
    """Run the command line."""
    app()


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"amct-fx {amct_fx.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
    traceback: Annotated[
        bool, typer.Option("--traceback", help="Show the traceback of an error.")
    ] = False,
) -> None:
    """Options of every command; ``_print_version`` and ``_Commands`` act on them."""


@app.command(epilog=example("amct-fx demo --epochs 5 --json figures.json"))
def demo(
    json_file: Annotated[
        Path | None,
        typer.Option(
            "--json", metavar="FILE", callback=writable_file, help="Write the figures here."
        ),
    ] = None,
    seed: Annotated[
        int, typer.Option(min=0, max=2**63 - 1, help="Start weights and order of the images.")
    ] = 0,
    epochs: Annotated[
        int, typer.Option(min=1, help="Epochs in float; a third as many follow quantized.")
    ] = 20,
) -> None:
    """Train, quantize, convert and export a small CNN on the digits of scikit-learn.

    Prints the accuracy of each model, the sizes of the ONNX files, and how well the codes of
    PyTorch and onnxruntime agree.
    """
    try:
        from amct_fx_demo import run_demo
    except ModuleNotFoundError as missing:
        message = f"the demo needs {missing.name}: python -m pip install 'amct-fx[demo]'"
        raise AmctError(message) from missing
    with quiet_exporter(), progress_bars() as report:
        result = run_demo(seed=seed, epochs=epochs, report=report)
    Console().print(_demo_table(result))
    if json_file is not None:
        write_text(json_file, json.dumps(dataclasses.asdict(result), indent=2) + "\n")


def _demo_table(result: DemoResult) -> Table:
    ratio = result.int8_onnx_bytes / result.float_onnx_bytes
    table = Table("Digits, held-out third", "", title="amct-fx demo")
    table.columns[1].justify = "right"
    table.add_row("accuracy: float", f"{result.float_accuracy:.4f}")
    table.add_row("accuracy: prepared (INT8 simulated)", f"{result.prepared_accuracy:.4f}")
    table.add_row("accuracy: converted (INT8 in PyTorch)", f"{result.converted_accuracy:.4f}")
    table.add_row("accuracy: INT8 in onnxruntime", f"{result.onnxruntime_accuracy:.4f}")
    table.add_section()
    table.add_row("float ONNX file", f"{result.float_onnx_bytes:,} bytes")
    table.add_row(f"INT8 ONNX file ({ratio:.2f} x float)", f"{result.int8_onnx_bytes:,} bytes")
    table.add_section()
    table.add_row("equal codes, PyTorch and onnxruntime", f"{result.equal_codes:.3%}")
    table.add_row("largest difference of two codes", f"{result.max_code_difference}")
    table.add_section()
    table.add_row("time", f"{result.seconds:.1f} s")
    return table


if __name__ == "__main__":
    main()
