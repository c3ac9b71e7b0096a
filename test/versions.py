"""What versions of PyTorch lack, for the tests that need it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

__all__ = [
    "BEFORE_2_7",
    "fx_cats_results",
    "skip_dynamo_exporter_of_2_6",
    "skip_unless_fx_traces",
]

BEFORE_2_7 = torch.__version__ < "2.7"


def fx_cats_results() -> bool:
    """Say whether fx traces ``torch.cat`` of what one call returned; PyTorch 2.7 does not."""
    try:
        fx.symbolic_trace(lambda x: torch.cat(x.chunk(2, 1), 1))
    except TypeError:
        return False
    return True


def skip_unless_fx_traces(operation: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Skip where fx hands a placeholder to a C function that wants a number; 2.7 does it more."""
    try:
        fx.symbolic_trace(operation)
    except TypeError as error:
        pytest.skip(f"fx of this PyTorch does not trace it: {error}")


def skip_dynamo_exporter_of_2_6(needed: bool = True) -> None:
    """Skip a test that needs ``torch.onnx.export(dynamo=True)`` to do what 2.6 does not.

    With the onnxscript that writes weights per channel it fails at batch norms, adds a Cast to
    scalars, and forgets the names of dynamic axes.
    """
    if needed and BEFORE_2_7:
        pytest.skip("the dynamo exporter of PyTorch 2.6 does not work with onnxscript 0.7")
