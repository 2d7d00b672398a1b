"""Norms of heads, rope, rounding and the cache write behind the q/k/v linear."""

from __future__ import annotations

from collections.abc import Mapping

from pagec.compiler.ir import Graph, Node
from pagec.compiler.passes.regions import absorb_views, drop_unused_views, fused


def fuse_kv_write(graph: Graph) -> Graph:
    """What only prepares q, k and v for the cache and its reader runs in one kernel.

    before:  %q = rmsnorm(%q.0, $q_norm); %k = ...      after:  %q.r.bf16, %kv0.new = fused.kv_write(...) {
             %q.r, %k.r = rope(%q, %k, ...)                         all of them }
             %q.r.bf16 = cast(%q.r); %k.r.bf16 = ...
             %kv0.new = kv_write(%kv0, %k.r.bf16, %v.bf16, ...)
    """
    producers, users = graph.producers(), graph.users()
    regions: dict[str, Node] = {}
    gone: set[str] = set()
    for node in graph.nodes:
        if node.op != "kv_write":
            continue
        body = _region(node, producers, users, graph)
        gone |= {name for inner in body for name in inner.outputs}
        regions[node.outputs[0]] = fused(
            "fused.kv_write", absorb_views(body, producers), users, graph.outputs
        )
    nodes = []
    for node in graph.nodes:
        if node.op == "kv_write":
            nodes.append(regions[node.outputs[0]])
        elif not set(node.outputs) & gone:
            nodes.append(node)
    return drop_unused_views(graph.with_nodes(nodes))


def _region(
    write: Node, producers: Mapping[str, Node], users: Mapping[str, list[Node]], graph: Graph
) -> list[Node]:
    """The write, and before it the casts, the rope and the norms of heads that nothing but it and its reader
    use."""
    reader = next(n for n in users[write.outputs[0]] if n.op == "paged_attention")
    q, k, v = reader.inputs[0][1:], write.inputs[1][1:], write.inputs[2][1:]
    body: list[Node] = [write]

    def take(name: str, op: str) -> str:
        """Takes the node that makes `name` if it is such an op and only the body and the reader use it."""
        node = producers.get(name)
        if node is None or node.op != op or node in body:
            return next(node.values()) if node is not None and node.op == op else name
        free = all(user in body or user is reader for out in node.outputs for user in users[out])
        if not free or set(node.outputs) & set(graph.outputs):
            return name
        body.insert(0, node)
        return next(node.values())

    q, k, v = take(q, "cast"), take(k, "cast"), take(v, "cast")
    rope = producers.get(k)
    if rope is not None and rope.op == "rope" and rope.outputs == (q, k):
        take(k, "rope")
        if rope in body:
            q, k = rope.inputs[0][1:], rope.inputs[1][1:]
    for name in (q, k):
        if _norms_heads(producers.get(name), graph):
            take(name, "rmsnorm")
    return body


def _norms_heads(node: Node | None, graph: Graph) -> bool:
    """Whether it is a norm over each head with one vector of weights for all heads."""
    if node is None or node.op != "rmsnorm" or len(node.inputs) != 2:
        return False
    inner = graph.type(node.outputs[0]).inner
    return len(inner) == 2 and graph.weights[node.inputs[1][1:]].inner == inner[1:]
