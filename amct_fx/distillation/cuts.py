"""Cutting a group out of the graph of a model, so that it runs on its own.

The *boundary inputs* of a group are the values that it reads and others make; its output is that of
its last node. A *block* is the group in the student with the quantizers of its inputs. Source:
spec/distillation.md section 9.3.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx, nn
from torch.ao.quantization import FakeQuantizeBase

from amct_fx.graph import GraphForward, fx_graph_of, module_of, regions
from amct_fx.graph.serialize import graph_from_record, graph_to_record
from amct_fx.nn.qat_layer import QATLayer

if TYPE_CHECKING:
    from amct_fx.distillation.groups import Group

__all__ = [
    "Block",
    "Cut",
    "cut_of",
    "extract",
    "fewest_bits",
    "float_graph",
    "is_quantizer",
    "own_nodes",
    "region_of",
]


@dataclass(frozen=True)
class Cut:
    """Where a group stands in the graph of its region, by the names of nodes.

    Teacher and student have the same names, so one cut serves both; a cut pickles.

    Args:
        names: Modules of the group.
        region: Name of the traced part that calls them; ``""`` for the whole model.
        nodes: All nodes of the group in graph order, functions included.
        inputs: Nodes outside that the group reads; first the one that enters its first module.
    """

    names: tuple[str, ...]
    region: str
    nodes: tuple[str, ...]
    inputs: tuple[str, ...]

    @property
    def output(self) -> str:
        """The node whose value leaves the group."""
        return self.nodes[-1]

    def __str__(self) -> str:
        """Return the modules as a JSON file lists them."""
        return f"[{', '.join(self.names)}]"


def cut_of(group: Group) -> Cut:
    """Return where a group stands, and what it reads from outside.

    Args:
        group: A group of the float graph.
    """
    inside = set(group.nodes)
    read = [node for member in group.nodes for node in member.all_input_nodes]
    inputs = [node for node in read if node not in inside and node.op != "get_attr"]
    return Cut(
        names=group.names,
        region=group.region.name,
        nodes=tuple(node.name for node in group.nodes),
        inputs=tuple(dict.fromkeys(node.name for node in inputs)),
    )


def is_quantizer(node: fx.Node, root: nn.Module) -> bool:
    """Say whether a node calls a fake-quantizer."""
    return isinstance(module_of(node, root), FakeQuantizeBase)


def region_of(student: nn.Module, name: str) -> GraphForward:
    """Return a traced part of a student by its name."""
    region = student.get_submodule(name)
    assert isinstance(region, GraphForward), f"{name!r} has no graph"
    return region


def float_graph(student: GraphForward) -> fx.Graph:
    """Return the graph that a traced part of the student had before it got quantizers.

    Args:
        student: A traced part of a prepared model; it is not changed.
    """
    graph = graph_from_record(graph_to_record(fx_graph_of(student)))
    for node in list(graph.nodes):
        if is_quantizer(node, student):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)
        elif node.kwargs.get("quantized") is True:
            added = ("quantized", "float_input")
            node.kwargs = {key: value for key, value in node.kwargs.items() if key not in added}
    return graph


def extract(
    root: nn.Module, inputs: Sequence[fx.Node], nodes: Iterable[fx.Node], outputs: Sequence[fx.Node]
) -> fx.GraphModule:
    """Return a module that runs some nodes of a graph, and shares the modules of ``root``.

    Args:
        root: The module that the graph belongs to.
        inputs: Nodes whose values are given, in the order of the arguments.
        nodes: Nodes to run, in graph order; parameters that they read come by themselves.
        outputs: Nodes whose values are returned, as a tuple.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.ReLU(), nn.Flatten())
        >>> x, relu, flatten, _ = fx.symbolic_trace(model).graph.nodes
        >>> extract(model, [relu], [flatten], [flatten])(torch.ones(1, 2, 2))[0].shape
        torch.Size([1, 4])
    """
    graph = fx.Graph()
    copies = {
        node: graph.node_copy(node) if node.op == "placeholder" else graph.placeholder(node.name)
        for node in inputs
    }

    def copied(node: fx.Node) -> fx.Node:
        if node not in copies:
            assert node.op == "get_attr", f"{node} is neither given nor run"
            copies[node] = graph.node_copy(node)
        return copies[node]

    for node in nodes:
        copies[node] = graph.node_copy(node, copied)
    graph.output(tuple(copied(node) for node in outputs))
    return fx.GraphModule(root, graph)


def fewest_bits(student: nn.Module, cuts: Sequence[Cut]) -> list[int | None]:
    """Return for each group the width of the coarsest weights in it and in the groups before.

    Args:
        student: The student.
        cuts: The groups, in order.

    Returns:
        ``None`` as long as there are no quantized weights.
    """
    found: list[int | None] = []
    fewest: int | None = None
    for cut in cuts:
        layers = map(student.get_submodule, cut.names)
        widths = [layer.weight_bits for layer in layers if isinstance(layer, QATLayer)]
        fewest = min([*widths, *([] if fewest is None else [fewest])], default=None)
        found.append(fewest)
    return found


class Block:
    """A group of the student as a function of its boundary inputs.

    Args:
        student: The student.
        cut: Where the group stands.

    Attributes:
        module: Runs the group; it shares the student's modules.
        nodes: Nodes of the student's graph that it runs, quantizers included.
        frozen: Names of parameters that are not trained, by the reason.
    """

    def __init__(self, student: nn.Module, cut: Cut) -> None:
        self.cut = cut
        self.root = region_of(student, cut.region)
        graph = fx_graph_of(self.root)
        by_name = {node.name: node for node in graph.nodes}
        members = set(cut.nodes)
        self.nodes = [node for node in graph.nodes if self._belongs(node, members)]
        self.inputs = [by_name[name] for name in cut.inputs]
        self.module = extract(self.root, self.inputs, self.nodes, [by_name[cut.output]])
        self.frozen: dict[str, list[str]] = {}
        self._trained = self._find_trained(student)

    def _belongs(self, node: fx.Node, members: set[str]) -> bool:
        feeds = is_quantizer(node, self.root) and any(user.name in members for user in node.users)
        return node.name in members or feeds

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """Return the output for the boundary inputs."""
        return self.module(*inputs)[0]

    def quantizers(self) -> list[FakeQuantizeBase]:
        """Return the fake-quantizers of inputs and weights."""
        return [part for part in self.module.modules() if isinstance(part, FakeQuantizeBase)]

    def trained_parameters(self) -> list[nn.Parameter]:
        """Return the parameters that this group trains, each once."""
        return self._trained

    def _find_trained(self, student: nn.Module) -> list[nn.Parameter]:
        """Leave out what other parts of the model use as well, and what the user froze."""
        elsewhere = _used_outside(student, set(self.nodes))
        owned = own_nodes(self.root, self.cut)
        late = {
            parameter
            for node in self.nodes
            if is_quantizer(node, self.root) and node not in owned
            for parameter in self.root.get_submodule(str(node.target)).parameters()
        }
        found = []
        for name, parameter in self.module.named_parameters():
            if parameter in elsewhere:
                self.frozen.setdefault("also used outside of the group", []).append(name)
            elif parameter in late:
                self.frozen.setdefault("shared with an earlier layer", []).append(name)
            elif not parameter.requires_grad:
                self.frozen.setdefault("requires_grad is False", []).append(name)
            else:
                found.append(parameter)
        return found


def own_nodes(root: GraphForward, cut: Cut) -> list[fx.Node]:
    """Return the nodes of a group, and those quantizers in front of it that it trains.

    A quantizer that layers of several groups read is trained by the first of them.

    Args:
        root: The traced part of the student.
        cut: Where the group stands.
    """
    members = set(cut.nodes)
    return [
        node
        for node in fx_graph_of(root).nodes
        if node.name in members or (is_quantizer(node, root) and min(node.users).name in members)
    ]


def _used_outside(student: nn.Module, inside: set[fx.Node]) -> set[nn.Parameter]:
    """Return the parameters that nodes outside of a group use."""
    found: set[nn.Parameter] = set()
    for _, region in regions(student):
        for node in fx_graph_of(region).nodes:
            if node in inside:
                continue
            if (module := module_of(node, region)) is not None:
                found |= set(_own_parameters(module))
            elif node.op == "get_attr":
                found |= _parameters_of_attribute(region, str(node.target))
    return found


def _own_parameters(module: nn.Module) -> Iterable[nn.Parameter]:
    """Yield the parameters of a module but not those of traced parts in it, which have nodes."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if not isinstance(child, (GraphForward, FakeQuantizeBase)):
            yield from _own_parameters(child)
        elif isinstance(child, FakeQuantizeBase) and not _is_input_quantizer(module, child):
            yield from child.parameters()


def _is_input_quantizer(owner: nn.Module, child: nn.Module) -> bool:
    """Say whether a fake-quantizer is a child that has a node of its own."""
    return owner._modules.get("input_fake_quant") is child


def _parameters_of_attribute(root: nn.Module, target: str) -> set[nn.Parameter]:
    path, _, name = target.rpartition(".")
    value = getattr(root.get_submodule(path), name)
    return {value} if isinstance(value, nn.Parameter) else set()
