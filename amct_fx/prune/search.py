"""Which layer may lose how much: search prune ratios for a wanted cost.

Source: spec/pruning.md section 11.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from amct_fx.checks import check_float_model
from amct_fx.choices import check_choices
from amct_fx.config import CompressionConfig, FilterPruneConfig, LayerOverride, resolve
from amct_fx.config.auto_prune import AutoPruneConfig, load_auto_prune_config
from amct_fx.config.files import write_text
from amct_fx.config.messages import warn
from amct_fx.copying import copy_model
from amct_fx.discovery import PrepareOptions, discovered
from amct_fx.errors import ConfigError, InputDataError, ModelError, PruneError, did_you_mean
from amct_fx.prune.cost import CostModel, Metric
from amct_fx.prune.functional import remaining_channels
from amct_fx.prune.greedy import TOLERANCE, GreedySearch, Step
from amct_fx.prune.latency import LayerClock
from amct_fx.prune.options import PruneKeywords, PruneOptions
from amct_fx.prune.plan import PrunePlan
from amct_fx.prune.planning import follow_channels
from amct_fx.prune.remove import check_fit
from amct_fx.prune.sensitivity import Loss, TaylorLossSensitivity, samples_of

if TYPE_CHECKING:
    import os
    from contextlib import AbstractContextManager

    from torch import nn
    from typing_extensions import Unpack

    from amct_fx.graph.capture import Region
    from amct_fx.prune.plan_parts import PruneGroup

__all__ = ["ChannelSearch", "search_channel_pruning"]

_GLOBAL_RATIO = 0.3


@dataclass(frozen=True)
class ChannelSearch:
    """What a search found.

    Attributes:
        plan: The channels to cut of the layers that were searched, for
            ``prepare_qat_amct(..., plan=...)``.
        config: The same as prune ratios of single layers, with the entries of
            ``override_prune_cfg``.
        target: The ratio that was asked for.
        ratio: Cost before over cost after.
        metric: What was counted.
        steps: The steps of the search.

    Example:
        >>> from torch import nn, rand
        >>> model = nn.Sequential(nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 8, 3))
        >>> data = [rand(1, 3, 8, 8), rand(1, 8, 4, 4)]
        >>> found = search_channel_pruning(
        ...     model, "compress_ratio: 1.6 ascend_optimized: false", data
        ... )
        >>> print(found)
        macs 1.60x cheaper, asked for 1.6x: 0 12 of 32 cut
    """

    plan: PrunePlan
    config: CompressionConfig
    target: float
    ratio: float
    metric: str
    steps: tuple[Step, ...] = field(repr=False, default=())

    def __str__(self) -> str:
        """Return what is reached and the layers that lose channels."""
        cuts = [
            f"{', '.join(group.producers)} {len(group.cut)} of {group.channels} cut"
            for group in self.plan.groups
            if group.cut
        ]
        head = f"{self.metric} {self.ratio:.2f}x cheaper, asked for {self.target:g}x"
        return f"{head}: {'; '.join(cuts) or 'nothing is cut'}"


def search_channel_pruning(
    model: nn.Module,
    config: str | os.PathLike[str] | Mapping[str, Any] | AutoPruneConfig,
    data: Any,
    *,
    output_cfg: str | os.PathLike[str] | None = None,
    output_plan: str | os.PathLike[str] | None = None,
    metric: Metric = "macs",
    loss: Loss | None = None,
    bits: Mapping[str, tuple[int, int]] | None = None,
    sensitivity: Any = "TaylorLossSensitivity",
    search_alg: Any = "GreedySearch",
    global_block: bool = True,
    progress: Any = None,
    **options: Unpack[PruneKeywords],
) -> ChannelSearch:
    """Find out which layer may lose how many channels, so that the model gets cheaper by a ratio.

    Channels go in steps, always those whose scores are lowest for the cost they save; the cost is
    exact at every step. The search ends at the first step that reaches the ratio; where that one
    would exceed it by more than 2 %, dearer steps that do not are taken, if there are such.

    Args:
        model: A float model; it is not changed.
        config: Path or text of AMCT's ``AutoChannelPruneConfig``, a dict with its fields, or an
            :class:`AutoPruneConfig`.
        data: ``[inputs, targets]`` with the samples along axis 0, or an iterable of such pairs,
            one batch each.
        output_cfg: File for the ratios, in AMCT's form.
        output_plan: File for the plan, as JSON, with the very channels.
        metric: ``"macs"``, ``"params"``, ``"bitops"`` (multiply-accumulates times bits), or
            ``"latency"``: the sum of what the layers take on this device, with the channels that
            they have left at each step; see :class:`amct_fx.prune.latency.LayerClock`.
        loss: Of an output and a target; ``None`` for the mean absolute difference.
        bits: For ``"bitops"`` the bits of weights and activations by name of the layer; 8 and 8
            where it says nothing.
        sensitivity: ``"TaylorLossSensitivity"``, or an object with its two methods.
        search_alg: ``"GreedySearch"``, or an object whose ``channel_prune_search(model, groups,
            (ratio, ascend_optimized, max_prune_ratio))`` returns the units to keep by id of the
            group; each group holds its scores.
        global_block: Write a global ``prune_config`` too, which AMCT asks for; it reaches no layer.
        progress: ``True`` for a progress bar, ``None`` for one in a terminal, or a callable of
            stage, done and total.
        **options: Such as ``mode``: see :class:`amct_fx.prune.PruneOptions`.

    Returns:
        What was found; a warning says so when the ratio is missed by more than 2 %.

    Raises:
        ConfigError: The configuration is wrong, or leaves no layer to search.
        ConfigFileNotFoundError: There is no such file.
        InputDataError: ``data`` is of the wrong form, or there are too few samples.
        ModelError: The model has no channels that can be cut.
    """
    check_choices(metric=(metric, ("macs", "params", "bitops", "latency")))
    check_float_model(model)
    _check_outputs(output_cfg=output_cfg, output_plan=output_plan)
    settings = load_auto_prune_config(config)
    sensitivity = _named(sensitivity, "sensitivity", "get_sensitivity")
    sensitivity = TaylorLossSensitivity(loss) if isinstance(sensitivity, str) else sensitivity
    search_alg = _named(search_alg, "search_alg", "channel_prune_search")
    samples = samples_of(data, settings.test_iteration)
    if not samples:
        message = "data holds no samples"
        raise InputDataError(message)
    own, regions, searched, plan = _plan(model, settings, samples[0][0], PruneOptions.of(options))
    sensitivity.setup_initialization((plan, own), samples, settings.test_iteration, None)
    scores = sensitivity.get_sensitivity(plan.groups)
    _check_scores(plan, scores)
    pairs = zip(plan.groups, scores, strict=True)
    plan = replace(plan, groups=tuple(replace(g, scores=tuple(s)) for g, s in pairs))
    factors = _factors(metric, plan, bits or {})
    clock = LayerClock(own, plan, samples[0][0]) if metric == "latency" else None
    cost = CostModel(plan, metric, factors, clock)
    full = cost.total
    wanted = (settings.compress_ratio, settings.ascend_optimized, settings.max_prune_ratio)
    steps: tuple[Step, ...] = ()
    with _bar(progress) as report:
        if isinstance(search_alg, str):
            told = lambda ratio: report("search", *_done(ratio, wanted[0]))  # noqa: E731
            greedy = GreedySearch(cost, told, plan.levels)
            kept: Any = greedy.channel_prune_search(plan.groups, scores, wanted)
            steps = tuple(greedy.steps)
        else:
            kept = search_alg.channel_prune_search(own, plan.groups, wanted)
    plan = _with_units(plan, kept)
    check_fit(own, plan, regions)
    found = ChannelSearch(
        plan,
        _as_config(settings, plan, searched, global_block=global_block),
        settings.compress_ratio,
        full / _left_of(plan, CostModel(plan, metric, factors, clock)),
        metric,
        steps,
    )
    _warn_if_missed(found, settings)
    if output_cfg is not None:
        write_text(output_cfg, found.config.to_cfg())
    if output_plan is not None:
        write_text(output_plan, plan.to_json(indent=1) + "\n")
    return found


def _plan(
    model: nn.Module, config: AutoPruneConfig, inputs: Any, options: PruneOptions
) -> tuple[nn.Module, list[Region], list[str], PrunePlan]:
    """Return our copy of the model, its traced parts, the layers that are searched, and a plan.

    The plan cuts nothing.
    """
    own = copy_model(model).eval()
    own.requires_grad_(True)
    with discovered(own, PrepareOptions(), inputs, prune_mode=options.mode) as found:
        ratio = FilterPruneConfig(_GLOBAL_RATIO, config.ascend_optimized)
        asked = replace(config.overrides, prune=ratio)
        specs = resolve(asked, found.facts).layers.values()
        searched = [
            spec.name
            for spec in specs
            if spec.prune is not None and spec.prune_origin.level not in ("layer", "type")
        ]
        if not searched:
            message = "no layer is left to be searched: all are overridden or skipped"
            raise ConfigError(message, file=config.file)
        wanted = {name: ratio for name in searched}
        regions, facts = found.captured.regions, found.captured.facts
        plan = follow_channels(own, regions, wanted, inputs, options, facts=facts).plan
    if not plan.groups:
        reasons = "; ".join(map(str, plan.pinned[:5]))
        message = f"the model has no channels that can be cut ({reasons})"
        raise ModelError(message)
    groups = tuple(replace(group, kept=tuple(range(group.channels))) for group in plan.groups)
    return own, regions, searched, replace(plan, groups=groups).with_costs()


def _with_units(plan: PrunePlan, kept: Any) -> PrunePlan:
    """Return the plan with the choice of a search."""
    if isinstance(kept, PrunePlan):
        return kept
    if not isinstance(kept, Mapping):
        message = "channel_prune_search must return the units to keep, by id of the group"
        raise PruneError(message)
    for group, units in kept.items():
        plan = plan.with_kept(group, units)
    plan.check()
    return plan


def _left_of(plan: PrunePlan, cost: CostModel) -> float:
    """Return what a plan costs with its choice."""
    cost.remove({group.id: group.cut for group in plan.groups})
    return cost.total


def _factors(
    metric: Metric, plan: PrunePlan, bits: Mapping[str, tuple[int, int]]
) -> dict[str, float]:
    """Return what a multiply-accumulate of each layer counts."""
    if metric != "bitops":
        return {}
    names = {cost.name for cost in plan.costs}
    for name in bits:
        if name not in names:
            message = f"bits names {name!r}, which is no layer of the model that costs anything"
            raise ConfigError(message + did_you_mean(name, names))
    products = {cost.name: bits.get(cost.name, (8, 8)) for cost in plan.costs}
    return {name: float(weight * activation) for name, (weight, activation) in products.items()}


def _as_config(
    settings: AutoPruneConfig, plan: PrunePlan, searched: list[str], *, global_block: bool
) -> CompressionConfig:
    """Return the choice as prune ratios of single layers; layers that stay are skipped."""
    groups = {name: group for group in plan.groups for name in group.producers if group.cut}
    asc = settings.ascend_optimized
    overrides = [
        LayerOverride(name, prune=FilterPruneConfig(_ratio_of(groups[name], asc), asc))
        for name in searched
        if name in groups
    ]
    given = settings.overrides
    if not global_block:
        return replace(given, layer_overrides=(*given.layer_overrides, *overrides))
    staying = [name for name in searched if name not in groups]
    return replace(
        given,
        prune=FilterPruneConfig(_GLOBAL_RATIO, asc),
        layer_overrides=(*given.layer_overrides, *overrides),
        prune_skip_layers=(*given.prune_skip_layers, *staying),
    )


def _ratio_of(group: PruneGroup, ascend_optimized: bool) -> float:
    """Return the shortest ratio that gives the number of units back."""
    share = len(group.cut) / group.channels
    for digits in range(1, 10):
        for shift in (0, 1, -1):
            ratio = round(share, digits) + shift * 10.0**-digits
            if 0 < ratio < 1 and len(group.kept) == remaining_channels(
                group.channels, ratio, groups=group.balance, ascend_optimized=ascend_optimized
            ):
                return ratio
    message = f"no prune_ratio leaves {len(group.kept)} of the {group.channels} channels of "
    message += ", ".join(group.producers)
    raise PruneError(message)


def _named(value: Any, what: str, method: str) -> Any:
    """Refuse what is neither the name that is known nor an object with the method."""
    known = {"sensitivity": "TaylorLossSensitivity", "search_alg": "GreedySearch"}[what]
    if value != known and (isinstance(value, str) or not callable(getattr(value, method, None))):
        message = f"{what} must be {known!r} or an object with {method}, not {value!r}"
        raise ConfigError(message)
    return value


def _check_outputs(**paths: str | os.PathLike[str] | None) -> None:
    """Refuse folders and one file for both before the search takes its time."""
    given = {name: Path(path) for name, path in paths.items() if path is not None}
    for name, path in given.items():
        if path.is_dir():
            message = f"{name} must name a file, {str(path)!r} is a folder"
            raise ConfigError(message)
    if len(given) > len({path.resolve() for path in given.values()}):
        message = f"{' and '.join(given)} are the same file"
        raise ConfigError(message)


def _check_scores(plan: PrunePlan, scores: Any) -> None:
    """Raise unless there is one finite score for each unit of each group."""
    counts = [len(group) for group in scores]
    if counts != [group.channels for group in plan.groups]:
        message = "get_sensitivity must return one score for each unit of each group"
        raise PruneError(message)
    for group, own in zip(plan.groups, scores, strict=True):
        if not all(map(math.isfinite, own)):
            message = (
                f"the sensitivity of {', '.join(group.producers)} is not finite; look at the "
                "weights and the samples"
            )
            raise PruneError(message)


def _done(ratio: float, target: float) -> tuple[int, int]:
    """Return how far a search is, in steps of a hundred."""
    return min(int(100 * (1 - 1 / ratio) / (1 - 1 / target)), 100), 100


def _warn_if_missed(found: ChannelSearch, settings: AutoPruneConfig) -> None:
    """Say what is reachable, where the wanted ratio is not."""
    hint = "; ascend_optimized: false allows other counts than multiples of 16 channels"
    if found.ratio < found.target * (1 - 1e-9):
        message = f"the largest ratio that can be reached is {found.ratio:.4g}"
    elif found.ratio > found.target * (1 + TOLERANCE):
        message = f"the ratio that can be reached is {found.ratio:.4g}"
        before = [step.ratio for step in found.steps if step.ratio < found.ratio]
        message += f", or {before[-1]:.4g} one step before" if before else ""
    else:
        return
    warn(f"{message}, not {found.target:g}{hint * settings.ascend_optimized}")


def _bar(progress: Any) -> AbstractContextManager[Any]:
    from amct_fx.report.progress import progress_bars

    return progress_bars(progress)
