"""Rope and the KV write behind the linear that makes q, k and v: in its registers, not through memory.

A token's q, k and v are float32 between the two kernels: (heads + 2 kv_heads) head_dim x 8 bytes are neither
written nor read again, and a launch is saved; what is left to do costs a linear nothing but registers. So
this is done wherever it can be, for all numbers of rows. It rounds where kv_write rounds: nothing changes a
bit. That any tile of columns will do, whatever the heads' size, is the packing's work: see rope_write.
"""

from __future__ import annotations

from collections.abc import Mapping

from pagec.compiler.backends.kv_sources import KvSources
from pagec.compiler.dims import padded_last
from pagec.compiler.ir import Graph, Node
from pagec.compiler.passes.regions import fused


def fuse_writes(graph: Graph) -> Graph:
    """The linear does what a KV write does to all that it makes.

    before:  %qkv = linear(%h, $qkv)                    after:  %q.bf16, %kv0.new = fused.linear(%h, ...) {
             %q.bf16, %kv0.new = fused.kv_write(%qkv, ...) {            all of them }
                 ... }
    """
    producers, users = graph.producers(), graph.users()
    merged: dict[str, Node] = {}
    for node in graph.nodes:
        if node.op == "fused.kv_write" and not _why_apart(node, graph, producers, users):
            linear = producers[_made(node, graph)]
            body = (linear, *node.body)
            outside = {**users, linear.outputs[0]: []}
            merged[linear.outputs[0]] = fused("fused.linear", body, outside, graph.outputs)
    gone = {name for node in merged.values() for name in node.outputs}
    nodes = [merged.get(node.outputs[0], node) for node in graph.nodes if not set(node.outputs) & gone]
    return graph.with_nodes(nodes)


def refused_writes(graph: Graph) -> Mapping[str, str]:
    """Why a KV write is a kernel of its own, by the first result of each that is."""
    producers, users = graph.producers(), graph.users()
    writes = [node for node in graph.nodes if node.op == "fused.kv_write"]
    reasons = {node.outputs[0]: _why_apart(node, graph, producers, users) for node in writes}
    return {name: reason for name, reason in reasons.items() if reason}


def _why_apart(
    node: Node, graph: Graph, producers: Mapping[str, Node], users: Mapping[str, list[Node]]
) -> str:
    q, k, v = KvSources(node, graph).find()
    if q is None:
        return "another kernel prepares q"
    if q.norm or k.norm:
        return "norms of heads sum over a head, of which a tile of the linear may hold a part"
    linear = producers.get(q.name)
    if linear is None or linear.op != "linear" or {k.name, v.name} != {q.name}:
        return "q, k and v do not come from one linear"
    if users[q.name] != [node] or q.name in graph.outputs:
        return "q, k and v are read elsewhere too"
    if not _follow_each_other(node, graph):
        return "q, k and v do not follow each other in what the linear makes"
    return ""


def _follow_each_other(node: Node, graph: Graph) -> bool:
    """Whether q, k and v, in this order, are all that the linear makes."""
    q, k, v = KvSources(node, graph).find()
    write = node.find("kv_write")
    assert q is not None
    assert write is not None
    query = next(name for name in node.outputs if name not in write.outputs)
    kv_heads = graph.type(write.inputs[1][1:]).inner[0]
    counts = [graph.type(query).inner[0], kv_heads, kv_heads]
    made = graph.type(q.name).inner
    starts = [padded_last(made) * sum(counts[:n]) for n in range(3)]
    return [q.offset, k.offset, v.offset] == starts and sum(counts) == made[0]


def _made(node: Node, graph: Graph) -> str:
    """What holds q, k and v."""
    return KvSources(node, graph).find()[1].name
