"""The commands ``amct-fx config``: check, show and convert configuration files.

What is wrong with a file is an error that the command ``amct-fx`` prints; here the line of the file
is added to it, with a caret under the column.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from amct_fx.backend_config import is_layer, model_facts
from amct_fx.checks import check_float_model
from amct_fx.cli_tools import AsJson, example, explained, make_model, print_json
from amct_fx.config import CompressionConfig, ModelFacts, Resolution, load_config, resolve
from amct_fx.config.distill import DistillConfig, load_distill_config, resolve_distill
from amct_fx.config.rewrite import rewrite_config
from amct_fx.config.show import format_rows, rows
from amct_fx.distillation import distill_facts, find_groups
from amct_fx.errors import AmctError
from amct_fx.graph import capture

if TYPE_CHECKING:
    from torch import nn

__all__ = ["app"]

app = typer.Typer(no_args_is_help=True, help="Check, show and convert configuration files.")


class Dialect(str, Enum):
    """How a file is read; the names are those of :func:`amct_fx.load_config`."""

    AUTO = "auto"
    PYTORCH = "pytorch"
    MINDSPORE = "mindspore"


File = Annotated[Path, typer.Argument(metavar="FILE", help="A .cfg or JSON file.")]
ModelName = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="PKG.MOD:FACTORY",
        help="What makes the model: a function or class without arguments, or a module object.",
    ),
]
NeededModelName = Annotated[
    str, typer.Option("--model", metavar="PKG.MOD:FACTORY", help="What makes the model.")
]
DialectName = Annotated[Dialect, typer.Option("--dialect", help="How the file is read.")]
Renames = Annotated[
    list[str] | None,
    typer.Option("--rename", metavar="OLD=NEW", help="New name of a layer; may be repeated."),
]
IsDistill = Annotated[
    bool, typer.Option("--distill", help="The file is a .cfg file of distillation.")
]
ChannelWise = Annotated[
    bool,
    typer.Option("--linear-channel-wise", help="Allow a scale per output of a Linear, by name."),
]


@app.command(epilog=example("amct-fx config check quant.cfg --model my.models:make"))
def check(
    file: File,
    model: ModelName = None,
    dialect: DialectName = Dialect.AUTO,
    rename: Renames = None,
    distill: IsDistill = False,
    linear_channel_wise: ChannelWise = False,
    as_json: AsJson = False,
) -> None:
    """Say whether a file is right, and with --model whether it fits the model."""
    options = _Options(dialect, _name_map(rename), distill, linear_channel_wise)
    network = None if model is None else make_model(model)
    report: dict[str, Any] = {"file": str(file), "ok": False, "error": None, "warnings": []}
    try:
        with explained(report["warnings"]):
            config = options.load(file)
            headline = "" if network is None else f": {options.plan(config, network).headline}"
        report["ok"] = True
    except (AmctError, OSError) as error:
        place = (getattr(error, key, None) for key in ("message", "line", "column"))
        report["error"] = dict(zip(("message", "line", "column"), place, strict=True))
        report["error"]["message"] = report["error"]["message"] or str(error)
        raise
    finally:
        if as_json:
            print_json(report)
    if not as_json:
        typer.echo(f"{file}: OK{headline}")


@app.command(epilog=example("amct-fx config show quant.cfg --model my.models:make"))
def show(
    file: File,
    model: NeededModelName,
    dialect: DialectName = Dialect.AUTO,
    rename: Renames = None,
    distill: IsDistill = False,
    linear_channel_wise: ChannelWise = False,
    as_json: AsJson = False,
) -> None:
    """Print what a file does to each layer of a model, which line says so, and why not."""
    options = _Options(dialect, _name_map(rename), distill, linear_channel_wise)
    network = make_model(model)
    with explained():
        plan = options.plan(options.load(file), network)
    table = rows(plan.resolution, plan.facts)
    if as_json:
        groups = {} if plan.groups is None else {"groups": plan.groups}
        print_json({"layers": [asdict(row) for row in table], **groups})
        return
    lines = [format_rows(table), *(f"group: {', '.join(group)}" for group in plan.groups or ())]
    typer.echo("\n".join([*lines, plan.headline]))


@app.command(epilog=example("amct-fx config convert quant.cfg quant.json --model my.models:make"))
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="A .cfg or JSON file.")],
    target: Annotated[
        Path, typer.Argument(metavar="OUT", help="The new file: .json, or else a PyTorch .cfg.")
    ],
    model: ModelName = None,
    dialect: DialectName = Dialect.AUTO,
    rename: Renames = None,
    as_json: AsJson = False,
) -> None:
    """Write a file as one of another kind; from .cfg to JSON it takes --model."""
    name_map = _name_map(rename)
    network = None if model is None else make_model(model)
    with explained():
        config = load_config(source, dialect=dialect.value, name_map=name_map)
        to_json = target.suffix.lower() == ".json"
        if to_json and network is None and not config.resolved:
            message = "the JSON lists the layers of a model; say which one"
            raise typer.BadParameter(message, param_hint="--model")
        facts = None
        if network is not None:
            check_float_model(network)
            facts = model_facts(network, capture(network, is_layer))
        rewrite_config(config, target, facts=facts, dialect=dialect.value)
    if as_json:
        print_json({"file": str(target)})
    else:
        typer.echo(f"wrote {target}")


@dataclass(frozen=True)
class _Plan:
    """What a configuration does to a model."""

    facts: ModelFacts
    resolution: Resolution
    groups: list[list[str]] | None = None

    @property
    def headline(self) -> str:
        """How many layers are compressed."""
        specs = self.resolution.layers.values()
        quantized = sum(spec.quantize for spec in specs)
        parts = [f"{quantized} of {len(self.facts.layers)} layers quantized"]
        if self.resolution.prune:
            parts.append(f"{sum(spec.prune is not None for spec in specs)} pruned")
        if self.groups is not None:
            parts.append(f"{len(self.groups)} groups")
        return ", ".join(parts)


@dataclass(frozen=True)
class _Options:
    """How a file is read, and how it meets a model."""

    dialect: Dialect
    name_map: dict[str, str] | None
    distill: bool
    linear_channel_wise: bool

    def load(self, file: Path) -> CompressionConfig | DistillConfig:
        """Read a file."""
        if self.distill:
            return load_distill_config(file)
        return load_config(file, dialect=self.dialect.value, name_map=self.name_map)

    def plan(self, config: CompressionConfig | DistillConfig, model: nn.Module) -> _Plan:
        """Resolve a configuration for a model."""
        check_float_model(model)
        captured = capture(model, is_layer)
        wise = self.linear_channel_wise
        if isinstance(config, CompressionConfig):
            facts = model_facts(model, captured)
            dialect = self.dialect.value
            resolution = resolve(config, facts, linear_channel_wise=wise, dialect=dialect)
            return _Plan(facts, resolution)
        facts = distill_facts(model, captured)
        resolution = resolve_distill(config, facts, linear_channel_wise=wise)
        user_groups, size = config.groups, config.group_size
        groups = find_groups(model, captured, facts, user_groups=user_groups, group_size=size)
        return _Plan(facts, resolution, [list(group.names) for group in groups])


def _name_map(renames: list[str] | None) -> dict[str, str] | None:
    """Return the map of ``--rename`` options."""
    pairs = [rename.partition("=") for rename in renames or ()]
    for old, equals, new in pairs:
        if not (old and equals and new):
            message = f"write OLD=NEW, not {old + equals + new!r}"
            raise typer.BadParameter(message, param_hint="--rename")
    return {old: new for old, _, new in pairs} or None
