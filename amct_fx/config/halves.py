"""From messages to dataclasses: the parts that every grammar has in common."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

from amct_fx.config.schema import (
    ActivationConfig,
    DataType,
    FilterPruneConfig,
    M4N2PruneConfig,
    Placed,
    PruneConfig,
    WeightConfig,
)
from amct_fx.errors import ConfigError

if TYPE_CHECKING:
    from amct_fx.config.textproto import Located

__all__ = ["build", "read_activation", "read_prune", "read_weight"]

T = TypeVar("T", bound=Placed)


def build(cls: type[T], part: Located, *, blame: Located | None = None, **values: Any) -> T:
    """Make a dataclass from what is given; point at ``blame`` when a value is out of range."""
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return cls(**given, source=part.source)
    except ConfigError as error:
        field = error.message.partition(" ")[0]
        raise (blame or part).error(error.message, field=field) from None


def read_activation(part: Located | None) -> ActivationConfig | None:
    """Read a data half; an empty one counts as given and means the defaults."""
    if part is None:
        return None
    algo = part.child("ulq_quantize")
    if algo is None:
        return build(ActivationConfig, part)
    clips = algo.child("clip_max_min")
    return build(
        ActivationConfig,
        part,
        blame=clips,
        clip_max=clips.required("clip_max") if clips else None,
        clip_min=clips.required("clip_min") if clips else None,
        fixed_min=algo.scalar("fixed_min"),
        dst_type=_data_type(algo),
    )


def read_weight(part: Located | None, oneof: str) -> WeightConfig | None:
    """Read a weight half; an empty one counts as given and means the defaults."""
    if part is None:
        return None
    member = part.message.WhichOneof(oneof)
    algo = part.child(member) if member else None
    if algo is None:
        return build(WeightConfig, part)
    return build(
        WeightConfig,
        part,
        algo="ulq_retrain" if member.startswith("ulq") else "arq_retrain",
        dst_type=_data_type(algo),
        channel_wise=algo.scalar("channel_wise"),
    )


def read_prune(part: Located | None) -> PruneConfig | None:
    """Read a pruning block; each of its levels must say which algorithm is meant."""
    if part is None:
        return None
    kind = part.required_member("regular_prune_strategy")
    if kind.message.DESCRIPTOR.name == "FilterPruner":
        algo = kind.required_member("filter_pruner_algo")
        return build(
            FilterPruneConfig,
            part,
            blame=algo,
            prune_ratio=algo.required("prune_ratio"),
            ascend_optimized=algo.scalar("ascend_optimized"),
        )
    algo = kind.required_member("n_out_of_m_pruner_algo")
    return build(M4N2PruneConfig, part, update_freq=algo.scalar("update_freq"))


def _data_type(algo: Located) -> DataType | None:
    """Return the integer type, or ``None`` when it is not given (or not in the dialect)."""
    number = algo.scalar("dst_type")
    if number is None:
        return None
    enum = algo.message.DESCRIPTOR.fields_by_name["dst_type"].enum_type
    return DataType[enum.values_by_number[number].name]
