"""The walk over the traced parts that finds out which channels live together.

One handler (:mod:`amct_fx.prune.channels.rules`) for each kind of node reads the spaces of the
inputs, joins or pins atoms, binds parameters, writes the space of the output and the step that
removal replays. What has no handler is pinned. Source: spec/pruning.md section 3.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn

from amct_fx.config import FilterPruneConfig
from amct_fx.graph.facts import submodule
from amct_fx.graph.shapes import TensorFact
from amct_fx.nn.become import float_class_of
from amct_fx.prune.channels.atoms import Atoms, Pin
from amct_fx.prune.channels.space import Space

if TYPE_CHECKING:
    from amct_fx.config import PruneConfig
    from amct_fx.graph.capture import Region
    from amct_fx.graph.shapes import Shape, ShapeFacts
    from amct_fx.prune.channels.sites import Site, SiteKey
    from amct_fx.prune.channels.statistics import NormUse
    from amct_fx.prune.channels.steps import Step
    from amct_fx.prune.options import PruneOptions

__all__ = [
    "Balance",
    "LayerUse",
    "Walk",
    "channel_space",
    "fixed_atoms",
    "float_class",
    "is_along",
    "source_of",
]

Value = Any
"""A :class:`Space`, a tuple of them for a node with several results, or ``None``."""


@dataclass(frozen=True)
class Balance:
    """Blocks of channels that must keep equally many.

    Attributes:
        node: The node that needs it.
        blocks: The atoms of each block.
        reason: What needs it, for messages.
    """

    node: str
    blocks: tuple[Tensor, ...]
    reason: str


@dataclass
class LayerUse:
    """One call of a layer: what it costs and what it is.

    Attributes:
        name: Name of the layer, or of the node of a functional call.
        kind: ``"conv"``, ``"deconv"``, ``"linear"`` or ``"matmul"``.
        weight: Shape of the weight.
        positions: Places at which the weight is used, in one example of the batch.
        groups: Groups of a convolution.
        rows: The key of the axis of the output channels of the weight.
        columns: The same of the input channels; both ``None`` without a weight.
        sizes: For a product of activations the operands and axes whose sizes ``weight`` holds.
        part: Number of the product in its node.
    """

    name: str
    kind: str
    weight: Shape
    positions: int
    groups: int = 1
    rows: SiteKey | None = None
    columns: SiteKey | None = None
    sizes: tuple[tuple[Any, int], ...] = ()
    part: int = 0


@dataclass
class Walk:
    """State of the analysis, and the vocabulary of its handlers.

    Attributes:
        model: The model that the regions belong to.
        regions: Its traced parts.
        settings: Pruning of each enabled layer, by name.
        options: The mode and its details.
        facts: Shapes of the values in the graphs.
        atoms: All channels.
        sites: Every axis of a parameter that belongs to channels.
        steps: For removal, in execution order.
        balances: Blocks that keep equal counts.
        uses: All calls of layers, for the costs.
        spaces: The space of every value.
        fixed: Why a tensor has no channels that may go.
        contracted: Channels that end in a product without a weight.
        inputs: Channels that each layer reads.
        calls: First call of each layer.
        producers: Weight, axis of its rows and groups of every layer that makes channels.
        seen: The nodes that were visited, and their order.
        of_parameters: Those that are computed from parameters and buffers alone.
        joining: Those whose rule heeds the channels of every tensor that they read.
        readers: By identity of a parameter the nodes whose rule has bound it.
        norms: Norms that must count only the channels that stay.
        tied: By name of a norm the channels of its first call.
        handlers: The rule of each node that was looked at.
    """

    model: nn.Module
    regions: Sequence[Region]
    settings: Mapping[str, PruneConfig]
    options: PruneOptions
    facts: ShapeFacts
    atoms: Atoms = field(default_factory=Atoms)
    sites: dict[SiteKey, Site] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    balances: list[Balance] = field(default_factory=list)
    uses: list[LayerUse] = field(default_factory=list)
    spaces: dict[Any, Value] = field(default_factory=dict)
    fixed: dict[fx.Node, Pin] = field(default_factory=dict)
    contracted: list[Tensor] = field(default_factory=list)
    producers: dict[str, tuple[Tensor, int, int]] = field(default_factory=dict)
    inputs: dict[str, Tensor] = field(default_factory=dict)
    calls: dict[str, fx.Node] = field(default_factory=dict)
    seen: dict[fx.Node, int] = field(default_factory=dict)
    of_parameters: set[fx.Node] = field(default_factory=set)
    joining: set[fx.Node] = field(default_factory=set)
    readers: dict[int, set[fx.Node]] = field(default_factory=dict)
    norms: list[NormUse] = field(default_factory=list)
    tied: dict[str, Tensor] = field(default_factory=dict)
    handlers: dict[fx.Node, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Index the model: first names of modules and tensors, owners of tensors."""
        self.names = {module: name for name, module in self.model.named_modules()}
        self.tensors: dict[int, str] = {}
        self.owners: dict[int, set[str]] = {}
        self._named: dict[str, Tensor] = {}
        self._modules: dict[fx.Node, nn.Module] = {}
        for name, module in self.model.named_modules():
            for key, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    full = f"{name}.{key}" if name else key
                    self._named[self.tensors.setdefault(id(tensor), full)] = tensor
                    self.owners.setdefault(id(tensor), set()).add(name)
        self._bound: dict[int, set[str]] = {}
        self._fixed_tensors: dict[int, Pin] = {}
        self._tainted: set[fx.Graph] = set()
        self._region_of = {region.graph: region for region in self.regions}

    def region(self, node: fx.Node) -> Region:
        """Return the traced part that a node belongs to."""
        return self._region_of[node.graph]

    # Reading nodes

    def fact(self, value: Any) -> Any:
        """Return what is known of a node, or the constant itself."""
        if not isinstance(value, fx.Node):
            return value
        known = self.facts.values.get(self.region(value).name, {})
        if value.name in known:
            return known[value.name]
        # a quantizer that prepare inserted, or a copy, has the shape of what it reads
        alike = value.op == "call_module" or value.target == "clone"
        source = value.args[0] if alike and value.args else None
        return self.fact(source) if isinstance(source, fx.Node) else None

    def shape(self, value: Any) -> Shape | None:
        """Return the shape of a tensor, ``None`` if it is none or nothing is known."""
        fact = self.fact(value)
        return fact.shape if isinstance(fact, TensorFact) else None

    def makes_tensors(self, value: Any) -> bool:
        """Say whether a node gives a tensor, or several."""
        fact = self.fact(value)
        items = fact if isinstance(fact, tuple) else (fact,)
        return any(isinstance(item, TensorFact) for item in items)

    def module(self, node: fx.Node) -> nn.Module | None:
        """Return the module that a node calls."""
        if node.op != "call_module":
            return None
        if node not in self._modules:
            found = submodule(self.region(node).module, str(node.target))
            self._modules[node] = found
        return self._modules[node]

    def name(self, node: fx.Node) -> str:
        """Return the first name in the model of the module that a node calls."""
        module = self.module(node)
        known = None if module is None else self.names.get(module)
        return known if known is not None else self.region(node).full_name(str(node.target))

    def space(self, node: Any) -> Space | None:
        """Return the channels of a tensor."""
        value = self.spaces.get(node)
        return value if isinstance(value, Space) else None

    def taint(self, node: fx.Node) -> None:
        """Note that an operation in place made other values of zeros, also in views."""
        self._tainted.add(node.graph)

    def keeps_zeros(self, space: Space, node: fx.Node) -> bool:
        """Say whether masked channels are 0 in the tensor that ``node`` reads."""
        return space.zero and node.graph not in self._tainted

    def spaces_of(self, value: Any) -> Iterator[Space]:
        """Yield every space in the value of a node."""
        found = self.spaces.get(value) if isinstance(value, fx.Node) else value
        if isinstance(found, Space):
            yield found
        elif isinstance(found, tuple):
            for item in found:
                yield from self.spaces_of(item)

    def owned_tensor(self, value: Any) -> Tensor | None:
        """Return the parameter or buffer of the model that a ``get_attr`` node reads."""
        if not isinstance(value, fx.Node) or value.op != "get_attr":
            return None
        path, _, name = str(value.target).rpartition(".")
        try:
            tensor = getattr(self.region(value).module.get_submodule(path), name, None)
        except AttributeError:
            return None
        return tensor if isinstance(tensor, Tensor) and id(tensor) in self.tensors else None

    def origin(self, node: fx.Node) -> Pin:
        """Return why a tensor without a space is what it is."""
        return self.fixed.get(node, Pin("graph_input", node.name, "it is not made by a layer"))

    # Deciding

    def pin(self, node: fx.Node, values: Iterable[Any], code: str, text: str) -> None:
        """Keep all channels of ``values``; the result of ``node`` has none that may go."""
        reason = Pin(code, node.name, text)
        for value in values:
            for space in self.spaces_of(value):
                self.atoms.pin(space.atoms, reason)
        self.fixed.setdefault(node, reason)

    def pin_inputs(self, node: fx.Node, code: str, text: str) -> None:
        """Keep the channels of every input of ``node`` and every parameter that it may read."""
        self.pin(node, node.all_input_nodes, code, text)
        reason = Pin(code, node.name, text)
        for value in node.all_input_nodes:
            tensor = self.owned_tensor(value)
            if tensor is not None:
                self._fixed_tensors.setdefault(id(tensor), reason)
        module = self.module(node)
        for tensor in module.parameters() if module is not None else ():
            self._fixed_tensors.setdefault(id(tensor), reason)

    def settle(self, node: fx.Node, value: Value, sources: Iterable[fx.Node] = ()) -> None:
        """Note the space of a result; without one it is fixed for the reason of its sources."""
        self.spaces[node] = value
        if value is None:
            reasons = [self.fixed[source] for source in sources if source in self.fixed]
            if reasons:
                self.fixed.setdefault(node, reasons[0])

    def balance(self, node: fx.Node, blocks: Iterable[Tensor], reason: str) -> None:
        """Ask for equal counts in blocks."""
        listed = tuple(blocks)
        if len(listed) > 1:
            self.balances.append(Balance(node.name, listed, reason))

    def bind(self, node: fx.Node, site: Site, tensor: Tensor) -> SiteKey:
        """Attach an axis of a tensor of the model to channels; a second use joins the first."""
        identity = id(tensor)
        site.layer, _, site.tensor = self.tensors[identity].rpartition(".")
        self.readers.setdefault(identity, set()).add(node)
        self._bound.setdefault(identity, set()).add(
            self.name(node) if node.op == "call_module" else site.layer
        )
        first = self.sites.setdefault(site.key, site)
        if first is not site:
            pin = Pin(
                "tied_parameter",
                node.name,
                f"{'.'.join(filter(None, (site.layer, site.tensor)))} is used in another way",
            )
            other = first.role != site.role and {first.role, site.role} == {"attached", "column"}
            if first.atoms.numel() != site.atoms.numel() or first.groups != site.groups or other:
                self.atoms.pin(first.atoms, pin)
                self.atoms.pin(site.atoms, pin)
            else:
                self.atoms.join(first.atoms, site.atoms, pin)
        return site.key

    def tie(self, node: fx.Node, atoms: Tensor) -> None:
        """Let all calls of a module without a parameter that ties them have the same channels."""
        name = self.name(node)
        known = self.tied.setdefault(name, atoms)
        pin = Pin("shared_module", node.name, f"{name} is also called with other channels")
        if known.numel() == atoms.numel():
            self.atoms.join(known, atoms, pin)
        else:
            self.atoms.pin(torch.cat([known, atoms]), pin)

    def rows_of(self, tensor: Tensor, axis: int) -> Tensor | None:
        """Return the atoms of a tensor that another call has bound, for a layer used again."""
        site = self.sites.get((self.tensors[id(tensor)], axis))
        return None if site is None else site.atoms

    def sites_of(self, tensor: Tensor) -> list[SiteKey]:
        """Return the axes of a tensor that belong to channels."""
        name = self.tensors[id(tensor)]
        return [(name, axis) for axis in range(tensor.dim()) if (name, axis) in self.sites]

    def producer_weight(self, name: str) -> tuple[Tensor, int, int]:
        """Return the weight of a producer, the axis of its rows, and its groups."""
        return self.producers[name]

    def setting(self, name: str) -> FilterPruneConfig | None:
        """Return how the output channels of a layer are pruned."""
        found = self.settings.get(name)
        return found if isinstance(found, FilterPruneConfig) else None

    def finish(self) -> None:
        """Pin what is shared with code that the walk did not see."""
        for site in self.sites.values():
            name, tensor = site.key[0], self.tensor(site)
            reason = self._called_elsewhere(id(tensor))
            strangers = self.owners[id(tensor)] - self._bound[id(tensor)]
            if reason is None and strangers:
                text = f"{name} is also a parameter of {sorted(strangers)[0]!r}"
                reason = Pin("tied_parameter", name, text)
            reason = reason or self._fixed_tensors.get(id(tensor))
            if reason is not None:
                self.atoms.pin(site.atoms, reason)

    def _called_elsewhere(self, identity: int) -> Pin | None:
        """Return why a parameter must stay whose module Python code calls, too."""
        for name in sorted(self.owners[identity] & self.facts.called_elsewhere):
            return Pin("shared_module", name, f"{name} is also called by code that is not traced")
        return None

    def tensor(self, site: Site) -> Tensor:
        """Return the parameter or buffer that a site is an axis of."""
        return self._named[site.key[0]]


def source_of(node: fx.Node) -> Any:
    """Return the first input of an operation, by place or by its name."""
    if node.args:
        return node.args[0]
    return next((node.kwargs[name] for name in _SOURCES if name in node.kwargs), None)


_SOURCES = ("input", "x", "tensor", "tensors")
"""What the first input of functions of torch, and of other libraries, is called."""


def channel_space(atoms: Tensor, rank: int, axis: int, **details: Any) -> Space:
    """Lay a row of atoms along one axis of a tensor."""
    shape = [1] * rank
    shape[axis] = -1
    return Space(atoms.reshape(shape), axis % rank, **details)


def is_along(space: Space, axis: int) -> bool:
    """Say whether the channels lie along ``axis`` and no other."""
    rank = space.atoms.dim()
    return space.axes == (axis % rank,) and space.axis == axis % rank


def fixed_atoms(count: int) -> Tensor:
    """Return atoms of channels that never go."""
    return torch.full((count,), -1, dtype=torch.long)


def float_class(module: nn.Module) -> type[nn.Module]:
    """Return the class of a layer, below parametrizations and quantization."""
    cls = float_class_of(module)
    return getattr(cls, "float_class", cls)
