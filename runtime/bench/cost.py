"""What a model needs at least: FLOPs of linears and attention, bytes of weights, keys and values.

Counted from the graph as the spec has it, before any pass, so that no fusion changes a share.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from pagec.compiler.artifact import Artifact, GpuArtifact
from pagec.compiler.dims import ITEM_BYTES
from pagec.compiler.ir import Graph, Node

# A chunk of a sequence: the first token's position, and how many tokens.
Chunk = tuple[int, int]


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """One layer's attention. `window`: keys further back are never read."""

    heads: int
    kv_heads: int
    head_dim: int
    window: int | None

    def pairs(self, start: int, count: int) -> int:
        """(query, key) pairs of `count` queries from position `start`, causal."""
        window = self.window or start + count
        full = min(max(window - start, 0), count)  # queries that see everything before them
        return full * start + full * (full + 1) // 2 + (count - full) * window

    def flops(self, start: int, count: int) -> int:
        """Two dot products per pair and head."""
        return 4 * self.heads * self.head_dim * self.pairs(start, count)

    def keys(self, start: int, count: int) -> int:
        """Keys that a chunk reads."""
        end = start + count
        return min(end, self.window + count - 1) if self.window else end

    def kv_bytes(self, start: int, count: int, item_bytes: int) -> int:
        """Bytes of keys and values that a chunk reads, each once."""
        return 2 * self.kv_heads * self.head_dim * item_bytes * self.keys(start, count)


@dataclass(frozen=True, slots=True)
class ModelCost:
    """`token_flops`: of the linears that every token needs; `logit_flops`: of those after the last
    attention, which only rows with logits need. `weights_bytes`: what one token reads, in the weights' own
    dtypes: every matrix and vector once, of an embedding one row (nothing), of experts the chosen ones."""

    token_flops: int
    logit_flops: int
    weights_bytes: int
    kv_item_bytes: int
    layers: tuple[AttentionCost, ...]

    def flops(self, chunks: Iterable[Chunk], num_logits: int) -> int:
        """FLOPs of linears and causal attention."""
        chunks = list(chunks)
        tokens = sum(count for _, count in chunks)
        attention = sum(layer.flops(*chunk) for layer in self.layers for chunk in chunks)
        return tokens * self.token_flops + num_logits * self.logit_flops + attention

    def decode_bytes(self, position: int) -> int:
        """Bytes that decoding one token at this position reads: weights, and KV up to itself."""
        return self.weights_bytes + sum(a.kv_bytes(position, 1, self.kv_item_bytes) for a in self.layers)


def model_cost(artifact: Artifact | GpuArtifact) -> ModelCost:
    """The costs of an artifact's model."""
    graph, numerics = artifact.graph(), artifact.manifest["numerics"]
    before_attention = _ancestors(graph, [n for n in graph.nodes if n.op == "attention"])
    linears = [node for node in graph.nodes if _matrix(node)]
    token = sum(_flops(graph, node) for node in linears if node.outputs[0] in before_attention)
    return ModelCost(
        token_flops=token,
        logit_flops=sum(_flops(graph, node) for node in linears) - token,
        weights_bytes=_weights_bytes(graph, ITEM_BYTES[numerics["dtype"]]),
        kv_item_bytes=ITEM_BYTES[numerics["kv_dtype"]],
        layers=tuple(_attention(graph, node) for node in graph.nodes if node.op == "attention"),
    )


def _matrix(node: Node) -> bool:
    return node.op in ("linear", "expert_linear")


def _ancestors(graph: Graph, nodes: list[Node]) -> set[str]:
    """All values that these nodes depend on."""
    producers = graph.producers()
    found: set[str] = set()
    todo = [name for node in nodes for name in node.values()]
    while todo:
        name = todo.pop()
        if name not in found:
            found.add(name)
            todo += producers[name].values() if name in producers else []
    return found


def _flops(graph: Graph, node: Node) -> int:
    """Of one row: its outputs (with experts, of each choice) times the matrix's last axis, twice."""
    matrix = graph.weights[next(node.weights())]
    return 2 * prod(graph.type(node.outputs[0]).inner) * matrix.inner[-1]


def _weights_bytes(graph: Graph, matrix_bytes: int) -> int:
    read: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "embed":
            continue
        for i, name in enumerate(node.weights()):
            t = graph.weights[name]
            size = prod(t.inner) * (matrix_bytes if _matrix(node) and i == 0 else ITEM_BYTES[t.dtype])
            if node.op == "expert_linear":
                choices = graph.type(node.outputs[0]).inner[0]
                size = size * min(choices, t.inner[0]) // t.inner[0]
            read[name] = size
    return sum(read.values())


def _attention(graph: Graph, node: Node) -> AttentionCost:
    q, k = (graph.type(node.inputs[i][1:]) for i in (0, 1))
    window = node.attrs.get("window")
    assert window is None or isinstance(window, int)
    return AttentionCost(q.inner[0], k.inner[0], q.inner[1], window)
