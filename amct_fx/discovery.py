"""What prepare finds in a model before it decides anything: traced parts, layers, reasons."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amct_fx.backend_config import (
    Reuse,
    is_layer,
    is_only_prunable,
    model_facts,
    other_weights,
    recorded_run,
    unbatched_in,
    without_unbatched,
)
from amct_fx.choices import check_choices
from amct_fx.graph import Capture, FixedMinRule, capture, lift_functional_layers
from amct_fx.graph.guards import constant_remover

if TYPE_CHECKING:
    from torch import nn

    from amct_fx.config import LayerFacts, LinearChannelWise, ModelFacts, PruneMode
    from amct_fx.distributed import RangeMergeRule
    from amct_fx.outputs import Outputs

__all__ = ["Discovery", "PrepareOptions", "discovered"]


@dataclass(frozen=True)
class PrepareOptions:
    """The keyword arguments of prepare that decide what the model becomes.

    A checkpoint keeps them beside the configuration. See :func:`amct_fx.prepare_qat_amct`.

    Raises:
        ConfigError: For a value that an option does not have.
    """

    fixed_min_rule: FixedMinRule = "relu"
    linear_channel_wise: LinearChannelWise = False
    reused: Reuse = "float"
    functional: bool = False
    range_merge: RangeMergeRule = "mean"
    outputs: Outputs = "float"

    def __post_init__(self) -> None:
        """Check the options that have a fixed set of values."""
        check_choices(
            fixed_min_rule=(self.fixed_min_rule, ("relu", "nonnegative")),
            linear_channel_wise=(self.linear_channel_wise, (False, True, "all")),
            reused=(self.reused, ("float", "quantize")),
            range_merge=(self.range_merge, ("mean", "max")),
            outputs=(self.outputs, ("float", "quantize")),
        )


@dataclass(frozen=True)
class Discovery:
    """Everything a decision needs.

    Attributes:
        captured: Traced parts and islands.
        facts: All layers of quantizable types, with the reason where one must stay float.
        others: Modules of other types that own weight matrices.
    """

    captured: Capture
    facts: ModelFacts
    others: tuple[LayerFacts, ...]


@contextmanager
def discovered(
    model: nn.Module,
    options: PrepareOptions,
    example_inputs: Any = None,
    *,
    strict: bool = False,
    prunes: bool = True,
    prune_mode: PruneMode = "native",
) -> Iterator[Discovery]:
    """Look through ``model``; if the body raises, the model is as it was before.

    Args:
        model: The float model. With ``options.functional`` it gets a module for each functional
            layer.
        options: Decide what counts as a layer.
        example_inputs: A tensor, a tuple of arguments, a dict of them by name, or ``None``.
        strict: Refuse parts that cannot be traced.
        prunes: Whether layers that can be pruned and not quantized are looked for, too.
        prune_mode: Decides which layers can be pruned.

    Yields:
        What was found.
    """
    given = example_inputs is not None
    calls = recorded_run(model, example_inputs) if given else None
    unbatched = frozenset() if calls is None else unbatched_in(model, calls)
    with ExitStack() as undo:
        undo.callback(constant_remover(model))
        captured = capture(
            model,
            is_layer,
            example_inputs=example_inputs,
            strict=strict,
            functional=options.functional,
            also=is_only_prunable if prunes else None,
            calls=calls,
        )
        for region in captured.regions if options.functional else ():
            for name in lift_functional_layers(region):
                undo.callback(delattr, region.module, name)
                captured.facts = None  # the graph has other nodes now
        facts = model_facts(
            model,
            captured,
            options.reused,
            functional=options.functional,
            prune_mode=prune_mode,
        )
        yield Discovery(captured, without_unbatched(facts, unbatched), other_weights(model))
        undo.pop_all()
