"""Where numbers are rounded: the only pass that changes what a graph computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagec.compiler.dims import DType
from pagec.compiler.ir import Graph, Node, Type, ValueType

# Ops whose second operand is a matrix, or a table of rows.
MATRIX_OPS: Final = ("embed", "linear", "grouped_linear")


def round_inputs(graph: Graph, dtype: DType, kv_dtype: DType) -> Graph:
    """Rows that a linear reads are rounded to `dtype`, q, k and v to `kv_dtype`, each once.

    Everything else (residual stream, norms, activations, softmax sums) stays float32. Weights of linears
    and embedding tables are stored in `dtype`.

    before:  %y = linear(%h, $w)              after:  %h.bf16 = cast(%h, dtype='bf16')
                                                      %y = linear(%h.bf16, $w)
    """
    types: dict[str, ValueType] = dict(graph.types)
    stored = {node.inputs[1][1:] for node in graph.nodes if node.op in MATRIX_OPS}
    weights = {n: replace(t, dtype=dtype) if n in stored else t for n, t in graph.weights.items()}
    nodes: list[Node] = []
    rounded: set[str] = set()

    users = graph.users()

    def cast(name: str, to: DType, alone: str = "") -> str:
        """`alone`: the name of a copy that nothing else reads, so that it can be fused with its reader."""
        source = types[name[1:]]
        assert isinstance(source, Type)
        if to == "f32" or source.dtype == to:
            return name
        new = alone if alone and len(users[name[1:]]) > 1 else f"{name[1:]}.{to}"
        if new not in rounded:
            rounded.add(new)
            types[new] = replace(source, dtype=to)
            nodes.append(Node("cast", (name,), (new,), {"dtype": to}))
        return f"%{new}"

    for node in graph.nodes:
        inputs = list(node.inputs)
        match node.op:
            case "linear" | "grouped_linear":
                inputs[0] = cast(inputs[0], dtype)
            case "kv_write":
                cache = node.inputs[0][1:]
                inputs[1:3] = [
                    cast(inputs[1], kv_dtype, f"{cache}.k"),
                    cast(inputs[2], kv_dtype, f"{cache}.v"),
                ]
            case "paged_attention":
                inputs[0] = cast(inputs[0], kv_dtype, f"{node.outputs[0]}.q")
        nodes.append(replace(node, inputs=tuple(inputs)))
    return graph.with_nodes(nodes, types, weights)
