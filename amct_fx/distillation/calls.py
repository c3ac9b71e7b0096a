"""The modules of a model by name, and where its graphs call them."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, NamedTuple

from amct_fx.config.schema import NOWHERE, Source
from amct_fx.distillation.spans import only_consumer, shape_readers
from amct_fx.errors import did_you_mean
from amct_fx.graph import layer_calls, module_of

if TYPE_CHECKING:
    from torch import fx, nn

    from amct_fx.graph import Capture, Region

__all__ = ["Call", "Calls"]


class Call(NamedTuple):
    """A node and the region that it belongs to."""

    region: Region
    node: fx.Node


class Calls:
    """Every call of every module, over all traced parts of a model.

    Args:
        model: The traced model.
        captured: What tracing found.
    """

    def __init__(self, model: nn.Module, captured: Capture) -> None:
        self.model = model
        self.regions = captured.regions
        self._names = {module: name for name, module in model.named_modules()}
        self._calls: defaultdict[nn.Module, list[Call]] = defaultdict(list)
        self._readers = {}
        self._positions: dict[fx.Node, int] = {}
        for region in self.regions:
            for module, nodes in layer_calls(region.graph, region.module).items():
                self._calls[module] += [Call(region, node) for node in nodes]
            self._readers[region.name] = shape_readers(region.graph)
        for region in self.regions:
            self._number(region)

    def position(self, node: fx.Node) -> int:
        """Return a number that grows along each graph; parts inside a call come before the call."""
        return self._positions[node]

    def _number(self, region: Region) -> None:
        """Number the nodes of a region, and of the regions inside the modules that it calls."""
        for node in region.graph.nodes:
            if node in self._positions:
                return
            if node.op == "call_module":
                inside = f"{region.full_name(str(node.target))}."
                for other in self.regions:
                    if f"{other.name}.".startswith(inside) and other is not region:
                        self._number(other)
            self._positions[node] = len(self._positions)

    def of_module(self, module: nn.Module | None) -> list[Call]:
        """Return the calls of a module."""
        return [] if module is None else self._calls[module]

    def of_name(self, name: str, source: Source = NOWHERE) -> list[Call]:
        """Return the calls of the module that a user names.

        Raises:
            ConfigError: When there is no such module, or no traced part calls it.
        """
        try:
            module = self.model.get_submodule(name)
        except AttributeError:
            hint = did_you_mean(name, filter(None, self._names.values()))
            message = f"the model has no module {name!r}{hint}"
            raise source.error(message) from None
        calls = self._calls[module]
        if not calls:
            what = f"module {name!r}" if name else "the model itself"
            message = f"{what} cannot be in a group: no traced part of the model calls it"
            if any(True for _ in module.children()):
                message += "; name the first and the last module inside of it"
            raise source.error(message)
        return calls

    def name(self, call: Call) -> str | None:
        """Return the name of the module that is called; ``None`` when it is a function."""
        module = module_of(call.node, call.region.module)
        return None if module is None else self._names[module]

    def module(self, call: Call) -> nn.Module | None:
        """Return the module that is called, if any."""
        return module_of(call.node, call.region.module)

    def readers(self, region: Region) -> frozenset[fx.Node]:
        """Return the nodes of a region that know shapes only."""
        return self._readers[region.name]

    def following(self, call: Call) -> Call | None:
        """Return the only consumer of a call, looking through Dropout and Identity."""
        region = call.region
        node = only_consumer(call.node, region.module, self.readers(region))
        return None if node is None else Call(region, node)
