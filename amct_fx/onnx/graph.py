"""An ONNX graph, indexed for rewriting: who makes a tensor, who reads it, what a constant holds."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from onnx import (
    AttributeProto,
    GraphProto,
    ModelProto,
    NodeProto,
    TensorProto,
    helper,
    numpy_helper,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["Graph", "attribute", "attributes", "set_attributes"]


class Graph:
    """The main graph of a model, as lists and dicts that can be changed; :meth:`save` writes back.

    Args:
        model: Its graph is emptied into this object.

    Attributes:
        nodes: In execution order.
        initializers: Constant tensors by name.
    """

    def __init__(self, model: ModelProto) -> None:
        self.model = model
        self.nodes: list[NodeProto] = list(model.graph.node)
        self.initializers: dict[str, TensorProto] = {
            tensor.name: tensor for tensor in model.graph.initializer
        }
        self._producers: dict[str, NodeProto] | None = None
        self._readers: dict[str, list[NodeProto]] | None = None

    @property
    def opset(self) -> int:
        """Version of the default operator set."""
        return next(int(item.version) for item in self.model.opset_import if not item.domain)

    @property
    def inputs(self) -> list[str]:
        """Names of the inputs that are no initializers."""
        return [i.name for i in self.model.graph.input if i.name not in self.initializers]

    @property
    def outputs(self) -> list[str]:
        """Names of the outputs."""
        return [output.name for output in self.model.graph.output]

    def output_ranks(self) -> list[int | None]:
        """Return the number of dimensions of each output, ``None`` where it is not known."""
        types = [output.type.tensor_type for output in self.model.graph.output]
        return [len(kind.shape.dim) if kind.HasField("shape") else None for kind in types]

    def producer(self, tensor: str) -> NodeProto | None:
        """Return the node that makes a tensor, ``None`` for inputs and initializers."""
        if self._producers is None:
            self._producers = {name: node for node in self.nodes for name in node.output if name}
        return self._producers.get(tensor)

    def readers(self, tensor: str) -> list[NodeProto]:
        """Return the nodes that read a tensor, also those inside subgraphs of theirs, each once."""
        if self._readers is None:
            self._readers = {}
            for node in self.nodes:
                for name in dict.fromkeys(_reads(node)):
                    self._readers.setdefault(name, []).append(node)
        return self._readers.get(tensor, [])

    def array(self, tensor: str) -> NDArray[Any] | None:
        """Return the value of a constant, through Identity; ``None`` for what is computed."""
        if tensor in self.initializers:
            return numpy_helper.to_array(self.initializers[tensor])
        node = self.producer(tensor)
        if node is not None and node.op_type == "Identity":
            return self.array(node.input[0])
        if node is not None and node.op_type == "Constant":
            value = attributes(node).get("value")
            return numpy_helper.to_array(value) if isinstance(value, TensorProto) else None
        return None

    def add_initializer(self, name: str, value: NDArray[Any]) -> str:
        """Add a constant, unless it is there, and return its name."""
        if name not in self.initializers:
            self.initializers[name] = numpy_helper.from_array(np.asarray(value, order="C"), name)
        return name

    def insert(self, nodes: Iterable[NodeProto], *, before: NodeProto) -> None:
        """Insert nodes in front of one."""
        position = self.position(before)
        self.nodes[position:position] = nodes
        self.changed()

    def append_after(self, node: NodeProto, nodes: Iterable[NodeProto]) -> None:
        """Insert nodes right behind one."""
        position = self.position(node) + 1
        self.nodes[position:position] = nodes
        self.changed()

    def replace(self, old: NodeProto, *new: NodeProto) -> None:
        """Put nodes where one was."""
        position = self.position(old)
        self.nodes[position : position + 1] = new
        self.changed()

    def replace_uses(self, old: str, new: str, *, besides: Iterable[NodeProto] = ()) -> None:
        """Let all readers of a tensor read another one; an output of the graph keeps its tensor."""
        skipped = {id(node) for node in besides}
        for node in self.readers(old):
            if id(node) not in skipped:
                _rename_reads(node, old, new)
        self.changed()

    def changed(self) -> None:
        """Forget the index, after nodes were changed from outside."""
        self._producers = self._readers = None

    def prune(self) -> None:
        """Drop nodes and initializers that no output needs."""
        needed = set(self.outputs)
        kept = []
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                needed.update(_reads(node))
                kept.append(node)
        self.nodes = kept[::-1]
        self.initializers = {n: t for n, t in self.initializers.items() if n in needed}
        self.changed()

    def save(self) -> ModelProto:
        """Write everything back into the model, and return it.

        What exporters note for debugging is dropped: it holds paths of source files.
        """
        graph = self.model.graph
        for node in self.nodes:
            node.doc_string = ""
            if "metadata_props" in node.DESCRIPTOR.fields_by_name:
                node.ClearField("metadata_props")
        inputs = [item for item in graph.input if item.name not in self.initializers]
        # Field by field, as a whole graph may be larger than what protobuf copies at once.
        _refill(graph.input, inputs)
        _refill(graph.node, self.nodes)
        _refill(graph.initializer, list(self.initializers.values()))
        _refill(graph.value_info, [])
        _refill(graph.quantization_annotation, [])
        for value in (*graph.input, *graph.output, *graph.initializer):
            for notes in ("doc_string", "metadata_props"):
                value.ClearField(notes)
        graph.doc_string = ""
        graph.ClearField("metadata_props")
        self.model.doc_string = ""
        self.model.ClearField("metadata_props")
        self.model.ClearField("functions")
        self.__init__(self.model)  # type: ignore[misc]  # the nodes are copies now
        return self.model

    def position(self, node: NodeProto) -> int:
        """Return the place of a node in the order of execution."""
        return next(i for i, other in enumerate(self.nodes) if other is node)


def _refill(fields: Any, values: Iterable[Any]) -> None:
    """Replace the content of a repeated field by copies of ``values``."""
    del fields[:]
    fields.extend(values)


def attribute(node: NodeProto, name: str, default: Any = None) -> Any:
    """Return one attribute of a node.

    Example:
        >>> attribute(helper.make_node("Gemm", ["x", "w"], ["y"], transB=1), "transB")
        1
    """
    return attributes(node).get(name, default)


def attributes(node: NodeProto) -> dict[str, Any]:
    """Return all attributes of a node as Python values.

    Example:
        >>> attributes(helper.make_node("Flatten", ["x"], ["y"], axis=1))
        {'axis': 1}
    """
    found = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    return {k: v.decode() if isinstance(v, bytes) else v for k, v in found.items()}


def set_attributes(node: NodeProto, **values: Any) -> None:
    """Give a node these attributes and no others."""
    node.ClearField("attribute")
    node.attribute.extend(helper.make_attribute(key, value) for key, value in values.items())


def _subgraphs(node: NodeProto) -> Iterator[GraphProto]:
    for item in node.attribute:
        if item.type == AttributeProto.GRAPH:
            yield item.g
        elif item.type == AttributeProto.GRAPHS:
            yield from item.graphs


def _reads(node: NodeProto) -> Iterator[str]:
    """Yield every name that a node, or a node of its subgraphs, reads."""
    yield from (name for name in node.input if name)
    for graph in _subgraphs(node):
        yield from (output.name for output in graph.output)
        for inner in graph.node:
            yield from _reads(inner)


def _rename_reads(node: NodeProto, old: str, new: str) -> None:
    for i, name in enumerate(node.input):
        if name == old:
            node.input[i] = new
    for graph in _subgraphs(node):
        for output in graph.output:
            if output.name == old:
                output.name = new
        for inner in graph.node:
            _rename_reads(inner, old, new)
