"""AMCT's functions of quantization-aware training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from amct_fx.amct_pytorch._agreement import check_agreement
from amct_fx.amct_pytorch._arguments import (
    check_different,
    check_export_names,
    check_input_data,
    config_paths,
    copied,
    file_path,
    float_model,
    save_paths,
    trace,
    unwrapped,
)
from amct_fx.amct_pytorch._pth import check_pth_arguments, load_state, read_state
from amct_fx.amct_pytorch._save import save_files
from amct_fx.backend_config import model_facts
from amct_fx.checks import check_prepared_model
from amct_fx.config import load_config, resolve, save_json_config
from amct_fx.config.files import write_text
from amct_fx.convert import convert_amct
from amct_fx.prepare import prepare_qat_amct

if TYPE_CHECKING:
    import torch
    from torch import nn

    from amct_fx.config import CompressionConfig

__all__ = [
    "create_quant_retrain_config",
    "create_quant_retrain_model",
    "restore_quant_retrain_model",
    "save_quant_retrain_model",
]


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


def create_quant_retrain_model(
    config_file: str,
    model: nn.Module,
    record_file: str,
    input_data: torch.Tensor | tuple[Any, ...],
) -> nn.Module:
    """Return a copy of a model that trains with quantization in the loop.

    Args:
        config_file: Path of the JSON that :func:`create_quant_retrain_config` wrote, or of a
            ``.cfg`` file.
        model: The float model, or ``DistributedDataParallel`` around it; it is not changed.
        record_file: Path of the record file; an empty one is written, and filled at the end by
            :func:`save_quant_retrain_model`.
        input_data: Example input, or a tuple of the arguments of ``forward``.

    Returns:
        The prepared model, as of :func:`amct_fx.prepare_qat_amct`.

    Raises:
        ArgumentTypeError: A path is not a string.
        ConfigError: The configuration is wrong or does not fit the model.
        ConfigFileNotFoundError: There is no such configuration file.
        InputDataError: ``input_data`` is neither a tensor nor a tuple.
        ModelStateError: The model is already prepared, or is itself a single layer.
        ModelTypeError: ``model`` is no module.

    Example:
        >>> import tempfile
        >>> import torch
        >>> from torch import nn
        >>> model, x = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()), torch.rand(1, 3, 8, 8)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     config, record = f"{folder}/config.json", f"{folder}/record.txt"
        ...     create_quant_retrain_config(config, model, x)
        ...     prepared = create_quant_retrain_model(config, model, record, x)
        >>> type(prepared[0]).__module__
        'amct_fx.nn.qat'
    """
    prepared = _prepared(config_file, model, record_file, input_data)
    write_text(record_file, "")
    return prepared


def restore_quant_retrain_model(
    config_file: str,
    model: nn.Module,
    record_file: str,
    input_data: torch.Tensor | tuple[Any, ...],
    pth_file: str,
    state_dict_name: str | None = None,
) -> nn.Module:
    """Return what :func:`create_quant_retrain_model` returns, in the state of a checkpoint.

    Learned ranges, flags and counters come along: the training goes on where it stopped, and
    nothing is calibrated again. A checkpoint that AMCT wrote for the same model is taken, too.

    Args:
        config_file: As for :func:`create_quant_retrain_model`.
        model: The float model, or ``DistributedDataParallel`` around it; it is not changed.
        record_file: As for :func:`create_quant_retrain_model`.
        input_data: As for :func:`create_quant_retrain_model`.
        pth_file: Path of the checkpoint, which ``torch.save`` wrote; nothing in it is executed.
        state_dict_name: Key of the state dict in the checkpoint; ``None`` when it is one.

    Returns:
        The prepared model, on the device of ``model``.

    Raises:
        AmctFileNotFoundError: There is no such checkpoint.
        ArgumentTypeError: ``pth_file`` is not a string, or ``state_dict_name`` neither that nor
            ``None``.
        CheckpointError: It is no checkpoint of this model; names what differs.
        CheckpointKeyError: It has no ``state_dict_name``, or lacks a part of the model.
    """
    check_pth_arguments(pth_file, state_dict_name)
    check_different(pth_file=pth_file, record_file=file_path("record_file", record_file))
    prepared = _prepared(config_file, model, record_file, input_data)
    load_state(prepared, read_state(pth_file, state_dict_name), pth_file)
    write_text(record_file, "")
    return prepared


def save_quant_retrain_model(
    config_file: str,
    model: nn.Module,
    record_file: str,
    save_path: str,
    input_data: torch.Tensor | tuple[Any, ...],
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    dynamic_axes: dict[str, Any] | None = None,
) -> None:
    """Write the record file and both ONNX files of a trained model, from its values of today.

    No evaluation is needed before, and the process need not be the one of the training.

    Args:
        config_file: Path of the configuration that the model was prepared with.
        model: The trained model, or ``DistributedDataParallel`` around it; it is not changed.
        record_file: Path of the record file; an older one is replaced.
        save_path: Folder and prefix of the files ``<prefix>_deploy_model.onnx``, for ATC, and
            ``<prefix>_fake_quant_model.onnx``, for onnxruntime; older ones are replaced, with a
            warning.
        input_data: Example input, or a tuple of the arguments of ``forward``.
        input_names: Names of the inputs in the files.
        output_names: Names of the outputs in the files.
        dynamic_axes: Axes whose length may change, as for ``torch.onnx.export``.

    Raises:
        ArgumentError: ``save_path`` is too long, or names and axes cannot be used.
        ArgumentTypeError: An argument has the wrong type; names it.
        ConfigError: ``config_file`` or ``record_file`` names no file.
        ConfigFileNotFoundError: There is no such configuration file.
        ConvertError: The model was never calibrated, or has diverged; names the layer.
        ExportError: The model cannot be exported.
        InputDataError: ``input_data`` is neither a tensor nor a tuple.
        ModelStateError: The model has no quantized layer, or the configuration is of another
            model.
        ModelTypeError: ``model`` is no module.
    """
    file_path("config_file", config_file)
    file_path("record_file", record_file)
    check_different(config_file=config_file, record_file=record_file)
    paths = save_paths(save_path)
    check_different(record_file=record_file, save_path=str(paths.deploy))
    check_different(record_file=record_file, save_path=str(paths.fake_quant))
    check_input_data(input_data)
    check_export_names(input_names, output_names, dynamic_axes)
    model = unwrapped(model)
    check_prepared_model(model)
    check_agreement(_configuration(config_file), model, config_file)
    save_files(
        convert_amct(model),
        paths,
        input_data,
        record_file=record_file,
        input_names=input_names,
        output_names=output_names,
        dynamic_axes=dynamic_axes,
    )


def _prepared(config_file: str, model: object, record_file: str, input_data: Any) -> nn.Module:
    """Check the arguments and prepare a copy of the model; nothing is written."""
    file_path("config_file", config_file)
    file_path("record_file", record_file)
    check_different(config_file=config_file, record_file=record_file)
    checked = float_model(model)
    check_input_data(input_data)
    config = _configuration(config_file)
    return prepare_qat_amct(copied(checked), config, input_data, inplace=True)


def _configuration(config_file: str) -> CompressionConfig:
    """Read a configuration file."""
    return load_config(Path(config_file), quant_only=True)
