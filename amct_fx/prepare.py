"""The verb ``prepare``: a float model becomes a quantization-aware one.

The recipe: copy, trace, resolve the configuration for the layers found, then swap layers, insert
one input quantizer for each quantized tensor, and mask what is pruned. Source: design.md, "How
prepare works".
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from torch.ao.quantization import QConfigMapping

from amct_fx.backend_config import Reuse, warn_of_reused_layers
from amct_fx.checks import check_finite_weights, check_float_model
from amct_fx.config import CompressionConfig, load_config, resolve
from amct_fx.copying import copy_model
from amct_fx.discovery import PrepareOptions, discovered
from amct_fx.distributed import RangeMerger, RangeMergeRule
from amct_fx.grouping import QuantizerGroups
from amct_fx.insertion import check_tied_weights, insert_quantizers
from amct_fx.nn.fused import disable_fused_paths
from amct_fx.nn.parametrized import still_parametrizations
from amct_fx.outputs import Outputs, quantize_outputs
from amct_fx.prune.options import PruneOptions
from amct_fx.prune.remove import remove_channels
from amct_fx.pruning import attach_pruning, plan_pruning
from amct_fx.qconfig import (
    calibration_forwards,
    qconfig_mapping_from_resolution,
    qconfigs_by_layer,
)
from amct_fx.report.preparation import Preparation, Recipe, record_preparation

if TYPE_CHECKING:
    import torch
    from torch import nn
    from typing_extensions import Unpack

    from amct_fx.config import LinearChannelWise
    from amct_fx.graph import FixedMinRule
    from amct_fx.prune.options import PruneKeywords
    from amct_fx.pruning import Choice

__all__ = ["prepare_qat_amct"]

logger = logging.getLogger("amct_fx")

Config = str | os.PathLike[str] | Mapping[str, Any] | CompressionConfig | QConfigMapping | None


def prepare_qat_amct(
    model: nn.Module,
    cfg: Config = None,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | torch.Tensor | None = None,
    *,
    inplace: bool = False,
    fixed_min_rule: FixedMinRule = "relu",
    linear_channel_wise: LinearChannelWise = False,
    strict: bool = False,
    reused: Reuse = "float",
    functional: bool = False,
    range_merge: RangeMergeRule = "mean",
    outputs: Outputs = "float",
    dialect: str = "auto",
    name_map: Mapping[str, str] | None = None,
    plan: Choice | None = None,
    **pruning: Unpack[PruneKeywords],
) -> nn.Module:
    """Return a copy of ``model`` that trains with quantization and pruning in the loop.

    The configuration switches each on: a file that only prunes quantizes nothing.

    Inputs and weights of the quantizable layers are fake-quantized; outputs stay float. Names stay:
    a float checkpoint loads by name with ``strict=False``. The first ``batch_num`` forwards find
    the ranges (unless the configuration gives them), the later ones learn them.

    Args:
        model: A float model in any mode, on any device; not wrapped in DDP or ``torch.compile``.
        cfg: Path or text of a ``.cfg`` or of AMCT's JSON, a dict, a :class:`CompressionConfig`, a
            ``QConfigMapping``, or ``None`` for AMCT's defaults: INT8 everywhere, learned ranges.
        example_inputs: A tensor, a tuple of arguments, or a dict of them by name; optional. The
            model runs on them, in eval mode. This shows in which form each part is called (``None``
            for a mask, the value of a flag), so that more can be traced; layers that read one
            tensor, for one quantizer; and convolutions without a batch axis, which are left out.
            A wholly traced model whose graph computes something else stays Python code.
        inplace: Change ``model`` itself. It is still unchanged if an error is raised.
        fixed_min_rule: When an input range starts at 0, if the configuration does not say:
            ``"relu"`` behind a ReLU (as AMCT), ``"nonnegative"`` wherever no value can be negative.
        linear_channel_wise: Allow one weight scale for each output of a Linear, by name; ``"all"``
            gives every Linear that many unless the configuration says ``channel_wise: false``.
            onnxruntime and torch-npu take such files, ATC does not.
        reused: What happens to layers that one forward calls several times, and to layers that
            share a weight: ``"float"`` leaves them float as AMCT, ``"quantize"`` gives them one
            weight quantizer and one input quantizer for all calls.
        strict: Raise instead of leaving parts that cannot be traced as they are.
        functional: Also quantize ``F.conv*`` and ``F.linear`` on parameters of the model, in traced
            parts; each is addressed by the name of its node in the graph.
        range_merge: How the ranks of a distributed training join the ranges they calibrated:
            ``"mean"``, or ``"max"`` for the widest.
        outputs: ``"quantize"`` also quantizes the results of convolutions, additions and poolings,
            with ranges that are learned too, for the fastest file of onnxruntime
            (``export_onnx(..., format="qdq_full")``). This is not AMCT's arithmetic; every range of
            values that cannot be negative then starts at 0.
        dialect: ``"mindspore"`` refuses what AMCT for MindSpore has no field for; ``"auto"`` reads
            both kinds of file.
        name_map: New names of layers, by the names in the configuration.
        plan: The channels to cut, instead of a choice by norm: from :func:`amct_fx.prune_plan`,
            perhaps edited or read from JSON; from AMCT's record file by
            :func:`amct_fx.prune.read_prune_record`; or the output channels to keep by layer.
        **pruning: The options of pruning, as :class:`amct_fx.prune.PruneOptions` explains them:
            ``mode``, ``importance``, ``apply``, ``deconv_consumer``, ``norm_axis``, ``row_masks``,
            ``count_eval``, ``straight_through``.

    Returns:
        The prepared model, in the mode of ``model``; ``isinstance`` of its class.

    Raises:
        ConfigError: The configuration is wrong or does not fit the model; names file and line.
        ModelError: Nothing can be quantized or pruned, or a weight is not finite; names the layer.
        ModelStateError: The model is already prepared, or wrapped.
        ModelTypeError: ``model`` is no ``nn.Module``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> prepared = prepare_qat_amct(model, 'skip_layers: "2"')
        >>> type(prepared[0]).__module__, type(prepared[2]).__module__
        ('amct_fx.nn.qat', 'torch.nn.modules.conv')
        >>> prepared(torch.randn(2, 3, 8, 8)).shape
        torch.Size([2, 4, 4, 4])
    """
    check_float_model(model)
    prune_options = PruneOptions.of(pruning)
    options = PrepareOptions(
        fixed_min_rule, linear_channel_wise, reused, functional, range_merge, outputs
    )
    config, resolution, settings, reasons = None, None, {}, {}
    if not isinstance(cfg, QConfigMapping):
        config = load_config(cfg, dialect=dialect, name_map=name_map)
    prepared = model if inplace else copy_model(model)
    prunes = plan is not None or (config is not None and config.has_prune_message)
    looked = partial(discovered, strict=strict, prunes=prunes, prune_mode=prune_options.mode)
    with (
        looked(prepared, options, example_inputs) as found,
        still_parametrizations(prepared),
    ):
        if config is not None:
            resolution = resolve(
                config, found.facts, linear_channel_wise=linear_channel_wise, dialect=dialect
            )
            cfg = qconfig_mapping_from_resolution(resolution, prepared)
            settings, reasons = resolution.prune_settings, resolution.prune_reasons
        assert isinstance(cfg, QConfigMapping)
        qconfigs = qconfigs_by_layer(prepared, found.facts, cfg, needed=not settings)
        check_finite_weights(prepared, qconfigs)
        check_tied_weights(prepared, qconfigs)
        analysis = plan_pruning(
            prepared, found.captured, settings, example_inputs, prune_options, plan, reasons
        )

    if resolution is None or resolution.quantize:
        warn_of_reused_layers(found.facts)
    chosen = None if analysis is None else analysis.plan
    quantize = outputs == "quantize"
    rule: FixedMinRule = "nonnegative" if quantize else fixed_min_rule
    with still_parametrizations(prepared):
        only_cut = chosen is not None and prune_options.apply == "prepare" and not qconfigs
        only_cut = only_cut and not functional  # then parts whose graph is as before stay Python
        if chosen is not None and prune_options.apply == "prepare":
            parts = found.captured.regions
            remove_channels(prepared, chosen, parts, install=only_cut, analysis=analysis)
        if not only_cut:
            insert_quantizers(prepared, found.captured, qconfigs, rule)
        if quantize:
            quantize_outputs(found.captured)
        attach_pruning(prepared, settings, chosen, prune_options, plan)
    disable_fused_paths(prepared)
    QuantizerGroups().attach(prepared)
    RangeMerger(calibration_forwards(qconfigs.values()), range_merge).attach(prepared)
    recipe = Recipe(config, asdict(options) | asdict(prune_options))
    preparation = Preparation.of(
        found.facts, found.others, qconfigs, found.captured, recipe, resolution, chosen
    )
    record_preparation(prepared, preparation)
    logger.info("%s", preparation.headline)
    return prepared
