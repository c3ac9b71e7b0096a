"""AMCT's functions of blockwise distillation."""

from __future__ import annotations

from typing import TYPE_CHECKING

from amct_fx.amct_pytorch._arguments import check_input_data, config_paths, float_model, trace
from amct_fx.config.distill import load_distill_config, resolve_distill
from amct_fx.config.distill_json import distill_to_dict, save_distill_json
from amct_fx.distill import distill_facts, find_groups

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["create_distill_config"]


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
        >>> import json, pathlib, tempfile
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/config.json"
        ...     create_distill_config(path, model, torch.rand(1, 3, 8, 8))
        ...     print(json.loads(pathlib.Path(path).read_text())["distill_group"])
        [['0', '1'], ['2']]
    """
    target, definition = config_paths(config_file, config_defination)
    model = float_model(model)
    check_input_data(input_data, tensors_only=True)
    config = load_distill_config(definition)
    traced = trace(model, input_data)
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
