"""Checks that a graph is well formed; the driver runs it before the first pass and after each."""

from __future__ import annotations

from collections.abc import Mapping

from pagec.compiler import ops
from pagec.compiler.ir import Graph, Node, Type, ValueType
from pagec.compiler.reference import MERGE_MARK

# Ops that only choose what to read.
VIEWS = frozenset({"slice", "take_rows", "heads_of"})


class VerifierError(AssertionError):
    """A graph is broken: a defect of the pass that made it."""


def verify(graph: Graph, after: str) -> None:
    """Every name is defined once and before its use, and every type is the one that the op gives."""
    try:
        known: dict[str, ValueType] = {name: graph.types[name] for name in graph.inputs}
        _verify_nodes(graph.nodes, known, graph)
        missing = [name for name in graph.outputs if name not in known]
        if missing:
            raise VerifierError(f"outputs {missing} are never made")
    except (VerifierError, KeyError, ops.ShapeError) as error:
        raise VerifierError(f"after {after}: {error}") from error


def _verify_nodes(
    nodes: tuple[Node, ...], known: dict[str, ValueType], graph: Graph, in_body: bool = False
) -> None:
    for node in nodes:
        inputs = [_input_type(name, known, graph) for name in node.inputs]
        if node.body:
            inside = dict(known)
            _verify_nodes(node.body, inside, graph, in_body=True)
            results = [inside[name] for name in node.outputs]
        else:
            results = list(ops.infer(node.op, inputs, node.attrs))
        if len(results) != len(node.outputs):
            raise VerifierError(f"{node.op} gives {len(results)} results, not {len(node.outputs)}")
        for name, result in zip(node.outputs, results, strict=True):
            if name in known and not (in_body and node.op in VIEWS):  # each region has its own views
                raise VerifierError(f"%{name} is defined twice")
            if graph.types[name] != result:
                raise VerifierError(f"%{name} is {result} by {node.op}, the graph says {graph.types[name]}")
            known[name] = result


def _input_type(name: str, known: Mapping[str, ValueType], graph: Graph) -> ValueType:
    if name[0] == "$":
        return graph.weights[name[1:]]
    if name[1:] not in known:
        raise VerifierError(f"{name} is used before it is made")
    return known[name[1:]]


def merged_type(parts: list[Type]) -> Type:
    """The type of weights that stand one below the other."""
    rows = sum(t.inner[0] for t in parts)
    return Type(None, (rows, *parts[0].inner[1:]), parts[0].dtype)


def merged_name(parts: list[str]) -> str:
    """The name of weights that stand one below the other."""
    return MERGE_MARK.join(parts)
