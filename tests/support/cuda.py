"""Kernels of every template of the NVIDIA backend, in the sizes of models that people serve."""

from __future__ import annotations

from collections.abc import Iterator

from pagec.compiler.backends.cuda.attention import (
    AttentionShape,
    DecodeKnobs,
    PrefillKnobs,
    decode,
    merge,
    prefill,
)
from pagec.compiler.backends.cuda.emit import CudaKernel
from pagec.compiler.backends.cuda.experts import GroupedKnobs, expert_lists, grouped_linear, top_k
from pagec.compiler.backends.cuda.fuse_norm import find_norms
from pagec.compiler.backends.cuda.fuse_write import fuse_writes
from pagec.compiler.backends.cuda.kv_write import CacheUse, KvWriteKnobs, kv_write
from pagec.compiler.backends.cuda.linear import LinearKnobs, linear_of, write_of
from pagec.compiler.backends.cuda.rowwise import RowwiseKnobs, rowwise
from pagec.compiler.backends.cuda.sample import sample
from pagec.compiler.backends.cuda.tokens import argmax, copy_blocks, embed, take_tokens
from pagec.compiler.ir import Graph, Node, Type
from pagec.compiler.ops.shapes import expert_lists_width
from pagec.compiler.passes import Numbers, run_passes
from support.graphs import llama_graph
from support.kernels import one_node_graph


def cuda_kernels() -> Iterator[CudaKernel]:
    """At least two configurations of each template, which compile clean for sm_80 and for sm_90."""
    yield from _attention()
    yield from _linears()
    graph = fused_llama(2048, 32, 8, 64, 8192)
    use = CacheUse("bf16", 64, 8192)
    write, norm = first(graph, "fused.kv_write"), first(graph, "fused.rowwise")
    for heads, warps in ((4, 1), (8, 4)):
        yield kv_write(write, graph, use, "table:rope0", KvWriteKnobs(heads, warps))[0]
    yield rowwise(norm, graph, RowwiseKnobs(1, 8))[0]
    yield rowwise(norm, graph, RowwiseKnobs(2, 4))[0]
    yield embed(2048, "bf16", "bf16")
    yield embed(576, "bf16", "f32")
    yield from argmax(128256)
    yield from argmax(4096)
    yield from _experts()
    yield sample(128256)
    yield sample(32000, 4096, 16)
    yield take_tokens(128256)
    yield take_tokens(32000, 1024)
    yield copy_blocks(16, 2 * 64 * 8 * 64 * 2)
    yield copy_blocks(30, 2 * 16 * 3 * 80 * 2)


def _attention() -> Iterator[CudaKernel]:
    llama = AttentionShape(32, 8, 128, "bf16", "bf16", 128**-0.5, 64, 8192)
    gemma = AttentionShape(8, 4, 256, "bf16", "bf16", 256**-0.5, 32, 8192, window=1024, softcap=50.0)
    smol = AttentionShape(9, 3, 64, "bf16", "bf16", 64**-0.5, 16, 2048)
    phi = AttentionShape(32, 32, 80, "bf16", "bf16", 80**-0.5, 64, 2048)
    yield prefill(llama, PrefillKnobs(128, 64, 8, 2))
    yield prefill(smol, PrefillKnobs(128, 64, 8, 2))
    yield prefill(gemma, PrefillKnobs(64, 32, 8, 2))
    yield prefill(phi, PrefillKnobs(64, 64, 4, 2))
    yield prefill(smol, PrefillKnobs(64, 64, 4, 2, split=512))
    yield decode(llama, DecodeKnobs(64, 512, 4, 3))
    yield decode(smol, DecodeKnobs(64, 256, 4, 3))
    yield decode(gemma, DecodeKnobs(32, 512, 4, 2))
    yield decode(phi, DecodeKnobs(64, 512, 4, 2))
    yield merge(llama)
    yield merge(phi)


def _linears() -> Iterator[CudaKernel]:
    """One with an activation product and one with a residual sum, for many rows and for few."""
    graph = fused_llama(2048, 32, 8, 64, 8192)
    product = next(n for n in graph.nodes if n.op == "fused.linear" and n.find("activation"))
    residual = next(n for n in graph.nodes if n.op == "fused.linear" and n.find("add"))
    for knobs in (LinearKnobs(128, 128, 64, 8, 3), LinearKnobs(16, 64, 128, 4, 4, 1)):
        yield from (kernel for kernel, _ in linear_of(product, graph, knobs))
    for knobs in (LinearKnobs(64, 128, 64, 4, 3), LinearKnobs(16, 64, 128, 4, 4, 1, splits=4)):
        yield from (kernel for kernel, _ in linear_of(residual, graph, knobs))
    yield from _writes()
    yield from _normed()
    many = fused_llama(576, 9, 3, 64, 1536, bias=True)
    yield from (kernel for kernel, _ in linear_of(first(many, "linear"), many, LinearKnobs(64, 64, 64, 4, 3)))


def _writes() -> Iterator[CudaKernel]:
    """q, k and v with rope and the KV write, for few rows and for many: Llama 1B, 8B, odd heads."""
    sizes = ((2048, 32, 8, 64), (4096, 32, 8, 128), (2560, 32, 32, 80))
    for hidden, heads, kv_heads, head_dim in sizes:
        graph = fuse_writes(fused_llama(hidden, heads, kv_heads, head_dim, 2 * hidden))
        node = next(n for n in graph.nodes if n.find("kv_write"))
        write = write_of(node, graph, CacheUse("bf16", 64, 8192), "table:rope0")
        tiles = [LinearKnobs(16, 64, 128, 4, 2, 1), LinearKnobs(128, 256, 64, 8, 2)]
        tiles += [LinearKnobs(64, 128, 64, 4, 3, splits=4)]
        for knobs in tiles:
            yield from (kernel for kernel, _ in linear_of(node, graph, knobs, write))


def _normed() -> Iterator[CudaKernel]:
    """Gate and up of Llama 1B with the norm before them, for few rows."""
    source = llama_graph(hidden=2048, heads=32, kv_heads=8, head_dim=64, inter=8192, layers=1)
    graph = run_passes(source, Numbers("bf16", "bf16", "bf16"))
    norm = find_norms(graph)
    node = next(n for n in graph.nodes if n.outputs[0] in norm and n.find("activation"))
    for knobs in (LinearKnobs(16, 32, 128, 4, 2, 1), LinearKnobs(16, 64, 128, 4, 4, 1, splits=4)):
        prologue = norm[node.outputs[0]].prologue
        yield from (kernel for kernel, _ in linear_of(node, graph, knobs, norm=prologue))


def _experts() -> Iterator[CudaKernel]:
    """Of 8 experts with two choices, and of 128 with eight."""
    for experts, k, hidden, inter in ((8, 2, 4096, 14336), (128, 8, 2048, 768)):
        types = {
            "x": Type("T", (hidden,), "bf16"),
            "w": Type(None, (experts, inter, hidden), "bf16"),
            "e": Type("T", (k,), "i32"),
            "l": Type("T", (expert_lists_width(experts, k),), "i32"),
        }
        linear = one_node_graph("grouped_linear", types, {"y": Type("T", (k, inter), "f32")})
        yield grouped_linear(linear.nodes[0], linear, GroupedKnobs(64, 128, 64, 4, 3))
        yield grouped_linear(linear.nodes[0], linear, GroupedKnobs(16, 64, 128, 4, 3))
        lists = one_node_graph("expert_lists", {"e": types["e"]}, {"l": types["l"]}, experts=experts)
        yield expert_lists(lists.nodes[0], lists)
        router = {"v": Type("T", (k,), "f32"), "e": types["e"]}
        choice = one_node_graph("top_k_of", {"p": Type("T", (experts,), "f32")}, router, k=k)
        yield top_k(choice.nodes[0], choice)


def fused_llama(
    hidden: int, heads: int, kv_heads: int, head_dim: int, inter: int, bias: bool = False
) -> Graph:
    """One layer, with the passes run."""
    graph = llama_graph(
        hidden=hidden, heads=heads, kv_heads=kv_heads, head_dim=head_dim, inter=inter, layers=1, qkv_bias=bias
    )
    return run_passes(graph, Numbers("bf16", "bf16"))


def first(graph: Graph, op: str) -> Node:
    """The first node with this op."""
    return next(node for node in graph.nodes if node.op == op)
