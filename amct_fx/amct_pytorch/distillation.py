"""AMCT's functions of blockwise distillation."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader

from amct_fx.amct_pytorch._arguments import (
    check_export_names,
    check_input_data,
    check_type,
    config_paths,
    file_path,
    float_model,
    save_paths,
    trace,
    unwrapped,
)
from amct_fx.amct_pytorch._save import save_files
from amct_fx.checks import check_prepared_model
from amct_fx.config.distill import DistillConfig, load_distill_config, resolve_distill
from amct_fx.config.distill_json import (
    DistillPlan,
    distill_to_dict,
    load_distill,
    save_distill_json,
)
from amct_fx.convert import convert_amct
from amct_fx.distillation import distill as _distill
from amct_fx.distillation import distill_facts, find_groups, prepare_distill_amct
from amct_fx.errors import ArgumentError, ArgumentTypeError, ConfigError, InputDataError

if TYPE_CHECKING:
    import os

    import torch
    from torch import nn
    from torch.optim import Optimizer

    from amct_fx.distillation.optim import OptimizerFactory
    from amct_fx.distillation.options import BnMode, CacheKind, Loss
    from amct_fx.distillation.samples import SampleFn

__all__ = [
    "DistillSampleBase",
    "create_distill_config",
    "create_distill_model",
    "distill",
    "save_distill_model",
]

_RECORD = "./amct_log/scale_offset_record.txt"


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
    model = float_model(model, "create_distill_config")
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


def create_distill_model(
    config_file: str | DistillConfig | DistillPlan,
    model: nn.Module,
    input_data: torch.Tensor | tuple[torch.Tensor, ...],
) -> nn.Module:
    """Return a copy of a model with quantizers, to be distilled.

    Args:
        config_file: Path of a JSON of :func:`create_distill_config`, or of a ``.cfg`` file; or what
            :func:`amct_fx.config.distill.load_distill_config` returned.
        model: The float model, or ``DistributedDataParallel`` around it; it is not changed.
        input_data: Example input, or a tuple of tensors.

    Returns:
        The student; :func:`distill` trains it.

    Raises:
        ArgumentTypeError: ``config_file`` is neither.
        ConfigError: The configuration is wrong or does not fit the model.
        ConfigFileNotFoundError: There is no such file.
        InputDataError: ``input_data`` is neither a tensor nor a tuple of tensors.
        ModelError: The model has no layer that can be distilled.
        ModelStateError: The model is already prepared, cannot be copied, or is a single layer.
        ModelTypeError: ``model`` is no module.
    """
    config = _config(config_file)
    model = float_model(model, "create_distill_model")
    check_input_data(input_data, tensors_only=True)
    return prepare_distill_amct(model, config, input_data)


class DistillSampleBase(ABC):
    """From a batch of the loader to the inputs of the model; subclass it for :func:`distill`.

    Example:
        >>> import torch
        >>> class Images(DistillSampleBase):
        ...     def get_model_input_data(self, samples):
        ...         return samples["image"]
        >>> Images().get_model_input_data({"image": torch.zeros(1)})
        tensor([0.])
    """

    @abstractmethod
    def get_model_input_data(self, samples: Any) -> torch.Tensor | list[torch.Tensor]:
        """Return a tensor, or a list or tuple of all arguments of the model.

        Args:
            samples: What the loader gives.
        """


def distill(
    model: nn.Module,
    compress_model: nn.Module,
    config_file: str | DistillConfig | DistillPlan,
    train_loader: Iterable[Any],
    epochs: int = 1,
    lr: float = 1e-3,
    sample_instance: DistillSampleBase | None = None,
    loss: Loss | None = None,
    optimizer: Optimizer | None = None,
    *,
    optimizer_factory: OptimizerFactory | None = None,
    sample_fn: SampleFn | None = None,
    device: torch.device | str | None = None,
    cache: CacheKind | None = None,
    dump_dir: str | os.PathLike[str] | None = None,
    bn_mode: BnMode = "eval",
    clip_lr: float | None = None,
    keep_best: bool = True,
) -> nn.Module:
    """Train a student block by block to follow its float model; needs no labels.

    Args:
        model: The float model, or ``DistributedDataParallel`` around it; it is not changed.
        compress_model: What :func:`create_distill_model` returned; trained in place.
        config_file: As for :func:`create_distill_model`.
        train_loader: A ``DataLoader``. A batch is a tensor, or begins with one.
        epochs: Epochs for each group.
        lr: Learning rate of weights, biases and batch norms, if ``optimizer`` is not given.
        sample_instance: Gives the inputs of the model for a batch.
        loss: A loss module of ``torch.nn`` or a function; default ``nn.MSELoss()``.
        optimizer: An optimizer whose class and hyper-parameters each group's optimizer gets.
        optimizer_factory: As for :func:`amct_fx.distill`, like all arguments below.
        sample_fn: A function, in place of ``sample_instance``.
        device: Where the samples go.
        cache: Where the teacher's activations are kept.
        dump_dir: Folder of the files.
        bn_mode: Mode of the batch norms.
        clip_lr: Learning rate of the clips.
        keep_best: Keep the best state of each group.

    Returns:
        ``compress_model``, out of ``DistributedDataParallel``, in eval mode.

    Raises:
        ArgumentError: An argument that cannot be used; an empty loader.
        ArgumentTypeError: An argument of the wrong type.
        ConfigError: The configuration does not fit the model.
        ConfigFileNotFoundError: There is no such file.
        DistillError: A group failed; names it.
        InputDataError: ``sample_instance`` is of another class.
        ModelStateError: ``model`` has quantizers, or ``compress_model`` has none.
        ModelTypeError: One of the models is no module.
    """
    if not isinstance(train_loader, DataLoader):
        message = f"train_loader must be a DataLoader, not {type(train_loader).__name__}"
        raise ArgumentTypeError(message)
    if sample_instance is not None:
        sample_fn = _sample_function(sample_instance, sample_fn)
    return _distill(
        model,
        compress_model,
        train_loader,
        _config(config_file),
        epochs=epochs,
        lr=lr,
        loss=loss,
        optimizer=optimizer,
        optimizer_factory=optimizer_factory,
        sample_fn=sample_fn,
        device=device,
        cache=cache,
        dump_dir=dump_dir,
        bn_mode=bn_mode,
        clip_lr=clip_lr,
        keep_best=keep_best,
    )


def save_distill_model(
    model: nn.Module,
    save_path: str,
    input_data: torch.Tensor | tuple[torch.Tensor, ...],
    record_file: str | None = None,
    input_names: list[str] | None = None,
    output_names: list[str] | None = None,
    dynamic_axes: dict[str, Any] | None = None,
) -> None:
    """Write a distilled student as AMCT's deploy file, its fake-quant file and the record.

    Args:
        model: What :func:`distill` returned, or ``DistributedDataParallel`` around it; not changed.
        save_path: Folder and prefix: ``"out/net"`` gives ``out/net_deploy_model.onnx`` and
            ``out/net_fake_quant_model.onnx``.
        input_data: Example input, or a tuple of tensors.
        record_file: Path of the record; default ``./amct_log/scale_offset_record.txt``.
        input_names: Names of the inputs in the files.
        output_names: Names of the outputs in the files.
        dynamic_axes: Axes that may change, as for ``torch.onnx.export``.

    Raises:
        ArgumentTypeError: An argument of the wrong type; names it.
        ConvertError: A layer was never calibrated, or a scale is not finite; names the layer.
        ExportError: The model cannot be exported.
        InputDataError: ``input_data`` is neither a tensor nor a tuple of tensors.
        ModelStateError: The model has no quantizers.
        ModelTypeError: ``model`` is no module.
    """
    model = unwrapped(model)
    paths = save_paths(save_path)
    check_input_data(input_data, tensors_only=True)
    check_export_names(input_names, output_names, dynamic_axes)
    record = file_path("record_file", _RECORD if record_file is None else record_file)
    check_prepared_model(model, first="create_distill_model and distill")
    save_files(
        convert_amct(model),
        paths,
        input_data,
        record_file=record,
        input_names=input_names,
        output_names=output_names,
        dynamic_axes=dynamic_axes,
    )


def _config(config_file: object) -> DistillConfig | DistillPlan:
    """Read the configuration of the last three functions."""
    if isinstance(config_file, (DistillConfig, DistillPlan)):
        return config_file
    check_type("config_file", config_file, str)
    if not config_file:
        message = "config_file is empty; give the path of a JSON or a .cfg file"
        raise ConfigError(message)
    return load_distill(Path(str(config_file)))


def _sample_function(sample_instance: object, sample_fn: object) -> SampleFn:
    if not isinstance(sample_instance, DistillSampleBase):
        message = (
            "sample_instance must be an object of a subclass of DistillSampleBase, not "
            f"{type(sample_instance).__name__}"
        )
        raise InputDataError(message)
    if sample_fn is not None:
        message = "give sample_instance or sample_fn, not both"
        raise ArgumentError(message)
    return sample_instance.get_model_input_data
