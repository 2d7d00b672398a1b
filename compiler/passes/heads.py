"""Heads become an axis of the linear that makes them, or of rows as they lie in memory."""

from __future__ import annotations

from dataclasses import replace

from pagec.compiler.dims import LANES
from pagec.compiler.ir import Graph, Node


def split_heads(graph: Graph) -> Graph:
    """A linear whose only use is heads_of gives heads itself, so that each is laid out padded.

    Elsewhere heads_of only names what lies in memory; heads that need padding are copied (regroup).

    before:  %y: T x 576 = linear(%x, $w)           after:  %q: T x 9 x 64 = linear(%x, $w, split=64)
             %q: T x 9 x 64 = heads_of(%y, head_dim=64)
    """
    users, producers = graph.users(), graph.producers()
    joined: dict[str, Node] = {}
    for node in graph.nodes:
        source = producers.get(next(node.values(), ""))
        if node.op != "heads_of" or source is None or source.op != "linear" or "split" in source.attrs:
            continue
        if len(users[source.outputs[0]]) == 1 and source.outputs[0] not in graph.outputs:
            joined[source.outputs[0]] = node
    nodes = []
    for node in graph.nodes:
        if node.op == "heads_of" and node is joined.get(next(node.values())):
            continue
        heads = joined.get(node.outputs[0])
        if heads is not None:
            attrs = {**node.attrs, "split": heads.attrs["head_dim"]}
            node = replace(node, outputs=heads.outputs, attrs=attrs)
        if node.op == "heads_of" and not _is_aligned(node):
            node = replace(node, op="regroup")
        nodes.append(node)
    return graph.with_nodes(nodes)


def _is_aligned(node: Node) -> bool:
    head_dim = node.attrs["head_dim"]
    assert isinstance(head_dim, int)
    return head_dim % LANES == 0
