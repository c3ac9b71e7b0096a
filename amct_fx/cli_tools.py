"""What the commands share: models and data from the command line, messages, JSON."""

from __future__ import annotations

import difflib
import importlib
import json
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import reduce
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import torch
import typer
from torch import nn

from amct_fx.checkpoint import load_checkpoint
from amct_fx.config.show import point_at
from amct_fx.errors import AmctError, AmctWarning, ConfigError
from amct_fx.nn.qat import QATLayer
from amct_fx.nn.quantized import QuantizedLayer
from amct_fx.prepare import prepare_qat_amct

__all__ = [
    "AsJson",
    "Cfg",
    "Device",
    "FloatFactory",
    "Source",
    "example",
    "explained",
    "find_object",
    "load_source",
    "make_inputs",
    "make_model",
    "make_object",
    "print_json",
    "user_code",
    "writable_file",
]

AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Source = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="PKG.MOD:FACTORY that makes the model, or a file of amct_fx.save_checkpoint.",
    ),
]
FloatFactory = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="PKG.MOD:FACTORY",
        help="What makes the float model that MODEL, a checkpoint, was prepared from.",
    ),
]
Cfg = Annotated[
    Path | None,
    typer.Option("--cfg", metavar="FILE", help="Prepare the float model with this .cfg or JSON."),
]
Device = Annotated[
    str | None, typer.Option("--device", help="Where the model runs, such as cuda:0.")
]


def example(*lines: str) -> str:
    """Return the end of a help text."""
    return "\n\n".join(["Example:", *lines])


def find_object(name: str, option: str = "--model") -> Any:
    """Return what ``pkg.mod:name.of.attribute`` names; the current folder can be imported from."""
    module, _, path = name.partition(":")
    try:
        imported = _import(module)
        return reduce(getattr, path.split("."), imported)
    except (ModuleNotFoundError, AttributeError) as error:
        message = (
            f"{name!r} names nothing that can be imported as PKG.MOD:FACTORY: "
            f"{_cause_and_remedy(name, error)}"
        )
        raise typer.BadParameter(message, param_hint=option) from error


def _import(module: str) -> ModuleType:
    """Import a module of the user's.

    Raises:
        ModuleNotFoundError: There is none, or it imports one that is not there.
        AmctError: It raised another error.
    """
    if not all(part.isidentifier() for part in module.split(".")):
        message = f"{module!r} is no name of a module"
        raise ModuleNotFoundError(message)
    try:
        with _current_folder():
            return importlib.import_module(module)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # whatever the user's module raises
        what = f"the import of {module}"
        raise _failed(what, error) from error


def _cause_and_remedy(name: str, error: Exception) -> str:
    """Return why a name cannot be imported, and what to write instead."""
    module, colon, path = name.partition(":")
    if module.endswith(".py") or "/" in module:
        dotted = module.removesuffix(".py").lstrip("./").replace("/", ".")
        return f"name the module as an import does, not its file: {dotted}:{path or 'FACTORY'}"
    if not path:
        return f"say what in the module: {module}:FACTORY" if colon else f"{name!r} has no colon"
    if isinstance(error, ModuleNotFoundError) and error.name in _parents(module):
        return f"{error}; start in the folder that {error.name} is imported from, or install it"
    if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
        names = [known for known in vars(error.obj) if not known.startswith("_")]
        close = difflib.get_close_matches(str(error.name), names, n=1)
        return f"{error}" + (f"; did you mean {close[0]!r}?" if close else "")
    return str(error)


def _parents(module: str) -> set[str]:
    """Return a dotted name and all that stands before its dots."""
    parts = module.split(".")
    return {".".join(parts[:count]) for count in range(1, len(parts) + 1)}


def make_object(name: str, option: str) -> Any:
    """Return what a name stands for: an object, or what a function without arguments returns."""
    found = find_object(name, option)
    is_factory = callable(found) and not isinstance(found, nn.Module)
    if not is_factory or (hasattr(found, "__iter__") and not isinstance(found, type)):
        return found
    try:
        with _current_folder():
            return found()
    except Exception as error:  # whatever the user's code raises
        raise _failed(name, error) from error


def make_model(name: str, option: str = "--model") -> nn.Module:
    """Return the model that ``pkg.mod:factory`` makes; the current folder can be imported from."""
    found = find_object(name, option)
    if not callable(found):  # a module is callable, too
        kind = type(found).__name__
        message = f"{name!r}, of type {kind}, makes no model; name a function or class that does"
        raise typer.BadParameter(message, param_hint=option)
    model = make_object(name, option)
    if not isinstance(model, nn.Module):
        message = f"{name!r} makes a {type(model).__name__}, not a torch.nn.Module"
        raise typer.BadParameter(message, param_hint=option)
    return model


def load_source(
    source: str, factory: str | None = None, cfg: Path | None = None, device: str | None = None
) -> nn.Module:
    """Return the model that the arguments of a command describe.

    Args:
        source: ``pkg.mod:factory``, or the path of a checkpoint.
        factory: What makes the float model of a checkpoint.
        cfg: The configuration to prepare a float model with.
        device: Where to put it.

    Raises:
        BadParameter: They do not fit together.
    """
    is_file = Path(source).exists() or ":" not in source
    if is_file and factory is None:
        message = (
            f"{source} is a checkpoint, which holds no code: say what makes the float model, "
            "--model PKG.MOD:FACTORY"
            if Path(source).exists()
            else f"there is no file {source!r}; what makes a model is written PKG.MOD:FACTORY"
        )
        raise typer.BadParameter(message, param_hint="MODEL")
    if is_file and cfg is not None:
        message = "a checkpoint holds its configuration; leave --cfg out"
        raise typer.BadParameter(message, param_hint="--cfg")
    if not is_file and factory is not None:
        message = "--model belongs to a checkpoint, and MODEL is no file"
        raise typer.BadParameter(message, param_hint="--model")
    if is_file:
        assert factory is not None
        with explained():
            model, _ = load_checkpoint(source, make_model(factory), map_location="cpu")
        return placed(model, device)
    model = make_model(source, "MODEL")
    if cfg is not None or not is_compressed(model):
        with explained():
            model = prepare_qat_amct(model, cfg)
    return placed(model, device)


def is_compressed(model: nn.Module) -> bool:
    """Say whether a model is prepared or converted."""
    return any(isinstance(part, (QATLayer, QuantizedLayer)) for part in model.modules())


def placed(model: nn.Module, device: str | None) -> nn.Module:
    """Return the model on a device."""
    try:
        return model if device is None else model.to(device)
    except (RuntimeError, AssertionError) as error:
        message = f"cannot use {device}: {error}"
        raise typer.BadParameter(message, param_hint="--device") from error


def make_inputs(shapes: list[str] | None, device: torch.device | None = None) -> tuple[Any, ...]:
    """Return random inputs for shapes such as ``1x3x224x224``, the same ones each time.

    Raises:
        BadParameter: A text is no shape.
    """
    generator = torch.Generator().manual_seed(0)
    found = []
    for text in shapes or ():
        sizes = text.lower().split("x")
        if not all(size.isdecimal() and int(size) > 0 for size in sizes):
            message = f"write a shape such as 1x3x224x224, not {text!r}"
            raise typer.BadParameter(message, param_hint="--input")
        made = torch.randn([int(size) for size in sizes], generator=generator)
        found.append(made if device is None else made.to(device))
    return tuple(found)


def writable_file(path: Path | None) -> Path | None:
    """Refuse a path that could not be written, before hours of work are lost on it."""
    if path is None:
        return None
    try:
        if path.exists() and not path.is_file():
            message = f"{path} is not a regular file"
            raise typer.BadParameter(message)
        with tempfile.TemporaryFile(dir=path.parent):
            return path
    except OSError as error:
        message = f"cannot write {path}: {error.strerror}"
        raise typer.BadParameter(message) from error


@contextmanager
def explained(messages: list[str] | None = None) -> Iterator[None]:
    """Print warnings as messages; give an error the line of the file and a caret.

    Args:
        messages: Gets the warnings, too.
    """
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", AmctWarning)
        try:
            yield
        except ConfigError as error:
            _add_notes(error, point_at(error).split("\n")[1:])
            raise
        finally:
            for item in caught:
                if issubclass(item.category, AmctWarning):
                    typer.echo(f"warning: {item.message}", err=True)
                if messages is not None:
                    messages.append(str(item.message))


def print_json(value: Any) -> None:
    """Print plain data as JSON."""
    typer.echo(json.dumps(value, indent=2))


@contextmanager
def user_code(name: str) -> Iterator[None]:
    """Turn whatever the user's code raises into one message."""
    try:
        with _current_folder():
            yield
    except (AmctError, OSError, typer.Exit, typer.BadParameter):
        raise
    except Exception as error:  # whatever the user's code raises
        raise _failed(name, error) from error


@contextmanager
def _current_folder() -> Iterator[None]:
    """Let modules of the current folder be imported."""
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _failed(name: str, error: Exception) -> AmctError:
    kind, text = type(error).__name__, str(error)
    return AmctError(f"{name} failed: {kind}: {text}" if text else f"{name} failed: {kind}")


def _add_notes(error: Exception, notes: list[str]) -> None:
    """Add lines below a message, also where Python has no ``add_note``."""
    vars(error)["__notes__"] = [*getattr(error, "__notes__", []), *notes]
