"""What prepares q, k and v for the cache and its reader -> one kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagec.compiler.backends.cuda.emit import ELEMENTS, CudaKernel, make_kernel
from pagec.compiler.backends.kv_sources import KvSources, Source
from pagec.compiler.dims import padded_last, row_stride
from pagec.compiler.errors import CompileError
from pagec.compiler.ir import CacheType, Graph, Node
from pagec.compiler.launch import Counts, GridRule
from pagec.compiler.rope import RopeConfig


@dataclass(frozen=True, slots=True)
class KvWriteKnobs:
    """HB heads of a program, in `warps` warps."""

    HB: int = 4
    warps: int = 1


@dataclass(frozen=True, slots=True)
class CacheUse:
    """The cache that is written: its `dtype` (and q's), tokens of a block, greatest length, layer's group."""

    dtype: str
    block_size: int
    max_len: int
    group: int = 0


def kv_write(
    node: Node, graph: Graph, use: CacheUse, table: str, knobs: KvWriteKnobs
) -> tuple[CudaKernel, tuple[str, ...]]:
    """The kernel of a fused.kv_write node and its arguments as program.py has them; `table` is the one that
    holds rope's cosines and sines."""
    q, k, v = KvSources(node, graph).find()
    params = place_params(node, graph, use)
    heads, kv_heads = params["heads"], params["kv_heads"]
    params |= {
        "width": cache_of(node, graph).head_dim,
        "block": 1 << (params["DP"] - 1).bit_length(),
        "HB": knobs.HB,
        "q_programs": -(-heads // knobs.HB),
        "kv_programs": -(-kv_heads // knobs.HB),
        "norms": {},
    }
    arrays, args = list[tuple[str, str]](), list[str]()
    sources = {"k": k, "v": v} | ({"q": q} if q and heads else {})
    for letter, source in sources.items():
        params[letter] = (source.stride, source.offset)
        arrays.append((letter, graph.type(source.name).dtype))
        args.append(f"value:{source.name}")
        if source.norm:
            params["norms"][letter] = _norm(source)
            arrays.append((f"{letter}_norm", "f32"))
            args.append(f"weight:{source.norm.inputs[1][1:]}")
    around, around_args = place_arrays(node, graph, use, table)
    programs = params["q_programs"] + 2 * params["kv_programs"]
    words = f"{use.dtype}_h{heads}_kv{kv_heads}_d{params['width']}"
    words += "_norm" * bool(params["norms"]) + "_rope" * bool(params["dims"])
    grid = GridRule(1, programs)
    arrays, args = [around[0], *arrays, *around[1:]], [around_args[0], *args, *around_args[1:]]
    kernel = make_kernel("kv_write", words, params, tuple(arrays), Counts.T, grid, knobs.warps)
    return kernel, tuple(args)


def place_params(node: Node, graph: Graph, use: CacheUse) -> dict[str, Any]:
    """What is written and where, for the templates that write q, k and v; `node` has a kv_write."""
    cache, outs = cache_of(node, graph), _queries(node)
    if len(outs) > 1:
        raise CompileError("a KV write gives more than its query", place=f"%{outs[1]}")
    rope = node.find("rope")
    config = RopeConfig.from_attrs(rope.attrs) if rope else None
    heads = graph.type(outs[0]).inner[0] if outs else 0
    dp = padded_last((cache.head_dim,))
    out_stride = row_stride((heads, cache.head_dim)) if heads else 0
    return {
        "dtype": ELEMENTS[use.dtype],
        "heads": heads,
        "kv_heads": cache.kv_heads,
        "DP": dp,
        "dims": config.dims if config else 0,
        "interleaved": bool(config and config.interleaved),
        "table_length": use.max_len,
        "block_size": use.block_size,
        "out_stride": out_stride,
        "rest": 1 << max(out_stride - heads * dp - 1, 0).bit_length(),
    }


def place_arrays(
    node: Node, graph: Graph, use: CacheUse, table: str
) -> tuple[tuple[tuple[str, str], ...], tuple[str, ...]]:
    """The arrays of these templates beside their sources, and the arguments behind them."""
    arrays, args = [("slots", "i32")], [f"step:slot_mapping.{use.group}"]
    if node.find("rope"):
        arrays += [("rope", "f32"), ("positions", "i32")]
        args += [table, "step:positions"]
    for name in _queries(node):
        arrays.append(("out", use.dtype))
        args.append(f"value:{name}")
    arrays.append(("kv", use.dtype))
    return tuple(arrays), (*args, f"kv:{cache_of(node, graph).layer}")


def cache_of(node: Node, graph: Graph) -> CacheType:
    """The cache that a node writes."""
    write = node.find("kv_write")
    assert write is not None
    cache = graph.types[write.outputs[0]]
    assert isinstance(cache, CacheType)
    return cache


def _queries(node: Node) -> list[str]:
    """What a node gives beside the cache."""
    write = node.find("kv_write")
    assert write is not None
    return [name for name in node.outputs if name not in write.outputs]


def _norm(source: Source) -> dict[str, Any]:
    assert source.norm is not None
    attrs = source.norm.attrs
    return {"eps": attrs["eps"], "offset": attrs.get("offset", 0)}
