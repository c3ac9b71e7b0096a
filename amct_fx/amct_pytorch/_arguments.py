"""What all of AMCT's functions check and do with their arguments."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amct_fx.backend_config import is_layer, unbatched_layers, without_unbatched
from amct_fx.checks import check_float_model
from amct_fx.copying import copy_model
from amct_fx.errors import (
    ConfigError,
    ConfigTypeError,
    InputDataError,
    ModelStateError,
    ModelTypeError,
)
from amct_fx.graph import Capture, capture

if TYPE_CHECKING:
    from amct_fx.config import ModelFacts

__all__ = ["Traced", "check_input_data", "config_paths", "float_model", "trace"]


def config_paths(config_file: object, definition: object) -> tuple[str, Path | None]:
    """Return the path to write, and the path of the ``.cfg`` file."""
    if not isinstance(config_file, str):
        message = f"config_file must be str, not {type(config_file).__name__}"
        raise ConfigTypeError(message)
    if not isinstance(definition, (str, type(None))):
        message = f"config_defination must be str or None, not {type(definition).__name__}"
        raise ConfigTypeError(message)
    if not config_file or config_file.endswith("/") or Path(config_file).is_dir():
        message = f"config_file must name a file, not {config_file!r}"
        raise ConfigError(message)
    if definition == "":
        message = "config_defination is empty; pass None for the defaults"
        raise ConfigError(message)
    return config_file, None if definition is None else Path(definition)


def float_model(model: object) -> nn.Module:
    """Return the float model, out of ``DistributedDataParallel``."""
    if isinstance(model, DistributedDataParallel):
        model = model.module
    check_float_model(model)
    if not isinstance(model, nn.Module):  # has just been checked; says it to mypy
        raise ModelTypeError
    if is_layer(model):
        kind = type(model).__name__
        message = f"the model is a single {kind}, which has no name; use nn.Sequential(model)"
        raise ModelStateError(message)
    return model


def check_input_data(data: object, *, tensors_only: bool = False) -> None:
    """Refuse what is no example input."""
    wrong = not isinstance(data, (torch.Tensor, tuple))
    if isinstance(data, tuple) and tensors_only:
        wrong = not all(isinstance(item, torch.Tensor) for item in data)
    if wrong:
        what = "a tensor or a tuple of tensors" if tensors_only else "a tensor or a tuple"
        message = f"input_data must be {what}, not {type(data).__name__}"
        raise InputDataError(message)


@dataclass(frozen=True)
class Traced:
    """A copy of the model in eval mode, what tracing and one run found in it."""

    model: nn.Module
    captured: Capture
    unbatched: frozenset[str]

    def mark_unbatched(self, facts: ModelFacts) -> ModelFacts:
        """Exclude the convolutions whose input has no batch axis."""
        return without_unbatched(facts, self.unbatched)


def trace(model: nn.Module, input_data: Any) -> Traced:
    """Copy, run and trace the model."""
    try:
        traced = copy_model(model).eval()
    except Exception as error:  # whatever the user's objects raise
        message = f"the model cannot be copied: {error}"
        raise ModelStateError(message) from error
    unbatched = unbatched_layers(traced, input_data, "input_data")
    captured = capture(traced, is_layer, example_inputs=input_data)
    return Traced(traced, captured, unbatched)
