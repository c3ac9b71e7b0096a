"""Which groups a student has, from a configuration; kept with the student.

A group is a place in the graphs of the student without its quantizers, so teacher and student
agree on it whatever hooks or wrappers the teacher has got since.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch.ao.quantization import FakeQuantizeBase

from amct_fx.config.distill import resolve_distill
from amct_fx.config.distill_json import DistillPlan, load_distill
from amct_fx.config.schema import Source
from amct_fx.distillation.agreement import check_same_settings
from amct_fx.distillation.cuts import Cut, cut_of, float_graph
from amct_fx.distillation.facts import distill_facts
from amct_fx.distillation.groups import Group, find_groups, groups_of_names
from amct_fx.distillation.history import History
from amct_fx.errors import ModelStateError
from amct_fx.graph import Capture, Region, regions
from amct_fx.nn.qat import QATLayer

if TYPE_CHECKING:
    import torch
    from torch import nn

    from amct_fx.config import ModelFacts
    from amct_fx.config.distill import DistillConfig

__all__ = [
    "Distillation",
    "check_same_model",
    "cuts_of_config",
    "distillation_of",
    "history_of",
    "meet",
    "record_distillation",
]

_ATTRIBUTE = "_amct_distillation"
_STORED = re.compile(r"\bparametrizations\.(\w+)\.original$")


@dataclass(frozen=True)
class LayerGroup:
    """One layer of a quantizable type.

    Args:
        name: Its name.
        layer_type: Its class.
        quantized: Whether it is quantized.
        group: Number of its group from 0, or ``None``.
        reason: Why it is not quantized, or is in no group.
    """

    name: str
    layer_type: str
    quantized: bool
    group: int | None
    reason: str


@dataclass
class Distillation:
    """What is known of the distillation of a student.

    Attributes:
        config: The configuration that the groups came from.
        cuts: The groups, in order.
        layers: All layers of quantizable types, with their groups.
        facts: What the configuration met.
        allow_branches: Whether groups of the user may have branches.
        history: What was trained, once it was.
    """

    config: DistillConfig | DistillPlan
    cuts: tuple[Cut, ...]
    layers: tuple[LayerGroup, ...]
    facts: ModelFacts
    allow_branches: bool = False
    history: History = field(default_factory=History)

    def __str__(self) -> str:
        """Return a table: each layer, whether it is quantized, its group or the reason."""
        width = max([5, *(len(layer.name) for layer in self.layers)])
        lines = [f"{'layer':<{width}}  type    weights  group"]
        for layer in self.layers:
            kind = "int" if layer.quantized else "float"
            where = "none" if layer.group is None else f"{layer.group} {self.cuts[layer.group]}"
            reason = f"  ({layer.reason})" if layer.reason else ""
            lines.append(
                f"{layer.name:<{width}}  {layer.layer_type:<6}  {kind:<7}  {where}{reason}"
            )
        quantized = sum(layer.quantized for layer in self.layers)
        lost = sum(layer.quantized and layer.group is None for layer in self.layers)
        lines.append(
            f"{quantized} of {len(self.layers)} layers quantized, {len(self.cuts)} groups, "
            f"{lost} quantized layers in no group"
        )
        return "\n".join(lines)


def record_distillation(student: nn.Module, distillation: Distillation) -> None:
    """Keep what is known with the student; copies and pickles carry it."""
    setattr(student, _ATTRIBUTE, distillation)


def distillation_of(student: nn.Module) -> Distillation:
    """Return groups, layers and history of a student; ``print`` it for a table.

    Args:
        student: What :func:`amct_fx.prepare_distill_amct` or :func:`amct_fx.distill` returned.

    Raises:
        ModelStateError: It is no such model.

    Example:
        >>> from torch import nn
        >>> from amct_fx import prepare_distill_amct
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3))
        >>> print(distillation_of(prepare_distill_amct(model)))
        layer  type    weights  group
        0      Conv2d  int      0 [0, 1]
        2      Conv2d  int      1 [2]
        2 of 2 layers quantized, 2 groups, 0 quantized layers in no group
    """
    found = getattr(student, _ATTRIBUTE, None)
    if isinstance(found, Distillation):
        return found
    message = "the model is no student; call prepare_distill_amct first"
    raise ModelStateError(message)


def history_of(student: nn.Module) -> History:
    """Return what the last distillation of a student did; see :func:`distillation_of`."""
    return distillation_of(student).history


def meet(
    model: nn.Module,
    captured: Capture,
    config: DistillConfig | DistillPlan,
    facts: ModelFacts,
    *,
    allow_branches: bool,
) -> list[Group]:
    """Return the groups that a configuration means for a model.

    Args:
        model: The float model.
        captured: Its traced parts.
        config: The configuration.
        facts: Facts about its layers.
        allow_branches: Let groups of the user have branches.

    Raises:
        ConfigError: When a group does not fit the model.
        ModelError: When there is no group.
    """
    if isinstance(config, DistillPlan):
        source = Source(config.quantization.file)
        return groups_of_names(model, captured, config.groups, source=source)
    return find_groups(
        model,
        captured,
        facts,
        user_groups=config.groups,
        group_size=config.group_size,
        allow_branches=allow_branches,
    )


def cuts_of_config(
    teacher: nn.Module, student: nn.Module, cfg: object, *, allow_branches: bool
) -> Distillation:
    """Return the groups of a prepared model for a configuration of any kind.

    Args:
        teacher: The float model, or a shadow of it.
        student: The prepared model.
        cfg: As for :func:`amct_fx.distill`; ``None``: as the student was prepared.
        allow_branches: Let groups of the user have branches.

    Raises:
        ConfigError: It does not fit the model, or contradicts what the student was prepared with.
    """
    known = getattr(student, _ATTRIBUTE, None)
    known = known if isinstance(known, Distillation) else None
    if cfg is None and known is not None:
        return known
    captured = _captured(teacher, student)
    facts = known.facts if known is not None else distill_facts(teacher, captured)
    config = load_distill(cfg)
    groups = meet(teacher, captured, config, facts, allow_branches=allow_branches)
    resolution = resolve_distill(config, facts, linear_channel_wise=True)
    check_same_settings(student, config, resolution)
    quantized = {name for name, part in student.named_modules() if isinstance(part, QATLayer)}
    return distillation(config, groups, facts, quantized, allow_branches=allow_branches)


def distillation(
    config: DistillConfig | DistillPlan,
    groups: Sequence[Group],
    facts: ModelFacts,
    quantized: set[str],
    *,
    allow_branches: bool,
) -> Distillation:
    """Collect what is known before the training.

    Args:
        config: The configuration.
        groups: The groups, in order.
        facts: All layers.
        quantized: Names of the layers with quantizers.
        allow_branches: As given.
    """
    owner = {name: number for number, group in enumerate(groups) for name in group.names}
    layers = tuple(
        LayerGroup(
            layer.name,
            layer.layer_type,
            layer.name in quantized,
            owner.get(layer.name),
            layer.reason or _reason(layer.name in quantized, layer.name in owner),
        )
        for layer in facts.layers
    )
    cuts = tuple(map(cut_of, groups))
    return Distillation(config, cuts, layers, facts, allow_branches)


def _reason(quantized: bool, grouped: bool) -> str:
    reasons = []
    if not quantized:
        reasons.append("the configuration does not quantize it")
    if not grouped:
        reasons.append("the configuration lists it in no group")
    return ", ".join(reasons)


def _captured(teacher: nn.Module, student: nn.Module) -> Capture:
    """Return what tracing the teacher gave when the student was prepared."""
    parts = [
        Region(name, teacher.get_submodule(name), float_graph(region))
        for name, region in regions(student)
    ]
    called = {
        part.full_name(str(node.target))
        for part in parts
        for node in part.graph.nodes
        if node.op == "call_module"
    }
    hidden = [
        name
        for name, part in student.named_modules()
        if isinstance(part, QATLayer) and name not in called
    ]
    return Capture(regions=parts, island_leaves=hidden)


def check_same_model(teacher: nn.Module, student: nn.Module) -> None:
    """Refuse a student that was not prepared from this teacher.

    Args:
        teacher: The float model.
        student: The prepared model.

    Raises:
        ModelStateError: Names the first difference.
    """
    quantizers = tuple(
        f"{name}." for name, part in student.named_modules() if isinstance(part, FakeQuantizeBase)
    )
    ours, theirs = _shapes(student), _shapes(teacher)
    ours = {name: shape for name, shape in ours.items() if not name.startswith(quantizers)}
    for name in dict.fromkeys([*theirs, *ours]):
        if ours.get(name) != theirs.get(name):
            shapes = " and ".join(
                f"{who} {'none' if shape is None else tuple(shape)}"
                for who, shape in (
                    ("the teacher has", theirs.get(name)),
                    ("the student", ours.get(name)),
                )
            )
            message = (
                f"the student was not prepared from this teacher: of {name!r} {shapes}; use "
                "prepare_distill_amct(teacher, cfg)"
            )
            raise ModelStateError(message)
    _check_devices(teacher, student)


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Return the shapes of all parameters by name; one that a mask hides has its plain name."""
    return {
        _STORED.sub(r"\1", name): parameter.shape
        for name, parameter in model.named_parameters(remove_duplicate=False)
    }


def _check_devices(teacher: nn.Module, student: nn.Module) -> None:
    devices = [
        next((str(parameter.device) for parameter in model.parameters()), "")
        for model in (teacher, student)
    ]
    if devices[0] != devices[1]:
        message = (
            f"the teacher is on {devices[0]} and the student on {devices[1]}; move them to one "
            "device"
        )
        raise ModelStateError(message)
