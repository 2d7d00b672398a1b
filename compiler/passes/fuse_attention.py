"""Attention stores its result rounded."""

from __future__ import annotations

from pagec.compiler.ir import Graph, Node


def fuse_attention(graph: Graph) -> Graph:
    """An attention and the cast that alone reads it become one kernel.

    before:  %a = paged_attention(%q, %kv0.new, ...)    after:  %a.bf16 = fused.attention(%q, %kv0.new, ...) {
             %a.bf16 = cast(%a, dtype='bf16')                       both }
    """
    users = graph.users()
    nodes: list[Node] = []
    casts: set[str] = set()
    for node in graph.nodes:
        if node.op == "paged_attention":
            following = users[node.outputs[0]]
            alone = len(following) == 1 and following[0].op == "cast" and node.outputs[0] not in graph.outputs
            body = (node, following[0]) if alone else (node,)
            casts |= {n.outputs[0] for n in body[1:]}
            node = Node("fused.attention", node.inputs, body[-1].outputs, body=body)
        if node.outputs[0] not in casts or node.op == "fused.attention":
            nodes.append(node)
    return graph.with_nodes(nodes)
