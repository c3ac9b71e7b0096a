"""Changing what a layer is without changing which object it is."""

from __future__ import annotations

from typing import TypeVar

from torch import nn
from torch.nn.utils import parametrize

from amct_fx.nn.parametrized import parametrized_class, parametrized_names

__all__ = [
    "become",
    "changes_its_input",
    "drop_reparametrization",
    "float_class_of",
    "has_hooks",
    "shared_as",
]

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
    if parametrize.is_parametrized(module):
        module.__class__ = parametrized_class(cls, parametrized_names(module))
    else:
        module.__class__ = cls
    assert isinstance(module, cls)
    return module


def shared_as(module: nn.Module, cls: type[Layer]) -> Layer:
    """Return a second module that holds the same parameters, buffers and attributes.

    Args:
        module: A layer; it is not changed.
        cls: A class with the same memory layout, such as a subclass of its own.

    Returns:
        A module of class ``cls`` with tables of its own: what is added to one is not in the other.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> twin = shared_as(layer, nn.Linear)
        >>> twin.extra = nn.ReLU()
        >>> twin.weight is layer.weight, hasattr(layer, "extra")
        (True, False)
    """
    twin = cls.__new__(cls)
    twin.__dict__.update(module.__dict__)
    for table in ("_parameters", "_buffers", "_modules"):
        twin.__dict__[table] = dict(module.__dict__[table])
    return twin


def float_class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of ``module``, below ``torch.nn.utils.parametrize``.

    Example:
        >>> float_class_of(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))).__name__
        'Linear'
    """
    parts = getattr(module, "_modules", ())  # what a user passes may be no module
    if "parametrizations" not in parts:  # torch asks through ``getattr``, which is slow
        return type(module)
    found: type[nn.Module] = parametrize.type_before_parametrizations(module)
    return found


def drop_reparametrization(module: nn.Module) -> None:
    """Make computed weights plain parameters that hold today's values.

    Knows ``torch.nn.utils.parametrize`` and the old ``torch.nn.utils.weight_norm``.

    Args:
        module: A layer; changed in place.
    """
    if parametrize.is_parametrized(module):
        # torch deletes the attribute from the class, which a deep copy shares with its original
        module.__class__ = parametrized_class(float_class_of(module), parametrized_names(module))
        for name in parametrized_names(module):
            parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    for key, hook in list(module._forward_pre_hooks.items()):
        if type(hook).__name__ == "WeightNorm":
            hook.remove(module)  # type: ignore[attr-defined]
            del module._forward_pre_hooks[key]


def changes_its_input(module: nn.Module) -> bool:
    """Say whether a forward pre-hook stands between a caller and the operator of a layer.

    The hooks of the old ``weight_norm`` and of 2:4 masks see to the weight only.
    """
    hooks = module._forward_pre_hooks.values()
    return not all(
        type(hook).__name__ == "WeightNorm" or getattr(hook, "only_weights", False)
        for hook in hooks
    )


def has_hooks(module: nn.Module) -> bool:
    """Say whether anything may look at, or change, what goes in and out of a module."""
    return changes_its_input(module) or bool(module._forward_hooks)
