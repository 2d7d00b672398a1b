"""The pass pipeline: pure functions from graph to graph, in the order in which they run.

Before them a graph is what the spec says; after them every node is one kernel launch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from pagec.compiler.dims import DType
from pagec.compiler.ir import Graph
from pagec.compiler.passes.argmax import add_argmax
from pagec.compiler.passes.attention import lower_attention
from pagec.compiler.passes.experts import group_experts
from pagec.compiler.passes.fuse_attention import fuse_attention
from pagec.compiler.passes.fuse_epilogue import fuse_epilogue
from pagec.compiler.passes.fuse_kv_write import fuse_kv_write
from pagec.compiler.passes.fuse_rowwise import fuse_rowwise
from pagec.compiler.passes.heads import split_heads
from pagec.compiler.passes.logit_rows import take_logit_rows
from pagec.compiler.passes.merge import merge_linears
from pagec.compiler.passes.rounding import round_inputs
from pagec.compiler.passes.sample import add_sample
from pagec.compiler.verifier import verify


@dataclass(frozen=True, slots=True)
class Numbers:
    """The data types of a program: `dtype` of weights and linear inputs, `kv_dtype` of the cache,
    `residual` of the stream that layers add to."""

    dtype: DType
    kv_dtype: DType
    residual: DType = "f32"


Pass = Callable[[Graph, Numbers], Graph]

PIPELINE: Final[tuple[tuple[str, Pass], ...]] = (
    ("split_heads", lambda graph, _: split_heads(graph)),
    ("merge_linears", lambda graph, _: merge_linears(graph)),
    ("take_logit_rows", lambda graph, _: take_logit_rows(graph)),
    ("add_argmax", lambda graph, _: add_argmax(graph)),
    ("add_sample", lambda graph, _: add_sample(graph)),
    ("lower_attention", lambda graph, _: lower_attention(graph)),
    ("group_experts", lambda graph, _: group_experts(graph)),
    ("round_inputs", lambda graph, n: round_inputs(graph, n.dtype, n.kv_dtype, n.residual)),
    ("fuse_kv_write", lambda graph, _: fuse_kv_write(graph)),
    ("fuse_attention", lambda graph, _: fuse_attention(graph)),
    ("fuse_epilogue", lambda graph, _: fuse_epilogue(graph)),
    ("fuse_rowwise", lambda graph, _: fuse_rowwise(graph)),
)


def stages(graph: Graph, numbers: Numbers) -> Iterator[tuple[str, Graph]]:
    """The graph after each pass, verified."""
    verify(graph, "the spec")
    for name, run in PIPELINE:
        graph = run(graph, numbers)
        verify(graph, name)
        yield name, graph


def run_passes(graph: Graph, numbers: Numbers) -> Graph:
    """The fused graph: every node is one kernel launch."""
    for _, result in stages(graph, numbers):
        graph = result
    return graph
