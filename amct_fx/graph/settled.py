"""What a graph that was traced for one form of call shows about all calls.

Calls of another form run the user's Python code, which may take other branches. What happens inside
a part that gets tensors only is the same in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import fx

    from amct_fx.graph.signature import CallForm

__all__ = ["settled"]


def settled(call: fx.Node, form: CallForm | None) -> Callable[[fx.Node], bool]:
    """Return a function that says which nodes surely run whenever ``call`` runs, and in which way.

    Args:
        call: A node of a graph.
        form: The form of call that the graph was traced for; ``None`` if it serves every call.
    """
    if form is None:
        return lambda node: True
    scope = next((path for path in _parts_around(call) if path not in form.undecided), None)
    return lambda node: scope is not None and scope in _parts_around(node)


def _parts_around(node: fx.Node) -> list[str]:
    """Return the names of the modules whose forward made ``node``, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    paths = [str(path) for path, _ in stack.values()]
    leaf = node.op == "call_module" and paths and paths[-1] == str(node.target)
    return paths[:-1] if leaf else paths
