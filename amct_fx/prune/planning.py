"""Making a plan: analysis, choice, and the reasons for what stays.

Source: spec/pruning.md sections 3, 4 and 7.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from amct_fx.checks import check_float_model
from amct_fx.config import CompressionConfig, FilterPruneConfig, load_config, resolve
from amct_fx.config.schema import Source
from amct_fx.discovery import PrepareOptions, discovered
from amct_fx.errors import ModelError
from amct_fx.graph.guards import constants_removed
from amct_fx.graph.shapes import propagate_shapes
from amct_fx.nn.parametrized import still_parametrizations
from amct_fx.prune.channels.analysis import analyze, settle_groups
from amct_fx.prune.channels.units import places_of
from amct_fx.prune.costs import layer_costs
from amct_fx.prune.inputs import example_specs, guess_inputs
from amct_fx.prune.levels import levels_of
from amct_fx.prune.options import PruneKeywords, PruneOptions
from amct_fx.prune.plan import PrunePlan
from amct_fx.prune.plan_parts import Member, PinnedLayer, PruneGroup

if TYPE_CHECKING:
    import os

    from torch import Tensor
    from typing_extensions import Unpack

    from amct_fx.config import PruneConfig
    from amct_fx.graph.capture import Capture, Region
    from amct_fx.graph.shapes import ShapeFacts
    from amct_fx.prune.channels.atoms import Indices
    from amct_fx.prune.channels.sites import Site
    from amct_fx.prune.channels.steps import Replay
    from amct_fx.prune.channels.units import Group
    from amct_fx.prune.channels.walk import Walk

__all__ = ["Analysis", "follow_channels", "not_traced", "prune_plan"]


@dataclass(frozen=True)
class Analysis:
    """A plan, and how the channels that it keeps pass through the model.

    Attributes:
        plan: The plan.
        walk: The analysis that it comes from; ``None`` for a plan from elsewhere.
        replay: The choice of the plan, carried through the graphs.
    """

    plan: PrunePlan
    walk: Walk | None = None
    replay: Replay | None = None


def follow_channels(
    model: nn.Module,
    regions: Sequence[Region],
    settings: Mapping[str, PruneConfig],
    example_inputs: Any = None,
    options: PruneOptions | None = None,
    reasons: Mapping[str, str] | None = None,
    facts: ShapeFacts | None = None,
) -> Analysis:
    """Analyse a traced model and choose the channels to cut.

    Args:
        model: The model; it is not changed.
        regions: Its traced parts.
        settings: Pruning of each enabled layer, by name; skipped layers are absent.
        example_inputs: A tensor, a tuple of arguments, or a dict of them by name. Without it
            usual shapes are tried.
        options: The mode and its details.
        reasons: Why settings do not reach other layers, or a layer is not traced, by name, for the
            report.
        facts: The shapes that ``example_inputs`` showed, if they are known.

    Returns:
        The plan, and what removal needs besides, while the model stays as it is.

    Raises:
        InputDataError: If the model cannot run on ``example_inputs``.
        ModelError: If there are none, and no usual shape fits.
    """
    options = options or PruneOptions()
    _check_values(model, settings)
    if example_inputs is None:
        example_inputs, facts = guess_inputs(model, regions)
    elif facts is None:
        facts = propagate_shapes(model, regions, example_inputs)
    walk = analyze(model, regions, settings, options, facts)
    groups, state = settle_groups(walk)
    plan = build_plan(walk, groups, state, example_specs(example_inputs), reasons or {})
    loses = _losing(plan.groups)
    unreached = tuple(
        PinnedLayer(name, "", "not_enabled", text)
        for name, text in (reasons or {}).items()
        if name not in loses and name not in settings
    )
    return Analysis(replace(plan, pinned=plan.pinned + unreached), walk, state)


def _check_values(model: nn.Module, settings: Mapping[str, PruneConfig]) -> None:
    """Refuse weights that cannot be ranked."""
    for name, module in model.named_modules():
        empty = any(parameter.is_meta for parameter in module.parameters(recurse=False))
        if empty and isinstance(settings.get(name), FilterPruneConfig):
            message = (
                f"layer {name!r} is on the meta device, where weights have no values to choose "
                "channels by; load the weights first"
            )
            raise ModelError(message)


def build_plan(
    walk: Walk,
    groups: Sequence[Group],
    state: Replay,
    inputs: tuple[Any, ...],
    reasons: Mapping[str, str],
) -> PrunePlan:
    """Write the result of an analysis down as plain data."""
    members = _members(walk, groups)
    singular = walk.atoms.roots_without_row_masks()
    contracted = {
        root for atoms in walk.contracted for root in walk.atoms.free(atoms).tolist() if root >= 0
    }
    listed = tuple(
        PruneGroup(
            id=number,
            producers=group.producers,
            consumers=_consumers(own),
            members=tuple(own),
            channels=group.size,
            ratio=group.ratio,
            ascend_optimized=group.ascend_optimized,
            balance=group.balance,
            balance_source=group.source,
            scores=tuple(group.scores.tolist()),
            kept=tuple(group.kept),
            note=group.note,
            rows_maskable=singular.isdisjoint(group.roots.tolist()),
            contracted=not contracted.isdisjoint(group.roots.tolist()),
        )
        for number, (group, own) in enumerate(zip(groups, members, strict=True))
    )
    before = sum(parameter.numel() for parameter in walk.model.parameters())
    plan = PrunePlan(
        groups=listed,
        pinned=_pinned(walk, listed, reasons),
        costs=layer_costs(walk, state),
        parameters=before,
        parameters_after=before,
        options=walk.options,
        settings=dict(walk.settings),
        inputs=inputs,
        levels=levels_of(walk, groups),
        facts=walk.facts,
    )
    return plan.with_costs()


def _members(walk: Walk, groups: Sequence[Group]) -> list[list[Member]]:
    """Return for each group every axis that follows its units."""
    group_of, unit_of = places_of(walk, groups)
    found: list[list[Member]] = [[] for _ in groups]
    known: dict[tuple[int, bytes, bytes], tuple[tuple[int, ...], ...]] = {}  # most are alike

    def by_unit(units: Indices, places: Indices, count: int) -> tuple[tuple[int, ...], ...]:
        key = count, units.tobytes(), places.tobytes()
        if key not in known:
            known[key] = _by_unit(units, places, count)
        return known[key]

    def shared(atoms: Tensor) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
        roots = walk.atoms.free(atoms)
        numbers = group_of[roots]
        places = {g: np.flatnonzero(numbers == g) for g in dict.fromkeys(numbers.tolist())}
        return [
            (g, by_unit(unit_of[roots[own]], own, groups[g].size))
            for g, own in places.items()
            if g >= 0
        ]

    seen: dict[int, tuple[Tensor, list[Any]]] = {}  # a batch norm has four axes of the same atoms

    def add(atoms: Tensor, make: Any) -> None:
        if id(atoms) not in seen:
            seen[id(atoms)] = atoms, shared(atoms)
        for g, positions in seen[id(atoms)][1]:
            found[g].append(make(positions))

    for site in walk.sites.values():
        add(site.atoms, lambda positions, site=site: _site_member(walk, site, positions))
    for name, atoms in walk.inputs.items():
        shape = (atoms.numel(),)
        add(atoms, lambda p, name=name, shape=shape: Member(name, "", 0, "input", shape, p))
    for norm in walk.norms:
        add(
            norm.atoms,
            lambda p, norm=norm: Member(norm.layer, norm.call, norm.axis, "norm", norm.shape, p),
        )
    for use in walk.uses:
        for number, (value, axis) in enumerate(use.sizes):
            space, full = walk.space(value), walk.shape(value)
            if space is None or full is None or space.axis != axis % len(full):
                continue
            atoms = space.atoms.movedim(space.axis, -1).reshape(-1, full[axis])[0]
            add(
                atoms,
                lambda p, use=use, number=number: Member(
                    use.name, f"size{use.part}", number, "size", use.weight, p
                ),
            )
    return found


def _by_unit(units: Indices, places: Indices, count: int) -> tuple[tuple[int, ...], ...]:
    """Return the places of each of ``count`` units, in ascending order."""
    if len(units) == count and bool((units[1:] > units[:-1]).all()):
        return tuple(zip(places.tolist()))
    order = np.argsort(units, kind="stable")
    counts = np.bincount(units, minlength=count)
    each = int(counts[0])
    if each and bool((counts == each).all()):
        return tuple(zip(*[iter(places[order].tolist())] * each, strict=True))
    parts = np.split(places[order], np.cumsum(counts)[:-1])
    return tuple(tuple(part.tolist()) for part in parts)


def _site_member(walk: Walk, site: Site, positions: tuple[tuple[int, ...], ...]) -> Member:
    tensor = walk.tensor(site)
    buffer = not isinstance(tensor, nn.Parameter)
    place = site.layer, site.tensor, site.axis, site.role
    return Member(*place, tuple(tensor.shape), positions, site.groups, buffer)


def _consumers(members: Sequence[Member]) -> tuple[str, ...]:
    columns = [member for member in members if member.role == "column"]
    return tuple(dict.fromkeys(member.layer or member.parameter for member in columns))


def _pinned(
    walk: Walk, groups: Sequence[PruneGroup], reasons: Mapping[str, str]
) -> tuple[PinnedLayer, ...]:
    """Return every enabled layer without a unit, with the reason."""
    loses = _losing(groups)
    return tuple(
        _why_pinned(walk, name, reasons)
        for name, setting in walk.settings.items()
        if isinstance(setting, FilterPruneConfig) and name not in loses
    )


def _losing(groups: Sequence[PruneGroup]) -> set[str]:
    """Return the layers whose output channels may go."""
    roles = ("row", "attached")
    loses = {member.layer for group in groups for member in group.members if member.role in roles}
    return loses | {name for group in groups for name in group.producers}


def _why_pinned(walk: Walk, name: str, reasons: Mapping[str, str]) -> PinnedLayer:
    node = walk.calls.get(name)
    if node is None:
        text = reasons.get(name, "it is called in no traced part of the model")
        return PinnedLayer(name, "", "unknown_op", text)
    pin = walk.fixed.get(node)
    if name in walk.producers:
        weight, axis, _ = walk.producers[name]
        atoms = walk.rows_of(weight, axis)
        known = [] if atoms is None else [a for a in atoms.flatten().tolist() if a >= 0]
        pins = (walk.atoms.pin_of(atom) for atom in known)
        pin = next((found for found in pins if found is not None), pin)
    if pin is None:
        return PinnedLayer(
            name, node.name, "coupled_to_skipped", "its channels follow another layer"
        )
    return PinnedLayer(name, pin.node, pin.code, pin.text)


def prune_plan(
    model: nn.Module,
    cfg: str | os.PathLike[str] | CompressionConfig,
    example_inputs: Any = None,
    **options: Unpack[PruneKeywords],
) -> PrunePlan:
    """Say what a configuration would prune, without changing the model.

    Args:
        model: A float model in any mode.
        cfg: Path or text of a ``.cfg``, or a :class:`amct_fx.CompressionConfig`, with pruning.
        example_inputs: A tensor, a tuple of arguments, or a dict of them by name. Without it
            usual shapes are tried.
        **options: Such as ``mode`` and ``importance``: see :class:`amct_fx.prune.PruneOptions`.

    Returns:
        The plan; the same for the same model.

    Raises:
        ConfigError: The configuration is wrong or does not fit the model.
        ModelError: Nothing can be pruned, or no shape of inputs can be guessed.
        InputDataError: The model cannot run on ``example_inputs``.

    Example:
        >>> import torch
        >>> from torch import nn
        >>> cfg = '''prune_config { filter_pruner {
        ...     balanced_l2_norm_filter_prune { prune_ratio: 0.5 ascend_optimized: false } } }'''
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 2, 3))
        >>> print(prune_plan(model, cfg, torch.ones(1, 3, 8, 8)))
        0: 4 of 8 -> 2
        stays 2: graph_output: it is an output of the model
        parameters 370 -> 186, MACs 10,080 -> 5,040
    """
    chosen = PruneOptions.of(options)
    check_float_model(model)
    config = load_config(cfg)
    if not config.has_prune_message:
        message = "the configuration does not prune: it has no prune_config"
        raise Source(config.file).error(message)
    with (
        constants_removed(model),
        discovered(model, PrepareOptions(), example_inputs, prune_mode=chosen.mode) as found,
        still_parametrizations(model),
    ):
        resolution = resolve(config, found.facts)
        captured, settings = found.captured, resolution.prune_settings
        reasons = resolution.prune_reasons | not_traced(captured, settings)
        return follow_channels(
            model,
            captured.regions,
            settings,
            example_inputs,
            chosen,
            reasons,
            captured.facts,
        ).plan


def not_traced(captured: Capture, names: Iterable[str]) -> dict[str, str]:
    """Say why layers are in parts that stay Python, by name; those of traced parts are absent."""
    found = {name: captured.why_not_traced(name) for name in names}
    return {name: text for name, text in found.items() if text is not None}
