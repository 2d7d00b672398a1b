"""Where numbers are rounded: the only pass that changes what a graph computes."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pagec.compiler.dims import DType
from pagec.compiler.ir import Graph, Node, Type, ValueType

# Ops whose second operand is a matrix, or a table of rows.
MATRIX_OPS: Final = ("embed", "linear", "grouped_linear")


# Ops that look at a value in place.
VIEWS: Final = ("slice", "take_rows", "heads_of")


def round_inputs(graph: Graph, dtype: DType, kv_dtype: DType, residual: DType = "f32") -> Graph:
    """Rows that a linear reads are rounded to `dtype`, q, k and v to `kv_dtype`, each once; the residual
    stream (embeddings, and sums of two rows) to `residual`.

    Everything else (norms, activations, softmax sums) stays float32. Weights of linears and embedding
    tables are stored in `dtype`.

    before:  %y = linear(%h, $w)              after:  %h.bf16 = cast(%h, dtype='bf16')
                                                      %y = linear(%h.bf16, $w)
    """
    types: dict[str, ValueType] = dict(graph.types)
    stored = {node.inputs[1][1:] for node in graph.nodes if node.op in MATRIX_OPS}
    weights = {n: replace(t, dtype=dtype) if n in stored else t for n, t in graph.weights.items()}
    nodes: list[Node] = []
    rounded: set[str] = set()
    stream: dict[str, str] = {}  # values of the residual stream, rounded

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
        inputs = [stream.get(name, name) for name in node.inputs]
        if node.op in VIEWS and inputs[0] != node.inputs[0]:
            view = types[node.outputs[0]]
            assert isinstance(view, Type)
            types[node.outputs[0]] = replace(view, dtype=residual)
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
        if _is_residual(node) and node.outputs[0] not in graph.outputs:
            stream[f"%{node.outputs[0]}"] = cast(f"%{node.outputs[0]}", residual)
    return graph.with_nodes(nodes, types, weights)


def _is_residual(node: Node) -> bool:
    """Whether a node's result is where the residual stream goes on."""
    return node.op == "embed" or (node.op == "add" and len(list(node.values())) == len(node.inputs) == 2)
