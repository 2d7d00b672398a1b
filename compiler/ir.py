"""The graph IR: ordered nodes over typed values, unrolled over a model's layers.

    %l0.q: T x 9 x 64 f32 = linear(%l0.h, $l0.q_w)
    `name`  `rows`  `inner`  `dtype`      `inputs: % values, $ weights`   attributes come last, as k=v

Names are unique in a graph. A KV cache is an *effect value*: `kv_write` takes a cache and returns the
next one, so the order of writes and reads is plain data flow. Graphs are immutable; a pass returns a new
one. `to_json` / `from_json` need the standard library alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from pagec.compiler.dims import ITEM_BYTES, DType, Rows

Attr = int | float | str | bool | None | tuple["Attr", ...]


@dataclass(frozen=True, slots=True)
class Type:
    """`rows` x `inner` elements of `dtype`. A weight has no rows."""

    rows: Rows | None
    inner: tuple[int, ...]
    dtype: DType

    def __str__(self) -> str:
        sizes = ([self.rows] if self.rows else []) + [str(n) for n in self.inner]
        return f"{' x '.join(sizes) or 'scalar'} {self.dtype}"


@dataclass(frozen=True, slots=True)
class CacheType:
    """One layer's keys and values: `kv_heads` x `head_dim` each per token; `window` keys are ever read."""

    layer: int
    kv_heads: int
    head_dim: int
    window: int | None

    def __str__(self) -> str:
        window = f" window {self.window}" if self.window else ""
        return f"cache {self.layer}: {self.kv_heads} x {self.head_dim}{window}"


ValueType = Type | CacheType


@dataclass(frozen=True, slots=True)
class Node:
    """One operation. `inputs` name values ("%x") and weights ("$w"); `attrs` are its constants.

    A fused node (op "fused.*") carries the nodes it stands for in `body`: their inputs are the fused
    node's inputs or results of earlier body nodes, and `outputs` name those results that live on.
    """

    op: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    attrs: Mapping[str, Attr] = field(default_factory=dict)
    body: tuple[Node, ...] = ()

    def values(self) -> Iterator[str]:
        """Names of the value inputs, without their mark."""
        return (name[1:] for name in self.inputs if name[0] == "%")

    def weights(self) -> Iterator[str]:
        """Names of the weight inputs, without their mark."""
        return (name[1:] for name in self.inputs if name[0] == "$")

    def find(self, op: str) -> Node | None:
        """The node with this op: this one, or the first in its body."""
        return next((node for node in (self, *self.body) if node.op == op), None)


@dataclass(frozen=True, slots=True)
class Graph:
    """A whole model. `types` gives the type of every value, `weights` of every weight.

    `inputs` are given by the step (tokens, positions, ...) or by memory (caches); `outputs` are read by
    the runtime.
    """

    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    nodes: tuple[Node, ...]
    types: Mapping[str, ValueType]
    weights: Mapping[str, Type]

    def type(self, name: str) -> Type:
        """The type of a tensor value (not of a cache)."""
        found = self.types[name]
        assert isinstance(found, Type), f"%{name} is a cache"
        return found

    def row_bytes(self, name: str) -> int:
        """Bytes of a row of a value, without padding; 0 for a cache."""
        t = self.types[name]
        return prod(t.inner) * ITEM_BYTES[t.dtype] if isinstance(t, Type) else 0

    def input_type(self, reference: str) -> ValueType:
        """The type behind a node's input, "%value" or "$weight"."""
        return self.types[reference[1:]] if reference[0] == "%" else self.weights[reference[1:]]

    def producers(self) -> dict[str, Node]:
        """The node that makes each value."""
        return {name: node for node in self.nodes for name in node.outputs}

    def users(self) -> dict[str, list[Node]]:
        """The nodes that read each value, in order."""
        found: dict[str, list[Node]] = {name: [] for name in self.types}
        for node in self.nodes:
            for name in dict.fromkeys(node.values()):
                found[name].append(node)
        return found

    def with_nodes(
        self,
        nodes: Iterable[Node],
        types: Mapping[str, ValueType] | None = None,
        weights: Mapping[str, Type] | None = None,
        inputs: tuple[str, ...] | None = None,
        outputs: tuple[str, ...] | None = None,
    ) -> Graph:
        """This graph with other nodes; types and weights that nothing names any more are dropped."""
        nodes = tuple(nodes)
        inputs = self.inputs if inputs is None else inputs
        outputs = self.outputs if outputs is None else outputs
        kept = set(inputs) | set(outputs) | {n for node in nodes for n in _named(node) if n}
        used = {w for node in nodes for w in node.weights()}
        all_types = self.types if types is None else types
        all_weights = self.weights if weights is None else weights
        return replace(
            self,
            inputs=inputs,
            outputs=outputs,
            nodes=nodes,
            types={name: t for name, t in all_types.items() if name in kept},
            weights={name: t for name, t in all_weights.items() if name in used},
        )


def _named(node: Node) -> Iterator[str]:
    yield from node.values()
    yield from node.outputs
    for inner in node.body:
        yield from _named(inner)


def format_node(node: Node, types: Mapping[str, ValueType], indent: str = "") -> str:
    """One node as a line (a fused node as a block)."""
    results = ", ".join(f"%{name}: {types[name]}" for name in node.outputs)
    attrs = [f"{key}={_format_attr(value)}" for key, value in node.attrs.items()]
    line = f"{indent}{results} = {node.op}({', '.join([*node.inputs, *attrs])})"
    if not node.body:
        return line
    inner = "\n".join(format_node(n, types, indent + "    ") for n in node.body)
    return f"{line} {{\n{inner}\n{indent}}}"


def format_graph(graph: Graph) -> str:
    """A graph as text, for people and goldens."""
    lines = [f"input %{name}: {graph.types[name]}" for name in graph.inputs]
    lines += [f"weight ${name}: {t}" for name, t in graph.weights.items()]
    lines += [format_node(node, graph.types) for node in graph.nodes]
    lines += [f"output %{name}" for name in graph.outputs]
    return "\n".join(lines) + "\n"


def _format_attr(value: Attr) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_format_attr(v) for v in value)}]"
    return repr(value)


def to_json(graph: Graph) -> dict[str, Any]:
    """A graph as JSON-ready data."""
    return {
        "inputs": list(graph.inputs),
        "outputs": list(graph.outputs),
        "types": {name: _type_to_json(t) for name, t in graph.types.items()},
        "weights": {name: _type_to_json(t) for name, t in graph.weights.items()},
        "nodes": [_node_to_json(node) for node in graph.nodes],
    }


def from_json(data: Mapping[str, Any]) -> Graph:
    """The graph that `to_json` wrote."""
    weights = {name: _type_from_json(t) for name, t in data["weights"].items()}
    assert all(isinstance(t, Type) for t in weights.values())
    return Graph(
        inputs=tuple(data["inputs"]),
        outputs=tuple(data["outputs"]),
        nodes=tuple(_node_from_json(node) for node in data["nodes"]),
        types={name: _type_from_json(t) for name, t in data["types"].items()},
        weights={name: t for name, t in weights.items() if isinstance(t, Type)},
    )


def _type_to_json(t: ValueType) -> dict[str, Any]:
    if isinstance(t, CacheType):
        return {"layer": t.layer, "kv_heads": t.kv_heads, "head_dim": t.head_dim, "window": t.window}
    return {"rows": t.rows, "inner": list(t.inner), "dtype": t.dtype}


def _type_from_json(data: Mapping[str, Any]) -> ValueType:
    if "layer" in data:
        return CacheType(data["layer"], data["kv_heads"], data["head_dim"], data["window"])
    return Type(data["rows"], tuple(data["inner"]), data["dtype"])


def _node_to_json(node: Node) -> dict[str, Any]:
    data: dict[str, Any] = {"op": node.op, "inputs": list(node.inputs), "outputs": list(node.outputs)}
    if node.attrs:
        data["attrs"] = dict(node.attrs)
    if node.body:
        data["body"] = [_node_to_json(inner) for inner in node.body]
    return data


def _node_from_json(data: Mapping[str, Any]) -> Node:
    return Node(
        op=data["op"],
        inputs=tuple(data["inputs"]),
        outputs=tuple(data["outputs"]),
        attrs={key: _attr_from_json(value) for key, value in data.get("attrs", {}).items()},
        body=tuple(_node_from_json(inner) for inner in data.get("body", ())),
    )


def _attr_from_json(value: Any) -> Attr:
    return tuple(_attr_from_json(v) for v in value) if isinstance(value, list) else value
