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
    write = next(n for n in node.body if n.op == "kv_write")
    rope = next((n for n in node.body if n.op == "rope"), None)
    cache = graph.types[write.outputs[0]]
    assert isinstance(cache, CacheType)
    q, k, v = KvSources(node, graph).find()
    outs = [name for name in node.outputs if name not in write.outputs]
    if len(outs) > 1:
        raise CompileError("a KV write gives more than its query", place=f"%{outs[1]}")
    config = RopeConfig.from_attrs(rope.attrs) if rope else None
    heads = graph.type(outs[0]).inner[0] if outs else 0
    dp = padded_last((cache.head_dim,))
    out_stride = row_stride((heads, cache.head_dim)) if heads else 0
    params: dict[str, Any] = {
        "dtype": ELEMENTS[use.dtype],
        "heads": heads,
        "kv_heads": cache.kv_heads,
        "width": cache.head_dim,
        "DP": dp,
        "block": 1 << (dp - 1).bit_length(),
        "dims": config.dims if config else 0,
        "interleaved": bool(config and config.interleaved),
        "table_length": use.max_len,
        "block_size": use.block_size,
        "out_stride": out_stride,
        "rest": 1 << max(out_stride - heads * dp - 1, 0).bit_length(),
        "HB": knobs.HB,
        "q_programs": -(-heads // knobs.HB),
        "kv_programs": -(-cache.kv_heads // knobs.HB),
        "norms": {},
    }
    arrays, args = [("slots", "i32")], [f"step:slot_mapping.{use.group}"]
    sources = {"k": k, "v": v} | ({"q": q} if q and heads else {})
    for letter, source in sources.items():
        params[letter] = (source.stride, source.offset)
        arrays.append((letter, graph.type(source.name).dtype))
        args.append(f"value:{source.name}")
        if source.norm:
            params["norms"][letter] = _norm(source)
            arrays.append((f"{letter}_norm", "f32"))
            args.append(f"weight:{source.norm.inputs[1][1:]}")
    if config:
        arrays += [("rope", "f32"), ("positions", "i32")]
        args += [table, "step:positions"]
    arrays += [("out", use.dtype)] if heads else []
    args += [f"value:{outs[0]}"] if heads else []
    programs = params["q_programs"] + 2 * params["kv_programs"]
    words = f"{use.dtype}_h{heads}_kv{cache.kv_heads}_d{cache.head_dim}"
    words += "_norm" * bool(params["norms"]) + "_rope" * bool(config)
    grid = GridRule(1, programs)
    kernel = make_kernel("kv_write", words, params, (*arrays, ("kv", use.dtype)), Counts.T, grid, knobs.warps)
    return kernel, (*args, f"kv:{cache.layer}")


def _norm(source: Source) -> dict[str, Any]:
    assert source.norm is not None
    attrs = source.norm.attrs
    return {"eps": attrs["eps"], "offset": attrs.get("offset", 0)}
