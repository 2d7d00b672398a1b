"""Linears of chosen experts take their rows expert by expert."""

from __future__ import annotations

from dataclasses import replace

from pagec.compiler import ops
from pagec.compiler.ir import Graph, Node


def group_experts(graph: Graph) -> Graph:
    """The rows of each expert are listed once, for all the linears that follow the same choice.

    before:  %g = expert_linear(%h, $gate, %e)      after:  %e.lists = expert_lists(%e, experts=8)
             %u = expert_linear(%h, $up, %e)                %g = grouped_linear(%h, $gate, %e, %e.lists)
                                                            %u = grouped_linear(%h, $up, %e, %e.lists)
    """
    types = dict(graph.types)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.op != "expert_linear":
            nodes.append(node)
            continue
        x, w, chosen, *bias = node.inputs
        lists = f"{chosen[1:]}.lists"
        if lists not in types:
            attrs = {"experts": graph.weights[w[1:]].inner[0]}
            nodes.append(Node("expert_lists", (chosen,), (lists,), attrs))
            (types[lists],) = ops.infer("expert_lists", [graph.types[chosen[1:]]], attrs)
        inputs = (x, w, chosen, f"%{lists}", *bias)
        nodes.append(replace(node, op="grouped_linear", inputs=inputs))
    return graph.with_nodes(nodes, types)
