"""Copying models: what ``copy.deepcopy`` refuses, and the rest in less time."""

from __future__ import annotations

import copy
import copyreg
from collections import OrderedDict
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

__all__ = ["copy_model", "shadow_model"]

Model = TypeVar("Model", bound=nn.Module)

_ATOMS = frozenset(
    (int, float, bool, str, bytes, type(None), type, FunctionType, BuiltinFunctionType)
)
_PROTOCOL = ("__deepcopy__", "__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")
_USUAL = {name: [getattr(nn.Module, name, None)] for name in _PROTOCOL}
_USUAL["__setstate__"].append(nn.modules.conv._ConvNd.__setstate__)  # adds what old files lack
_ARGUMENTS = ("__getnewargs__", "__getnewargs_ex__")


def copy_model(model: Model) -> Model:
    """Return a deep copy; tensors that are results of a computation are copied by value.

    The old ``torch.nn.utils.weight_norm`` keeps such a tensor as the weight of its layer and makes
    it anew in the next forward; ``copy.deepcopy`` refuses it after the first one.

    Args:
        model: Any module; it is not changed.

    Example:
        >>> import torch
        >>> layer = nn.Linear(2, 2)
        >>> layer.result = layer(torch.ones(2))
        >>> copy_model(layer).result.grad_fn is None
        True
    """
    return _copied(model, _results(model))


def shadow_model(model: Model, *, share_buffers: bool) -> Model:
    """Return other module objects around the same parameters, at no cost in memory.

    Modes, classes and hooks of a shadow can be changed without the model noticing; hooks that the
    model has run for its shadow, too.

    Args:
        model: Any module; it is not changed.
        share_buffers: Share the buffers as well; otherwise the shadow has copies of them.

    Example:
        >>> layer = nn.BatchNorm1d(2)
        >>> shadow = shadow_model(layer, share_buffers=False).eval()
        >>> shadow.weight is layer.weight, shadow.running_mean is layer.running_mean, layer.training
        (True, False, True)
    """
    memo = _results(model)
    memo |= {id(parameter): parameter for parameter in model.parameters()}
    if share_buffers:
        memo |= {id(buffer): buffer for buffer in model.buffers()}
    for module in model.modules():
        hooks = (value for key, value in vars(module).items() if key.endswith("hooks"))
        memo |= {id(value): value for value in hooks if isinstance(value, dict)}
    return _copied(model, memo)


def _results(model: nn.Module) -> dict[int, Any]:
    """Return copies of the tensors that ``copy.deepcopy`` refuses, for its memo."""
    return {
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }


def _copied(model: Model, memo: dict[int, Any]) -> Model:
    """Do what ``copy.deepcopy`` does.

    Modules of classes that leave copying to Python are made first and filled then; so nothing of
    them is copied by way of a description of how to build it anew.
    """
    plain: dict[type[nn.Module], bool] = {}
    pairs: list[tuple[nn.Module, nn.Module]] = []
    for module in model.modules():
        cls = type(module)
        if cls not in plain:
            plain[cls] = _is_plain(cls)
        if plain[cls] and id(module) not in memo:
            memo[id(module)] = cls.__new__(cls)
            pairs.append((module, memo[id(module)]))
    for module, made in pairs:
        _link(module, made, memo)
    for module, made in reversed(pairs):  # what a traced part looks at while it is copied is there
        for name, value in vars(module).items():
            if name != "_modules":
                made.__dict__[name] = _copied_value(value, memo)
        for key, child in module._modules.items():
            made._modules[key] = _copied_value(child, memo)
    return copy.deepcopy(model, memo)


def _link(module: nn.Module, made: nn.Module, memo: dict[int, Any]) -> None:
    """Give a module that is being made the parts that are being made, too; ``None`` for others."""
    made.__dict__.update(dict.fromkeys(vars(module)))  # the order of attributes
    parts = {key: memo.get(id(child)) for key, child in module._modules.items()}
    made.__dict__["_modules"] = memo[id(module._modules)] = type(module._modules)(parts)


def _is_plain(cls: type[nn.Module]) -> bool:
    """Say whether Python would copy a module attribute by attribute."""
    usual = all(getattr(cls, name, None) in known for name, known in _USUAL.items())
    own_new = cls.__new__ is not object.__new__ or any(hasattr(cls, name) for name in _ARGUMENTS)
    slots = any(base.__dict__.get("__slots__") for base in cls.__mro__)
    return usual and not own_new and not slots and cls not in copyreg.dispatch_table


def _copied_value(value: Any, memo: dict[int, Any]) -> Any:
    """Copy an attribute of a module."""
    kind = type(value)
    if kind in _ATOMS:
        return value
    if id(value) in memo:
        return memo[id(value)]
    if kind is dict or kind is OrderedDict:
        made = memo[id(value)] = kind()
        for key, item in value.items():
            made[_copied_value(key, memo)] = _copied_value(item, memo)
        return made
    if kind is tuple and all(type(item) in _ATOMS for item in value):
        return value
    if kind is nn.Parameter:
        return value.__deepcopy__(memo)
    if kind is Tensor and _is_whole(value):
        return _copied_tensor(value, memo)
    return copy.deepcopy(value, memo)


def _is_whole(tensor: Tensor) -> bool:
    """Say whether a tensor is nothing but all values of a storage on the CPU."""
    usual = tensor.layout is torch.strided and tensor.device.type == "cpu" and tensor.is_leaf
    usual = usual and not tensor.requires_grad and tensor.is_contiguous() and not vars(tensor)
    usual = usual and not tensor.is_inference() and tensor.grad is None and not tensor.is_conj()
    size = tensor.numel() * tensor.element_size()
    return usual and size == tensor.untyped_storage().nbytes() and not tensor.is_neg()


def _copied_tensor(tensor: Tensor, memo: dict[Any, Any]) -> Tensor:
    """Copy a tensor, and note its storage for others that share it."""
    storages = memo.setdefault("torch", {})
    storage = tensor.untyped_storage()
    if storage._cdata in storages:
        return copy.deepcopy(tensor, memo)
    made = memo[id(tensor)] = tensor.detach().clone()
    storages[storage._cdata] = made.untyped_storage()
    return made
