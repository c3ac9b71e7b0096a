"""The messages that the page of troubleshooting quotes are messages of the package."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def quoted_messages() -> list[str]:
    """Return what stands as code in the first column of the tables."""
    lines = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8").splitlines()
    columns = [line.split(" | ")[0] for line in lines if line.startswith("| ")]
    return [message for column in columns for message in re.findall(r"`([^`]+)`", column)]


def fixed_parts(message: str) -> list[str]:
    """Return the words of a message between what differs from case to case: names, numbers, …."""
    parts = re.split(r"'[^']*'|\[[^]]*\]|[…:;]|\b\d+\b", message)
    return [part for part in (" ".join(part.split()).strip(" ?") for part in parts) if part]


@lru_cache
def texts_of_the_package() -> str:
    """Return all strings in the code of the package, without those of its documentation."""
    found = []
    for file in sorted((ROOT / "amct_fx").rglob("*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        documentation = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        found += [
            " ".join(node.value.split())
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in documentation
        ]
    return "\n".join(found)


@pytest.mark.parametrize("message", quoted_messages())
def test_the_quoted_message_is_one_of_the_package(message: str) -> None:
    missing = [part for part in fixed_parts(message) if part not in texts_of_the_package()]
    assert missing == []
