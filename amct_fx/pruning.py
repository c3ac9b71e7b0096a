"""Where pruning meets quantization: masks on a model with quantizers, and their end at convert.

The order on a weight is filter mask, 2:4 mask, fake-quantizer. Which channels stay is part of the
state dict: the buffer ``kept_channels`` of every layer that loses some. Source: spec/pruning.md
section 9.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from amct_fx.config import FilterPruneConfig
from amct_fx.errors import ArgumentTypeError, PruneError, did_you_mean
from amct_fx.graph.shapes import propagate_shapes
from amct_fx.nn.geometry import weight_geometry
from amct_fx.nn.qat import QATLayer
from amct_fx.observers import ULQFakeQuantize, ULQWeightFakeQuantize
from amct_fx.prune.masked_norms import attach_norm_masks, fold_norm_masks
from amct_fx.prune.masks import attach_filter_masks, attach_m4n2, fold_masks
from amct_fx.prune.parametrization import input_axis
from amct_fx.prune.plan import PrunePlan
from amct_fx.prune.planning import Analysis, follow_channels, not_traced
from amct_fx.prune.record import PruneRecord, plan_from_record, set_m4n2_masks
from amct_fx.prune.remove import check_fit, kept_values, remove_channels
from amct_fx.report.preparation import preparation_of, record_removal

if TYPE_CHECKING:
    from amct_fx.config import PruneConfig
    from amct_fx.graph import Capture
    from amct_fx.prune.options import PruneOptions

__all__ = [
    "Choice",
    "attach_pruning",
    "current_plan",
    "kept_channels",
    "plan_pruning",
    "remove_pruned",
]

Choice = PrunePlan | PruneRecord | Mapping[str, Tensor]
"""What may stand in place of a choice by norm: a plan, a record, or kept output channels by layer.
"""

_KEPT = "kept_channels"


def plan_pruning(
    model: nn.Module,
    captured: Capture,
    settings: Mapping[str, PruneConfig],
    example_inputs: Any,
    options: PruneOptions,
    given: Choice | None = None,
    reasons: Mapping[str, str] | None = None,
) -> Analysis | None:
    """Choose the channels to cut.

    Args:
        model: The float model.
        captured: Its traced parts.
        settings: How each layer is pruned, by name.
        example_inputs: A tensor or a tuple of arguments, or ``None``.
        options: Those of pruning.
        given: A plan, a record, or the output channels that layers keep, instead of a choice by
            norm.
        reasons: Why settings do not reach other layers, by name, for the report.

    Returns:
        The plan, with the analysis if it is a choice by norm; ``None`` if no channels are pruned.

    Raises:
        PruneError: What is given does not fit the model.
    """
    if isinstance(given, PrunePlan):
        if example_inputs is not None:  # they may be more than the shapes that a file holds
            shapes = captured.facts or propagate_shapes(model, captured.regions, example_inputs)
            given = replace(given, facts=shapes)
        check_fit(model, given, captured.regions)
        return Analysis(given)
    _check_given(model, given)
    if given is not None:  # the ratio plays no part: the channels are known
        names = given.removed if isinstance(given, PruneRecord) else given
        settings = {name: FilterPruneConfig(0.5) for name in names} | dict(settings)
    if not any(isinstance(setting, FilterPruneConfig) for setting in settings.values()):
        return None
    others = {name: text for name, text in (reasons or {}).items() if name not in settings}
    others |= not_traced(captured, settings)
    analysis = follow_channels(
        model, captured.regions, settings, example_inputs, options, others, captured.facts
    )
    if given is None:
        return analysis
    if isinstance(given, PruneRecord):
        plan = plan_from_record(analysis.plan, given, dict(model.named_modules()))
    else:
        plan = analysis.plan.with_rows(given)
    check_fit(model, plan, captured.regions)
    return Analysis(plan)


def kept_channels(plan: PrunePlan) -> dict[str, Tensor]:
    """Return a bool mask of the output channels that stay, for every layer that may lose some."""
    kept = plan.kept_rows()
    return {
        name: _as_mask(kept.get(name, torch.arange(size)), size).bool()
        for name, size in plan.row_sizes().items()
    }


def _check_given(model: nn.Module, given: object) -> None:
    """Refuse what stands in place of a choice by norm and is none, or names no layer.

    Raises:
        ArgumentTypeError: It is of another type.
        PruneError: A layer of it is not in the model.
    """
    if given is not None and not isinstance(given, (PruneRecord, Mapping)):
        message = (
            "plan must be a PrunePlan, a record that read_prune_record returned, or the channels "
            f"to keep by layer, not {type(given).__name__}; PrunePlan.from_json reads a text"
        )
        raise ArgumentTypeError(message)
    known = [name for name, _ in model.named_modules()]
    for name in given if isinstance(given, Mapping) else ():
        if name not in known:
            message = f"plan names {name!r}, which is no layer of the model"
            raise PruneError(message + did_you_mean(str(name), known))


def attach_pruning(
    model: nn.Module,
    settings: Mapping[str, PruneConfig],
    plan: PrunePlan | None,
    options: PruneOptions,
    given: Choice | None = None,
) -> None:
    """Mask what the configuration prunes.

    Args:
        model: The model, quantizers already inserted; changed in place.
        settings: How each layer is pruned, by name.
        plan: Which channels go, or ``None``; with ``apply="prepare"`` they are gone already.
        options: Those of pruning.
        given: As for :func:`plan_pruning`; a record has 2:4 masks, too.
    """
    columns: dict[str, Tensor] = {}
    if plan is not None and options.apply == "convert":
        columns = plan.column_masks()
        _restrict_results(model, plan)
        attach_filter_masks(model, _joined(columns, plan.row_masks()))
        attach_norm_masks(model, plan.norm_masks())
        for name, kept in plan.kept_rows().items():
            layer: Any = model.get_submodule(name)
            channels = getattr(layer, "out_channels", None) or layer.out_features
            layer.register_buffer(_KEPT, _as_mask(kept, channels).to(_device(layer)))
        _restrict_calibration(model, plan)
        _count_kept_columns(model, columns)
    attach_m4n2(model, settings, columns, options)
    if isinstance(given, PruneRecord):
        set_m4n2_masks(model, given)


def current_plan(model: nn.Module) -> PrunePlan | None:
    """Return the plan of a prepared model with the channels that its state keeps now.

    Args:
        model: A prepared model; a loaded checkpoint decides the channels.
    """
    preparation = preparation_of(model)
    if preparation is None or preparation.plan is None:
        return None
    kept = {name: layer.kept_channels for name, layer in _cut_layers(model).items()}
    return preparation.plan.with_rows(kept) if kept else preparation.plan


def remove_pruned(model: nn.Module) -> None:
    """Fold the masks into the weights and cut the masked channels away.

    Args:
        model: Our own copy of a prepared model; changed in place.
    """
    plan, layers = current_plan(model), _cut_layers(model)
    fold_masks(model)
    fold_norm_masks(model)
    for layer in layers.values():
        delattr(layer, _KEPT)
    if plan is not None and layers:
        record_removal(model, plan, remove_channels(model, plan))
        for layer in model.modules():
            if isinstance(layer, QATLayer):
                _fit_weight_quantizers(layer)


def _fit_weight_quantizers(layer: QATLayer) -> None:
    """Tell the fake-quantizers of the weights about the channels that are left."""
    geometry = weight_geometry(layer)
    for name in layer.weight_quantizers.values():
        quantizer: Any = getattr(layer, name)
        if getattr(quantizer, "num_channels", None) not in (None, 1):
            quantizer.num_channels = geometry.num_channels
        if getattr(quantizer, "ch_axis", None) == 1:
            quantizer.groups = geometry.groups


def _cut_layers(model: nn.Module) -> dict[str, Any]:
    """Return the layers that lose output channels, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if _KEPT in module._buffers and not isinstance(module, ULQFakeQuantize)
    }


def _joined(columns: Mapping[str, Tensor], rows: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return one mask for each parameter."""
    joined = dict(columns)
    for name, mask in rows.items():
        joined[name] = joined[name] & mask if name in joined else mask
    return joined


def _restrict_calibration(model: nn.Module, plan: PrunePlan) -> None:
    """Let the range search see only channels that stay."""
    for name, kept in plan.kept_inputs().items():
        layer: Any = model.get_submodule(name)
        quantizer = getattr(layer, "input_fake_quant", None)  # the owner's, where it is shared
        if isinstance(quantizer, ULQFakeQuantize):
            channels = getattr(layer, "in_channels", None) or layer.in_features
            quantizer.calibrate_on(
                _as_mask(kept, channels), axis=-1 if isinstance(layer, nn.Linear) else 1
            )


def _restrict_results(model: nn.Module, plan: PrunePlan) -> None:
    """Let the quantizers of results calibrate on channels that stay, as those of inputs do."""
    quantizers = {
        module
        for name, module in model.named_modules()
        if name.endswith("output_fake_quant") and isinstance(module, ULQFakeQuantize)
    }
    for quantizer, kept, axis in kept_values(model, plan) if quantizers else ():
        if quantizer in quantizers:
            assert isinstance(quantizer, ULQFakeQuantize)
            quantizer.calibrate_on(kept, axis)


def _count_kept_columns(model: nn.Module, columns: Mapping[str, Tensor]) -> None:
    """Let the gradient of learned weight scales count only elements that stay."""
    for name, mask in columns.items():
        owner, _, parameter = name.rpartition(".")
        layer = model.get_submodule(owner)
        quantizer = getattr(layer, f"{parameter}_fake_quant", None)
        if isinstance(quantizer, ULQWeightFakeQuantize):
            quantizer.kept_share = float(mask.float().mean(input_axis(layer)).max())


def _as_mask(kept: Tensor, channels: int) -> Tensor:
    mask = torch.zeros(channels, dtype=torch.uint8)
    mask[kept] = 1
    return mask


def _device(module: nn.Module) -> torch.device:
    return next(module.parameters()).device
