"""A node of the fused graph -> the kernel that computes it, and what its arguments are."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

from pagec.compiler.backends.cpu.epilogue import Epilogue, plain_store
from pagec.compiler.backends.cpu.kv_sources import KvSources
from pagec.compiler.backends.cpu.rowwise import Code, Region
from pagec.compiler.backends.cpu.tiles import (
    FEW_TILES,
    KEY_SPLIT,
    KEY_TILE,
    PARTIAL_EXTRA,
    attention_tiles,
    linear_tiles,
)
from pagec.compiler.dims import ITEM_BYTES, WORD_ELEMENTS, DType, padded_last, row_stride
from pagec.compiler.errors import CompileError
from pagec.compiler.ir import CacheType, Graph, Node
from pagec.compiler.packer import Layout, Packer
from pagec.compiler.program import Kernel, KvLayout, RowCount
from pagec.compiler.rope import RopeConfig, frequencies
from pagec.compiler.target import CpuTarget


@dataclass(frozen=True, slots=True)
class Call:
    """A node lowered: one kernel per bucket of rows, and arguments that name values, weights, ...

    `args` are as program.py has them, but "value:NAME" where a buffer is not chosen yet.
    """

    node: Node
    rows: RowCount
    variants: tuple[tuple[int, Kernel], ...]
    args: tuple[str, ...]
    suffix: str = ""

    @property
    def name(self) -> str:
        """The launch's name: the node's first result, and what tells several launches of a node apart."""
        return self.node.outputs[0] + self.suffix


@dataclass(frozen=True, slots=True)
class Settings:
    """What lowering needs to know beside the graph."""

    target: CpuTarget
    max_len: int
    query_tile: int
    kv: KvLayout


# Floating-point operations per element of row-wise work; what is not here takes one.
_ELEMENT_FLOPS = {
    "slice": 0,
    "take_rows": 0,
    "cast": 0,
    "rmsnorm": 4,
    "layernorm": 7,
    "activation": 16,
    "softcap": 18,
    "softmax": 13,
}


def kernel_name(template: str, words: str, params: Mapping[str, Any]) -> str:
    """The key of a kernel: readable, and different for different parameters."""
    text = json.dumps(params, sort_keys=True)
    return f"{template}_{words}_{hashlib.sha256(text.encode()).hexdigest()[:6]}"


class Lowering:
    """Lowers the nodes of a fused graph; `source` is the graph before the passes.

    Collects packed weights and rope tables in `packer`.
    """

    def __init__(self, graph: Graph, source: Graph, settings: Settings) -> None:
        self.graph, self.settings = graph, settings
        self.target = settings.target
        self.packer = Packer(graph, source.weights, linear_tiles(settings.target).nt)
        self.scratch_bytes = 0  # kernels that need scratch memory share one area

    def lower(self, node: Node) -> tuple[Call, ...]:
        """The kernels of one node; CompileError if the CPU backend has none for it."""
        return self._attention(node) if node.op == "fused.attention" else (self._one(node),)

    def _one(self, node: Node) -> Call:
        match node.op:
            case "embed":
                return self._embed(node)
            case "linear" | "fused.linear":
                return self._linear(node)
            case "fused.rowwise":
                return self._rowwise(node)
            case "fused.kv_write":
                return self._kv_write(node)
            case "argmax":
                return self._argmax(node)
            case "top_k_of":
                return self._top_k(node)
            case "expert_lists":
                return self._expert_lists(node)
            case "grouped_linear":
                return self._grouped_linear(node)
        raise CompileError(
            f"the CPU backend has no kernel for op {node.op!r}",
            place=f"%{node.outputs[0]}",
            remedy="give the op a CPU template or a scalar expression",
        )

    # ---------------------------------------------------------------------------------- shared

    def _kernel(
        self,
        template: str,
        words: str,
        params: dict[str, Any],
        arrays: list[tuple[str, str]],
        *,
        flops: int = 0,
        bytes_per_row: int = 0,
        bytes_fixed: int = 0,
    ) -> Kernel:
        key = kernel_name(template, words, {**params, "L": self.target.lanes})
        return Kernel(
            key=key,
            symbol=key,
            template=template,
            params={**params, "arrays": [list(a) for a in arrays]},
            signature=tuple(dtype for _, dtype in arrays),
            flops_per_row=flops,
            bytes_per_row=bytes_per_row,
            bytes_fixed=bytes_fixed,
        )

    def _row_bytes(self, name: str) -> int:
        t = self.graph.types[name]
        return 0 if isinstance(t, CacheType) else prod(t.inner) * ITEM_BYTES[t.dtype]

    def _rows(self, node: Node) -> RowCount:
        return "R" if self.graph.type(node.outputs[0]).rows == "R" else "T"

    # ----------------------------------------------------------------------------------- nodes

    def _linear(self, node: Node) -> Call:
        linear = next((n for n in node.body if n.op == "linear"), node)
        x, y = self.graph.type(linear.inputs[0][1:]), self.graph.type(linear.outputs[0])
        dtype, bias = x.dtype, len(linear.inputs) > 2
        unit, kp = WORD_ELEMENTS[dtype], row_stride(x.inner)
        nt = self.packer.nt
        arrays, args = [("x", "int32"), ("w", "int32")], [f"value:{linear.inputs[0][1:]}", ""]
        parts, ops, layout = 1, [], Layout(y.inner)
        store = plain_store(row_stride(y.inner), self.target.lanes, nt, bias)
        extra = Code([], [], [], 0, 0, False, [])
        if node.body:
            epilogue = Epilogue(node, self.graph, self.target.lanes, nt, bias)
            written = epilogue.store()
            store, extra, parts = written.line, written.code, epilogue.parts
            ops = [n.op for n in node.body if n.op not in ("linear", "slice", "take_rows")]
            if parts > 1:
                layout = Layout(y.inner, side_by_side=epilogue.columns)
        args[1] = f"weight:{self.packer.matrix(linear.inputs[1][1:], layout, x.inner, dtype)}"
        if bias:
            arrays.append(("bias", "float32"))
            args.append(f"weight:{self.packer.vector(linear.inputs[2][1:], layout)}")
        arrays += extra.arrays
        args += [self._row_weight(arg[7:]) if arg.startswith("weight:") else arg for arg in extra.args]
        out = self.graph.type(node.outputs[0])
        arrays.append(("out", "int32" if out.dtype == "bf16" else "float32"))
        args.append(f"value:{node.outputs[0]}")
        n, k, width = prod(y.inner), prod(x.inner), layout.width
        suffix = "_bias" * bias + "".join(f"_{op}" for op in dict.fromkeys(ops))
        variants = []
        for limit, num_rows in linear_tiles(self.target).buckets:
            params = {
                "dtype": dtype,
                "N": width,
                "NP": width,
                "K": kp,
                "KW": kp // unit,
                "unit": unit,
                "NT": nt,
                "MB": num_rows,
                "bias": bias,
                "parts": parts,
                "ops": ops,
                "store": store,
            }
            kernel = self._kernel(
                "linear",
                f"{dtype}_n{width}_k{kp}{suffix}_m{num_rows}",
                params,
                arrays,
                flops=2 * n * k + prod(out.inner) * sum(_ELEMENT_FLOPS.get(op, 1) for op in ops),
                bytes_per_row=sum(self._row_bytes(name) for name in (*node.values(), node.outputs[0])),
                bytes_fixed=n * k * ITEM_BYTES[dtype],
            )
            variants.append((limit, kernel))
        return Call(node, self._rows(node), tuple(variants), tuple(args))

    def _embed(self, node: Node) -> Call:
        out = self.graph.type(node.outputs[0])
        weight, tiled = self.packer.table(node.inputs[1][1:])
        dtype = self.graph.weights[node.inputs[1][1:]].dtype
        unit, stride = WORD_ELEMENTS[dtype], row_stride(out.inner)
        params = {
            "dtype": dtype,
            "unit": unit,
            "width": out.inner[0],
            "stride": stride,
            "KW": stride // unit,
            "NT": self.packer.nt,
            "tiled": tiled,
        }
        arrays = [("ids", "int32"), ("table", "int32"), ("out", "float32")]
        kernel = self._kernel(
            "embed",
            f"{dtype}_{stride}{'_tiled' if tiled else ''}",
            params,
            arrays,
            bytes_per_row=out.inner[0] * (ITEM_BYTES[dtype] + 4),
        )
        args = (f"value:{node.inputs[0][1:]}", f"weight:{weight}", f"value:{node.outputs[0]}")
        return Call(node, self._rows(node), ((0, kernel),), args)

    def _argmax(self, node: Node) -> Call:
        x = self.graph.type(node.inputs[0][1:])
        params = {"width": x.inner[0], "stride": row_stride(x.inner)}
        arrays = [("x", "float32"), ("out", "int32")]
        kernel = self._kernel("argmax", str(x.inner[0]), params, arrays, bytes_per_row=4 * x.inner[0])
        args = (f"value:{node.inputs[0][1:]}", f"value:{node.outputs[0]}")
        return Call(node, self._rows(node), ((0, kernel),), args)

    def _top_k(self, node: Node) -> Call:
        x, k = self.graph.type(node.inputs[0][1:]), self.graph.type(node.outputs[0]).inner[0]
        params = {
            "width": x.inner[0],
            "stride": row_stride(x.inner),
            "k": k,
            "out_stride": row_stride((k,)),
            "normalize": bool(node.attrs.get("normalize", False)),
        }
        arrays = [("x", "float32"), ("values", "float32"), ("indices", "int32")]
        kernel = self._kernel(
            "top_k", f"{k}_of_{x.inner[0]}", params, arrays, bytes_per_row=4 * x.inner[0] + 8 * k
        )
        return Call(node, self._rows(node), ((0, kernel),), self._values(*node.inputs, *node.outputs))

    def _expert_lists(self, node: Node) -> Call:
        chosen, out = self.graph.type(node.inputs[0][1:]), self.graph.type(node.outputs[0])
        params = {
            "experts": node.attrs["experts"],
            "k": chosen.inner[0],
            "stride": row_stride(chosen.inner),
            "width": row_stride(out.inner),
        }
        arrays = [("chosen", "int32"), ("out", "int32")]
        words = f"{chosen.inner[0]}_of_{node.attrs['experts']}"
        kernel = self._kernel("expert_lists", words, params, arrays, bytes_per_row=4 * chosen.inner[0])
        return Call(node, self._rows(node), ((0, kernel),), self._values(*node.inputs, *node.outputs))

    def _grouped_linear(self, node: Node) -> Call:
        x, out = self.graph.type(node.inputs[0][1:]), self.graph.type(node.outputs[0])
        experts, n, k = self.graph.weights[node.inputs[1][1:]].inner
        choices, dtype = out.inner[0], x.dtype
        unit, tiles = WORD_ELEMENTS[dtype], linear_tiles(self.target)
        per_choice = len(x.inner) == 2
        params: dict[str, Any] = {
            "dtype": dtype,
            "unit": unit,
            "experts": experts,
            "k": choices,
            "N": n,
            "NP": row_stride((n,)),
            "KW": row_stride((k,)) // unit if not per_choice else padded_last((k,)) // unit,
            "NT": tiles.nt,
            "per_choice": per_choice,
            "x_stride": row_stride(x.inner),
            "x_group": padded_last(x.inner),
            "out_stride": row_stride(out.inner),
            "out_group": padded_last(out.inner),
            "bias": len(node.inputs) > 4,
        }
        weight = self.packer.experts(node.inputs[1][1:], params["KW"] * unit, dtype)
        args = [f"value:{node.inputs[0][1:]}", f"weight:{weight}", f"value:{node.inputs[3][1:]}"]
        arrays = [("x", "int32"), ("w", "int32"), ("lists", "int32")]
        if params["bias"]:
            args.append(f"weight:{self.packer.expert_vectors(node.inputs[4][1:])}")
            arrays.append(("bias", "float32"))
        args.append(f"value:{node.outputs[0]}")
        arrays.append(("out", "float32"))
        variants = []
        # The choices of one row are different experts: each then has one row at most.
        for limit, rows in ((1, 1), (0, tiles.buckets[-1][1])):
            kernel = self._kernel(
                "grouped_linear",
                f"{dtype}_{choices}_of_{experts}_n{n}_k{k}{'_bias' if params['bias'] else ''}_m{rows}",
                {**params, "MB": rows},
                arrays,
                flops=2 * n * k * choices,
                bytes_per_row=self._row_bytes(node.inputs[0][1:]) + self._row_bytes(node.outputs[0]),
                bytes_fixed=experts * n * k * ITEM_BYTES[dtype],
            )
            variants.append((limit, kernel))
        return Call(node, self._rows(node), tuple(variants), tuple(args))

    def _values(self, *references: str) -> tuple[str, ...]:
        """Arguments for values, given as "%name" or by name."""
        return tuple(f"value:{name.removeprefix('%')}" for name in references)

    def _rowwise(self, node: Node) -> Call:
        region = Region(node, self.graph, self.target.lanes)
        code = region.build()
        ops = [inner.op for inner in node.body]
        params = {
            "groups": region.groups,
            "width": region.width,
            "padded": region.padded,
            "ops": ops,
            "num_temporaries": code.num_temporaries,
            "num_stats": code.num_stats,
            "gathers": code.gathers,
            "walks": [asdict(walk) for walk in code.walks],
            "pads": code.pads,
        }
        words = "_".join(dict.fromkeys(op for op in ops if op != "slice"))
        kernel = self._kernel(
            "rowwise",
            f"{words}_{region.groups}x{region.width}",
            params,
            code.arrays,
            flops=region.groups * region.width * sum(_ELEMENT_FLOPS.get(op, 1) for op in ops),
            bytes_per_row=sum(self._row_bytes(name) for name in (*node.values(), *node.outputs)),
        )
        args = tuple(self._row_weight(arg[7:]) if arg.startswith("weight:") else arg for arg in code.args)
        return Call(node, self._rows(node), ((0, kernel),), args)

    def _row_weight(self, name: str) -> str:
        inner = self.graph.weights[name].inner
        packed = self.packer.vector(name, Layout(inner)) if len(inner) == 1 else self.packer.groups(name)
        return f"weight:{packed}"

    def _kv_write(self, node: Node) -> Call:
        write = next(n for n in node.body if n.op == "kv_write")
        rope = next((n for n in node.body if n.op == "rope"), None)
        cache = self.graph.types[write.outputs[0]]
        assert isinstance(cache, CacheType)
        sources = KvSources(node, self.graph)
        q, k, v = sources.find()
        outs = [name for name in node.outputs if name != write.outputs[0]]
        if len(outs) > 1:
            raise CompileError("a KV write gives more than its query", place=f"%{outs[1]}")
        config = RopeConfig.from_attrs(rope.attrs) if rope else None
        heads = self.graph.type(outs[0]).inner[0] if outs else 0
        dp, dtype = padded_last((cache.head_dim,)), self.settings.kv.dtype
        unit = WORD_ELEMENTS[dtype]
        group, _ = self.settings.kv.place(cache.layer)
        params: dict[str, Any] = {
            "dtype": dtype,
            "unit": unit,
            "heads": heads,
            "kv_heads": cache.kv_heads,
            "DP": dp,
            "dims": config.dims if config else 0,
            "interleaved": bool(config and config.interleaved),
            "table_length": self.settings.max_len,
            "block_size": self.settings.kv.block_size,
            "span_elements": self.settings.kv.span_bytes // ITEM_BYTES[dtype],
            "out_stride": row_stride((heads, cache.head_dim)) if heads else 0,
        }
        arrays, args = [("slots", "int32")], [f"step:slot_mapping.{group}"]
        for letter, source in (("k", k), ("v", v), *((("q", q),) if q and heads else ())):
            arrays.append((letter, "float32"))
            args.append(f"value:{source.name}")
            params |= {f"{letter}_stride": source.stride, f"{letter}_offset": source.offset}
        if config:
            arrays += [("rope", "float32"), ("positions", "int32")]
            args += [f"table:{self._table(config)}", "step:positions"]
        if heads:
            arrays.append(("out", "int32" if unit == 2 else "float32"))
            args.append(f"value:{outs[0]}")
        arrays.append(("cache", "int16" if unit == 2 else "float32"))
        args.append(f"kv:{cache.layer}")
        elements = (heads + 2 * cache.kv_heads) * cache.head_dim
        kernel = self._kernel(
            "kv_write",
            f"{dtype}_h{heads}_kv{cache.kv_heads}_d{cache.head_dim}{'_rope' if config else ''}",
            params,
            arrays,
            bytes_per_row=elements * (4 + ITEM_BYTES[dtype]),
        )
        return Call(node, "T", ((0, kernel),), tuple(args))

    def _table(self, config: RopeConfig) -> str:
        turns = tuple(float(f) for f in frequencies(config))
        return self.packer.rope_table(turns, self.settings.max_len)

    def _attention(self, node: Node) -> tuple[Call, ...]:
        core = node.body[0]
        out = self.graph.type(node.outputs[0])
        cache = self.graph.types[core.inputs[1][1:]]
        assert isinstance(cache, CacheType)
        heads, dp = out.inner[0], padded_last((cache.head_dim,))
        dtype: DType = self.settings.kv.dtype
        unit = WORD_ELEMENTS[dtype]
        tiles = attention_tiles(self.target, dp, heads // cache.kv_heads)
        seen = min(self.settings.max_len, (cache.window or self.settings.max_len) + KEY_SPLIT)
        max_splits = -(-seen // KEY_SPLIT)
        kv = self.settings.kv
        group, _ = kv.place(cache.layer)
        params = {
            "dtype": dtype,
            "unit": unit,
            "heads": heads,
            "kv_heads": cache.kv_heads,
            "DP": dp,
            "scale": core.attrs["scale"],
            "window": core.attrs.get("window"),
            "softcap": core.attrs.get("softcap"),
            "query_tile": self.settings.query_tile,
            "BN": KEY_TILE,
            "SPLIT": KEY_SPLIT,
            "few_tiles": FEW_TILES,
            "max_splits": max_splits,
            "RM": tiles.rows,
            "KV": tiles.key_vectors,
            "OV": tiles.dim_vectors,
            "block_size": kv.block_size,
            "max_blocks": -(-self.settings.max_len // kv.block_size),
            "span_words": kv.span_bytes // 4,
            "q_stride": row_stride((heads, cache.head_dim)),
            "out_stride": row_stride(out.inner),
            "out_unit": WORD_ELEMENTS[out.dtype],
        }
        arrays = [
            ("tiles", "int32"),
            ("query_start", "int32"),
            ("seq_lens", "int32"),
            ("block_tables", "int32"),
            ("q", "int32"),
            ("cache", "int32"),
            ("partials", "float32"),
            ("out", "int32" if out.dtype == "bf16" else "float32"),
        ]
        args = (
            "step:tiles",
            "step:query_start",
            "step:seq_lens",
            f"step:block_tables.{group}",
            f"value:{core.inputs[0][1:]}",
            f"kv:{cache.layer}",
            "scratch:",
            f"value:{node.outputs[0]}",
        )
        window = f"_w{core.attrs['window']}" if core.attrs.get("window") else ""
        words = f"{dtype}_h{heads}_kv{cache.kv_heads}_d{cache.head_dim}{window}"
        row_bytes = self._row_bytes(core.inputs[0][1:]) + self._row_bytes(node.outputs[0])
        kernel = self._kernel("attention", words, params, arrays, bytes_per_row=row_bytes)
        calls = [Call(node, "tiles", ((0, kernel),), args)]
        pieces = FEW_TILES * heads * max_splits
        self.scratch_bytes = max(self.scratch_bytes, 4 * pieces * (dp + PARTIAL_EXTRA))
        if max_splits > 1:
            merge = self._kernel("attention_merge", words, params, [*arrays[:3], *arrays[-2:]])
            calls.append(Call(node, "tiles", ((0, merge),), (*args[:3], *args[-2:]), ".merge"))
        return tuple(calls)
