"""Runs the command ``amct-fx`` in this process; the models that the tests name."""

from __future__ import annotations

from typer.testing import CliRunner, Result

from amct_fx import cli

MODEL = "test.cli_models:make"
PREPARED = "test.cli_models:make_prepared"
DATA = "test.cli_models:validation"


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli.app, arguments)


def plain(text: str) -> str:
    """Return the words of a message in a box."""
    return " ".join(text.replace("│", " ").split())
