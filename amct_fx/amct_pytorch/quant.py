"""AMCT's functions of quantization-aware training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from amct_fx.amct_pytorch._arguments import check_input_data, config_paths, float_model, trace
from amct_fx.backend_config import model_facts
from amct_fx.config import load_config, resolve, save_json_config

if TYPE_CHECKING:
    import torch
    from torch import nn

__all__ = ["create_quant_retrain_config"]


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
        >>> import json, pathlib, tempfile
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     path = f"{folder}/config.json"
        ...     create_quant_retrain_config(path, model, torch.rand(1, 3, 8, 8))
        ...     print(json.loads(pathlib.Path(path).read_text())["0"]["retrain_weight_config"])
        {'algo': 'arq_retrain', 'channel_wise': True, 'dst_type': 'INT8'}
    """
    target, definition = config_paths(config_file, config_defination)
    model = float_model(model)
    check_input_data(input_data)
    config = load_config(definition, quant_only=True)
    traced = trace(model, input_data)
    facts = traced.mark_unbatched(model_facts(traced.model, traced.captured))
    save_json_config(target, resolve(config, facts))
