"""Norms that a linear does itself while rows are few.

A launch costs the wait for all workers. Where a row's norm costs less than that, it is done anew for every
share of the linear, into memory of its own, and the launch before the linear is left out. Larger steps share
the norm out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagec.compiler.backends.cpu.rowwise import Region
from pagec.compiler.backends.cpu.tiles import linear_buckets
from pagec.compiler.ir import Graph, Node
from pagec.compiler.target import CpuTarget

# The array that holds the rows in a kernel.
NEAR = "near"


@dataclass(frozen=True, slots=True)
class Prologue:
    """Row-wise work that a linear does itself in steps of up to `rows` rows."""

    node: Node
    rows: int

    def region(self, graph: Graph, lanes: int) -> Region:
        """The work's code; its result goes into the array NEAR."""
        region = Region(self.node, graph, lanes, prefix="n")
        region.array_of[f"value:{self.node.outputs[0]}"] = NEAR
        region.build()
        return region


def find_prologues(graph: Graph, target: CpuTarget) -> tuple[Mapping[str, Prologue], Mapping[str, str]]:
    """By the first result of a linear: what it does itself; and by the first result of row-wise work that
    precedes a linear: why it is a launch of its own in steps of every size."""
    users, producers = graph.users(), graph.producers()
    found: dict[str, Prologue] = {}
    refused: dict[str, str] = {}
    for node in graph.nodes:
        linear = node.find("linear")
        if linear is None:
            continue
        work = producers.get(linear.inputs[0][1:])
        if work is None or work.op != "fused.rowwise":
            continue
        reason = _reason(work, users, graph)
        rows = 0 if reason else _rows(work, graph, target)
        if rows:
            found[node.outputs[0]] = Prologue(work, rows)
        else:
            refused[work.outputs[0]] = reason or (
                f"a row of {_row_bytes(work, graph):,} bytes costs more than the launch that it would save"
            )
    return found, refused


def _reason(work: Node, users: Mapping[str, list[Node]], graph: Graph) -> str:
    """Why a linear cannot do the work itself."""
    if len(work.outputs) > 1:
        return f"%{work.outputs[0]} is kept as well"
    if len(users[work.outputs[0]]) > 1:
        return f"{len(users[work.outputs[0]])} kernels read %{work.outputs[0]}"
    if work.outputs[0] in graph.outputs:
        return f"%{work.outputs[0]} is a result"
    return ""


def _rows(work: Node, graph: Graph, target: CpuTarget) -> int:
    """The largest bucket of rows for which doing the work costs less than a launch."""
    row_ns = _row_bytes(work, graph) / target.row_bytes_per_ns
    dtype = graph.type(work.outputs[0]).dtype
    limits = [
        limit for limit, _ in linear_buckets(target, dtype) if limit and limit * row_ns < target.launch_ns
    ]
    return max(limits, default=0)


def _row_bytes(work: Node, graph: Graph) -> int:
    return sum(graph.row_bytes(name) for name in (*work.values(), *work.outputs))
