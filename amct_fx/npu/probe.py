"""What torch-npu can do in this process: imported once, when a model is lowered for it.

torch-npu is never imported before, and a failed import leaves nothing behind. Source:
spec/deploy.md section 8.1.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import os
import sys
from dataclasses import dataclass
from enum import Enum

import torch

from amct_fx.errors import BackendError

__all__ = ["NpuState", "Probe", "has_arguments", "probe"]

_PACKAGE = "torch_npu"
_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"


class NpuState(Enum):
    """What :func:`probe` found."""

    NOT_INSTALLED = "not installed"
    UNUSABLE = "installed, cannot be imported"
    NO_DEVICE = "importable, no device"
    USABLE = "usable"


@dataclass(frozen=True)
class Probe:
    """The state of torch-npu.

    Attributes:
        state: One of four.
        version: Version of the installed package, ``None`` without one.
        message: What the loader said when the import failed, or ``""``.
        device_name: Name of the first device, ``""`` without one.
    """

    state: NpuState
    version: str | None = None
    message: str = ""
    device_name: str = ""

    def __str__(self) -> str:
        """Return one line that says everything."""
        parts = [f"torch-npu {self.version}" if self.version else "torch-npu", self.state.value]
        detail = self.message or self.device_name
        return ": ".join(parts) + (f" ({detail})" if detail else "")

    def require_operators(self) -> None:
        """Refuse to go on without the operators of torch-npu; a device is not needed.

        Raises:
            BackendError: Says what is missing and what to do.
        """
        if self.state is NpuState.NOT_INSTALLED:
            message = (
                f"torch-npu is not installed; pip install 'amct-fx[npu]' on a Linux machine with "
                f"CANN (PyTorch here is {torch.__version__}, which its wheel must match)"
            )
            raise BackendError(message)
        if self.state is NpuState.UNUSABLE:
            message = (
                f"{self}; set up CANN (source set_env.sh) before Python starts. On a machine "
                f"without CANN, {_AUTOLOAD}=0 keeps `import torch` working"
            )
            raise BackendError(message)


@functools.cache
def probe() -> Probe:
    """Import torch-npu and say what can be used; the answer of the first call is kept.

    Example:
        >>> print(probe().state.value)  # doctest: +SKIP
        usable
    """
    if importlib.util.find_spec(_PACKAGE) is None:
        return Probe(NpuState.NOT_INSTALLED)
    version = _version()
    message = _import()
    if message is not None:
        return Probe(NpuState.UNUSABLE, version, message)
    npu = getattr(torch, "npu", None)
    if npu is None or not npu.is_available():
        return Probe(NpuState.NO_DEVICE, version)
    return Probe(NpuState.USABLE, version, device_name=str(npu.get_device_name(0)))


def has_arguments(operator: str, *arguments: str) -> bool:
    """Say whether torch-npu has an operator, with these arguments.

    Args:
        operator: Name in the namespace ``npu``.
        arguments: Names of arguments that a call will use.
    """
    packet = getattr(torch.ops.npu, operator, None)
    if packet is None:
        return False
    names = {
        argument.name
        for overload in packet.overloads()
        for argument in getattr(packet, overload)._schema.arguments
    }
    return names.issuperset(arguments)


def _version() -> str | None:
    """Return the version of the installed package, which needs no import."""
    try:
        return importlib.metadata.version("torch-npu")
    except importlib.metadata.PackageNotFoundError:
        return None


def _import() -> str | None:
    """Import torch-npu; after a failure undo what it left, and return the loader's message."""
    before, autoload = set(sys.modules), os.environ.get(_AUTOLOAD)
    try:
        importlib.import_module(_PACKAGE)
    except (ImportError, OSError, RuntimeError) as error:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == _PACKAGE:
                del sys.modules[name]
        return str(error) or type(error).__name__
    finally:
        if autoload is None:
            os.environ.pop(_AUTOLOAD, None)
        else:
            os.environ[_AUTOLOAD] = autoload
    return None
