"""Places for the nodes of a graph: rows, no overlap, lines from row to row, upright."""

from __future__ import annotations

from collections import defaultdict
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from amct_fx import prepare_qat_amct
from amct_fx.report.graph_view import graph_view
from amct_fx.report.layout import lay_out
from test.networks import Net, NetWithIsland

graphs = st.integers(1, 12).flatmap(
    lambda count: st.tuples(
        st.just(count),
        st.lists(
            st.tuples(st.integers(0, count - 1), st.integers(0, count - 1)).filter(
                lambda link: link[0] < link[1]
            ),
            unique=True,
            max_size=30,
        )
        if count > 1
        else st.just([]),
    )
)


@given(graphs)
def test_lines_go_down_row_by_row_and_boxes_do_not_overlap(
    graph: tuple[int, list[tuple[int, int]]],
) -> None:
    count, links = graph
    layout = lay_out(count, links)
    for (source, target), line in zip(links, layout.edges, strict=True):
        assert (line[0], line[-1]) == (layout.nodes[source], layout.nodes[target])
        assert all(below[1] == above[1] + 1 for above, below in pairwise(line))
    rows = defaultdict(list)
    for x, y in layout.nodes:
        rows[y].append(x)
    for places in rows.values():
        assert all(right - left >= 1 - 1e-9 for left, right in pairwise(sorted(places)))
    assert min(x for x, _ in layout.nodes) >= 0
    assert max(x for x, _ in layout.nodes) <= layout.width - 1 + 1e-9
    assert max(y for _, y in layout.nodes) < layout.height


def test_a_long_chain_of_blocks_with_unequal_branches_stays_upright() -> None:
    links, last, count = [], 0, 1
    for _ in range(30):
        left, first, second, join = range(count, count + 4)
        links += [(last, left), (last, first), (first, second), (left, join), (second, join)]
        last, count = join, count + 4
    assert lay_out(count, links).width < 3


def test_the_picture_shows_each_layer_once_with_what_joins_them() -> None:
    view = graph_view(prepare_qat_amct(Net(), 'skip_layers: "head"'))
    assert [(node.label, node.kind) for node in view.nodes] == [
        ("x", "input"),
        ("stem", "layer"),
        ("left", "layer"),
        ("right", "layer"),
        ("add", "join"),
        ("head", "float"),
        ("output", "output"),
    ]
    assert len(view.edges) == 7


def test_parts_that_were_not_traced_are_islands_with_their_layers_below() -> None:
    view = graph_view(prepare_qat_amct(NetWithIsland()))
    kinds = {node.label: node.kind for node in view.nodes if node.layer == ""}
    assert kinds["middle"] == "island"
    assert {node.layer for node in view.nodes if node.kind == "layer"} == {
        "stem",
        "head",
        "middle.conv",
        "middle.tail.0",
    }
    assert [title for title, _ in view.titles] == ["middle.tail", "called by Python code"]


@pytest.mark.parametrize("depth", [1, 40])
def test_a_chain_is_a_column(depth: int) -> None:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(depth)))
    view = graph_view(prepare_qat_amct(model))
    assert {node.x for node in view.nodes} == {0.0}
    assert view.height == depth + 2
