"""Norms that a linear does itself while rows are few.

A launch costs LAUNCH_US. Instead every program of the linear can sum up the squares of its rows, which come
from the second-level cache, and scale and round its input as it loads it. Rows are normed and rounded before
the product, as by a kernel apart: rounding points are the same, no weight is folded into another, and tied
matrices stay tied. Only the order of a row's sum of squares is another, so that strict programs do not do it,
and others choose by the number of rows. (Scaling the sums behind the product instead would save the first
pass over the rows, but rounds something else, and would have to hold for chunks of thousands of rows too.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from pagec.compiler.backends.cuda.linear import LinearKnobs, LinearShape, Prologue
from pagec.compiler.dims import ITEM_BYTES, row_stride
from pagec.compiler.ir import Graph, Node
from pagec.compiler.target import CudaTarget

# Of a launch in a captured graph; estimates, as are the clocks until the first bytes of a row are there, and
# the bytes that a multiprocessor takes from the second-level cache in a clock.
LAUNCH_US: Final = 1.5
LATENCY_CLOCKS: Final = 600
CACHE_BYTES_PER_CLOCK: Final = 32
# Numbers of rows up to which it may be worth while.
FEW: Final = (1, 2, 4, 8, 16)
# So much less than a launch it must cost, as all of this is estimated.
MARGIN: Final = 0.75


@dataclass(frozen=True, slots=True)
class Norm:
    """A fused.rowwise node that norms and rounds what one linear alone reads; the same as its prologue."""

    node: Node
    prologue: Prologue


def find_norms(graph: Graph) -> Mapping[str, Norm]:
    """By the first result of a linear: the norm that it could do itself."""
    users, producers = graph.users(), graph.producers()
    found: dict[str, Norm] = {}
    for node in graph.nodes:
        linear = node.find("linear")
        work = producers.get(linear.inputs[0][1:]) if linear else None
        if work is None or users[work.outputs[0]] != [node] or work.outputs[0] in graph.outputs:
            continue
        prologue = _prologue(work, graph)
        if prologue:
            found[node.outputs[0]] = Norm(work, prologue)
    return found


def _prologue(work: Node, graph: Graph) -> Prologue | None:
    ops = [inner.op for inner in work.body]
    if work.op != "fused.rowwise" or ops not in (["rmsnorm"], ["rmsnorm", "cast"]) or len(work.outputs) > 1:
        return None
    norm = work.body[0]
    source, attrs = graph.type(norm.inputs[0][1:]), norm.attrs
    if len(norm.inputs) != 2 or len(source.inner) != 1:
        return None
    eps, offset = attrs["eps"], attrs.get("offset", 0)
    assert isinstance(eps, int | float)
    assert isinstance(offset, int | float)
    name, weight = norm.inputs[0][1:], norm.inputs[1][1:]
    return Prologue(name, source.dtype, weight, source.inner[0], float(eps), float(offset))


def most_rows(
    norm: Norm, graph: Graph, shape: LinearShape, knobs: Iterable[LinearKnobs], target: CudaTarget
) -> int:
    """The largest of FEW for which the linear does the norm itself, or 0; `knobs`: the linear's for each."""
    source = graph.type(norm.prologue.source)
    row_bytes = row_stride(source.inner) * ITEM_BYTES[source.dtype]
    worth = 0
    for rows, one in zip(FEW, knobs, strict=True):
        programs = -(-shape.n // one.BN) * one.splits * -(-rows // one.BM)
        clocks = LATENCY_CLOCKS + -(-programs // target.sms) * rows * row_bytes / CACHE_BYTES_PER_CLOCK
        if rows <= one.BM <= FEW[-1] and clocks / target.clock_mhz < MARGIN * LAUNCH_US:
            worth = rows
    return worth
