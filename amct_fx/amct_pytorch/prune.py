"""AMCT's functions of pruning, alone and together with quantization."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amct_fx.amct_pytorch._arguments import (
    check_different,
    check_export_names,
    check_input_data,
    check_type,
    copied,
    file_path,
    float_model,
    save_paths,
    unwrapped,
)
from amct_fx.amct_pytorch._pth import check_pth_arguments, load_state, read_state
from amct_fx.amct_pytorch._save import save_files
from amct_fx.checks import check_prepared_model
from amct_fx.config import CompressionConfig, load_config
from amct_fx.config.messages import warn
from amct_fx.convert import convert_amct
from amct_fx.errors import ConfigError, InputDataError, ModelStateError
from amct_fx.nn.qat import QATLayer
from amct_fx.prepare import prepare_qat_amct
from amct_fx.prune.parametrization import WeightMask
from amct_fx.prune.record import add_prune_record, read_prune_record
from amct_fx.pruning import current_plan
from amct_fx.record import record_message, write_record_message

if TYPE_CHECKING:
    import torch
    from torch import nn

    from amct_fx.prune.options import PruneKeywords

__all__ = [
    "auto_channel_prune_search",
    "create_compressed_retrain_model",
    "create_prune_retrain_model",
    "restore_compressed_retrain_model",
    "restore_prune_retrain_model",
    "save_compressed_retrain_model",
    "save_prune_retrain_model",
]

_AS_AMCT: PruneKeywords = {"mode": "amct", "importance": "first", "apply": "prepare"}
"""Its barriers, its scores, its order: the channels are gone before the training."""


def create_prune_retrain_model(
    model: nn.Module,
    input_data: torch.Tensor | tuple[Any, ...],
    config_defination: str,
    record_file: str | None,
) -> nn.Module:
    """Return a copy of a model without the channels that the configuration prunes, or with masks.

    Channels are gone at once; 2:4 sparsity is a mask on the weights while training.

    Args:
        model: The float model, or ``DistributedDataParallel`` around it; it is not changed.
        input_data: Example input, or a tuple of the arguments of ``forward``.
        config_defination: Path of a ``.cfg`` file, spelled as AMCT spells it; what it says of
            quantization plays no part.
        record_file: Path of the record file to write, or ``None``.

    Returns:
        The pruned model, with parameters of its own; an unchanged copy, with a warning, when the
        file only quantizes.

    Raises:
        ArgumentTypeError: A path is not a string.
        ConfigError: The configuration is wrong, empty, or does not fit the model.
        ConfigFileNotFoundError: There is no such configuration file.
        InputDataError: ``input_data`` is neither a tensor nor a tuple of tensors.
        ModelStateError: The model is already prepared, or is itself a single layer.
        ModelTypeError: ``model`` is no module.

    Example:
        >>> import pathlib, tempfile
        >>> import torch
        >>> from torch import nn
        >>> cfg = '''prune_config { filter_pruner {
        ...     balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }'''
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = pathlib.Path(folder, "prune.cfg").write_text(cfg)
        ...     pruned = create_prune_retrain_model(
        ...         model, torch.rand(1, 3, 8, 8), f"{folder}/prune.cfg", f"{folder}/record.txt"
        ...     )
        >>> pruned[0].out_channels
        4
    """
    config = _checked(model, input_data, config_defination, record_file)
    return _created(model, input_data, _only_pruning(config), record_file)


def restore_prune_retrain_model(
    model: nn.Module,
    input_data: torch.Tensor | tuple[Any, ...],
    record_file: str,
    config_defination: str,
    pth_file: str,
    state_dict_name: str | None = None,
) -> nn.Module:
    """Return what :func:`create_prune_retrain_model` returned, in the state of a checkpoint.

    Exactly the channels and weights that the record names are removed or masked; nothing is chosen
    again. A record and a checkpoint of AMCT are taken, too.

    Args:
        model: The float model before pruning, or ``DistributedDataParallel`` around it.
        input_data: As for :func:`create_prune_retrain_model`.
        record_file: Path of the record file that was written then.
        config_defination: As for :func:`create_prune_retrain_model`.
        pth_file: Path of the checkpoint, which ``torch.save`` wrote; nothing in it is executed.
        state_dict_name: Key of the state dict in the checkpoint; ``None`` when it is one.

    Raises:
        AmctFileNotFoundError: There is no such record or checkpoint.
        ArgumentTypeError: A path is not a string.
        CheckpointError: It is no checkpoint of this model; names what differs.
        CheckpointKeyError: It has no ``state_dict_name``, or lacks a part of the model.
        PruneError: The record does not fit the model; names the layers.
        RecordParseError: It is no record file.
    """
    config = _checked(model, input_data, config_defination, record_file, required=True)
    pruning = _only_pruning(config)
    return _restored(model, input_data, pruning, record_file, pth_file, state_dict_name)


def save_prune_retrain_model(
    model: nn.Module,
    save_path: str,
    input_data: torch.Tensor | tuple[Any, ...],
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    dynamic_axes: dict[str, Any] | None = None,
) -> None:
    """Write both ONNX files of a pruned model: float files, with the zeros of the masks.

    Args:
        model: The trained model, or ``DistributedDataParallel`` around it; it is not changed.
        save_path: Folder and prefix of the files ``<prefix>_deploy_model.onnx`` and
            ``<prefix>_fake_quant_model.onnx``.
        input_data: As for :func:`save_quant_retrain_model`.
        input_names: As for :func:`save_quant_retrain_model`.
        output_names: As for :func:`save_quant_retrain_model`.
        dynamic_axes: As for :func:`save_quant_retrain_model`.

    Raises:
        ArgumentError: ``save_path`` is too long, or names and axes cannot be used.
        ArgumentTypeError: An argument has the wrong type; names it.
        ExportError: The model cannot be exported.
        InputDataError: ``input_data`` is neither a tensor nor a tuple of tensors.
        ModelStateError: Nothing is pruned in the model.
        ModelTypeError: ``model`` is no module.
    """
    names = (input_names, output_names, dynamic_axes)
    _save(model, None, save_path, input_data, names)


def create_compressed_retrain_model(
    model: nn.Module,
    input_data: torch.Tensor | tuple[Any, ...],
    config_defination: str,
    record_file: str | None,
) -> nn.Module:
    """Return a copy of a model that is pruned, and then trains with quantization in the loop.

    Args:
        model: As for :func:`create_prune_retrain_model`.
        input_data: As for :func:`create_prune_retrain_model`.
        config_defination: Path of a ``.cfg`` file; it switches pruning and quantization on by what
            it holds.
        record_file: As for :func:`create_prune_retrain_model`.

    Raises:
        ConfigError: The configuration is wrong, or does not fit the model.
        ModelStateError: The model is already prepared, or is itself a single layer.
    """
    config = _checked(model, input_data, config_defination, record_file)
    return _created(model, input_data, config, record_file)


def restore_compressed_retrain_model(
    model: nn.Module,
    input_data: torch.Tensor | tuple[Any, ...],
    config_defination: str,
    record_file: str,
    pth_file: str,
    state_dict_name: str | None = None,
) -> nn.Module:
    """Return what :func:`create_compressed_retrain_model` returned, in the state of a checkpoint.

    Mind the order of the arguments, which is AMCT's and not that of
    :func:`restore_prune_retrain_model`.

    Args:
        model: The float model before pruning, or ``DistributedDataParallel`` around it.
        input_data: As for :func:`create_prune_retrain_model`.
        config_defination: As for :func:`create_compressed_retrain_model`.
        record_file: As for :func:`restore_prune_retrain_model`.
        pth_file: As for :func:`restore_prune_retrain_model`.
        state_dict_name: As for :func:`restore_prune_retrain_model`.

    Raises:
        AmctError: As for :func:`restore_prune_retrain_model`.
    """
    config = _checked(model, input_data, config_defination, record_file, required=True)
    return _restored(model, input_data, config, record_file, pth_file, state_dict_name)


def save_compressed_retrain_model(
    model: nn.Module,
    record_file: str,
    save_path: str,
    input_data: torch.Tensor | tuple[Any, ...],
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    dynamic_axes: dict[str, Any] | None = None,
) -> None:
    """Write the record file and both ONNX files of a compressed model.

    Args:
        model: As for :func:`save_prune_retrain_model`.
        record_file: Path of the record file: scales of quantized layers, and what was pruned.
        save_path: As for :func:`save_prune_retrain_model`.
        input_data: As for :func:`save_quant_retrain_model`.
        input_names: As for :func:`save_quant_retrain_model`.
        output_names: As for :func:`save_quant_retrain_model`.
        dynamic_axes: As for :func:`save_quant_retrain_model`.

    Raises:
        ConvertError: The model was never calibrated, or has diverged; names the layer.
        ModelStateError: The model is neither pruned nor quantized.
    """
    file_path("record_file", record_file)
    names = (input_names, output_names, dynamic_axes)
    _save(model, record_file, save_path, input_data, names)


def auto_channel_prune_search(
    model: nn.Module,
    config: str,
    input_data: list[Any],
    output_cfg: str,
    sensitivity: Any = "TaylorLossSensitivity",
    search_alg: Any = "GreedySearch",
) -> None:
    """Search the prune ratio of every layer for a wanted total, and write them as a ``.cfg`` file.

    The very channels stand in a plan beside it, ``<output_cfg without its suffix>.plan.json``.

    Args:
        model: The float model, or ``DistributedDataParallel`` around it; it is not changed.
        config: Path of the configuration of the search.
        input_data: ``[data, label]``, two tensors with the samples along axis 0.
        output_cfg: Path of the file to write, for :func:`create_prune_retrain_model`.
        sensitivity: ``"TaylorLossSensitivity"``, or an object; see
            :func:`amct_fx.search_channel_pruning`.
        search_alg: ``"GreedySearch"``, or an object.

    Raises:
        ArgumentTypeError: A path is not a string, ``input_data`` is no list of two.
        ConfigError: The configuration is wrong, or leaves no layer to search.
        ConfigFileNotFoundError: There is no such file.
        InputDataError: There are fewer samples than ``test_iteration``.
        ModelError: The model has no channels that can be cut.
    """
    from amct_fx.prune.search import search_channel_pruning

    check_type("config", config, str)
    check_different(config=config, output_cfg=file_path("output_cfg", output_cfg))
    check_type("input_data", input_data, list)
    if len(input_data) != 2:
        message = f"input_data must be [data, label], not a list of {len(input_data)}"
        raise InputDataError(message)
    checked = copied(float_model(model))
    search_channel_pruning(
        checked,
        Path(config),
        input_data,
        output_cfg=output_cfg,
        output_plan=Path(output_cfg).with_suffix(".plan.json"),
        sensitivity=sensitivity,
        search_alg=search_alg,
        mode="amct",
        importance="first",
    )


def _checked(
    model: object, input_data: object, definition: object, record: object, *, required: bool = False
) -> CompressionConfig:
    """Check the arguments of create and restore; return the configuration."""
    check_type("config_defination", definition, str)
    if record is not None or required:
        path = file_path("record_file", record)
        check_different(config_defination=str(definition), record_file=path)
    float_model(model)
    check_input_data(input_data, tensors_only=True)
    if definition == "":
        message = "config_defination must name a file; it is empty"
        raise ConfigError(message)
    return load_config(Path(str(definition)))


def _only_pruning(config: CompressionConfig) -> CompressionConfig | None:
    """Return a configuration without what it says of quantization; ``None``: it says no more."""
    if not config.has_prune_message:
        if config.has_quant_message:
            return None
        message = "the configuration has no prune_config, so there is nothing to prune"
        raise ConfigError(message, file=config.file)

    def pruning(overrides: tuple[Any, ...]) -> tuple[Any, ...]:
        mine = (override for override in overrides if override.prune is not None)
        return tuple(replace(override, activation=None, weight=None) for override in mine)

    return replace(
        config,
        activation=None,
        weight=None,
        quant_skip_layers=(),
        quant_skip_types=(),
        layer_overrides=pruning(config.layer_overrides),
        type_overrides=pruning(config.type_overrides),
    )


def _created(
    model: nn.Module,
    input_data: Any,
    config: CompressionConfig | None,
    record_file: str | None,
    **options: Any,
) -> nn.Module:
    """Prepare a copy of the model and write the record; without a configuration only copy it."""
    created = copied(float_model(model))
    if config is None:
        warn("the configuration only quantizes: nothing is pruned")
    else:
        keywords: dict[str, Any] = {**_AS_AMCT, **options}
        created = prepare_qat_amct(created, config, input_data, inplace=True, **keywords)
    if record_file is not None:
        record = _record_pb2().ScaleOffsetRecord()
        add_prune_record(record, created, current_plan(created))
        write_record_message(record_file, record)
    return created


def _restored(
    model: nn.Module,
    input_data: Any,
    config: CompressionConfig | None,
    record_file: str,
    pth_file: str,
    state_dict_name: str | None,
) -> nn.Module:
    """Prepare as the record says and load the checkpoint, which wins where they differ."""
    check_pth_arguments(pth_file, state_dict_name)
    record = read_prune_record(record_file)
    state = read_state(pth_file, state_dict_name)
    masked = any(key.endswith(".kept_channels") and "fake_quant" not in key for key in state)
    options = {"plan": record, "apply": "convert" if masked else "prepare"}
    restored = _created(model, input_data, config, None, **options)
    before = current_plan(restored)
    load_state(restored, state, pth_file)
    after = current_plan(restored)
    if before is not None and after is not None and before.diff(after):
        warn(f"{pth_file} and {record_file} prune other channels; those of the checkpoint count")
    return restored


def _save(
    model: object, record_file: str | None, save_path: str, input_data: object, names: Any
) -> None:
    """Check the arguments, convert, and write all files."""
    paths = save_paths(save_path)
    check_different(record_file=record_file, save_path=str(paths.deploy))
    check_different(record_file=record_file, save_path=str(paths.fake_quant))
    check_input_data(input_data, tensors_only=True)
    check_export_names(*names)
    checked = unwrapped(model)
    check_prepared_model(checked)
    plan = current_plan(checked)
    cuts = plan is not None and any(group.cut for group in plan.groups)
    quantized = any(isinstance(module, QATLayer) for module in checked.modules())
    masked = any(isinstance(module, WeightMask) for module in checked.modules())
    if not (cuts or quantized or masked):
        message = (
            "nothing is pruned in the model and nothing is quantized; there is nothing to save"
        )
        raise ModelStateError(message)
    converted = convert_amct(checked)
    record = None
    if record_file is not None:
        record = record_message(converted) if quantized else _record_pb2().ScaleOffsetRecord()
        add_prune_record(record, checked, plan)
    inputs, outputs, axes = names
    save_files(
        converted,
        paths,
        input_data,
        record_file=record_file,
        record=record,
        input_names=inputs,
        output_names=outputs,
        dynamic_axes=axes,
    )


def _record_pb2() -> Any:
    """Return the module of the record's messages; protobuf loads now."""
    from amct_fx.config import record_pb2 as module

    return module
