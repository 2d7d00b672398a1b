"""The problems of a model: which shapes its fused graph has, each once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pagec.autotune.entries import (
    Bucket,
    Compiler,
    attention_entries,
    decode_buckets,
    linear_buckets,
    linear_entry,
    prefill_buckets,
)
from pagec.autotune.shipped import gpu_table
from pagec.autotune.table import Entry, Table
from pagec.compiler.backends.cuda.build import Progress
from pagec.compiler.backends.cuda.linear import shape_of
from pagec.compiler.driver import CompileOptions, find_source
from pagec.compiler.errors import CompileError
from pagec.compiler.ir import CacheType, Graph
from pagec.compiler.passes import Numbers, run_passes
from pagec.compiler.spec import build_graph
from pagec.compiler.target import CudaTarget


@dataclass(frozen=True, slots=True)
class Attention:
    """An attention shape of a model."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Shapes:
    """What a model computes: linears (N, K) as they lie in memory, attention; how often each in a step."""

    model: str
    linears: Mapping[tuple[int, int], int]
    attention: Mapping[Attention, int]


def shapes_of_model(options: CompileOptions) -> Shapes:
    """The shapes of anything that can be compiled, in bf16."""
    source = find_source(options)
    graph = run_passes(build_graph(source.spec), Numbers("bf16", "bf16"))
    return shapes_of(source.spec.name, graph)


def shapes_of(model: str, graph: Graph) -> Shapes:
    """The shapes of a fused graph."""
    linears = dict[tuple[int, int], int]()
    attention = dict[Attention, int]()
    for node in graph.nodes:
        if node.op in ("linear", "fused.linear"):
            shape = shape_of(node, graph)
            linears[shape.n, shape.k] = linears.get((shape.n, shape.k), 0) + 1
        elif node.op == "fused.attention":
            cache = graph.types[node.body[0].inputs[1][1:]]
            assert isinstance(cache, CacheType)
            heads = graph.type(node.outputs[0]).inner[0]
            one = Attention(heads, cache.kv_heads, cache.head_dim)
            attention[one] = attention.get(one, 0) + 1
    if not linears:
        raise CompileError("has no linears to tune", place=model)
    return Shapes(model, linears, attention)


def tune_offline(
    shapes: Shapes, target: CudaTarget, progress: Progress, compiler: Compiler | None = None, best: int = 0
) -> list[Table]:
    """Predicted tables with an entry for each shape of the model; `best`: see entries.py."""
    total, done = len(shapes.linears) + len(shapes.attention), 0
    linears, prefills, decodes = dict[str, Entry](), dict[str, Entry](), dict[str, Entry]()
    for n, k in shapes.linears:
        progress("rank", done, total)
        buckets = linear_buckets(n, k)
        linears[_key(buckets)] = linear_entry(buckets, target, compiler, best)
        done += 1
    for one in shapes.attention:
        progress("rank", done, total)
        sizes = (one.heads, one.kv_heads, one.head_dim)
        first, second = prefill_buckets(*sizes), decode_buckets(*sizes)
        prefills[_key(first)], decodes[_key(second)] = attention_entries(
            first, second, target, compiler, best
        )
        done += 1
    progress("rank", total, total)
    return [
        gpu_table(target.name, "attention_prefill", prefills),
        gpu_table(target.name, "attention_decode", decodes),
        gpu_table(target.name, "linear", linears),
    ]


def _key(buckets: list[Bucket]) -> str:
    return buckets[0][1].key
