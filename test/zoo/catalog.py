"""All models of the zoo whose library is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from .libraries import declare_torchvision_operators, is_installed
from .timm_models import timm_entries
from .torchvision_models import torchvision_entries
from .transformers_models import transformers_entries

if TYPE_CHECKING:
    from .entry import Entry

__all__ = ["LIBRARIES", "entries_of"]

LIBRARIES: dict[str, Callable[[], list[Entry]]] = {
    "torchvision": torchvision_entries,
    "timm": timm_entries,
    "transformers": transformers_entries,
}


def entries_of(library: str) -> list[Entry]:
    """Return the entries of ``library``; empty when it is not installed."""
    if not is_installed(library):
        return []
    if is_installed("torchvision"):
        declare_torchvision_operators()
    return LIBRARIES[library]()
