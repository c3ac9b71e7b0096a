"""What was pruned, as AMCT's record file says it: removed channels by layer, 2:4 masks by layer.

For exchange only; a state dict restores a model of this package. Source: spec/pruning.md section
10.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from amct_fx.config.messages import listing, warn
from amct_fx.errors import PruneError, RecordError
from amct_fx.prune.bits import pack_mask, unpack_mask
from amct_fx.prune.parametrization import M4N2

if TYPE_CHECKING:
    import os

    from torch import Tensor

    from amct_fx.config.record_pb2 import ScaleOffsetRecord
    from amct_fx.prune.plan import PrunePlan
    from amct_fx.prune.plan_parts import Member, PruneGroup

__all__ = [
    "PruneRecord",
    "add_prune_record",
    "plan_from_record",
    "read_prune_record",
    "set_m4n2_masks",
]

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class PruneRecord:
    """The pruning part of a record file.

    Attributes:
        removed: The removed output channels of every producer, none for an empty tuple.
        masks: The 2:4 masks, bool, by name of the layer.
        groups: The producers that lose the same channels.
        consumers: What every other layer of a group loses; AMCT's nodes of additions and
            concatenations are here, too.
        ends: For every producer the place behind the last channel of its groups.
        path: The file.
    """

    removed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    masks: Mapping[str, Tensor] = field(default_factory=dict)
    groups: tuple[tuple[str, ...], ...] = ()
    consumers: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    ends: Mapping[str, int] = field(default_factory=dict)
    path: str = ""

    @property
    def is_empty(self) -> bool:
        """Whether nothing was pruned."""
        return not self.removed and not self.masks


def read_prune_record(path: str | os.PathLike[str]) -> PruneRecord:
    """Read the pruning part of a record file, made by AMCT or by this package.

    The consumers of a group decide nothing, the analysis of the model finds them; what they lose
    is read to be compared.

    Args:
        path: The file.

    Raises:
        AmctFileNotFoundError: There is no such file.
        RecordParseError: It is no record file.
        RecordError: An attribute is of another type, a mask does not fit its shape; names the
            layer.
    """
    from amct_fx.record import read_record_message

    removed: dict[str, tuple[int, ...]] = {}
    consumers: dict[str, tuple[int, ...]] = {}
    ends: dict[str, int] = {}
    masks: dict[str, Tensor] = {}
    groups = []
    for entry in read_record_message(path).prune_record:
        for nodes, gone in ((entry.producer, removed), (entry.consumer, consumers)):
            for node in nodes:
                ints = _integers(node, "prune_index", path)
                gone[node.name] = tuple(sorted({*gone.get(node.name, ()), *ints}))
        for node in entry.producer:
            end = next((item.i for item in node.attr if item.name == "end"), 0)
            ends[node.name] = max(ends.get(node.name, 0), end)
        if entry.producer:
            groups.append(tuple(node.name for node in entry.producer))
        if entry.HasField("selective_prune"):
            masks[entry.selective_prune.name] = _mask_of(entry.selective_prune, path)
    return PruneRecord(removed, masks, tuple(groups), consumers, ends, str(path))


def _mask_of(node: Any, path: Any) -> Tensor:
    """Return the 2:4 mask of a layer.

    Raises:
        RecordError: It has none, or one of another size.
    """
    shape, packed = (_integers(node, key, path) for key in ("mask_shape", "selective_mask"))
    if not shape or not packed:
        message = f"{path}: layer {node.name!r} needs mask_shape and selective_mask"
        raise RecordError(message)
    if min(shape) < 1:
        message = f"{path}: layer {node.name!r} cannot have the mask_shape {shape}"
        raise RecordError(message)
    try:
        return unpack_mask(packed, shape)
    except RecordError as error:
        message = f"{path}: layer {node.name!r}: {error}"
        raise RecordError(message) from None


def plan_from_record(plan: PrunePlan, record: PruneRecord, names: Iterable[str]) -> PrunePlan:
    """Let a plan remove exactly the channels that a record names.

    Args:
        plan: What the analysis of the model found; its own choice is replaced.
        record: What was removed.
        names: The modules of the model.

    Raises:
        PruneError: The record names layers that the model lacks, channels that the analysis does
            not find safe to remove together, or other channels of the layers that read them.
    """
    known = set(names)
    missing = [name for name in (*record.removed, *record.masks) if name not in known]
    if missing:
        message = f"{record.path}: the model has no layers {listing(missing)}"
        raise PruneError(message)
    if record.is_empty:
        warn(f"{record.path} holds no pruning, so no channels are removed")
    prunable = {name for group in plan.groups for name in group.producers}
    for name, channels in record.removed.items():
        if channels and name not in prunable:
            message = f"{record.path}: the channels of {name!r} cannot be removed from this model"
            raise PruneError(message)
    sizes = plan.row_sizes()
    rows = {}
    for name in prunable:
        stays = torch.ones(sizes[name], dtype=torch.bool)
        removed = list(record.removed.get(name, ()))
        last = max(removed[-1] if removed else 0, record.ends.get(name, 0) - 1)
        if last >= sizes[name] or (removed and removed[0] < 0):
            wrong = (
                removed if removed and not 0 <= removed[0] <= removed[-1] < sizes[name] else last
            )
            message = f"{record.path}: {name!r} has channels 0 to {sizes[name] - 1}, not {wrong}"
            raise PruneError(message)
        stays[removed] = False
        rows[name] = stays
    if not rows:
        return plan
    try:
        chosen = plan.with_rows(rows)
    except PruneError as error:
        message = f"{record.path}: {error}"
        raise PruneError(message) from None
    _check_consumers(chosen, record, known)
    return chosen


def _check_consumers(plan: PrunePlan, record: PruneRecord, known: set[str]) -> None:
    """Compare what the layers behind the producers lose: another model may have the same names."""
    ours: dict[str, set[int]] = {}
    for group in plan.groups:
        for role in ("attached", "column"):
            for name, members in _nodes(group, role).items():
                if name not in group.producers or role == "column":
                    ours.setdefault(name, set()).update(_gone(group, members))
    for name, channels in record.consumers.items():
        if name in known and set(channels) != ours.get(name, set()):
            message = (
                f"{record.path}: {name!r} loses the channels {list(channels)} there, in this model "
                f"it would be {sorted(ours.get(name, ()))}; the record is of another model"
            )
            raise PruneError(message)


def set_m4n2_masks(model: nn.Module, record: PruneRecord) -> None:
    """Put the 2:4 masks of a record in place of those chosen by magnitude.

    Args:
        model: A prepared model; changed in place.
        record: What :func:`read_prune_record` returned.

    Raises:
        PruneError: A layer has no 2:4 mask, or one of another shape.
    """
    for name, mask in record.masks.items():
        found = _m4n2_masks(model.get_submodule(name))
        if not found or found[0].mask.shape != mask.shape:
            shape = tuple(found[0].mask.shape) if found else None
            message = f"{record.path}: {name!r} has a mask of shape {tuple(mask.shape)}, " + (
                f"the model one of {shape}" if found else "but the model has no 2:4 mask there"
            )
            raise PruneError(message)
        found[0].mask.copy_(mask)


def add_prune_record(
    message: ScaleOffsetRecord, model: nn.Module, plan: PrunePlan | None = None
) -> None:
    """Add what is pruned in a model to a record.

    Args:
        message: The record; changed in place.
        model: A prepared model, for its 2:4 masks and the types of its layers.
        plan: Its channels, with the current choice.
    """
    for group in plan.groups if plan is not None else ():
        entry = message.prune_record.add()
        for name, members in _nodes(group, "row").items():
            _write_node(entry.producer.add(), name, model, group, members)
        for role in ("attached", "column"):
            for name, members in _nodes(group, role).items():
                if name not in group.producers or role == "column":
                    _write_node(entry.consumer.add(), name, model, group, members)
    for name, module in model.named_modules():
        for mask in _m4n2_masks(module):
            node = message.prune_record.add().selective_prune
            node.name = name
            _ints(node, "mask_shape", mask.mask.shape)
            _ints(node, "selective_mask", pack_mask(mask.mask))


def _m4n2_masks(module: Any) -> list[M4N2]:
    if not parametrize.is_parametrized(module, "weight"):
        return []
    return [part for part in module.parametrizations.weight if isinstance(part, M4N2)]


def _nodes(group: PruneGroup, role: str) -> dict[str, list[Member]]:
    """Return the members of one role by layer, one tensor of each."""
    found: dict[str, list[Member]] = {}
    for member in group.members:
        if member.role == role:
            mine = found.setdefault(member.layer, [])
            if all(other.parameter == member.parameter for other in mine):
                mine.append(member)
    return found


def _write_node(
    node: Any, name: str, model: nn.Module, group: PruneGroup, members: list[Member]
) -> None:
    """Describe one producer or consumer of a group."""
    places = [place for member in members for unit in member.positions for place in unit]
    gone = _gone(group, members)
    layer: Any = model.get_submodule(name)
    is_producer = members[0].role == "row"
    node.name = name
    node.attr.add(name="type", type="STRING", s=_type_of(layer).encode())
    node.attr.add(name="begin", type="INT", i=min(places))
    node.attr.add(name="end", type="INT", i=max(places) + 1)
    own_groups = getattr(layer, "groups", 1)
    if own_groups > 1 and own_groups != getattr(layer, "in_channels", 0):
        node.attr.add(name="group", type="INT", i=own_groups)
    if is_producer and group.balance > 1:
        node.attr.add(name="prune_group", type="INT", i=group.balance)
    if gone:
        _ints(node, "prune_index", sorted(gone))


def _type_of(layer: nn.Module) -> str:
    """Return the ONNX operator that a layer becomes."""
    if isinstance(layer, nn.Linear):
        return "MatMul" if layer.bias is None else "Gemm"
    if isinstance(layer, _TRANSPOSED):
        return "ConvTranspose"
    if isinstance(layer, _BATCH_NORMS):
        return "BatchNormalization"
    return "Conv" if "Conv" in type(layer).__name__ else type(layer).__name__


def _gone(group: PruneGroup, members: Iterable[Member]) -> set[int]:
    """Return the places that a layer loses."""
    return {place for member in members for unit in group.cut for place in member.positions[unit]}


def _ints(node: Any, name: str, values: Iterable[int]) -> None:
    node.attr.add(name=name, type="INTS", ints=[int(value) for value in values])


def _integers(node: Any, name: str, path: Any) -> tuple[int, ...]:
    """Return a list of integers of a node; nothing if it has none.

    Raises:
        RecordError: The attribute holds something else.
    """
    found: tuple[int, ...] = ()
    for attribute in node.attr:
        if attribute.name == name:
            if attribute.HasField("i") or attribute.floats or attribute.strings:
                message = f"{path}: layer {node.name!r}: {name} must be of type INTS, with ints"
                raise RecordError(message)
            found = tuple(attribute.ints)
    return found
