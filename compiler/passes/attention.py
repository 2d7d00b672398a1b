"""Attention goes through a KV cache."""

from __future__ import annotations

from pagec.compiler.ir import CacheType, Graph, Node


def lower_attention(graph: Graph) -> Graph:
    """Each attention becomes a write of its keys and values and a read of all that its cache holds.

    before:  %a = attention(%q, %k, %v, %positions, %sequences, scale=0.125)
    after:   %kv0.new = kv_write(%kv0, %k, %v, %positions, %sequences)
             %a = paged_attention(%q, %kv0.new, %positions, %sequences, scale=0.125)
    """
    types = dict(graph.types)
    caches: list[str] = []
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op != "attention":
            nodes.append(node)
            continue
        q, k, v, *step = node.inputs
        kv_heads, head_dim = graph.type(k[1:]).inner
        window = node.attrs.get("window")
        assert window is None or isinstance(window, int)
        cache = f"kv{len(caches)}"
        types[cache] = types[f"{cache}.new"] = CacheType(len(caches), kv_heads, head_dim, window)
        caches.append(cache)
        nodes.append(Node("kv_write", (f"%{cache}", k, v, *step), (f"{cache}.new",)))
        nodes.append(Node("paged_attention", (q, f"%{cache}.new", *step), node.outputs, node.attrs))
    return graph.with_nodes(nodes, types, inputs=(*graph.inputs, *caches))
