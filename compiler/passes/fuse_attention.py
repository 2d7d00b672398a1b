"""Attention stores its result rounded."""

from __future__ import annotations

from dataclasses import replace

from pagec.compiler.ir import Graph, Node, Type, ValueType


def fuse_attention(graph: Graph) -> Graph:
    """An attention and the cast that alone reads it become one kernel.

    Rows that are taken between the two are taken after the rounding: so the last layer's attention is the
    same kernel as the others', and no bit changes.

    before:  %a = paged_attention(%q, %kv0.new, ...)    after:  %a.bf16 = fused.attention(%q, %kv0.new, ...) {
             %a.bf16 = cast(%a, dtype='bf16')                       both }
    """
    graph = _take_rows_rounded(graph)
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


def _take_rows_rounded(graph: Graph) -> Graph:
    """Of an attention's result: cast(take_rows(%a)) -> take_rows(cast(%a))."""
    users, types = graph.users(), dict[str, ValueType](graph.types)
    swapped: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op != "paged_attention" or len(users[node.outputs[0]]) != 1:
            continue
        take = users[node.outputs[0]][0]
        if take.op != "take_rows" or [user.op for user in users[take.outputs[0]]] != ["cast"]:
            continue
        (cast,) = users[take.outputs[0]]
        rounded = f"{node.outputs[0]}.{cast.attrs['dtype']}"
        source, result = graph.type(node.outputs[0]), graph.type(cast.outputs[0])
        assert isinstance(source, Type)
        types[rounded] = replace(source, dtype=result.dtype)
        del types[take.outputs[0]]
        swapped[take.outputs[0]] = replace(cast, inputs=take.inputs[:1], outputs=(rounded,))
        taken = (f"%{rounded}", *take.inputs[1:])
        swapped[cast.outputs[0]] = replace(take, inputs=taken, outputs=cast.outputs)
    return graph.with_nodes([swapped.get(node.outputs[0], node) for node in graph.nodes], types)
