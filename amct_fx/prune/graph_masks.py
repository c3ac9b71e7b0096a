"""Masks on parameters that a traced part owns itself: a node of its graph instead of a class.

A parametrization changes the class of the module that owns the parameter. A traced part has a class
of its own already, made from its graph; there the mask is a call behind each read of the parameter.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from amct_fx.graph.region import GraphForward, fx_graph_of, guard_of, install_graph
from amct_fx.prune.parametrization import FilterNorm

if TYPE_CHECKING:
    from torch import Tensor, fx, nn

__all__ = ["GraphMask", "fold_graph_masks", "mask_in_graph", "masked_parameters"]


class GraphMask(FilterNorm):
    """A mask that the graph of a traced part applies to a parameter of that part.

    Example:
        >>> GraphMask(torch.tensor([[1, 0]]))(torch.ones(2, 2)).tolist()
        [[1.0, 0.0], [1.0, 0.0]]
    """


def mask_in_graph(part: GraphForward, name: str, mask: Tensor) -> None:
    """Mask a parameter of a traced part wherever its graph reads it.

    Args:
        part: The traced part; changed in place.
        name: Name of the parameter in it.
        mask: As for :class:`FilterNorm`.
    """
    key = f"{name}_mask"
    while hasattr(part, key):
        key = f"_{key}"
    part.add_module(key, GraphMask(mask.to(part.get_parameter(name).device)))
    graph = fx_graph_of(part)
    for node in [n for n in graph.nodes if n.op == "get_attr" and n.target == name]:
        with graph.inserting_after(node):
            masked = graph.call_module(key, (node,))
        node.replace_all_uses_with(masked, delete_user_cb=lambda user, own=masked: user is not own)
    # the Python code of the part would read the parameter without its mask
    install_graph(part, graph, replace(guard_of(part), exclusive=True))


def fold_graph_masks(part: GraphForward) -> None:
    """Write the zeros of all masks of a graph into the parameters, and drop the masks.

    Args:
        part: The traced part; changed in place.
    """
    graph = fx_graph_of(part)
    calls = list(_calls(part))
    if not calls:
        return
    with torch.no_grad():
        for parameter, mask in masked_parameters(part):
            parameter.mul_(mask)
    for node in calls:
        node.replace_all_uses_with(node.args[0])  # type: ignore[arg-type]
        graph.erase_node(node)
    for key in {str(node.target) for node in calls}:
        delattr(part, key)
    install_graph(part, graph, guard_of(part))


def masked_parameters(module: nn.Module) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield the parameters of a traced part that its graph masks, with their masks."""
    if isinstance(module, GraphForward):
        found = {str(node.target): str(node.all_input_nodes[0].target) for node in _calls(module)}
        for key, name in found.items():
            mask = module.get_submodule(key)
            assert isinstance(mask, GraphMask)
            yield module.get_parameter(name), mask.mask


def _calls(part: GraphForward) -> Iterator[fx.Node]:
    """Yield the nodes that apply a mask of the part itself."""
    for node in fx_graph_of(part).nodes:
        own = node.op == "call_module" and "." not in str(node.target)
        if own and isinstance(part.get_submodule(str(node.target)), GraphMask):
            yield node
