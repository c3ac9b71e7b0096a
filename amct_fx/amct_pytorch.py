"""The words of AMCT for PyTorch, for scripts that change one import line.

    from amct_fx import amct_pytorch as amct

    amct.create_quant_retrain_config("config.json", model, input_data, "quant.cfg")

Names, order of arguments and the classes of errors are AMCT's. The files that are written are, byte
for byte, those of AMCT; ``docs/configuration.md`` lists where a value in them differs on purpose.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from amct_fx.backend_config import is_layer, model_facts, unbatched_layers, without_unbatched
from amct_fx.checks import check_float_model
from amct_fx.config import load_config, resolve, save_json_config
from amct_fx.config.distill import load_distill_config, resolve_distill
from amct_fx.config.distill_json import distill_to_dict, save_distill_json
from amct_fx.copying import copy_model
from amct_fx.distill import distill_facts, find_groups
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

__all__ = ["create_distill_config", "create_quant_retrain_config"]


def create_quant_retrain_config(
    config_file: str,
    model: nn.Module,
    input_data: torch.Tensor | tuple[Any, ...],
    config_defination: str | None = None,
) -> None:
    """Write the JSON that says how each layer of a model is trained with quantization.

    :func:`amct_fx.prepare_qat_amct` takes the JSON, and the ``.cfg`` file as well.

    Args:
        config_file: Path of the JSON; an older file is replaced, missing folders are made.
        model: The float model, or ``DistributedDataParallel`` around it; it is not changed.
        input_data: Example input, or a tuple of the arguments of ``forward``.
        config_defination: Path of a ``.cfg`` file, spelled as AMCT spells it; ``None`` for the
            defaults.

    Raises:
        ConfigError: The configuration is wrong, prunes, or does not fit the model.
        ConfigFileNotFoundError: There is no such ``.cfg`` file.
        ConfigTypeError: A path is not a string.
        InputDataError: ``input_data`` is neither a tensor nor a tuple.
        ModelError: The model has no layer that can be quantized.
        ModelStateError: The model is already prepared, or is itself a single layer.
        ModelTypeError: ``model`` is no module.

    Example:
        >>> import json, tempfile
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/config.json"
        ...     create_quant_retrain_config(path, model, torch.rand(1, 3, 8, 8))
        ...     print(json.loads(Path(path).read_text())["0"]["retrain_weight_config"])
        {'algo': 'arq_retrain', 'channel_wise': True, 'dst_type': 'INT8'}
    """
    target, definition = _check_paths(config_file, config_defination)
    model = _check_model(model)
    _check_input_data(input_data)
    config = load_config(definition, quant_only=True)
    traced = _trace(model, input_data)
    facts = traced.mark_unbatched(model_facts(traced.model, traced.captured))
    save_json_config(target, resolve(config, facts))


def create_distill_config(
    config_file: str,
    model: nn.Module,
    input_data: torch.Tensor | tuple[torch.Tensor, ...],
    config_defination: str | None = None,
) -> None:
    """Write the JSON that says how a model is distilled block by block.

    Args:
        config_file: Path of the JSON; an older file is replaced with a warning.
        model: The float model, or ``DistributedDataParallel`` around it; it is not changed.
        input_data: Example input, or a tuple of tensors.
        config_defination: Path of a ``.cfg`` file of distillation; ``None`` for the defaults.

    Raises:
        ConfigError: The configuration is wrong or does not fit the model.
        ConfigFileNotFoundError: There is no such ``.cfg`` file.
        ConfigTypeError: A path is not a string.
        InputDataError: ``input_data`` is neither a tensor nor a tuple of tensors.
        ModelError: The model has no layer that can be distilled.
        ModelStateError: The model is already prepared, or is itself a single layer.
        ModelTypeError: ``model`` is no module.

    Example:
        >>> import json, tempfile
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/config.json"
        ...     create_distill_config(path, model, torch.rand(1, 3, 8, 8))
        ...     print(json.loads(Path(path).read_text())["distill_group"])
        [['0', '1'], ['2']]
    """
    target, definition = _check_paths(config_file, config_defination)
    model = _check_model(model)
    _check_input_data(input_data, tensors_only=True)
    config = load_distill_config(definition)
    traced = _trace(model, input_data)
    facts = traced.mark_unbatched(distill_facts(traced.model, traced.captured))
    resolution = resolve_distill(config, facts)
    groups = find_groups(
        traced.model,
        traced.captured,
        facts,
        user_groups=config.groups,
        group_size=config.group_size,
    )
    names = [group.names for group in groups]
    save_distill_json(target, distill_to_dict(config, names, resolution))


def _check_paths(config_file: object, definition: object) -> tuple[str, Path | None]:
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


def _check_model(model: object) -> nn.Module:
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


def _check_input_data(data: object, *, tensors_only: bool = False) -> None:
    """Refuse what is no example input."""
    wrong = not isinstance(data, (torch.Tensor, tuple))
    if isinstance(data, tuple) and tensors_only:
        wrong = not all(isinstance(item, torch.Tensor) for item in data)
    if wrong:
        what = "a tensor or a tuple of tensors" if tensors_only else "a tensor or a tuple"
        message = f"input_data must be {what}, not {type(data).__name__}"
        raise InputDataError(message)


@dataclass(frozen=True)
class _Traced:
    """A copy of the model in eval mode, what tracing and one run found in it."""

    model: nn.Module
    captured: Capture
    unbatched: frozenset[str]

    def mark_unbatched(self, facts: ModelFacts) -> ModelFacts:
        """Exclude the convolutions whose input has no batch axis."""
        return without_unbatched(facts, self.unbatched)


def _trace(model: nn.Module, input_data: Any) -> _Traced:
    """Copy, run and trace the model."""
    try:
        traced = copy_model(model).eval()
    except Exception as error:  # whatever the user's objects raise
        message = f"the model cannot be copied: {error}"
        raise ModelStateError(message) from error
    unbatched = unbatched_layers(traced, input_data, "input_data")
    captured = capture(traced, is_layer, example_inputs=input_data)
    return _Traced(traced, captured, unbatched)
