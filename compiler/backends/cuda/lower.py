"""A node of the fused graph -> the kernels that compute it for a bucket of rows, and their arguments.

Arguments are those of program.py, and

    scratch:N      memory for within a launch and the one after it, from byte N on
    partial:stats, partial:sums     what decode attention's items leave, for as many as a step may have
    step:splits[n, 2], step:split_start[S + 1]     these items, and each sequence's first
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from pagec.compiler.backends.cuda.attention import AttentionShape, decode, merge, prefill
from pagec.compiler.backends.cuda.emit import CudaKernel
from pagec.compiler.backends.cuda.experts import expert_columns, expert_lists, grouped_linear, top_k
from pagec.compiler.backends.cuda.fuse_norm import FEW, find_norms, most_rows
from pagec.compiler.backends.cuda.knobs import Choice, Chooser
from pagec.compiler.backends.cuda.kv_write import CacheUse, KvWriteKnobs, cache_of, kv_write
from pagec.compiler.backends.cuda.linear import LinearShape, Prologue, linear_of, shape_of, write_of
from pagec.compiler.backends.cuda.rowwise import RowwiseKnobs, rowwise
from pagec.compiler.backends.cuda.sample import sample
from pagec.compiler.backends.cuda.tokens import argmax, embed
from pagec.compiler.dims import BYTE_ALIGN, Capacity, DType, round_up
from pagec.compiler.errors import CompileError
from pagec.compiler.ir import CacheType, Graph, Node, Type
from pagec.compiler.ops.frequencies import frequencies
from pagec.compiler.packer import Layout, Packer
from pagec.compiler.program import KvLayout
from pagec.compiler.rope import RopeConfig

# Vocabularies that eight warps share; with few tokens they spill.
MANY_TOKENS: Final = 1 << 14
# What decode attention leaves of each item, for the merge.
PARTIAL: Final = ("partial:stats", "partial:sums")


@dataclass(frozen=True, slots=True)
class Settings:
    """What lowering needs beside the graph."""

    capacity: Capacity
    max_len: int
    kv: KvLayout
    chooser: Chooser


@dataclass(frozen=True, slots=True)
class Call:
    """A launch: its kernel and what the kernel's arrays are, `counts` left out. `choice`: the tuned one."""

    node: Node
    kernel: CudaKernel
    args: tuple[str, ...]
    choice: Choice | None = None


class RowMajor(Packer):
    """Packs matrices as [N, K], each padded as rows are: what tensor cores read, and what an embedding reads
    of a matrix that it shares."""

    def matrix(self, name: str, out: Layout, x: tuple[int, ...], dtype: DType) -> str:
        steps = [*out.steps(0), *Layout(x).steps(1)]
        return self._add(name, [*steps, ("round", ())] if dtype == "bf16" else steps, dtype)

    def experts(self, name: str, length: int, dtype: DType) -> str:
        _, n, k = self.source[name].inner
        steps = Layout((n,)).steps(1)
        if length != k:
            steps.append(("pad", (2, length)))
        return self._add(name, [*steps, ("round", ())] if dtype == "bf16" else steps, dtype)

    def table(self, name: str) -> tuple[str, bool]:
        packed, _ = super().table(name)
        return packed, False


class Lowering:
    """Lowers the nodes of a fused graph; `source` is the graph before the passes."""

    def __init__(self, graph: Graph, source: Graph, settings: Settings) -> None:
        self.graph, self.settings = graph, settings
        self.packer = RowMajor(graph, source.weights, 0)
        self.scratch_bytes = 0  # launches that need scratch memory share one area
        self.chooser = settings.chooser
        self.norms = {} if self.chooser.strict else find_norms(graph)
        # Up to how many rows a norm is left to the linear behind it, by the norm's result.
        self.few = {norm.node.outputs[0]: self._most(name) for name, norm in self.norms.items()}
        self.chooser.limits |= set(self.few.values()) - {0}

    def lower(self, node: Node, rows: int) -> tuple[Call, ...]:
        """The launches of a node in a bucket of up to `rows` rows; CompileError if it has no kernel."""
        match node.op:
            case "embed":
                return (self._embed(node),)
            case "linear" | "fused.linear":
                return self._linear(node, rows)
            case "fused.rowwise" if rows <= self.few.get(node.outputs[0], 0):
                return ()
            case "fused.rowwise":
                kernel, args = rowwise(node, self.graph, RowwiseKnobs())
                return (Call(node, kernel, self._packed(args)),)
            case "fused.kv_write":
                return (self._kv_write(node),)
            case "fused.attention":
                return self._attention(node, rows)
            case "argmax":
                return self._argmax(node)
            case "sample":
                return (self._sample(node),)
            case "top_k_of":
                return (Call(node, top_k(node, self.graph), _values(*node.inputs, *node.outputs)),)
            case "expert_lists":
                return (Call(node, expert_lists(node, self.graph), _values(*node.inputs, *node.outputs)),)
            case "grouped_linear":
                return (self._grouped_linear(node, rows),)
        raise CompileError(
            f"the NVIDIA backend has no kernel for op {node.op!r}", place=f"%{node.outputs[0]}"
        )

    # ----------------------------------------------------------------------------------- nodes

    def _embed(self, node: Node) -> Call:
        name, out = node.inputs[1][1:], self.graph.type(node.outputs[0])
        kernel = embed(out.inner[0], self.graph.weights[name].dtype, out.dtype)
        table, _ = self.packer.table(name)
        return Call(node, kernel, (_value(node.inputs[0]), f"weight:{table}", _value(node.outputs[0])))

    def _linear(self, node: Node, rows: int) -> tuple[Call, ...]:
        shape = shape_of(node, self.graph)
        knobs, choice = self.chooser.linear(shape, rows)
        if knobs.splits > 1:
            self._scratch(4 * knobs.splits * rows * shape.n)
        own, norm = self._matrix(node, shape), self._prologue(node, rows)
        if norm:  # if the kernel does not compile clean, it is the norm that is left out first
            choice = _norm_choice(shape)
        write = write_of(node, self.graph, *self._cache(node)) if node.find("kv_write") else None
        return tuple(
            Call(node, kernel, self._packed(args, own), choice)
            for kernel, args in linear_of(node, self.graph, knobs, write, norm)
        )

    def _prologue(self, node: Node, rows: int) -> Prologue | None:
        """The norm that a linear does itself in a bucket of up to `rows` rows."""
        norm = self.norms.get(node.outputs[0])
        return norm.prologue if norm and rows <= self.few[norm.node.outputs[0]] else None

    def _most(self, name: str) -> int:
        node = self.graph.producers()[name]
        shape = shape_of(node, self.graph)
        if _norm_choice(shape) in self.chooser.refused:
            return 0
        knobs = [self.chooser.linear(shape, rows)[0] for rows in FEW]
        return most_rows(self.norms[name], self.graph, shape, knobs, self.chooser.target)

    def reads(self, node: Node) -> tuple[str, ...]:
        """The values that a node's launches read, in buckets of any size."""
        norm = self.norms.get(node.outputs[0])
        return (*node.values(), *((norm.prologue.source,) if norm else ()))

    def _matrix(self, node: Node, shape: LinearShape) -> dict[str, str]:
        """How the linear's own weights are packed."""
        linear = node.find("linear")
        assert linear is not None
        x, y = self.graph.type(linear.inputs[0][1:]), self.graph.type(linear.outputs[0])
        turned = _turned_halves(node) if node.find("kv_write") else 0
        layout = Layout(y.inner, side_by_side=int(shape.parts > 1), turned=turned)
        weight = linear.inputs[1][1:]
        own = {f"weight:{weight}": f"weight:{self.packer.matrix(weight, layout, x.inner, x.dtype)}"}
        if shape.bias:
            bias = linear.inputs[2][1:]
            own[f"weight:{bias}"] = f"weight:{self.packer.vector(bias, layout)}"
        return own

    def _grouped_linear(self, node: Node, rows: int) -> Call:
        dtype = self.graph.type(node.inputs[0][1:]).dtype
        columns = expert_columns(node, self.graph)
        matrix = self.packer.experts(node.inputs[1][1:], columns, dtype)
        args = [*_values(node.inputs[0]), f"weight:{matrix}", *_values(node.inputs[3])]
        if len(node.inputs) > 4:
            args.append(f"weight:{self.packer.expert_vectors(node.inputs[4][1:])}")
        kernel = grouped_linear(node, self.graph, self.chooser.grouped(columns, rows))
        return Call(node, kernel, (*args, *_values(node.outputs[0])))

    def _kv_write(self, node: Node) -> Call:
        kernel, args = kv_write(node, self.graph, *self._cache(node), KvWriteKnobs())
        return Call(node, kernel, self._packed(args))

    def _cache(self, node: Node) -> tuple[CacheUse, str]:
        """The cache that a node writes, and the argument of its rope's table (empty without rope)."""
        kv, rope, table = self.settings.kv, node.find("rope"), ""
        if rope is not None:
            config = RopeConfig.from_attrs(rope.attrs)
            turns = tuple(float(f) for f in frequencies(config))
            table = f"table:{self.packer.rope_table(turns, self.settings.max_len, config.scale)}"
        group = kv.place(cache_of(node, self.graph).layer)[0]
        return CacheUse(kv.dtype, kv.block_size, self.settings.max_len, group), table

    def _attention(self, node: Node, rows: int) -> tuple[Call, ...]:
        """Chunks, single new tokens, and what puts the latter's splits together: each finds its own items."""
        shape, group = self.attention(node)
        (chunks, chunks_choice), (knobs, choice) = (
            self.chooser.prefill(shape),
            self.chooser.decode(shape, rows),
        )
        core, result = node.body[0], _value(node.outputs[0])
        step = ("step:query_start", "step:seq_lens", f"step:block_tables.{group}")
        read = (*step, _value(core.inputs[0]), core_cache(core, self.graph))
        return (
            Call(node, prefill(shape, chunks), ("step:tiles", *read, result), chunks_choice),
            Call(node, decode(shape, knobs), ("step:splits", *read, *PARTIAL), choice),
            Call(node, merge(shape), ("step:split_start", "step:query_start", *PARTIAL, result)),
        )

    def attention(self, node: Node) -> tuple[AttentionShape, int]:
        """The shape of a fused.attention node, and its layer's group of cache blocks."""
        core = node.body[0]
        cache = self.graph.types[core.inputs[1][1:]]
        assert isinstance(cache, CacheType)
        shape = attention_shape(core, self.graph.type(node.outputs[0]), cache, self.settings)
        return shape, self.settings.kv.place(cache.layer)[0]

    def _argmax(self, node: Node) -> tuple[Call, ...]:
        x, out = self.graph.type(node.inputs[0][1:]), _value(node.outputs[0])
        kernels = argmax(x.inner[0])
        if len(kernels) == 1:
            return (Call(node, kernels[0], (_value(node.inputs[0]), out)),)
        index = round_up(4 * self.settings.capacity.R * kernels[0].grid.columns, BYTE_ALIGN)
        self._scratch(2 * index)
        found = ("scratch:0", f"scratch:{index}")
        return (
            Call(node, kernels[0], (_value(node.inputs[0]), *found)),
            Call(node, kernels[1], (*found, out)),
        )

    def _sample(self, node: Node) -> Call:
        vocab = self.graph.type(node.inputs[0][1:]).inner[0]
        kernel = sample(vocab, warps=8 if vocab >= MANY_TOKENS else 4)
        self._scratch(4 * self.settings.capacity.R * int(kernel.params["padded"]))
        inputs, outputs = ([_value(name) for name in names] for names in (node.inputs, node.outputs))
        return Call(node, kernel, (*inputs, "scratch:0", *outputs))

    # --------------------------------------------------------------------------------- arguments

    def _scratch(self, nbytes: int) -> None:
        self.scratch_bytes = max(self.scratch_bytes, nbytes)

    def _packed(self, args: tuple[str, ...], own: dict[str, str] | None = None) -> tuple[str, ...]:
        """Arguments with the names of packed weights in place of the graph's."""
        return tuple((own or {}).get(arg) or self._argument(arg) for arg in args)

    def _argument(self, arg: str) -> str:
        kind, _, name = arg.partition(":")
        if kind == "scratch":
            return "scratch:0"
        if kind == "value":
            return _value(name)
        if kind != "weight":
            return arg
        inner = self.graph.weights[name].inner
        packed = self.packer.vector(name, Layout(inner)) if len(inner) == 1 else self.packer.groups(name)
        return f"weight:{packed}"


def _norm_choice(shape: LinearShape) -> Choice:
    """That linears of a shape do the norm before them while rows are few."""
    return Choice(f"norm/n{shape.n}_k{shape.k}", 0)


def _turned_halves(node: Node) -> int:
    """Elements of a head that rope turns, if their pairs are a half apart."""
    rope = node.find("rope")
    config = RopeConfig.from_attrs(rope.attrs) if rope else None
    return config.dims if config and not config.interleaved else 0


def core_cache(core: Node, graph: Graph) -> str:
    """The argument of a paged_attention node's cache."""
    cache = graph.types[core.inputs[1][1:]]
    assert isinstance(cache, CacheType)
    return f"kv:{cache.layer}"


def attention_shape(core: Node, out: Type, cache: CacheType, settings: Settings) -> AttentionShape:
    """Of a paged_attention node."""
    scale, softcap = core.attrs["scale"], core.attrs.get("softcap")
    assert isinstance(scale, int | float)
    assert softcap is None or isinstance(softcap, int | float)
    kv = settings.kv
    return AttentionShape(
        heads=out.inner[0],
        kv_heads=cache.kv_heads,
        head_dim=cache.head_dim,
        dtype=kv.dtype,
        out_dtype=out.dtype,
        scale=float(scale),
        block_size=kv.block_size,
        max_len=settings.max_len,
        window=cache.window,
        softcap=softcap,
    )


def _value(reference: str) -> str:
    """The argument of a value, given as "%name" or by name."""
    return f"value:{reference.removeprefix('%')}"


def _values(*references: str) -> tuple[str, ...]:
    return tuple(map(_value, references))
