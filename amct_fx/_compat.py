"""Where versions of PyTorch differ; the rest of the package knows one interface."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["forget_autocast_copies", "is_exporting", "same_strides"]

_BEFORE_2_7 = not hasattr(torch.compiler, "is_exporting")


def forget_autocast_copies() -> None:
    """Let autocast cast the parameters anew; for the end of a ``no_grad`` part of a forward.

    Autocast keeps its copies of parameters until its block ends. In PyTorch 2.6 and 2.7 a copy made
    under ``no_grad`` is used again where gradients are recorded, and cuts the parameter off.
    """
    torch.clear_autocast_cache()


def same_strides(a: Tensor, b: Tensor) -> bool:
    """Say whether two tensors of one shape have one layout; ``False`` where that is not known.

    PyTorch 2.6 does not read strides while ``torch.compile`` traces the backward of a function.
    """
    if _BEFORE_2_7 and torch.compiler.is_compiling():
        return False
    return a.stride() == b.stride()


def _is_exporting_before_2_13() -> bool:
    """Stand in for ``torch.compiler.is_exporting``.

    PyTorch 2.6 has none, but sets the flag of ``is_compiling`` while it exports with
    ``strict=False``. In 2.7 it is true under ``torch.compile`` too. Right in 2.13.
    """
    if torch.compiler.is_dynamo_compiling():
        return _dynamo_exports()
    return torch.compiler.is_compiling() if _BEFORE_2_7 else torch.compiler.is_exporting()


def _dynamo_exports() -> bool:
    """Say whether the graph that is being traced is for ``torch.export``."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return bool(InstructionTranslator.current_tx().export)


# What torch._dynamo.assume_constant_result does: the tracer calls it instead of tracing into it.
_dynamo_exports._dynamo_marked_constant = True  # type: ignore[attr-defined]

is_exporting: Callable[[], bool] = (
    _is_exporting_before_2_13 if torch.__version__ < "2.13" else torch.compiler.is_exporting
)
