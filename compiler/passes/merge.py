"""Linears that read the same rows become one."""

from __future__ import annotations

from pagec.compiler.ir import Graph, Node, Type, ValueType
from pagec.compiler.verifier import merged_name, merged_type


def merge_linears(graph: Graph) -> Graph:
    """Linears of one input whose results divide into groups of one size are computed together.

    A result then is a slice of the merged one: groups start:stop, or one group without its axis.

    before:  %q: T x 9 x 64 = linear(%h, $q, split=64)
             %k: T x 3 x 64 = linear(%h, $k, split=64)
    after:   %q+k: T x 12 x 64 = linear(%h, $q+k, split=64)
             %q = slice(%q+k, start=0, stop=9)
             %k = slice(%q+k, start=9, stop=12)
    """
    families: dict[tuple[object, ...], list[Node]] = {}
    for node in graph.nodes:
        if node.op == "linear" and not set(node.outputs) & set(graph.outputs):
            families.setdefault(_family(node, graph), []).append(node)
    first = {group[0].outputs[0]: group for group in families.values() if len(group) > 1}
    gone = {node.outputs[0] for group in first.values() for node in group}
    types, weights = dict(graph.types), dict(graph.weights)
    nodes: list[Node] = []
    for node in graph.nodes:
        if node.outputs and node.outputs[0] in first:
            nodes += _merge(first[node.outputs[0]], graph, types, weights)
        elif node.op != "linear" or node.outputs[0] not in gone:
            nodes.append(node)
    return graph.with_nodes(nodes, types, weights)


def _group_size(node: Node, graph: Graph) -> int:
    return graph.type(node.outputs[0]).inner[-1]


def _family(node: Node, graph: Graph) -> tuple[object, ...]:
    return node.inputs[0], len(node.inputs), "split" in node.attrs, _group_size(node, graph)


def _merge(
    group: list[Node], graph: Graph, types: dict[str, ValueType], weights: dict[str, Type]
) -> list[Node]:
    size = _group_size(group[0], graph)
    inputs = [group[0].inputs[0]]
    for slot in range(1, len(group[0].inputs)):
        names = [node.inputs[slot][1:] for node in group]
        weights[merged_name(names)] = merged_type([graph.weights[name] for name in names])
        inputs.append("$" + merged_name(names))
    name = "+".join(node.outputs[0] for node in group)
    counts = [weights[node.inputs[1][1:]].inner[0] // size for node in group]
    types[name] = Type(graph.type(group[0].outputs[0]).rows, (sum(counts), size), "f32")
    nodes = [Node("linear", tuple(inputs), (name,), {"split": size})]
    start = 0
    for node, count in zip(group, counts, strict=True):
        attrs: dict[str, int | bool] = {"start": start, "stop": start + count}
        if "split" not in node.attrs:
            attrs["drop_axis"] = True
        nodes.append(Node("slice", (f"%{name}",), node.outputs, attrs))
        start += count
    return nodes
