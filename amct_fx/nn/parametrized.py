"""Layers with ``torch.nn.utils.parametrize`` that pickle, load plain checkpoints, keep their names.

torch gives a parametrized layer a class of its own that refuses to be pickled, calls itself
``ParametrizedConv2d`` and knows its weight as ``parametrizations.weight.original`` only. The class
made here is named like the layer it extends, pickles through it, and takes a weight saved under its
plain name. ``parametrize.is_parametrized`` and ``remove_parametrizations`` work as ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

from torch.nn.utils import parametrize

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["parametrized_class", "parametrized_names", "register", "still_parametrizations"]


def register(module: nn.Module, name: str, parametrization: nn.Module) -> None:
    """Compute a parameter of a module from the stored one.

    Nothing is called, and the parameter stays the same object, so an optimizer that holds it still
    does.

    Args:
        module: Any module; its class becomes a subclass.
        name: Name of the parameter in ``module``.
        parametrization: Gives the effective value of the stored one, in its shape and dtype.

    Example:
        >>> import pickle
        >>> from torch import nn
        >>> layer = nn.Linear(2, 2)
        >>> register(layer, "weight", nn.ReLU())
        >>> type(layer).__name__, bool((layer.weight >= 0).all())
        ('Linear', True)
        >>> parametrize.is_parametrized(pickle.loads(pickle.dumps(layer)))
        True
    """
    parametrize.register_parametrization(module, name, parametrization, unsafe=True)
    base = parametrize.type_before_parametrizations(module)
    module.__class__ = parametrized_class(base, parametrized_names(module))


def parametrized_names(module: nn.Module) -> tuple[str, ...]:
    """Return the names of the parameters of ``module`` itself that are computed."""
    parametrizations = getattr(module, "parametrizations", None)
    # the compiler of PyTorch 2.6 iterates over keys, not over a ModuleDict
    return () if parametrizations is None else tuple(parametrizations.keys())


@contextmanager
def still_parametrizations(model: nn.Module) -> Iterator[None]:
    """Let reading a parameter change nothing in the block.

    A parametrization may move its state whenever its parameter is read in train mode, as the power
    iteration of ``spectral_norm`` does; looking at a weight is no step of the training. Here those
    of ``model`` are in eval mode.

    Args:
        model: Any module, in any mode.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> layer = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        >>> with still_parametrizations(layer):
        ...     torch.equal(layer.weight, layer.weight)
        True
    """
    moving = [
        part
        for module in model.modules()
        if "parametrizations" in module._modules
        for part in cast("nn.ModuleDict", module.parametrizations).modules()
        if part.training
    ]
    for part in moving:
        part.training = False
    try:
        yield
    finally:
        for part in moving:
            part.training = True


def parametrized_class(base: type[nn.Module], names: Iterable[str]) -> type[nn.Module]:
    """Return a subclass of ``base`` with computed attributes.

    Args:
        base: The class below.
        names: Names of the attributes.

    Example:
        >>> from torch import nn
        >>> parametrized_class(nn.Linear, ["weight"]).__name__
        'Linear'
    """
    namespace: dict[str, Any] = {
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
        "__reduce_ex__": _reduce,
        "_load_from_state_dict": _load_from_state_dict,
    }
    namespace.update({name: _computed(name) for name in names})
    return type(base.__name__, (base,), namespace)


def _computed(name: str) -> property:
    """Return the property that computes ``name``; setting it sets the stored value."""

    def get(self: Any) -> Tensor:
        value: Tensor = self.parametrizations[name]()
        return value

    def set_(self: Any, value: Tensor) -> None:
        self.parametrizations[name].right_inverse(value)

    return property(get, set_)


def _reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Pickle and copy through the class below; this one has no importable name."""
    base = type(self).__bases__[0]
    state = cast("Any", base).__reduce_ex__(self, protocol)[2:]
    return (_rebuild, (base, parametrized_names(self)), *state)


def _rebuild(base: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    cls = parametrized_class(base, names)
    return cls.__new__(cls)


def _load_from_state_dict(self: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Take a stored weight also under its plain name, as a float checkpoint has it."""
    for name in self.parametrizations:
        plain, stored = f"{prefix}{name}", f"{prefix}parametrizations.{name}.original"
        if plain in state and stored not in state:
            state[stored] = state.pop(plain)
    cast("Any", type(self).__bases__[0])._load_from_state_dict(self, state, prefix, *args)
