"""The network as a picture: layers and joins from top to bottom, with places to draw them.

Only layers, inputs, outputs, islands and nodes that join several tensors are shown; what lies
between (activations, batch norms, reshapes) is part of the lines.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from amct_fx.backend_config import is_layer
from amct_fx.graph import fx_graph_of, module_of, regions
from amct_fx.nn.qat import QATLayer
from amct_fx.nn.quantized import QuantizedLayer
from amct_fx.report.layout import Layout, lay_out
from amct_fx.report.lookup import joined
from amct_fx.report.table import one_line, shortened

if TYPE_CHECKING:
    from torch import fx, nn

__all__ = ["GraphView", "ShownNode", "graph_view"]


@dataclass(frozen=True)
class ShownNode:
    """One box of the picture.

    Attributes:
        label: What stands in it.
        kind: ``"layer"``, ``"float"`` (a layer that stays float), ``"input"``, ``"output"``,
            ``"island"`` or ``"join"``.
        layer: Name of the layer in the model, ``""`` for other nodes.
        x: Centre, in units of one box.
        y: Row, from the top.
    """

    label: str
    kind: str
    layer: str
    x: float
    y: float


@dataclass(frozen=True)
class GraphView:
    """All traced parts, one below the other.

    Attributes:
        nodes: The boxes.
        edges: Lines, each a list of places from one box to the next.
        titles: Text above each part, with its row.
        width: Boxes side by side.
        height: Rows.
    """

    nodes: tuple[ShownNode, ...]
    edges: tuple[tuple[tuple[float, float], ...], ...]
    titles: tuple[tuple[str, float], ...]
    width: float
    height: float


@dataclass(frozen=True)
class _Box:
    label: str
    kind: str
    layer: str


def graph_view(model: nn.Module) -> GraphView:
    """Return the picture of a prepared or converted model.

    Args:
        model: What :func:`amct_fx.prepare_qat_amct` or :func:`amct_fx.convert_amct` returned.

    Example:
        >>> from torch import nn
        >>> from amct_fx import prepare_qat_amct
        >>> view = graph_view(prepare_qat_amct(nn.Sequential(nn.Linear(4, 4), nn.ReLU())))
        >>> [(node.label, node.kind, node.y) for node in view.nodes]
        [('input_1', 'input', 0.0), ('0', 'layer', 1.0), ('output', 'output', 2.0)]
    """
    nodes: list[ShownNode] = []
    edges: list[tuple[tuple[float, float], ...]] = []
    titles: list[tuple[str, float]] = []
    width, top = 1.0, 0.0
    shown: set[str] = set()
    parts = [(name, *_boxes(name, region)) for name, region in regions(model)]
    for name, boxes, links in parts:
        shown |= {box.layer for box in boxes}
        if name:
            titles.append((name, top))
            top += 1
        layout = lay_out(len(boxes), links)
        nodes += _placed(boxes, layout, top)
        edges += [tuple((x, y + top) for x, y in line) for line in layout.edges]
        width, top = max(width, layout.width), top + layout.height + (1 if name else 0)
    rest = [
        _Box(_label(name), "layer", name)
        for name, module in model.named_modules()
        if isinstance(module, (QATLayer, QuantizedLayer)) and name not in shown
    ]
    if rest:
        titles.append(("called by Python code", top))
        layout = lay_out(len(rest), [(i, i + 1) for i in range(len(rest) - 1)])
        nodes += _placed(rest, layout, top + 1)
        top += layout.height + 1
    return GraphView(tuple(nodes), tuple(edges), tuple(titles), width, top)


def _placed(boxes: list[_Box], layout: Layout, top: float) -> list[ShownNode]:
    return [
        ShownNode(box.label, box.kind, box.layer, x, y + top)
        for box, (x, y) in zip(boxes, layout.nodes, strict=True)
    ]


def _boxes(prefix: str, region: nn.Module) -> tuple[list[_Box], list[tuple[int, int]]]:
    """Return the boxes of one traced part and the links between them, by index."""
    boxes: list[_Box] = []
    links: dict[tuple[int, int], None] = {}
    sources: dict[fx.Node, tuple[int, ...]] = {}
    for node in fx_graph_of(region).nodes:
        before = tuple(dict.fromkeys(i for arg in node.all_input_nodes for i in sources[arg]))
        box = _box(node, prefix, region, joins=len(before) > 1)
        if box is None:
            sources[node] = before
            continue
        sources[node] = (len(boxes),)
        links.update(((source, len(boxes)), None) for source in before)
        boxes.append(box)
    return boxes, list(links)


def _box(node: fx.Node, prefix: str, region: nn.Module, *, joins: bool) -> _Box | None:
    """Return the box of a node, ``None`` for what is part of a line."""
    if node.op == "placeholder":
        return _Box(_label(node.name), "input", "") if node.users else None
    if node.op == "output":
        return _Box("output", "output", "")
    module = module_of(node, region)
    target = str(node.target)
    if isinstance(module, (QATLayer, QuantizedLayer)):
        return _Box(_label(target), "layer", joined(prefix, target))
    if module is not None and is_layer(module):
        return _Box(_label(target), "float", joined(prefix, target))
    if module is not None and any(map(_holds_weight, module.modules())):
        return _Box(_label(target), "island", "")
    if joins:
        return _Box(_label(node.name.rstrip("_0123456789") or node.name), "join", "")
    return None


def _holds_weight(module: nn.Module) -> bool:
    return is_layer(module) or isinstance(module, (QATLayer, QuantizedLayer))


def _label(name: str) -> str:
    """Return what fits into a box."""
    return shortened(one_line(name), 20)
