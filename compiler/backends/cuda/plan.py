"""The plan for a GPU: a fused graph lowered for every number of rows, as a GpuProgram."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from pagec.compiler.backends.cuda.attention import query_tile
from pagec.compiler.backends.cuda.emit import CudaKernel
from pagec.compiler.backends.cuda.fuse_write import fuse_writes
from pagec.compiler.backends.cuda.knobs import Choice, Chooser
from pagec.compiler.backends.cuda.lower import Lowering, Settings
from pagec.compiler.backends.cuda.tokens import copy_blocks, take_tokens
from pagec.compiler.dims import Capacity, DType
from pagec.compiler.errors import CompileError
from pagec.compiler.gpu_program import GpuKernel, GpuLaunch, GpuProgram, Span, When
from pagec.compiler.ir import Graph, Node, Type
from pagec.compiler.launch import Counts
from pagec.compiler.plan import assign_slots, kv_layout, place_args

# Tokens that steps are padded to, before they double; graphs of decoding steps are captured for each.
DECODE_BUCKETS: Final = (1, 2, 4, *range(8, 257, 8))
BLOCK_SIZE: Final = 16


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """A program, its kernels by key, and the tuned choices that stand behind a kernel."""

    program: GpuProgram
    graph: Graph
    kernels: dict[str, CudaKernel]
    choices: dict[str, set[Choice]]


def make_gpu_plan(
    source: Graph,
    fused: Graph,
    *,
    model: str,
    max_len: int,
    capacity: Capacity,
    kv_dtype: DType,
    block_size: int | None,
    chooser: Chooser,
) -> GpuPlan:
    """The program of a fused graph; `source` is the same graph before the passes. `block_size` None: as the
    tables have it."""
    fused = fuse_writes(fused)
    size = block_size or _tuned_block(source, fused, max_len, capacity, kv_dtype, chooser) or BLOCK_SIZE
    kv = kv_layout(fused, kv_dtype, size, "rows")
    lowering = Lowering(fused, source, Settings(capacity, max_len, kv, chooser))
    attention = [lowering.attention(node)[0] for node in fused.nodes if node.op == "fused.attention"]
    body = [node for node in fused.nodes if not _in_head(node, fused)]
    head = [node for node in fused.nodes if _in_head(node, fused)]
    made = _Made({}, {}, fused)
    spans = {
        name: made.spans(lowering, nodes, most)
        for name, nodes, most in (("body", body, capacity.T), ("head", head, capacity.R))
    }
    take = take_tokens(fused.type("logits").inner[0])
    copy = copy_blocks(max(kv.spans, 1), kv.span_bytes)
    made.kernels.update({take.key: take, copy.key: copy})
    first = GpuLaunch("tokens", take.key, Counts.T.name, TAKE_ARGS)
    placed = {arg for part in spans.values() for span in part for one in span.launches for arg in one.args}
    uses = [
        [(lowering.reads(n), [name for name in n.outputs if f"buffer:{name}" in placed]) for n in nodes]
        for nodes in (body, head)
    ]
    buffers, slots = assign_slots(fused, uses[0], uses[1])
    per_item = max((shape.heads for shape in attention), default=0)
    width = max((shape.padded for shape in attention), default=0)
    program = GpuProgram(
        model=model,
        vocab=fused.type("logits").inner[0],
        max_len=max_len,
        capacity=capacity,
        kv=kv,
        slots=slots,
        buffers=buffers,
        weights=tuple(lowering.packer.weights.values()),
        tables=tuple(lowering.packer.tables.values()),
        scratch_bytes=lowering.scratch_bytes,
        outputs={name: name for name in fused.outputs},
        strict=chooser.strict,
        buckets=tuple(sorted({*buckets_of(capacity.T), capacity.S, min(capacity.R, capacity.T)})),
        query_tile=min((query_tile(one, chooser.prefill(one)[0]) for one in attention), default=1),
        split_bytes=(4 * per_item * 2, 4 * per_item * width),
        kernels=tuple(
            GpuKernel(k.key, k.template, k.params, k.arrays, k.warps, k.stages) for k in made.kernels.values()
        ),
        body=tuple(replace(span, launches=(first, *span.launches)) for span in spans["body"]),
        head=spans["head"],
        copy=GpuLaunch("copy_blocks", copy.key, Counts.COPIES.name, COPY_ARGS),
    )
    return GpuPlan(program, fused, made.kernels, made.choices)


TAKE_ARGS: Final = ("step:tokens", "step:chosen")
COPY_ARGS: Final = ("step:copies", "step:num_blocks", "pool:")
# Launches that only some steps want, by the op that they compute.
WANTED: Final[Mapping[str, When]] = {"argmax": "greedy", "sample": "sampled"}


def buckets_of(most: int) -> tuple[int, ...]:
    """Tokens that steps of up to `most` tokens are padded to."""
    found = [rows for rows in DECODE_BUCKETS if rows < most]
    rows = 2 * DECODE_BUCKETS[-1]
    while rows < most:
        found.append(rows)
        rows *= 2
    return (*found, most)


def _tuned_block(
    source: Graph, fused: Graph, max_len: int, capacity: Capacity, kv_dtype: DType, chooser: Chooser
) -> int | None:
    """The least block size that the tables have for the model's attention."""
    kv = kv_layout(fused, kv_dtype, BLOCK_SIZE, "rows")
    lowering = Lowering(fused, source, Settings(capacity, max_len, kv, chooser))
    shapes = [lowering.attention(node)[0] for node in fused.nodes if node.op == "fused.attention"]
    return min((size for shape in shapes if (size := chooser.block_size(shape))), default=None)


def _in_head(node: Node, graph: Graph) -> bool:
    types = [graph.types[name] for name in node.outputs]
    return any(isinstance(t, Type) and t.rows == "R" for t in types)


@dataclass(frozen=True, slots=True)
class _Made:
    """Kernels while they are collected."""

    kernels: dict[str, CudaKernel]
    choices: dict[str, set[Choice]]
    graph: Graph

    def spans(self, lowering: Lowering, nodes: Sequence[Node], most: int) -> tuple[Span, ...]:
        """By numbers of rows up to `most`; neighbours with the same launches are one."""
        for node in nodes:  # what is asked says where choices change
            lowering.lower(node, most)
        found: list[Span] = []
        for rows in sorted({min(limit, most) for limit in (*lowering.chooser.limits, most)}):
            span = self._span(lowering, nodes, rows)
            if found and found[-1].launches == span.launches and found[-1].key_split == span.key_split:
                found.pop()
            found.append(span)
        return tuple(found)

    def _span(self, lowering: Lowering, nodes: Sequence[Node], rows: int) -> Span:
        calls = [(node, number, c) for node in nodes for number, c in enumerate(lowering.lower(node, rows))]
        for _, _, call in calls:
            self.kernels.setdefault(call.kernel.key, call.kernel)
            if call.choice:
                self.choices.setdefault(call.kernel.key, set()).add(call.choice)
        splits = {c.kernel.params["split"] for _, _, c in calls if c.kernel.template == "attention_decode"}
        if len(splits) > 1:
            raise CompileError(f"layers differ in the keys of a split: {sorted(splits)}")
        launches = tuple(
            GpuLaunch(
                node.outputs[0] + (f".{number}" if number else ""),
                call.kernel.key,
                call.kernel.rows.name,
                place_args(call.args, self.graph),
                WANTED.get(node.op, "always"),
            )
            for node, number, call in calls
        )
        return Span(rows, next(iter(splits), 0), launches)
