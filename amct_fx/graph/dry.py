"""Running a model on shapes alone, and proving that a graph does what the model did.

Most models call a few well-known functions, whose results have a shape that is known without
computing them. Such a model runs on meta tensors, in a fraction of the time, and each call is
written down. A graph of the model then runs against that list: if it makes the same calls with the
same arguments in the same order, it computes the same. A function that is not known, a value that
is asked for, or anything else unusual ends the run, and the model is run on real tensors instead.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from amct_fx.graph.dry_rules import IN_PLACE, QUERIES, Unknown, on_meta, result_of

__all__ = ["DryRun"]

_CONSTANTS = (bool, int, float, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


class _Call(NamedTuple):
    """A call of a function and the very objects that it got and returned."""

    function: Any
    args: Any
    kwargs: Any
    result: Any


class DryRun(TorchFunctionMode):
    """What one run of a model on meta tensors called.

    Args:
        model: Any module.
        call: The arguments of the example call, positional and by name.

    Attributes:
        call: The same arguments, with meta tensors.

    Example:
        >>> model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.ones(1, 3, 9, 9)
        >>> run = DryRun.of(model, ((x,), {}))
        >>> with torch.no_grad(), run.recording(model):
        ...     result = model(*run.call[0])
        >>> result.shape, run.went_through
        (torch.Size([1, 8, 7, 7]), True)
    """

    def __init__(self, call: Any, device: torch.device, owned: frozenset[int]) -> None:
        super().__init__()
        self.call = call
        self.went_through = True
        self._device = device
        self._owned = owned
        self._calls: list[_Call] = []
        self._expected: Iterator[_Call] | None = None
        self._now: dict[int, Tensor] = {}
        self._stale: set[int] = set()
        self._differs = False

    @classmethod
    def of(cls, model: nn.Module, call: Any) -> DryRun | None:
        """Make ready for a run; ``None`` if the model or its inputs are not of the usual kind."""
        owned = [*model.parameters(), *model.buffers()]
        given = [leaf for leaf in tree_leaves(call) if isinstance(leaf, Tensor)]
        tensors = owned + given
        devices = {tensor.device for tensor in tensors}
        kinds = {device.type for device in devices}
        if "meta" in kinds or any(map(torch.is_autocast_enabled, kinds)):
            return None
        if not given or len(devices) > 1 or not all(map(_is_usual, tensors)):
            return None
        if any(isinstance(part, torch.jit.ScriptModule) for part in model.modules()):
            return None
        known = frozenset(map(id, owned))
        if any(id(leaf) in known for leaf in given):
            return None  # a weight that is also an input
        dry = copy.deepcopy(call, {id(leaf): on_meta(leaf) for leaf in given})
        return cls(dry, devices.pop(), known)

    @contextmanager
    def recording(self, model: nn.Module) -> Iterator[None]:
        """Write down what is called in the body; an error there only ends the run.

        Args:
            model: It keeps no part that it makes in the body.
        """
        before = [(part, type(part), _members(part)) for part in model.modules()]
        try:
            with self:
                yield
        except Exception:  # the model is run on real tensors next, which raises it again
            self.went_through = False
        finally:
            for part, kind, members in before:
                if type(part) is not kind or not all(map(_identical, _members(part), members)):
                    self.went_through = False
                    part.__class__ = kind
                    _give(part._parameters, members[0])
                    _give(part._modules, members[1])

    @contextmanager
    def replaying(self) -> Iterator[None]:
        """Let the body get the results of the same calls.

        Raises:
            Unknown: The body makes another call, or fewer.
        """
        self._expected = iter(self._calls)
        self._now, self._stale, self._differs = {}, set(), False
        with self:
            yield
        if self._differs or next(self._expected, None) is not None:
            self._differ()

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Answer a call without computing anything."""
        kwargs = kwargs or {}
        if func in QUERIES:
            known = QUERIES[func]
            return self._device if known is torch.device else func(*args, **kwargs)
        if self._expected is None:
            return self._record(func, args, kwargs)
        return self._replay(func, args, kwargs)

    def _record(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            noted = self._noted(args), self._noted(kwargs)
            result = result_of(func, args, kwargs)
        except BaseException as error:
            self.went_through = False  # even if the model catches the error
            if isinstance(error, Exception):
                raise Unknown(str(error)) from error
            raise
        self._calls.append(_Call(func, *noted, result))
        return result

    def _noted(self, value: Any) -> Any:
        """Copy the containers, which the model may change later.

        Raises:
            Unknown: A tensor in them is neither of the model nor made in this run.
        """
        if isinstance(value, Tensor):
            if not value.is_meta and id(value) not in self._owned:
                message = "a tensor comes from elsewhere"
                raise Unknown(message)
            return value
        if isinstance(value, (tuple, list)):
            return tuple(map(self._noted, value))
        if isinstance(value, dict):
            return {key: self._noted(item) for key, item in value.items()}
        return value

    def _replay(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._expected is not None
        expected = next(self._expected, None)
        if expected is None or not self._same((expected.args, expected.kwargs), (args, kwargs)):
            self._differ()
        if expected.function == func:
            return tree_map(self._current, expected.result) if self._stale else expected.result
        if IN_PLACE.get(expected.function) != func or not expected.result.is_meta:
            self._differ()
        # `x += y` is traced as `x = x + y`: from now on it is the new tensor that counts
        now = expected.result.detach()
        self._stale.add(_storage(now))
        others = {key: t for key, t in self._now.items() if _storage(t) != _storage(now)}
        self._now = {**others, id(expected.result): now}
        return now

    def _current(self, result: Any) -> Any:
        """Return what stands for a result; views of a new tensor are new, too."""
        if isinstance(result, Tensor) and _storage(result) in self._stale:
            return self._now.setdefault(id(result), result)
        return result

    def _same(self, a: Any, b: Any) -> bool:
        """Compare arguments with recorded ones: tensors by identity, the rest by content."""
        if isinstance(a, Tensor):
            if id(a) in self._now:
                return self._now[id(a)] is b
            return a is b and not (self._stale and _storage(a) in self._stale)
        if isinstance(a, (tuple, list)):
            alike = isinstance(b, (tuple, list)) and len(a) == len(b)
            return alike and all(map(self._same, a, b))
        if isinstance(a, dict):
            alike = isinstance(b, dict) and a.keys() == b.keys()
            return alike and all(self._same(a[key], b[key]) for key in a)
        if isinstance(a, slice):
            a = (a.start, a.stop, a.step)
            return isinstance(b, slice) and self._same(a, (b.start, b.stop, b.step))
        return a is b or (type(a) is type(b) and isinstance(a, _CONSTANTS) and bool(a == b))

    def _differ(self) -> NoReturn:
        self._differs = True  # even if the model catches the error
        message = "the calls differ"
        raise Unknown(message)


def _members(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the parameters and the parts of a module."""
    return dict(module._parameters), dict(module._modules)


def _give(own: dict[str, Any], members: dict[str, Any]) -> None:
    own.clear()
    own.update(members)


def _identical(a: dict[str, Any], b: dict[str, Any]) -> bool:
    return a.keys() == b.keys() and all(a[key] is b[key] for key in a)


def _storage(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunction():
        return int(tensor.untyped_storage()._cdata)


def _is_usual(tensor: Tensor) -> bool:
    """Say whether a tensor is a plain one with values."""
    strided = (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_meta
    )
    return strided and not tensor.is_inference() and not tensor.is_complex()
