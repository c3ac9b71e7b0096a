"""Changing what a layer is without changing which object it is."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

__all__ = ["become"]

Layer = TypeVar("Layer", bound=nn.Module)


def become(module: nn.Module, cls: type[Layer]) -> Layer:
    """Give ``module`` the class ``cls`` and return it.

    Aliases, plain Python lists of layers, hooks and attributes all keep pointing to the right
    layer, which replacing it by a new object could not promise. ``torch.nn.utils.parametrize``
    works the same way.

    Args:
        module: A layer of our own copy of the model.
        cls: A class with the same memory layout, such as a subclass of its own.

    Example:
        >>> class Named(nn.Linear): ...
        >>> layer = nn.Linear(2, 2)
        >>> become(layer, Named) is layer
        True
    """
    module.__class__ = cls
    assert isinstance(module, cls)
    return module
