"""Chains of row-wise work become one kernel each."""

from __future__ import annotations

from pagec.compiler import ops
from pagec.compiler.ir import Graph, Node, Type
from pagec.compiler.passes.regions import VIEWS, absorb_views, drop_unused_views, fused, reads_any


def fuse_rowwise(graph: Graph) -> Graph:
    """Neighbouring row-wise nodes over rows of one shape, each reading another, run in one kernel.

    Slices and taken rows are read in place. Rounding points stay as they are: nothing changes a bit.

    before:  %x.1 = add(%x, %y)                  after:  %x.1, %h.bf16 = fused.rowwise(%x, %y, $norm) {
             %h = rmsnorm(%x.1, $norm, eps=1e-05)            all of them }
             %h.bf16 = cast(%h, dtype='bf16')
    """
    producers, users = graph.producers(), graph.users()
    nodes: list[Node] = []
    region: list[Node] = []

    def close() -> None:
        if region:
            nodes.append(fused("fused.rowwise", absorb_views(region, producers), users, graph.outputs))
            region.clear()

    for node in graph.nodes:
        if node.op in VIEWS:
            if node.outputs[0] in graph.outputs or any(map(_needs_copy, users[node.outputs[0]])):
                close()
                nodes.append(fused("fused.rowwise", absorb_views([node], producers), users, graph.outputs))
            continue
        if not (node.op in ops.OPS and ops.OPS[node.op].rowwise):
            close()
            nodes.append(node)
            continue
        if region and not _joins(node, region, graph):
            close()
        region.append(node)
    close()
    return drop_unused_views(graph.with_nodes(nodes))


def _joins(node: Node, region: list[Node], graph: Graph) -> bool:
    """Rows of the same count and shape, made from what the region makes."""
    made = [name for member in region for name in member.outputs]
    return _shape(node, graph) == _shape(region[0], graph) and reads_any(node, made)


def _shape(node: Node, graph: Graph) -> tuple[object, ...]:
    t = graph.types[node.outputs[0]]
    assert isinstance(t, Type)
    return t.rows, t.inner


def _needs_copy(reader: Node) -> bool:
    """Whether a view must be copied for a reader that cannot take it in place (a linear, say)."""
    in_place = reader.op in VIEWS or reader.op == "fused.kv_write"
    return not in_place and not (reader.op in ops.OPS and ops.OPS[reader.op].rowwise)
