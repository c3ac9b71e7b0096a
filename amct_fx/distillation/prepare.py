"""The verb ``prepare_distill``: a float model becomes a student. Source: spec section 9.2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from amct_fx.backend_config import is_layer, unbatched_layers, without_unbatched
from amct_fx.checks import check_float_model
from amct_fx.config.distill import resolve_distill
from amct_fx.config.distill_json import load_distill
from amct_fx.config.schema import CompressionConfig, LayerOverride
from amct_fx.copying import copy_model
from amct_fx.distillation.facts import distill_facts
from amct_fx.distillation.options import check_flag
from amct_fx.distillation.plan import distillation, meet, record_distillation
from amct_fx.errors import ModelStateError
from amct_fx.graph import capture
from amct_fx.prepare import prepare_qat_amct

if TYPE_CHECKING:
    import os

    import torch
    from torch import nn

    from amct_fx.config import Resolution
    from amct_fx.config.distill import DistillConfig
    from amct_fx.config.distill_json import DistillPlan
    from amct_fx.distributed import RangeMergeRule
    from amct_fx.graph import FixedMinRule

__all__ = ["prepare_distill_amct"]


def prepare_distill_amct(
    model: nn.Module,
    cfg: str | os.PathLike[str] | Mapping[str, Any] | DistillConfig | DistillPlan | None = None,
    example_inputs: tuple[Any, ...] | torch.Tensor | None = None,
    *,
    fixed_min_rule: FixedMinRule = "relu",
    linear_channel_wise: bool = False,
    allow_branches: bool = False,
    range_merge: RangeMergeRule = "mean",
) -> nn.Module:
    """Return a copy of ``model`` with quantizers, the student of a blockwise distillation.

    ``Conv2d`` and ``Linear`` are quantized. The groups that are trained together are found in the
    graph or taken from the configuration; :func:`amct_fx.distillation.distillation_of` lists them.
    :func:`amct_fx.distill` calibrates and trains the student.

    Args:
        model: The float model in any mode, which is the teacher later; it is not changed.
        cfg: Path or text of a distillation ``.cfg`` or of its JSON, a dict with the keys of the
            JSON, or ``None`` for the defaults: INT8 everywhere, each layer its own group.
        example_inputs: A tensor or a tuple of arguments; optional, as for
            :func:`amct_fx.prepare_qat_amct`.
        fixed_min_rule: When an input range starts at 0, if the configuration does not say:
            ``"relu"`` behind a ReLU, ``"nonnegative"`` wherever no value can be negative.
        linear_channel_wise: Allow one weight scale for each output of a Linear, by name.
        allow_branches: Let a group of the configuration hold a closed residual block.
        range_merge: How ranks join the ranges that they calibrated, ``"mean"`` or ``"max"``.

    Returns:
        The student, in the mode of ``model``.

    Raises:
        ArgumentTypeError: A switch is neither ``True`` nor ``False``.
        ConfigError: The configuration is wrong or does not fit the model; names file and line.
        ModelError: Nothing can be quantized, or there is no group.
        ModelStateError: The model is prepared, wrapped, cannot be copied, or is a single layer.
        ModelTypeError: ``model`` is no ``nn.Module``.

    Example:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> student = prepare_distill_amct(model, 'quant_skip_layers: "2"')
        >>> type(student[0]).__module__, type(student[2]).__module__
        ('amct_fx.nn.qat', 'torch.nn.modules.conv')
    """
    check_flag("linear_channel_wise", linear_channel_wise)
    check_flag("allow_branches", allow_branches)
    check_float_model(model, call="prepare_distill_amct")
    if is_layer(model):
        kind = type(model).__name__
        message = f"the model is a single {kind}, which has no name; use nn.Sequential(model)"
        raise ModelStateError(message)
    config = load_distill(cfg)
    traced = _copied(model)
    given = example_inputs is not None
    unbatched = unbatched_layers(traced, example_inputs) if given else frozenset()
    captured = capture(traced, is_layer, example_inputs=example_inputs)
    facts = without_unbatched(distill_facts(traced, captured), unbatched)
    resolution = resolve_distill(config, facts, linear_channel_wise=linear_channel_wise)
    groups = meet(traced, captured, config, facts, allow_branches=allow_branches)
    student = prepare_qat_amct(
        model,
        _as_training_config(resolution),
        example_inputs,
        fixed_min_rule=fixed_min_rule,
        linear_channel_wise=True,  # was decided by the rules of distillation
        range_merge=range_merge,
    )
    quantized = {spec.name for spec in resolution.layers.values() if spec.quantize}
    known = distillation(config, groups, facts, quantized, allow_branches=allow_branches)
    record_distillation(student, known)
    return student


def _copied(model: nn.Module) -> nn.Module:
    try:
        return copy_model(model)
    except Exception as error:  # whatever the user's objects raise
        message = f"the model cannot be copied: {type(error).__name__}: {error}"
        raise ModelStateError(message) from error


def _as_training_config(resolution: Resolution) -> CompressionConfig:
    """Say the same to the preparation for training: a list of layers, nothing inherited."""
    specs = resolution.layers.values()
    return CompressionConfig(
        batch_num=resolution.batch_num,
        layer_overrides=tuple(
            LayerOverride(spec.name, activation=spec.activation, weight=spec.weight)
            for spec in specs
        ),
        quant_skip_layers=tuple(spec.name for spec in specs if not spec.quantize),
        resolved=True,
    )
