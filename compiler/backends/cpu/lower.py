"""A node of the fused graph -> the kernel that computes it, and what its arguments are."""

from __future__ import annotations

from typing import Any

from pagec.compiler.backends.cpu.calls import ELEMENT_FLOPS, Call, Settings
from pagec.compiler.backends.cpu.lower_experts import BACKEND
from pagec.compiler.backends.cpu.lower_sample import SampleLowering
from pagec.compiler.backends.cpu.rowwise import Region
from pagec.compiler.backends.cpu.tiles import (
    FEW_TILES,
    KEY_SPLIT,
    KEY_TILE,
    PARTIAL_EXTRA,
    SHARES,
)
from pagec.compiler.backends.kv_sources import KvSources
from pagec.compiler.dims import ITEM_BYTES, WORD_ELEMENTS, DType, padded_last, row_stride
from pagec.compiler.errors import CompileError
from pagec.compiler.ir import CacheType, Node
from pagec.compiler.ops import OPS
from pagec.compiler.ops.frequencies import frequencies
from pagec.compiler.program import Kernel
from pagec.compiler.rope import RopeConfig

__all__ = ["Call", "Lowering", "Settings"]


class Lowering(SampleLowering):
    """Lowers the nodes of a fused graph."""

    def lower(self, node: Node) -> tuple[Call, ...]:
        """The kernels of one node; CompileError if the CPU backend has none for it."""
        if node.op == "fused.attention":
            return self._attention(node)
        return self._argmax(node) if node.op == "argmax" else (self._one(node),)

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
            case "rope":
                return self._rope(node)
            case "top_k_of":
                return self._top_k(node)
            case "expert_lists":
                return self._expert_lists(node)
            case "grouped_linear":
                return self._grouped_linear(node)
            case "sample":
                return self._sample(node)
        if node.op in OPS and BACKEND in OPS[node.op].templates:
            return self._templated(node)
        raise CompileError(
            f"the CPU backend has no kernel for op {node.op!r}",
            place=f"%{node.outputs[0]}",
            remedy='give the op a template, templates={"cpu": Path(...)}, or a scalar expression',
        )

    # ----------------------------------------------------------------------------------- nodes

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

    def _argmax(self, node: Node) -> tuple[Call, ...]:
        """From the logits where they are wanted, else straight from the linear that makes them."""
        name = node.inputs[0][1:]
        x = self.graph.type(name)
        params = {"width": x.inner[0], "stride": row_stride(x.inner), "pairs": False}
        arrays = [("x", "float32"), ("out", "int32")]
        kernel = self._kernel("argmax", str(x.inner[0]), params, arrays, bytes_per_row=4 * x.inner[0])
        args = (f"value:{name}", f"value:{node.outputs[0]}")
        if name != self.logits:
            return (Call(node, self._rows(node), ((0, kernel),), args),)
        return (Call(node, "logits", ((0, kernel),), args), *self._greedy(node))

    def _rowwise(self, node: Node) -> Call:
        region = Region(node, self.graph, self.target.lanes)
        code = region.build()
        ops = [inner.op for inner in node.body]
        params = {
            "ops": ops,
            "code": region.params(),
        }
        words = "_".join(dict.fromkeys(op for op in ops if op != "slice"))
        kernel = self._kernel(
            "rowwise",
            f"{words}_{region.groups}x{region.width}",
            params,
            code.arrays,
            flops=region.groups * region.width * sum(ELEMENT_FLOPS.get(op, 1) for op in ops),
            bytes_per_row=sum(self.graph.row_bytes(name) for name in (*node.values(), *node.outputs)),
        )
        variants: tuple[tuple[int, Kernel | None], ...] = ((0, kernel),)
        if node.outputs[0] in self.done_by_linear:
            variants = ((self.done_by_linear[node.outputs[0]], None), *variants)
        return Call(node, self._rows(node), variants, self._arguments(code))

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
            "span_words": self.settings.kv.span_bytes // 4,
            "out_stride": row_stride((heads, cache.head_dim)) if heads else 0,
            "width": cache.head_dim,
            "norms": {},
        }
        arrays, args = [("slots", "int32")], [f"step:slot_mapping.{group}"]
        for letter, source in (("k", k), ("v", v), *((("q", q),) if q and heads else ())):
            arrays.append((letter, "float32"))
            args.append(f"value:{source.name}")
            params |= {f"{letter}_stride": source.stride, f"{letter}_offset": source.offset}
            if source.norm:
                attrs = source.norm.attrs
                params["norms"][letter] = {"eps": attrs["eps"], "offset": attrs.get("offset", 0)}
                arrays.append((f"{letter}_norm", "float32"))
                args.append(self._row_weight(source.norm.inputs[1][1:]))
        if config:
            arrays += [("rope", "float32"), ("positions", "int32")]
            args += [f"table:{self._table(config)}", "step:positions"]
        if heads:
            arrays.append(("out", "int32"))
            args.append(f"value:{outs[0]}")
        arrays.append(("cache", "int32"))
        args.append(f"kv:{cache.layer}")
        elements = (heads + 2 * cache.kv_heads) * cache.head_dim
        kernel = self._kernel(
            "kv_write",
            f"{dtype}_h{heads}_kv{cache.kv_heads}_d{cache.head_dim}{'_norm' * bool(params['norms'])}"
            f"{'_rope' * bool(config)}",
            params,
            arrays,
            bytes_per_row=elements * (4 + ITEM_BYTES[dtype]),
        )
        return Call(node, "T", ((0, kernel),), tuple(args))

    def _rope(self, node: Node) -> Call:
        """Rope whose results something else than a KV write reads."""
        config = RopeConfig.from_attrs(node.attrs)
        q, k = (self.graph.type(name).inner for name in node.outputs)
        params = {
            "q_heads": q[0],
            "k_heads": k[0],
            "q_stride": row_stride(q),
            "k_stride": row_stride(k),
            "DP": padded_last(q),
            "dims": config.dims,
            "interleaved": config.interleaved,
            "table_length": self.settings.max_len,
        }
        arrays = [(name, "float32") for name in ("q", "k")]
        arrays += [("positions", "int32"), ("rope", "float32"), ("q_out", "float32"), ("k_out", "float32")]
        words = f"h{q[0]}_kv{k[0]}_d{q[1]}_{config.dims}"
        row_bytes = sum(self.graph.row_bytes(name) for name in (*node.values(), *node.outputs))
        kernel = self._kernel("rope", words, params, arrays, bytes_per_row=row_bytes)
        args = [f"value:{name[1:]}" for name in node.inputs[:2]]
        args += [
            "step:positions",
            f"table:{self._table(config)}",
            *(f"value:{name}" for name in node.outputs),
        ]
        return Call(node, "T", ((0, kernel),), tuple(args))

    def _table(self, config: RopeConfig) -> str:
        turns = tuple(float(f) for f in frequencies(config))
        return self.packer.rope_table(turns, self.settings.max_len, config.scale)

    def _attention(self, node: Node) -> tuple[Call, ...]:
        core = node.body[0]
        out = self.graph.type(node.outputs[0])
        cache = self.graph.types[core.inputs[1][1:]]
        assert isinstance(cache, CacheType)
        heads, dp = out.inner[0], padded_last((cache.head_dim,))
        dtype: DType = self.settings.kv.dtype
        unit = WORD_ELEMENTS[dtype]
        window = f"_w{core.attrs['window']}" if core.attrs.get("window") else ""
        words = f"{dtype}_h{heads}_kv{cache.kv_heads}_d{cache.head_dim}{window}"
        tuned, tiles = self.chooser.attention(words, dp, heads // cache.kv_heads)
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
        row_bytes = self.graph.row_bytes(core.inputs[0][1:]) + self.graph.row_bytes(node.outputs[0])
        kernel = self._kernel("attention", words, params, arrays, bytes_per_row=row_bytes, shares=SHARES)
        calls = [Call(node, "tiles", ((0, kernel),), args, tuned=tuned)]
        pieces = FEW_TILES * heads * max_splits
        self.scratch_bytes = max(self.scratch_bytes, 4 * pieces * (dp + PARTIAL_EXTRA))
        if max_splits > 1:
            merge = self._kernel("attention_merge", words, params, [*arrays[:3], *arrays[-2:]])
            calls.append(Call(node, "merges", ((0, merge),), (*args[:3], *args[-2:]), ".merge"))
        return tuple(calls)
