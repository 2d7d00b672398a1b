"""Greedy decoding needs the greatest logit's index only."""

from __future__ import annotations

from pagec.compiler.ir import Graph, Node, Type


def add_argmax(graph: Graph) -> Graph:
    """Adds the index of each row's greatest logit to the outputs.

    before:  output %logits                after:  %argmax: R i32 = argmax(%logits)
                                                   output %logits, output %argmax
    """
    types = {**graph.types, "argmax": Type(graph.type("logits").rows, (), "i32")}
    node = Node("argmax", ("%logits",), ("argmax",))
    return graph.with_nodes([*graph.nodes, node], types, outputs=(*graph.outputs, "argmax"))
