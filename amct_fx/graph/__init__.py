"""Graphs of models: tracing with islands, facts, and modules that run a graph."""

from amct_fx.graph.capture import Capture, Island, Region, capture
from amct_fx.graph.facts import (
    FixedMinRule,
    batch_norm_after,
    initial_hidden_state,
    is_nonnegative,
    is_nonnegative_input,
    kind_of,
    layer_calls,
    layer_input,
    module_of,
    mutates,
    tensor_version,
    weight_readers,
)
from amct_fx.graph.lift import is_functional_layer, lift_functional_layers
from amct_fx.graph.region import (
    GraphForward,
    check_parts,
    fx_graph_of,
    guard_of,
    install_graph,
    regions,
)
from amct_fx.graph.runtime_guard import Guard
from amct_fx.graph.settled import settled
from amct_fx.graph.signature import as_call
from amct_fx.graph.tracer import kept_python

__all__ = [
    "Capture",
    "FixedMinRule",
    "GraphForward",
    "Guard",
    "Island",
    "Region",
    "as_call",
    "batch_norm_after",
    "capture",
    "check_parts",
    "fx_graph_of",
    "guard_of",
    "initial_hidden_state",
    "install_graph",
    "is_functional_layer",
    "is_nonnegative",
    "is_nonnegative_input",
    "kept_python",
    "kind_of",
    "layer_calls",
    "layer_input",
    "lift_functional_layers",
    "module_of",
    "mutates",
    "regions",
    "settled",
    "tensor_version",
    "weight_readers",
]
