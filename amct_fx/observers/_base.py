"""What the three fake-quantizers have in common: switches, checkpoints, keyword checks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.ao.quantization import FakeQuantizeBase

from amct_fx._compat import is_exporting
from amct_fx.errors import AmctWarning, ModelStateError
from amct_fx.observers._checks import check_floating, check_keywords, check_num_bits

_T = TypeVar("_T")

STATE_VERSION = 1
"""Format of the extra state; a new field means a new version and code that reads the old one."""


def in_recomputation() -> bool:
    """Return whether this forward is recomputed by activation checkpointing.

    Checkpointing runs the forward again inside backward, where an autograd graph task exists.
    """
    return bool(torch._C._current_graph_task_id() != -1)


class Slot(Generic[_T]):
    """Holds what belongs to one forward of a module and to no copy of it.

    An attribute of the module itself would take as long to set as several small operations.
    """

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value: _T | None = None

    def take(self) -> _T | None:
        """Return the value and forget it."""
        value, self.value = self.value, None
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class KeywordChecked:
    """Names an unknown keyword, and the one probably meant, at construction and in with_args."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        """Check the names before ``__init__`` sees them."""
        check_keywords(cls, kwargs)
        return super().__new__(cls)


class AmctFakeQuantize(KeywordChecked, FakeQuantizeBase):
    """Base of the fake-quantizers of amct_fx.

    Forward branches on Python attributes only. The flag tensors of torch.ao's base class are kept
    as mirrors that no one reads; ``torch.ao.quantization.disable_fake_quant`` and its siblings set
    both. All tensors have their final shape from construction, are updated in place, and stay
    float32 when the model is cast.

    Args:
        num_bits: Width of the integer codes, 2 to 16.
        qscheme: torch.ao's name of the scheme.
        ch_axis: Axis of the output channels, -1 for none.
        layer_name: Name for messages.
    """

    scale: Tensor
    zero_point: Tensor
    calibrated: Tensor

    def __init__(
        self, *, num_bits: int, qscheme: torch.qscheme, ch_axis: int = -1, layer_name: str = ""
    ) -> None:
        super().__init__()
        self.num_bits = check_num_bits(num_bits)
        self.quant_min = -(2 ** (num_bits - 1))
        self.quant_max = 2 ** (num_bits - 1) - 1
        self.dtype = torch.qint8 if num_bits <= 8 else torch.int16
        self.qscheme = qscheme
        self.is_per_channel = qscheme == torch.per_channel_symmetric
        self.is_dynamic = False
        self.ch_axis: int | None = ch_axis
        self.layer_name = layer_name
        for name in ("fake_quant_enabled", "observer_enabled"):
            self.register_buffer(name, getattr(self, name), persistent=False)
        self._fake_quant_on = True
        self._observer_on = True
        self._batches_seen = 0
        self._calibrated = True

    @classmethod
    def with_args(cls, **kwargs: Any) -> Any:
        """Return a constructor with these keywords set, for a ``QConfig``.

        Raises:
            TypeError: A keyword is unknown; the message names the one probably meant.
        """
        check_keywords(cls, kwargs)
        return super().with_args(**kwargs)  # type: ignore[no-untyped-call]

    @property
    def activation_post_process(self) -> FakeQuantizeBase:
        """What ``torch.ao.quantization.prepare_qat_fx`` asks for ranges of codes: itself."""
        return self

    @property
    def is_calibrated(self) -> bool:
        """Whether the range is known; may read the device."""
        return self._notice_calibration()

    @property
    def is_untouched(self) -> bool:
        """Whether no input has reached the quantizer and its range is still unknown."""
        return self._batches_seen == 0 and not self.is_calibrated

    def enable_fake_quant(self, enabled: bool = True) -> None:
        """Switch the fake-quantization on or off; off means ``y = x``."""
        self._fake_quant_on = bool(enabled)
        self.fake_quant_enabled.fill_(int(enabled))

    def enable_observer(self, enabled: bool = True) -> None:
        """Switch the calibration on or off; without effect once calibrated."""
        self._observer_on = bool(enabled)
        self.observer_enabled.fill_(int(enabled))

    def get_extra_state(self) -> Tensor:
        """Return int64 ``[version, batches seen, fake_quant_enabled, observer_enabled]``."""
        state = [STATE_VERSION, self._batches_seen, self._fake_quant_on, self._observer_on]
        return torch.tensor([int(value) for value in state], dtype=torch.int64)

    def set_extra_state(self, state: Tensor | None) -> None:
        """Restore what :meth:`get_extra_state` returned; ``None`` changes nothing.

        Raises:
            ModelStateError: The state was written by a newer version of amct_fx.
        """
        if state is None:
            return
        version, seen, fake_quant_on, observer_on = (int(v) for v in state.tolist()[:4])
        if version > STATE_VERSION:
            message = (
                f"{self._label()}the checkpoint has quantizer state version {version}, this "
                f"amct_fx reads up to {STATE_VERSION}; update amct_fx"
            )
            raise ModelStateError(message)
        self._batches_seen = seen
        self.enable_fake_quant(bool(fake_quant_on))
        self.enable_observer(bool(observer_on))

    def _check_input(self, x: Tensor, what: str) -> None:
        """Raise :class:`ModelTypeError` unless ``x`` is a floating point tensor."""
        if not (isinstance(x, Tensor) and x.is_floating_point()):
            check_floating(x, f"{self._label()}{what}")

    def _label(self) -> str:
        """Return ``"layer 'name': "`` for messages, or nothing."""
        return f"layer {self.layer_name!r}: " if self.layer_name else ""

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Load, cast to the dtypes held here, and accept a checkpoint without extra state."""
        for name, tensor in [*self._parameters.items(), *self._buffers.items()]:
            saved = state_dict.get(prefix + name)
            if isinstance(saved, Tensor) and tensor is not None:
                state_dict[prefix + name] = saved.to(tensor.dtype)
        super()._load_from_state_dict(
            state_dict,
            prefix,
            local_metadata,
            strict,
            missing_keys,
            unexpected_keys,
            error_msgs,
        )
        extra = f"{prefix}_extra_state"
        if extra in missing_keys:
            missing_keys.remove(extra)
        if any(key.startswith(prefix) for key in state_dict):
            self._after_load()

    def _after_load(self) -> None:
        """Bring the Python attributes in line with loaded buffers."""
        if "calibrated" not in self._buffers:
            return
        self._calibrated = False
        if not self._notice_calibration() and self._batches_seen:
            self._batches_seen = 0
            message = (
                "the checkpoint was taken in the middle of a calibration over several batches; "
                "the quantizers collect their batches again"
            )
            warnings.warn(message, AmctWarning, stacklevel=2)

    def _forward_uncalibrated(self, x: Tensor) -> Tensor:
        """Run a forward while the range is not known; it reads the device, so never compiled."""
        if is_exporting():
            message = (
                f"{self._label()}the range is not calibrated; run calibration batches through the "
                "model before exporting it"
            )
            raise ModelStateError(message)
        if torch.compiler.is_compiling():
            # Breaks the graph; torch.compile(fullgraph=True) needs a calibrated model.
            run_eagerly = torch.compiler.disable(self._start)
            y: Tensor = run_eagerly(x)
            return y
        return self._start(x)

    def _start(self, x: Tensor) -> Tensor:
        """Calibrate with ``x``, and quantize it."""
        raise NotImplementedError

    def _notice_calibration(self) -> bool:
        """Return whether the range is known, looking at the buffer when Python says no.

        Averaging (EMA, SWA) copies tensors only, so a copy made before the start learns of its
        clips here.
        """
        if not self._calibrated and not self.calibrated.is_meta:
            self._calibrated = bool(self.calibrated > 0)
        return self._calibrated

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        """Move the tensors, but keep float32: quantizer arithmetic has no other precision."""

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)  # type: ignore[no-untyped-call]

    def _switches_repr(self) -> str:
        """Return the switches that are off, for ``extra_repr``."""
        off = [
            name
            for name, on in (("fake_quant", self._fake_quant_on), ("observer", self._observer_on))
            if not on
        ]
        return "".join(f", {name}=off" for name in off)
